package smolvm

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/attach"
	"hermes-box-lite/internal/wire"
)

// Exec implements vm.Driver. Bytes travel by `exec -i` only: without it smolvm
// keeps the output to itself until the end and cuts it at 11 MiB (its agent,
// process.rs). A command that writes far more than it reads, and does not read
// while its output waits, can still stop both ways: the agent writes to it
// without looking elsewhere. tar, cat and hb are not such.
func (d *Driver) Exec(ctx context.Context, name string, c vm.Command) (int, error) {
	if len(c.Argv) == 0 {
		return 0, errors.New("no command to execute")
	}
	if err := checkName(name); err != nil {
		return 0, err
	}
	most := sessions
	if c.TTY != nil {
		most = terminals
	}
	slot, err := d.session(ctx, name, most)
	if err != nil {
		return 0, fmt.Errorf("smolvm machine %s: %w", name, err)
	}
	defer slot.release()
	// While it connects the machine must not be deleted: a connection that
	// fails writes the machine's record back (src/cli/vm_common.rs).
	connecting, err := d.share(ctx, name)
	if err != nil {
		return 0, err
	}
	defer func() { connecting.release() }()
	if err := d.mustRun(ctx, name); err != nil {
		return 0, err
	}
	return d.exec(ctx, name, againScript, c, func() { connecting.release() })
}

// mustRun tells a stopped machine apart before smolvm is asked to execute, whose
// own word for it is the same as for one that is merely busy.
func (d *Driver) mustRun(ctx context.Context, name string) error {
	state, err := d.state(ctx, name)
	if err != nil {
		return err
	}
	switch state {
	case "created", "stopped":
		return fmt.Errorf("smolvm machine %s: %w", name, vm.ErrNotRunning)
	case "frozen":
		return fmt.Errorf("smolvm machine %s is frozen as the base of clones that smolvm made", name)
	}
	return nil // an unreachable one may answer all the same
}

// exec is Exec without looking, waiting and locking. The script first runs
// before the command; onBegin is called when the command has begun.
func (d *Driver) exec(ctx context.Context, name, first string, c vm.Command, onBegin func()) (int, error) {
	program, err := d.program(ctx)
	if err != nil {
		return 0, err
	}
	random := make([]byte, 12)
	_, _ = rand.Read(random) // never fails
	id := hex.EncodeToString(random)

	args := []string{"machine", "exec", "--name", name, "-i"}
	script := execScript
	var seen *marks
	if c.TTY != nil {
		args = append(args, "-t", "-e", "TERM="+c.TTY.Term)
		script = ttyScript
		seen = newMarks(c.Stdout, id, onBegin)
		c.Stdout = seen
	} else {
		seen = newMarks(c.Stderr, id, onBegin)
		c.Stderr = seen
	}
	// smolvm makes its standard input non-blocking, and leaves it so when it is
	// killed (src/agent/terminal.rs). Those whose input it is must not suffer:
	// it gets a pipe, or a terminal, of its own.
	if c.Stdin != nil {
		c.Stdin = struct{ io.Reader }{c.Stdin}
	}
	cmd := command(program, append(append(args, "--", "/bin/sh", "-c", first+script, "sh", id), c.Argv...)...)
	// Its warnings would be among the command's own words.
	cmd.Env = append(cmd.Env, "RUST_LOG=smolvm=error")
	code, err := attach.Run(ctx, cmd, c)
	began, ended, own, words := seen.verdict()
	switch {
	case err != nil:
		return 0, errors.Join(fmt.Errorf("smolvm exec: %w", err), d.kill(ctx, name, id))
	case ended && own == code:
		return code, nil
	case ended:
		return 0, fmt.Errorf("smolvm exec ended with %d, its command with %d: some of its output may be lost%s", code, own, and(words))
	case began:
		// Only a machine that still runs has a process to end.
		err = fmt.Errorf("the connection to smolvm machine %s broke%s", name, and(words))
		if notRunning := d.mustRun(ctx, name); notRunning != nil {
			return 0, errors.Join(err, notRunning)
		}
		killErr := d.kill(ctx, name, id)
		if killErr != nil {
			if notRunning := d.mustRun(ctx, name); notRunning != nil { // it was just going down
				return 0, errors.Join(err, notRunning)
			}
		}
		return 0, errors.Join(err, killErr)
	}
	if notRunning := d.mustRun(ctx, name); notRunning != nil {
		return 0, notRunning
	}
	return 0, fmt.Errorf("the command did not begin in smolvm machine %s (smolvm ended with %d)%s", name, code, and(words))
}

func and(words string) string {
	if words == "" {
		return ""
	}
	return ": " + words
}

// kill ends the guest's side of a command whose client is gone.
func (d *Driver) kill(ctx context.Context, name, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.opts.Patience.Kill)
	defer cancel()
	if _, err := d.run(ctx, d.opts.Patience.Kill, "machine", "exec", "--name", name, "-i", "--", "/bin/sh", "-c", killScript, "sh", id); err != nil {
		return fmt.Errorf("end the command in the guest: %w", err)
	}
	return nil
}

// ask runs a script of ours in a machine and returns its output. It takes no
// session: two connections are kept free for it.
func (d *Driver) ask(ctx context.Context, limit time.Duration, name, script string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("smolvm machine %s did not answer within %s", name, limit))
	defer cancel()
	out, words := &head{max: 4096}, &tail{max: 4096}
	code, err := d.exec(ctx, name, "", vm.Command{
		Argv: append([]string{"/bin/sh", "-c", script, "sh"}, args...), Stdout: out, Stderr: words,
	}, nil)
	if err == nil && code != 0 {
		err = fmt.Errorf("it ended with %d%s", code, and(wire.Printable(string(bytes.TrimSpace(words.buf)))))
	}
	return strings.TrimSpace(out.buf.String()), err
}

// answers reports whether commands run in a machine.
func (d *Driver) answers(ctx context.Context, name string) bool {
	_, err := d.ask(ctx, d.opts.Patience.Probe, name, ":")
	return err == nil
}
