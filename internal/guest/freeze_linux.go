package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/wire"
)

// freezeLimit ends a freeze whose host does not come back. Everything in the
// box that writes waits meanwhile.
const freezeLimit = 40 * time.Second

// ioctls of linux/fs.h.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// freezeCommand keeps the file systems still, with everything on the disks,
// until standard input ends.
func (a *app) freezeCommand() *cobra.Command {
	var thaw bool
	cmd := verb("freeze", "Keep the disks still until standard input ends", "", cobra.NoArgs, a.mustBeRoot(func(context.Context) error {
		if thaw {
			return a.thawLater()
		}
		emit := wire.NewEmitter(a.stdout)
		err := a.freeze(emit)
		if emitErr := emit.Emit(resultEvent(err)); emitErr != nil {
			return errors.Join(err, emitErr)
		}
		if err != nil {
			return &exitError{exitFailed, nil} // said in the result
		}
		return nil
	}))
	cmd.Flags().BoolVar(&thaw, "thaw", false, "thaw what is frozen when standard input ends, or after a while")
	return cmd
}

// frozenMounts are frozen in this order: whoever waits for a write to the
// system must not hold up the state.
func frozenMounts() []string { return []string{"/data", "/"} }

func (a *app) freeze(emit *wire.Emitter) error {
	hostDone := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, a.stdin)
		close(hostDone)
	}()
	thaw := func() error { return nil }
	if a.layout.Real() { // a host's file systems are not this box's
		var err error
		if thaw, err = startThawer(); err != nil {
			return err
		}
		syncDisks() // most of the work, before anybody has to wait
		for _, mount := range frozenMounts() {
			if err := fsIoctl(mount, fiFreeze); err != nil {
				return errors.Join(fmt.Errorf("freeze %s: %w", mount, err), thaw())
			}
		}
	}
	if err := emit.Emit(wire.Event{Type: wire.EventStep, Step: wire.FrozenStep}); err != nil {
		return errors.Join(err, thaw())
	}
	timeout := time.NewTimer(freezeLimit / 2)
	defer timeout.Stop()
	var err error
	select {
	case <-hostDone:
	case <-timeout.C:
		err = fmt.Errorf("the host did not finish within %s", freezeLimit/2)
	}
	return errors.Join(err, thaw())
}

// startThawer starts a process of its own session that thaws when this one
// says so, when this one is gone, however it went, or after a while. It is
// there before anything is frozen.
func startThawer() (thaw func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "freeze", "--thaw")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start what thaws: %w", err)
	}
	// It has loaded what it needs when it has written something.
	if _, err := stdout.Read(make([]byte, 1)); err != nil {
		return nil, errors.Join(fmt.Errorf("start what thaws: %w", err), stdin.Close(), cmd.Wait())
	}
	return func() error { return errors.Join(stdin.Close(), cmd.Wait()) }, nil
}

// thawLater is what startThawer starts.
func (a *app) thawLater() error {
	var errs []error
	if err := a.printf("."); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, a.stdin)
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(freezeLimit):
	}
	for _, mount := range frozenMounts() {
		// EINVAL: it is not frozen.
		if err := fsIoctl(mount, fiThaw); err != nil && !errors.Is(err, syscall.EINVAL) {
			errs = append(errs, fmt.Errorf("thaw %s: %w", mount, err))
		}
	}
	return errors.Join(errs...)
}

func fsIoctl(mount string, request uint) error {
	dir, err := os.Open(mount)
	if err != nil {
		return err
	}
	return errors.Join(unix.IoctlSetInt(int(dir.Fd()), request, 0), dir.Close())
}
