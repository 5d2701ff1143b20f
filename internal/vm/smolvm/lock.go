package smolvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// sessions is how many commands of ours run in a machine at once. smolvm's
// guest agent serves eight connections (its main.rs) and takes a machine whose
// ninth question has to wait for dead; two stay free for such questions and
// for ending commands.
const sessions = 6

// terminals is how many of them may have a terminal: those last for hours, and
// the box must still be examined, saved and stopped.
const terminals = 4

// held is an flock. It ends with its process, is not inherited and cannot be
// stale.
type held struct{ f *os.File }

func (h *held) release() {
	if h != nil {
		_ = h.f.Close() // which unlocks
	}
}

// tryLock locks a file, or returns nil when somebody else has it.
func tryLock(path string, how int) (*held, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		switch err = syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB); {
		case err == nil:
			return &held{f}, nil
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EWOULDBLOCK):
			return nil, f.Close()
		default:
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
	}
}

const poll = 20 * time.Millisecond

func (d *Driver) lockPath(name string) string { return filepath.Join(d.opts.Dir, "locks", name) }

// lock keeps all other lifecycle calls of a name out: smolvm kills a machine
// that is being started when it is told to start or stop it once more, and may
// write back the record of one that is being deleted.
func (d *Driver) lock(ctx context.Context, name string) (*held, error) {
	return d.wait(ctx, name, syscall.LOCK_EX)
}

// share keeps lifecycle calls out while a command connects.
func (d *Driver) share(ctx context.Context, name string) (*held, error) {
	return d.wait(ctx, name, syscall.LOCK_SH)
}

func (d *Driver) tryShared(name string) (*held, error) {
	return tryLock(d.lockPath(name), syscall.LOCK_SH)
}

func (d *Driver) wait(ctx context.Context, name string, how int) (*held, error) {
	for {
		h, err := tryLock(d.lockPath(name), how)
		if err != nil || h != nil {
			return h, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another call about %s: %w", name, context.Cause(ctx))
		case <-time.After(poll):
		}
	}
}

func (d *Driver) sessionPath(name string, i int) string {
	return filepath.Join(d.opts.Dir, "sessions", name, strconv.Itoa(i))
}

// session takes one of the first n sessions of a machine, and waits a while for
// one.
func (d *Driver) session(ctx context.Context, name string, n int) (*held, error) {
	limit := d.opts.Patience.Session
	ctx, cancel := context.WithTimeoutCause(ctx, limit,
		fmt.Errorf("all its %d sessions for this were in use for %s; leave one (detach from tmux, end a command) and try again", n, limit))
	defer cancel()
	for {
		for i := range n {
			h, err := tryLock(d.sessionPath(name, i), syscall.LOCK_EX)
			if err != nil || h != nil {
				return h, err
			}
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(poll):
		}
	}
}

// busy counts the sessions that are in use.
func (d *Driver) busy(name string) (int, error) {
	n := 0
	for i := range sessions {
		if _, err := os.Stat(d.sessionPath(name, i)); err != nil {
			continue // never used
		}
		h, err := tryLock(d.sessionPath(name, i), syscall.LOCK_EX)
		if err != nil {
			return 0, err
		}
		if h == nil {
			n++
		}
		h.release()
	}
	return n, nil
}
