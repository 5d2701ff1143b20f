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
	"sync/atomic"
	"syscall"
	"time"

	"github.com/creack/pty"

	"hermes-box-lite/internal/vm"
)

// patience is how long a process that has ended is waited for by what it left
// behind: children that hold its output open, or that say nothing any more.
const patience = 5 * time.Second

// Run runs a local process with the command's streams and returns its exit
// code. When ctx ends, or its output cannot be written, the process is killed
// and the error is ctx's cause or the writer's.
func Run(ctx context.Context, cmd *exec.Cmd, c vm.Command) (int, error) {
	return run(ctx, cmd, c, patience)
}

func run(ctx context.Context, cmd *exec.Cmd, c vm.Command, patience time.Duration) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if c.TTY != nil {
		c.Stdout = vm.Watched(c.Stdout, cancel)
		return runTTY(ctx, cmd, c)
	}
	var outputs []*output
	for _, stream := range []struct {
		to    io.Writer
		local *io.Writer
	}{{c.Stdout, &cmd.Stdout}, {c.Stderr, &cmd.Stderr}} {
		if _, direct := stream.to.(*os.File); direct || stream.to == nil {
			*stream.local = stream.to
			continue
		}
		o, err := newOutput(vm.Watched(stream.to, cancel), patience)
		if err != nil {
			return 0, err
		}
		defer o.close()
		*stream.local = o.in
		outputs = append(outputs, o)
	}
	if c.Stdin == nil {
		return wait(ctx, cmd, outputs, nil)
	}
	if f, ok := c.Stdin.(*os.File); ok {
		cmd.Stdin = f
		return wait(ctx, cmd, outputs, nil)
	}
	// Not cmd.Stdin: Wait would block on a reader that never ends although
	// the command has.
	w, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	return wait(ctx, cmd, outputs, func() {
		_, _ = io.Copy(w, c.Stdin) // the command may stop reading when it likes
		_ = w.Close()
	})
}

// output is the pipe from a process to a writer. os/exec has such pipes too, but
// gives the writer only a fixed time after the end of the process: a disk that
// stalls would cost a stream its last bytes.
type output struct {
	to       io.Writer
	in, out  *os.File
	patience time.Duration
	exited   atomic.Bool
	ended    chan struct{}
}

func newOutput(to io.Writer, patience time.Duration) (*output, error) {
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return &output{to: to, in: in, out: out, patience: patience, ended: make(chan struct{})}, nil
}

func (o *output) close() { _, _ = o.in.Close(), o.out.Close() } // closed twice after a good end

// copy writes what comes until all who hold the other end are gone or, once the
// process has exited, silent.
func (o *output) copy() {
	defer close(o.ended)
	buf := make([]byte, 64<<10)
	for {
		if o.exited.Load() {
			_ = o.out.SetReadDeadline(time.Now().Add(o.patience))
		}
		n, err := o.out.Read(buf)
		if n > 0 {
			if _, err := o.to.Write(buf[:n]); err != nil {
				return // the writer's owner was told
			}
		}
		if err != nil {
			return
		}
	}
}

// drain waits until what the process wrote has arrived.
func (o *output) drain(ctx context.Context) {
	o.exited.Store(true)
	_ = o.out.SetReadDeadline(time.Now().Add(o.patience)) // for a read that waits already
	select {
	case <-o.ended:
		return
	case <-ctx.Done():
	}
	_ = o.out.Close()
	select {
	case <-o.ended:
	case <-time.After(o.patience): // the writer is stuck
	}
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
	code, err := wait(ctx, cmd, nil, func() {
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
func wait(ctx context.Context, cmd *exec.Cmd, outputs []*output, started func()) (int, error) {
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
	for _, o := range outputs {
		_ = o.in.Close()
		go o.copy()
	}
	if started != nil {
		go started()
	}
	err := cmd.Wait()
	for _, o := range outputs {
		o.drain(ctx)
	}
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
