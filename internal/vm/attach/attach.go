// Package attach connects a local process to the streams of a vm.Command: an
// engine's command-line client, or, for the fake driver, the command itself.
package attach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/creack/pty"

	"hermes-box-lite/internal/vm"
)

// Run runs a local process with the command's streams and returns its exit
// code. When ctx ends the process is killed and the error is ctx's cause.
func Run(ctx context.Context, cmd *exec.Cmd, c vm.Command) (int, error) {
	if c.TTY != nil {
		return runTTY(ctx, cmd, c)
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

// runTTY gives the process a terminal of its own, so that raw mode and
// window size are ours to drive whatever the caller's streams are.
func runTTY(ctx context.Context, cmd *exec.Cmd, c vm.Command) (int, error) {
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
			_, _ = io.Copy(out, master) // ends with EIO when the process is gone
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
// ends. Only a process that ran and exited yields a code.
func wait(ctx context.Context, cmd *exec.Cmd, started func()) (int, error) {
	cmd.WaitDelay = 5 * time.Second
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-ctx.Done():
			kill(cmd)
		case <-done:
		}
	}()
	if started != nil {
		go started()
	}
	err := cmd.Wait()
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// kill ends the process, with its whole group where it leads one.
func kill(cmd *exec.Cmd) {
	if cmd.SysProcAttr != nil && cmd.SysProcAttr.Setsid {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		return
	}
	_ = cmd.Process.Kill()
}
