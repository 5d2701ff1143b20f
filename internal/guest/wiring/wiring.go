// Package wiring registers Executor's MCP endpoint with Claude Code, Codex and
// Hermes Agent, by editing their configuration files.
//
// Everything in those files but our own entry, called "executor", belongs to
// the user. An edit is a splice into the text, so that order, comments, numbers
// and line ends stay; the result is parsed again and must mean the same as
// before but for our entry, or nothing is written. A file that cannot be
// parsed is left alone and named. Files are replaced atomically, with mode
// 0600, because they hold the token; a file that is right already is not
// touched.
//
// All edits are made as the agent. When Apply runs as root in a real box it
// runs this very program again as the agent, with the single argument
// ApplyVerb; that verb must call ApplyAsAgent with standard input and output.
// The token goes over standard input, never in arguments.
//
// Checks compares the configuration with the endpoint and then has the tools
// themselves connect. The callers are hb's supervisor, wire-mcp and doctor.
package wiring

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// ApplyVerb is hb's hidden verb that must call ApplyAsAgent.
const ApplyVerb = "wire-apply"

// serverName is the name of our entry in the tools' configurations.
const serverName = "executor"

// maxConfig bounds the files that are edited. Claude's holds the user's
// history and can grow to megabytes.
const maxConfig = 64 << 20

// Endpoint is what the tools are to be configured with.
type Endpoint struct {
	URL   string `json:"url"`   // http://127.0.0.1:4788/mcp
	Token string `json:"token"` // the agent token, 64 hex
}

var tokenGrammar = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (ep Endpoint) validate() error {
	if !tokenGrammar.MatchString(ep.Token) {
		return errors.New("the token is not 64 hex digits")
	}
	u, err := url.Parse(ep.URL)
	if err != nil || u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" ||
		!regexp.MustCompile(`^http://[a-z0-9.:\[\]-]+/[a-z0-9/_.-]*$`).MatchString(ep.URL) {
		return errors.New("the address is not like http://127.0.0.1:4788/mcp")
	}
	return nil
}

// String keeps the token out of logs and errors.
func (ep Endpoint) String() string { return ep.URL + " [redacted]" }

// GoString keeps the token out of logs and errors.
func (ep Endpoint) GoString() string { return ep.String() }

func (ep Endpoint) bearer() string { return "Bearer " + ep.Token }

// client is a tool that can be wired.
type client struct {
	name  string // of its launcher
	title string
	apply func(home string, ep Endpoint) (bool, error)
	state func(home string, ep Endpoint) state
	probe func(context.Context, layout.Layout) (ok bool, evidence string)
}

func clients() []client {
	return []client{
		{"claude", "Claude Code", applyClaude, claudeState, probeClaude},
		{"codex", "Codex", applyCodex, codexState, probeCodex},
		{"hermes", "Hermes Agent", applyHermes, hermesState, nil},
	}
}

func (c client) installed(l layout.Layout) bool {
	_, err := os.Stat(l.Path("/usr/local/bin/" + c.name))
	return err == nil
}

// answer is what ApplyAsAgent prints.
type answer struct {
	Changed []string `json:"changed"`
	Errors  []string `json:"errors"`
}

// Apply edits the tools' configuration, as the agent, and returns the names
// of the tools whose configuration was changed. The caller has checked that
// the endpoint is healthy. A tool that could not be wired does not keep the
// others from being wired.
func Apply(ctx context.Context, l layout.Layout, ep Endpoint) (changed []string, err error) {
	if err := ep.validate(); err != nil {
		return nil, fmt.Errorf("wire: %w", err)
	}
	if !l.Real() || os.Geteuid() != 0 {
		a := apply(l, ep)
		return a.Changed, a.err()
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("wire: %w", err)
	}
	request, err := json.Marshal(ep)
	if err != nil {
		return nil, fmt.Errorf("wire: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cmd := l.AgentCommand(ctx, self, ApplyVerb)
	cmd.Stdin = bytes.NewReader(request)
	out, stderr := &bounded{max: wire.MaxDocument}, &bounded{max: 4096}
	cmd.Stdout, cmd.Stderr = out, stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("wire: as the agent: %w: %s", err, redact(strings.TrimSpace(stderr.String())))
	}
	var a answer
	if err := wire.DecodeStrict(out.Bytes(), &a); err != nil {
		return nil, fmt.Errorf("wire: the answer as the agent: %w", err)
	}
	return a.Changed, a.err()
}

// ApplyAsAgent does the work of Apply in the agent's own process: it reads the
// endpoint from stdin and prints what it changed to stdout. A tool that could
// not be wired is part of the answer, not an error.
func ApplyAsAgent(stdin io.Reader, stdout io.Writer, l layout.Layout) error {
	data, err := io.ReadAll(io.LimitReader(stdin, 1<<16))
	if err != nil {
		return err
	}
	var ep Endpoint
	if err := wire.DecodeStrict(data, &ep); err != nil {
		return errors.New("standard input is not an endpoint") // err could quote the token
	}
	if err := ep.validate(); err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(apply(l, ep))
}

func apply(l layout.Layout, ep Endpoint) answer {
	a := answer{Changed: []string{}, Errors: []string{}}
	all := clients()
	did, errs := make([]bool, len(all)), make([]error, len(all))
	var wg sync.WaitGroup // each may await a writer
	for i, c := range all {
		if c.installed(l) {
			wg.Go(func() { did[i], errs[i] = c.apply(l.Home(), ep) })
		}
	}
	wg.Wait()
	for i, c := range all {
		if errs[i] != nil {
			a.Errors = append(a.Errors, c.name+": "+redact(errs[i].Error()))
		}
		if did[i] {
			a.Changed = append(a.Changed, c.name)
		}
	}
	return a
}

func (a answer) err() error {
	if len(a.Errors) == 0 {
		return nil
	}
	return errors.New("wire: " + wire.Printable(strings.Join(a.Errors, "; ")))
}

// writerPause is longer than a program takes between truncating a file and
// writing it: what is being written meanwhile is no text to work on.
const writerPause = 150 * time.Millisecond

func pause() { time.Sleep(writerPause) }

// editFile replaces the content of path by what edit makes of it, unless that
// is the same. edit gets nil for a missing file. await lets a while pass, in
// which a text that is not whole would change.
func editFile(path string, await func(), edit func([]byte) ([]byte, error)) (bool, error) {
	const attempts = 3
	for i := 1; ; i++ {
		old, err := readConfig(path)
		if err != nil {
			return false, err
		}
		text, mark := bytes.CutPrefix(old, []byte(utf8Mark))
		fresh, editErr := edit(text)
		if mark {
			fresh = append([]byte(utf8Mark), fresh...)
		}
		if editErr == nil && old != nil && bytes.Equal(old, fresh) {
			return tighten(path)
		}
		// The tools rewrite their files whenever they like, and have no lock
		// that we could take: look again just before replacing. Nobody is
		// amid writing a file that is not there.
		if old != nil {
			await()
		}
		now, err := readConfig(path)
		if err != nil {
			return false, err
		}
		if (now == nil) != (old == nil) || !bytes.Equal(now, old) {
			if i < attempts {
				continue
			}
			return false, fmt.Errorf("%s keeps changing", path)
		}
		if editErr != nil {
			return false, fmt.Errorf("%s was left as it is: %w", path, editErr)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return false, err
		}
		return true, atomicfile.Write(path, fresh, 0o600)
	}
}

// utf8Mark is the byte order mark that some editors put before a text.
const utf8Mark = "\xef\xbb\xbf"

// readConfig returns nil for a missing file. It does not wait for pipes.
func readConfig(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat() // of what was opened: the agent may replace it at any time
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if len(data) > maxConfig {
		return nil, fmt.Errorf("%s has more than %d bytes", path, maxConfig)
	}
	if data == nil {
		data = []byte{}
	}
	return data, nil
}

// tighten takes away what others may do with a file that holds a token.
func tighten(path string) (bool, error) {
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() == 0o600 {
		return false, err
	}
	return true, os.Chmod(path, 0o600)
}

// errChangedMeaning stops an edit that would have altered what is the user's.
var errChangedMeaning = errors.New("editing it would have changed more than the executor entry; add the entry by hand")

// corrupt says that a file cannot be parsed and how that is mended.
func corrupt(kind string, err error) error {
	return fmt.Errorf("it is not valid %s (%w): mend it or move it away, then run `hb wire-mcp`", kind, err)
}

// state compares a configuration with the endpoint.
type state struct {
	ok       bool
	summary  string // what is wrong
	evidence string
}

// compare is the common part of the tools' states.
func compare(path string, err error, found bool, gotURL, gotToken string, ep Endpoint) state {
	switch {
	case err != nil:
		return state{summary: "the configuration cannot be read", evidence: redact(err.Error())}
	case !found:
		return state{summary: "not wired to Executor", evidence: path + " has no usable executor entry"}
	case gotURL != ep.URL:
		return state{summary: "wired to another address", evidence: redact(fmt.Sprintf("%s says %q instead of %q", path, gotURL, ep.URL))}
	case gotToken != ep.bearer():
		return state{summary: "wired with an old token", evidence: path + " has another token than this box"}
	}
	return state{ok: true, evidence: path + " has this box's address and token"}
}

var secretLooking = regexp.MustCompile(`(?i)[0-9a-f]{32,}|bearer\s+[^\s"']+`)

// redact removes whatever could be a token from a message.
func redact(s string) string { return secretLooking.ReplaceAllString(s, "[redacted]") }

// bounded keeps the first max bytes.
type bounded struct {
	bytes.Buffer
	max int
}

func (b *bounded) Write(p []byte) (int, error) {
	if room := b.max - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}
