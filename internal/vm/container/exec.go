package container

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/creack/pty"

	"hermes-box-lite/internal/vm"
)

// execScript runs a command and leaves a note of it in the guest, for two
// questions that the engine's command line cannot answer: which processes to
// kill when the caller gives up (a killed `exec` client leaves its command
// running), and whether an exit code that the engine also uses for its own
// failures (125 and up) was really the command's. $1 is the note's name.
const execScript = `d=/run/hermes-box-exec; n=$d/$1; shift
mkdir -p "$d" && echo "pid $$" >"$n" || exit 125
"$@"
c=$?
if [ $c -ge 125 ]; then echo "exit $c" >"$n"; else rm -f "$n"; fi
exit $c`

// killScript ends every process of the noted command's session, politely and
// then for good. Daemons with a session of their own (tmux's server) stay.
const killScript = `n=/run/hermes-box-exec/$1
read -r k s <"$n" && [ "$k" = pid ] || exit 0
rm -f "$n"
members() {
	for f in /proc/[0-9]*/stat; do
		read -r l <"$f" || continue
		p=${f#/proc/}; p=${p%/stat}
		set -- ${l##*) }
		[ "$4" = "$s" ] && [ "$1" != Z ] && echo "$p"
	done 2>/dev/null
}
for g in TERM TERM TERM TERM TERM KILL KILL KILL; do
	m=$(members)
	[ -n "$m" ] || exit 0
	kill -$g $m 2>/dev/null
	[ $g = TERM ] && kill -CONT $m 2>/dev/null
	sleep 0.2
done`

// Exec implements vm.Driver.
func (d *Driver) Exec(ctx context.Context, name string, c vm.Command) (int, error) {
	if len(c.Argv) == 0 {
		return 0, errors.New("no command to execute")
	}
	box, err := d.container(ctx, name)
	if err != nil {
		return 0, err
	}
	if box.state != vm.Running {
		return 0, fmt.Errorf("%s: %w", prefix+name, vm.ErrNotRunning)
	}
	note := make([]byte, 12)
	_, _ = rand.Read(note) // never fails
	id := hex.EncodeToString(note)

	args := []string{"container", "exec"}
	if c.Stdin != nil || c.TTY != nil {
		args = append(args, "--interactive")
	}
	if c.TTY != nil {
		args = append(args, "--tty", "--env", "TERM="+c.TTY.Term)
	}
	args = append(args, box.id, "/bin/sh", "-c", execScript, "sh", id)
	cmd := exec.Command(d.engine, append(args, c.Argv...)...)

	code, err := d.attach(ctx, cmd, c)
	switch {
	case ctx.Err() != nil:
		return 0, errors.Join(context.Cause(ctx), d.kill(ctx, box.id, id))
	case err != nil:
		return 0, errors.Join(fmt.Errorf("%s exec: %w", d.engine, err), d.kill(ctx, box.id, id))
	case code < 125:
		return code, nil
	}
	return d.confirm(ctx, name, box.id, id, code)
}

// attach runs the engine's client with the command's streams and returns its
// exit code. When ctx ends the client is killed.
func (d *Driver) attach(ctx context.Context, cmd *exec.Cmd, c vm.Command) (int, error) {
	if c.TTY != nil {
		return attachTTY(ctx, cmd, c)
	}
	cmd.Stdout, cmd.Stderr = c.Stdout, c.Stderr
	if c.Stdin == nil {
		return wait(ctx, cmd, nil)
	}
	if f, ok := c.Stdin.(*os.File); ok {
		cmd.Stdin = f
		return wait(ctx, cmd, nil)
	}
	// Not cmd.Stdin: Wait would block on a reader that never ends although
	// the command has.
	w, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	return wait(ctx, cmd, func() {
		_, _ = io.Copy(w, c.Stdin) // the command may stop reading when it likes
		_ = w.Close()
	})
}

// attachTTY gives the client a terminal of its own, so that raw mode and
// window size are ours to drive whatever the caller's streams are.
func attachTTY(ctx context.Context, cmd *exec.Cmd, c vm.Command) (int, error) {
	size := c.TTY.Size
	if size.Rows == 0 || size.Cols == 0 {
		size = vm.WinSize{Rows: 24, Cols: 80}
	}
	master, slave, err := pty.Open()
	if err != nil {
		return 0, fmt.Errorf("open a terminal: %w", err)
	}
	defer func() { _ = master.Close() }()
	if err := pty.Setsize(master, &pty.Winsize{Rows: size.Rows, Cols: size.Cols}); err != nil {
		_ = slave.Close()
		return 0, err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}

	output := make(chan struct{})
	code, err := wait(ctx, cmd, func() {
		_ = slave.Close()
		go func() {
			defer close(output)
			out := c.Stdout
			if out == nil {
				out = io.Discard
			}
			_, _ = io.Copy(out, master) // ends with EIO when the client is gone
		}()
		if c.TTY.Resize != nil {
			go func() {
				for {
					select {
					case <-output:
						return
					case s, ok := <-c.TTY.Resize:
						if !ok {
							return
						}
						_ = pty.Setsize(master, &pty.Winsize{Rows: s.Rows, Cols: s.Cols})
					}
				}
			}()
		}
		if c.Stdin != nil {
			_, _ = io.Copy(master, c.Stdin)
		}
	})
	if cmd.Process == nil {
		_ = slave.Close()
		return code, err
	}
	select {
	case <-output:
	case <-time.After(2 * time.Second):
	}
	return code, err
}

// wait starts cmd, runs started (if any) beside it, and kills cmd when ctx
// ends. Only a client that ran and exited yields a code.
func wait(ctx context.Context, cmd *exec.Cmd, started func()) (int, error) {
	cmd.WaitDelay = 5 * time.Second
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-ctx.Done():
			_ = cmd.Process.Kill()
		case <-done:
		}
	}()
	if started != nil {
		go started()
	}
	err := cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// confirm asks the guest whether a code that may be the engine's own was the
// command's.
func (d *Driver) confirm(ctx context.Context, name, container, id string, code int) (int, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	out, err := d.run(ctx, "container", "exec", container, "/bin/sh", "-c",
		`n=/run/hermes-box-exec/$1; cat "$n" 2>/dev/null && rm -f "$n"`, "sh", id)
	if noted, ok := strings.CutPrefix(strings.TrimSpace(string(out)), "exit "); err == nil && ok {
		if own, convErr := strconv.Atoi(noted); convErr == nil && own == code {
			return code, nil
		}
	}
	if m, inspectErr := d.Inspect(ctx, name); inspectErr == nil && m.State != vm.Running {
		return 0, fmt.Errorf("%s: %w", prefix+name, vm.ErrNotRunning)
	}
	return 0, fmt.Errorf("%s exec ended with %d, and not by its command (%w)", d.engine, code,
		errors.Join(err, d.kill(ctx, container, id)))
}

// kill ends the guest's side of an Exec whose client is gone.
func (d *Driver) kill(ctx context.Context, container, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	_, err := d.run(ctx, "container", "exec", container, "/bin/sh", "-c", killScript, "sh", id)
	if err != nil {
		return fmt.Errorf("end the command in the guest: %w", err)
	}
	return nil
}
