package provision

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/wire"
)

// tailBytes is how much of a failed program's last output an error quotes.
const tailBytes = 1200

// maxOutput bounds what is kept of a program's standard output.
const maxOutput = 4 << 20

// commandError is a program that did not do its work. Its message ends with
// the last lines the program printed, because that is where the reason is.
type commandError struct {
	what string
	exit int // -1: not run, or killed
	err  error
	tail string
}

func (e *commandError) Error() string {
	msg := e.what + ": "
	if e.exit >= 0 {
		msg += fmt.Sprintf("exit code %d", e.exit)
	} else {
		msg += e.err.Error()
	}
	if e.tail != "" {
		msg += ": " + e.tail
	}
	return msg
}

func (e *commandError) Unwrap() error { return e.err }

// networkWords are what apt, curl, npm, git and uv print when a server could
// not be reached or trusted, as opposed to a package that cannot be installed.
var networkWords = whenNeeded(`(?i)could not resolve|temporary failure|unable to connect|could not connect|couldn't connect|connection (timed out|refused|reset|failed)|cannot initiate the connection|network is unreachable|no route to host|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|socket hang up|timed out|failed to fetch|some index files failed|dns error|error sending request|proxy connect|407`)

var trustWords = regexp.MustCompile(`(?i)certificate|SELF_SIGNED|UNABLE_TO_(GET|VERIFY)|SSL routines|tls handshake`)

// explain adds to err what was out of reach and what to do about it, when the
// programs' output says that the network was the reason.
func explain(err error, what, fix string) error {
	var ce *commandError
	if err == nil || !errors.As(err, &ce) {
		return err
	}
	switch {
	case trustWords.MatchString(ce.tail):
		return &hintedError{
			fmt.Errorf("%s could not be trusted: %w", what, err),
			"set EXTRA_CA_FILE in box.env to the CA certificates of your network" + fix,
		}
	case networkWords().MatchString(ce.tail) || ce.exit < 0 && errors.Is(ce.err, context.DeadlineExceeded):
		return &hintedError{
			fmt.Errorf("%s could not be reached: %w", what, err),
			"check the network; behind a proxy set HTTP_PROXY and HTTPS_PROXY in box.env" + fix,
		}
	}
	return err
}

// env is the environment of the programs that provisioning runs as root.
func (r *run) env(more ...string) []string {
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "LANG=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "TERM=dumb",
	}
	env = append(env, networkEnvironment(r.req)...)
	return append(env, more...)
}

// command prepares a program in a process group of its own, which is killed as
// a whole when ctx ends. It reads nothing.
func (r *run) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = r.env()
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	return cmd
}

// patience is how long a program may go on that was told to end.
const patience = 10 * time.Second

// gently has cmd, as command has prepared it, told by sig when its context
// ends, it alone, so that it can bring to an end what would be left half done;
// its whole group is killed when it takes too long for that. The caller runs
// cmd and then calls done.
func gently(cmd *exec.Cmd, sig syscall.Signal) (done func()) {
	kill := cmd.Cancel
	var late *time.Timer
	cmd.Cancel = func() error {
		late = time.AfterFunc(patience, func() { _ = kill() })
		return cmd.Process.Signal(sig)
	}
	cmd.WaitDelay += patience
	return func() {
		if late != nil {
			late.Stop()
		}
	}
}

// quiet runs cmd, keeps its standard output and returns it.
func (r *run) quiet(cmd *exec.Cmd) (string, error) {
	out := &limited{max: maxOutput}
	err := r.finish(cmd, out, out)
	return out.String(), err
}

// loud runs cmd with all of its output in the transcript.
func (r *run) loud(cmd *exec.Cmd) error { return r.finish(cmd, r.log, nil) }

// finish runs cmd. Everything it prints is also seen by the tail that an error
// quotes.
func (r *run) finish(cmd *exec.Cmd, stdout io.Writer, kept *limited) error {
	tail := &lastBytes{max: tailBytes}
	if kept == nil {
		both := io.MultiWriter(stdout, tail)
		cmd.Stdout, cmd.Stderr = both, both
	} else {
		cmd.Stdout, cmd.Stderr = stdout, io.MultiWriter(r.log, tail)
	}
	err := cmd.Run()
	if err == nil {
		return nil
	}
	ce := &commandError{what: commandName(cmd), exit: -1, err: err, tail: tail.lines()}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() >= 0 {
		ce.exit = exit.ExitCode()
	}
	return ce
}

// commandName is the program and its verb: enough to recognise it, without
// arguments that may be long.
func commandName(cmd *exec.Cmd) string {
	args := cmd.Args
	if len(args) > 1 && args[0] == "/usr/bin/env" {
		args = args[1:]
	}
	name := args[0][strings.LastIndexByte(args[0], '/')+1:]
	for _, a := range args[1:] {
		if len(a) < 20 && regexp.MustCompile(`^[a-z][a-z-]*$`).MatchString(a) {
			return name + " " + a
		}
	}
	return name
}

// retry repeats what may have failed because of the network.
func (r *run) retry(ctx context.Context, what string, attempt func(context.Context) error) error {
	const attempts = 3
	pause := 2 * time.Second
	for i := 1; ; i++ {
		err := attempt(ctx)
		if err == nil || i == attempts || ctx.Err() != nil {
			return err
		}
		r.note("%s: attempt %d of %d did not succeed, trying again in %s", what, i, attempts, pause)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
		pause *= 3
	}
}

// limited keeps the first max bytes.
type limited struct {
	bytes.Buffer
	max int
}

func (b *limited) Write(p []byte) (int, error) {
	if room := b.max - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}

// lastBytes keeps the last max bytes.
type lastBytes struct {
	buf []byte
	max int
}

func (b *lastBytes) Write(p []byte) (int, error) {
	b.buf = append(b.buf, p...)
	if len(b.buf) > 2*b.max {
		b.buf = append(b.buf[:0], b.buf[len(b.buf)-b.max:]...)
	}
	return len(p), nil
}

// lines returns the end of the output as one printable line.
func (b *lastBytes) lines() string {
	data := b.buf
	if len(data) > b.max {
		data = data[len(data)-b.max:]
	}
	var parts []string
	for line := range strings.Lines(string(data)) {
		if line = strings.TrimSpace(line); line != "" {
			parts = append(parts, wire.Printable(redactURLs(line)))
		}
	}
	if len(parts) > 8 {
		parts = parts[len(parts)-8:]
	}
	return strings.Join(parts, " | ")
}

var userInfo = regexp.MustCompile(`://[^/@\s]+@`)

// redactURLs removes user names and passwords (of proxies) from what a program
// printed.
func redactURLs(s string) string { return userInfo.ReplaceAllString(s, "://[redacted]@") }

// cleanupLimit bounds the undoing of temporary work, which runs also after the
// step's own deadline.
func (r *run) cleanupLimit() time.Duration { return 5 * time.Minute }
