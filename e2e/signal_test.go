//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"time"
)

// awaited tells when a text was written. os/exec writes from one goroutine.
type awaited struct {
	text  string
	found chan struct{}
	all   bytes.Buffer
	done  bool
}

func (a *awaited) Write(p []byte) (int, error) {
	a.all.Write(p)
	if !a.done && strings.Contains(a.all.String(), a.text) {
		a.done = true
		close(a.found)
	}
	return len(p), nil
}

// signalled runs box until it says that it has come to a step and, after a
// while, sends it a signal. It reports whether that was soon enough: the command
// ended by it, and not before.
func (h *home) signalled(at string, after time.Duration, signal syscall.Signal, args ...string) (r result, inTime bool) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := h.command(ctx, args...)
	steps := &awaited{text: at + "\n", found: make(chan struct{})}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, steps
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	var err error
	over := false
	select {
	case <-steps.found:
		select {
		case <-time.After(after): // another moment of the step each time
		case err = <-exited:
			over = true
		}
	case err = <-exited:
		h.t.Fatalf("box %s never came to %q: %v\n%s", strings.Join(args, " "), at, err, steps.all.String())
	}
	if !over {
		if err := cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
			h.t.Fatal(err)
		}
		err = <-exited
	}
	r = h.conclude(args, err, out.String(), steps.all.String())
	switch {
	case r.code == 0:
		return r, false
	case signal == syscall.SIGKILL && r.code == -1, r.code == 128+int(signal):
		return r, true
	}
	h.t.Errorf("%v at %q: %s", signal, at, r)
	return r, false
}

// cut is signalled where a command cannot be quicker.
func (h *home) cut(at string, signal syscall.Signal, args ...string) result {
	h.t.Helper()
	r, inTime := h.signalled(at, 0, signal, args...)
	if !inTime {
		h.t.Errorf("%v at %q came too late: %s", signal, at, r)
	}
	return r
}

// quicker: a save was ended too late, so it is whole. It is removed.
func (h *home) quicker(at, file string) {
	h.t.Helper()
	h.t.Logf("the save was quicker than its signal at %q", at)
	h.must("verify", file)
	if err := os.Remove(file); err != nil {
		h.t.Error(err)
	}
}
