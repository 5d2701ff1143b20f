// Package wire is what box (host) and hb (guest) say to each other: the
// version handshake, the plumbing requests, and JSON-line events. Everything
// read from a guest is hostile: decoded strictly, bounded in size, and escaped
// before it can reach a terminal.
package wire

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Protocol is the version of everything in this package. A host talks to a
// guest of another protocol only to replace its hb.
const Protocol = 1

// Paths and ports that both sides must know.
const (
	// HBPath is where the host puts hb inside a box.
	HBPath = "/opt/hermes-box/bin/hb"
	// DoorPort is the guest port of the door, the only one forwarded.
	DoorPort = 4788
	// MaxLine bounds one event line, MaxDocument one JSON answer, in bytes.
	MaxLine     = 64 << 10
	MaxDocument = 1 << 20
)

// Hello is hb's answer to the version handshake (`hb hello`).
type Hello struct {
	Protocol    int    `json:"protocol"`
	Version     string `json:"version"`
	Arch        string `json:"arch"`
	Supervised  bool   `json:"supervised"`  // a supervisor answers in this box
	Provisioned bool   `json:"provisioned"` // provisioning has succeeded once
	Paused      bool   `json:"paused"`      // Executor is deliberately down
	Awaits      bool   `json:"awaits"`      // a new box whose state is not in yet
	UnixTime    int64  `json:"unix_time"`   // the guest's clock, seconds
}

// ProvisionRequest is the standard input of `hb provision`. It holds no
// secret of the box; proxy URLs may carry the user's own credentials, hence
// standard input and not arguments.
type ProvisionRequest struct {
	Protocol  int    `json:"protocol"`
	BoxName   string `json:"box_name"`
	HostPort  int    `json:"host_port"` // forwarded port of the door; 0 = none
	EnvFile   string `json:"env_file"`  // box.env as it is to land at /etc/hermes-box.env
	NodeMajor int    `json:"node_major"`
	Hermes    bool   `json:"hermes"`
	Executor  bool   `json:"executor"`
	WireMCP   bool   `json:"wire_mcp"`
	Refresh   bool   `json:"refresh"` // repair: bring tools without a pinned version to the latest
	// Prepared: the system is a copy of one on which the same request has
	// succeeded, so that its tools are there and need not be looked at.
	Prepared   bool   `json:"prepared,omitempty"`
	Versions   Pins   `json:"versions"`
	CABundle   string `json:"ca_bundle"` // additional CAs to trust, PEM
	HTTPProxy  string `json:"http_proxy"`
	HTTPSProxy string `json:"https_proxy"`
	NoProxy    string `json:"no_proxy"`
	Timezone   string `json:"timezone"` // IANA name; "" = UTC
	// HermesInstaller replaces the address of Hermes' official installer; ""
	// means the official one.
	HermesInstaller string `json:"hermes_installer"`
}

// Pins are the versions asked for; an empty one means the latest.
type Pins struct {
	Claude   string `json:"claude,omitempty"`
	Codex    string `json:"codex,omitempty"`
	Executor string `json:"executor,omitempty"`
	Hermes   string `json:"hermes,omitempty"`
}

// EventType says what an Event is.
type EventType string

// Event types.
const (
	EventStep     EventType = "step"     // Step began
	EventProgress EventType = "progress" // Done of Total bytes
	EventNote     EventType = "note"     // what a step did or found
	EventWarning  EventType = "warning"  // worth the user's attention
	EventResult   EventType = "result"   // the last event; Error is empty on success
)

// FrozenStep is the step of `hb freeze` in which nothing is written to the
// disks; it ends with standard input.
const FrozenStep = "frozen"

// Event is one line of a plumbing verb's event stream.
type Event struct {
	V     int       `json:"v"`
	Type  EventType `json:"type"`
	Step  string    `json:"step,omitempty"`
	Text  string    `json:"text,omitempty"`
	Done  int64     `json:"done,omitempty"`
	Total int64     `json:"total,omitempty"` // 0 = unknown
	Error string    `json:"error,omitempty"`
	Hint  string    `json:"hint,omitempty"`
	// State is the result of pack and unpack.
	State *StateResult `json:"state,omitempty"`
}

// Emitter writes events; it is not safe for concurrent use.
type Emitter struct{ w io.Writer }

// NewEmitter returns an Emitter that writes one JSON line per event to w.
func NewEmitter(w io.Writer) *Emitter { return &Emitter{w} }

// Emit writes one event.
func (e *Emitter) Emit(ev Event) error {
	ev.V = Protocol
	line, err := json.Marshal(ev)
	if err != nil {
		return err
	}
	_, err = e.w.Write(append(line, '\n'))
	return err
}

// ErrNoResult means that an event stream ended before its result: the command
// died or the transport was cut.
var ErrNoResult = errors.New("the stream ended without a result")

// ReadEvents decodes events from r, calls fn for each, and returns the result
// event. Lines that are not events are handed to other (for transcripts); it
// may be nil. An event after the result is an error.
func ReadEvents(r io.Reader, fn func(Event), other func(string)) (Event, error) {
	var result *Event
	br := bufio.NewReaderSize(r, MaxLine)
	for {
		line, err := br.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			return Event{}, fmt.Errorf("a line of more than %d bytes", MaxLine)
		}
		if len(line) > 0 {
			var ev Event
			if decErr := DecodeStrict(line, &ev); decErr != nil || ev.V != Protocol || ev.Type == "" {
				if other != nil {
					other(strings.TrimRight(string(line), "\r\n"))
				}
			} else {
				if result != nil {
					return Event{}, errors.New("an event after the result")
				}
				if ev.Type == EventResult {
					result = &ev
				}
				if fn != nil {
					fn(ev)
				}
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return Event{}, err
		}
	}
	if result == nil {
		return Event{}, ErrNoResult
	}
	return *result, nil
}

// DecodeStrict decodes exactly one JSON document of at most MaxDocument bytes
// and refuses unknown fields and trailing data.
func DecodeStrict(data []byte, v any) error {
	if len(data) > MaxDocument {
		return fmt.Errorf("a document of more than %d bytes", MaxDocument)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("data after the document")
	}
	return nil
}

// Status of one check.
type Status string

// Statuses.
const (
	Pass Status = "pass"
	Fail Status = "fail"
	Skip Status = "skip" // could not apply; Summary says why
	Info Status = "info" // worth knowing, not a fault
)

// Check is one line of a doctor's report.
type Check struct {
	ID       string `json:"id"` // dotted, stable: "tool.claude", "mcp.guest"
	Status   Status `json:"status"`
	Summary  string `json:"summary"`
	Evidence string `json:"evidence"` // what was seen; never a secret
	Fix      string `json:"fix"`      // a command that works, or ""
}

// Report is what a doctor found. Its JSON form is the schema of
// `box doctor --json` and `hb doctor --json`.
type Report struct {
	Schema  int     `json:"schema"`
	Box     string  `json:"box"`
	Healthy bool    `json:"healthy"`
	Checks  []Check `json:"checks"`
}

// Parts of the doctor inside a box, which the host may ask for one by one.
const (
	// DoctorTools is whether the tools work; an Executor that is being started
	// meanwhile is believed when it is healthy, and not started once more.
	DoctorTools = "tools"
	DoctorRest  = "rest"
)

// NewReport builds a report; a box is healthy when no check failed.
func NewReport(box string, checks []Check) Report {
	healthy := len(checks) > 0
	for _, c := range checks {
		if c.Status == Fail {
			healthy = false
		}
	}
	return Report{Schema: 1, Box: box, Healthy: healthy, Checks: checks}
}

// ToolVersion is one entry of the runtime manifest.
type ToolVersion struct {
	Name    string `json:"name"`
	Version string `json:"version"` // semver where the tool has one, else its own words
	Path    string `json:"path"`
}

// RuntimeManifest records the versions of the tools in a box. It is kept at
// ~/.config/hermes-box/runtime-manifest and travels in archives.
type RuntimeManifest struct {
	Schema int           `json:"schema"`
	Time   time.Time     `json:"time"` // UTC
	HB     string        `json:"hb"`
	Tools  []ToolVersion `json:"tools"`
}

// Printable escapes control bytes, invalid UTF-8 and invisible or
// direction-changing runes, so that what a guest says can be shown on a
// terminal.
func Printable(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n <= 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\t' || unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
		i += n
	}
	return b.String()
}
