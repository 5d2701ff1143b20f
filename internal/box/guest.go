package box

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// guest talks to hb in one machine. All it reads is bounded and escaped.
type guest struct {
	drv    vm.Driver
	name   string
	log    io.Writer // the transcript; nil: none
	limits Deadlines
}

func (m *Manager) guest(drv vm.Driver, name string, log io.Writer) guest {
	return guest{drv, name, log, m.opts.Deadlines}
}

// GuestError is hb's own word of what went wrong inside the box.
type GuestError struct {
	Text string // escaped
	Fix  string // a command of this host; may be ""
}

func (e *GuestError) Error() string { return e.Text }

// Hint returns hb's hint.
func (e *GuestError) Hint() string { return e.Fix }

// capture keeps the first bytes of a stream.
type capture struct {
	buf  bytes.Buffer
	over bool
}

func (c *capture) Write(p []byte) (int, error) {
	if room := wire.MaxDocument - c.buf.Len(); room < len(p) {
		c.over = true
		c.buf.Write(p[:room])
	} else {
		c.buf.Write(p)
	}
	return len(p), nil
}

// call runs `hb args...` and returns its exit code and output.
func (g guest) call(ctx context.Context, stdin io.Reader, args ...string) (int, []byte, error) {
	var out, errOut capture
	stderr := io.Writer(&errOut)
	if g.log != nil {
		stderr = io.MultiWriter(&errOut, g.log)
	}
	code, err := g.drv.Exec(ctx, g.name, vm.Command{
		Argv: append([]string{wire.HBPath}, args...), Stdin: stdin, Stdout: &out, Stderr: stderr,
	})
	if err != nil {
		return 0, nil, fmt.Errorf("hb %s: %w", args[0], err)
	}
	if out.over {
		return 0, nil, fmt.Errorf("hb %s answered more than %d bytes", args[0], wire.MaxDocument)
	}
	if code != 0 {
		return code, out.buf.Bytes(), &GuestError{Text: fmt.Sprintf("hb %s: %s", args[0], lastWords(errOut.buf.Bytes(), code))}
	}
	return 0, out.buf.Bytes(), nil
}

func lastWords(stderr []byte, code int) string {
	lines := strings.Split(strings.TrimSpace(string(stderr)), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		line := strings.TrimSpace(lines[i])
		if line != "" && !strings.HasPrefix(line, "hint:") {
			return wire.Printable(strings.TrimPrefix(line, "hb: "))
		}
	}
	return fmt.Sprintf("exit code %d", code)
}

// runLimit is enough for whatever has no deadline of its own.
const runLimit = 15 * time.Minute

// run is call for a verb without an answer.
func (g guest) run(ctx context.Context, args ...string) error {
	limit := g.limits.guest(runLimit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it did not end within %s", limit))
	defer cancel()
	_, _, err := g.call(ctx, nil, args...)
	return err
}

func (g guest) hello(ctx context.Context) (wire.Hello, error) {
	ctx, cancel := context.WithTimeout(ctx, g.limits.guest(time.Minute))
	defer cancel()
	code, out, err := g.call(ctx, nil, "hello")
	if code == 126 || code == 127 { // of a shell and of the engines: it cannot be run, or is not there
		return wire.Hello{}, &unfitError{g.name, fmt.Errorf("hb in the box cannot be run: %w", err)}
	}
	if err != nil {
		return wire.Hello{}, err
	}
	var h wire.Hello
	if err := wire.DecodeStrict(out, &h); err != nil {
		return wire.Hello{}, &unfitError{g.name, fmt.Errorf("hb's handshake is not of this version: %w", err)}
	}
	if h.Protocol != wire.Protocol {
		return h, &unfitError{g.name, fmt.Errorf("hb in the box speaks protocol %d, and this box protocol %d", h.Protocol, wire.Protocol)}
	}
	return h, nil
}

// unfitError is an hb that this program cannot work with, and replaces.
type unfitError struct {
	name string
	err  error
}

func (e *unfitError) Error() string { return e.err.Error() }
func (e *unfitError) Unwrap() error { return e.err }

// Hint returns the command that replaces hb.
func (e *unfitError) Hint() string { return "box repair " + e.name }

// ready waits until Executor is healthy, or is not to run, and returns which.
func (g guest) ready(ctx context.Context) (phase string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, g.limits.guest(10*time.Minute), errors.New("the box was not ready within 10 minutes"))
	defer cancel()
	_, out, err := g.call(ctx, nil, "ready")
	return strings.TrimSpace(string(out)), err
}

var secretPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// secret fetches a token or ticket; the verb is "token" or "ticket".
func (g guest) secret(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, g.limits.guest(time.Minute))
	defer cancel()
	_, out, err := g.call(ctx, nil, args...)
	if err != nil {
		return "", err
	}
	s := strings.TrimSpace(string(out))
	if !secretPattern.MatchString(s) {
		return "", fmt.Errorf("hb %s did not answer 64 hexadecimal digits", args[0])
	}
	return s, nil
}

// installScript puts standard input at hb's place, whole or not at all. $1 is
// its size in bytes. HB_ROOT is set by the fake driver only.
const installScript = `set -e
d="${HB_ROOT:-}/opt/hermes-box/bin"
mkdir -p "$d"
t="$d/.hb.$$"
trap 'rm -f "$t"' EXIT
cat >"$t"
if [ "$(wc -c <"$t")" -ne "$1" ]; then echo "hb arrived incomplete" >&2; exit 1; fi
chmod 755 "$t"
mv -f "$t" "$d/hb"
trap - EXIT`

// installHB brings hb in the box to this version and waits for its supervisor.
func (m *Manager) installHB(ctx context.Context, g guest) error {
	ctx, cancel := context.WithTimeoutCause(ctx, g.limits.guest(10*time.Minute), errors.New("hb did not come up within 10 minutes"))
	defer cancel()
	h, err := g.hello(ctx)
	if err == nil && h.Version == m.opts.Version && h.Supervised {
		return nil
	}
	if err != nil || h.Version != m.opts.Version {
		binary, err := m.opts.HB()
		if err != nil {
			return err
		}
		var errOut capture
		code, err := g.drv.Exec(ctx, g.name, vm.Command{
			Argv:  []string{"/bin/sh", "-c", installScript, "sh", fmt.Sprint(len(binary))},
			Stdin: bytes.NewReader(binary), Stderr: &errOut,
		})
		if err != nil {
			return err
		}
		if code != 0 {
			return errors.New(lastWords(errOut.buf.Bytes(), code))
		}
	}
	return m.awaitSupervisor(ctx, g)
}

// quietWait is how long the wait for the supervisor needs no explanation, and
// how long an engine that has just started a machine may not find hb in it.
const quietWait = 10 * time.Second

// supervisorLimit bounds how long a machine that runs may take until its
// supervisor answers.
func (m *Manager) supervisorLimit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, m.opts.Deadlines.guest(5*time.Minute), errors.New("the supervisor did not answer within 5 minutes"))
}

// awaitSupervisor returns when the supervisor of the machine answers.
func (m *Manager) awaitSupervisor(ctx context.Context, g guest) error {
	quiet := time.Now().Add(m.opts.Deadlines.guest(5*quietWait) / 5)
	said := false
	for {
		h, err := g.hello(ctx)
		if err == nil && h.Supervised {
			return nil
		}
		if errors.Is(err, vm.ErrNotRunning) {
			return fmt.Errorf("wait for the supervisor: %w", err)
		}
		if time.Now().After(quiet) && ctx.Err() == nil {
			var unfit *unfitError
			if errors.As(err, &unfit) {
				return fmt.Errorf("wait for the supervisor: %w", err)
			}
			if !said {
				said = true
				m.opts.Report.Note("still waiting for the supervisor in the box" + because(err))
			}
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + wire.Printable(err.Error())
}

// provisionRequest translates the configuration; pins, unless nil, replace the
// versions that it asks for.
func (m *Manager) provisionRequest(rec Record, refresh bool, pins *wire.Pins) (wire.ProvisionRequest, error) {
	c := m.config
	if pins == nil {
		pins = &wire.Pins{Claude: c.ClaudeVersion, Codex: c.CodexVersion, Executor: c.ExecutorVersion, Hermes: c.HermesVersion}
	}
	bundle, err := extraCAs(c.ExtraCAFile)
	if err != nil {
		return wire.ProvisionRequest{}, err
	}
	return wire.ProvisionRequest{
		Protocol: wire.Protocol, BoxName: rec.Name, HostPort: rec.HostPort, EnvFile: c.GuestFile(),
		NodeMajor: c.NodeMajor, Hermes: c.InstallHermes, Executor: c.InstallExecutor, WireMCP: c.WireMCP, Refresh: refresh,
		Versions: *pins,
		CABundle: bundle, HTTPProxy: c.HTTPProxy, HTTPSProxy: c.HTTPSProxy, NoProxy: c.NoProxy,
		Timezone: hostTimezone(), HermesInstaller: c.HermesInstaller,
	}, nil
}

// provision streams hb's events into the mutation.
func (g guest) provision(ctx context.Context, req wire.ProvisionRequest, mu *mutation) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	_, err = g.perform(ctx, mu, bytes.NewReader(body), nil, mu.provisionEvent, "provision")
	return err
}

// perform runs a verb of hb that reports by events, hands them to on, and
// returns the result. Events are on standard output, or on standard error when
// data gets what the verb writes.
func (g guest) perform(ctx context.Context, mu *mutation, stdin io.Reader, data io.Writer, on func(wire.Event), args ...string) (wire.Event, error) {
	pr, pw := io.Pipe()
	type outcome struct {
		event wire.Event
		err   error
	}
	done := make(chan outcome, 1)
	go func() {
		ev, err := wire.ReadEvents(pr, on, func(line string) { mu.log.line("%s", line) })
		_ = pr.CloseWithError(err)
		done <- outcome{ev, err}
	}()
	cmd := vm.Command{Argv: append([]string{wire.HBPath}, args...), Stdin: stdin, Stdout: pw, Stderr: mu.log}
	if data != nil {
		cmd.Stdout, cmd.Stderr = data, pw
	}
	code, execErr := g.drv.Exec(ctx, g.name, cmd)
	_ = pw.Close()
	result := <-done
	switch {
	case execErr != nil:
		return wire.Event{}, execErr
	case result.err != nil:
		return wire.Event{}, fmt.Errorf("hb %s ended with %d: %w", args[0], code, result.err)
	case result.event.Error != "":
		// hb names its step too; once is enough.
		return wire.Event{}, guestError(g.name, strings.TrimPrefix(result.event.Error, mu.step+": "), result.event.Hint)
	case code != 0:
		return wire.Event{}, fmt.Errorf("hb %s ended with %d after reporting success", args[0], code)
	}
	return result.event, nil
}

// provisionEvent passes an event of provisioning on to the user.
func (mu *mutation) provisionEvent(ev wire.Event) {
	if ev.Type == wire.EventStep {
		mu.subStep("provision: " + wire.Printable(ev.Step))
		return
	}
	mu.remark(ev)
}

// stateEvent passes an event of pack or unpack on; total is what there is to
// read, bytes.
func (mu *mutation) stateEvent(total int64) func(wire.Event) {
	return func(ev wire.Event) {
		switch ev.Type {
		case wire.EventStep:
			mu.subStep(mu.verb + ": " + wire.Printable(ev.Step))
		case wire.EventProgress:
			if ev.Done >= 0 {
				mu.m.opts.Report.Progress(ev.Done, max(total, ev.Done))
			}
		default:
			mu.remark(ev)
		}
	}
}

// subStep shows a guest's step. It is not journalled.
func (mu *mutation) subStep(name string) {
	mu.step = name
	mu.m.opts.Report.Step(name)
	mu.log.line("step %s", name)
}

func (mu *mutation) remark(ev wire.Event) {
	switch ev.Type {
	case wire.EventNote:
		mu.note(wire.Printable(ev.Text))
	case wire.EventWarning:
		mu.warn(wire.Printable(ev.Text))
	}
}

// maxCAs bounds a CA bundle, in bytes.
const maxCAs = 512 << 10

// extraCAs returns the certificates to trust inside: those of file, else the
// ones that the host's administrator added to its system (Debian's and Red
// Hat's places; elsewhere EXTRA_CA_FILE is the way).
func extraCAs(file string) (string, error) {
	files := []string{file}
	if file == "" {
		files = nil
		for _, pattern := range []string{"/usr/local/share/ca-certificates/*.crt", "/etc/pki/ca-trust/source/anchors/*"} {
			found, err := filepath.Glob(pattern)
			if err != nil {
				return "", err
			}
			files = append(files, found...)
		}
	}
	var bundle bytes.Buffer
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return "", fmt.Errorf("additional CAs: %w", err)
		}
		found := false
		for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
			if block.Type != "CERTIFICATE" {
				continue
			}
			if _, err := x509.ParseCertificate(block.Bytes); err != nil {
				return "", fmt.Errorf("additional CAs: %s: %w", f, err)
			}
			found = true
			if err := pem.Encode(&bundle, &pem.Block{Type: "CERTIFICATE", Bytes: block.Bytes}); err != nil {
				return "", err
			}
		}
		if !found && file != "" {
			return "", fmt.Errorf("EXTRA_CA_FILE %s holds no PEM certificate", f)
		}
		if bundle.Len() > maxCAs {
			return "", fmt.Errorf("additional CAs: more than %d bytes", maxCAs)
		}
	}
	return bundle.String(), nil
}

// hostTimezone is the host's IANA time zone, or "" where it has none to tell.
func hostTimezone() string {
	if tz := strings.TrimPrefix(os.Getenv("TZ"), ":"); tz != "" && !strings.HasPrefix(tz, "/") {
		return tz
	}
	target, err := filepath.EvalSymlinks("/etc/localtime")
	if err != nil {
		return ""
	}
	if _, zone, ok := strings.Cut(target, "/zoneinfo/"); ok {
		return zone
	}
	return ""
}
