package box

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// LockedError says who holds a box's lock.
type LockedError struct {
	Name   string
	Holder Holder
}

// Holder is what the owner of a lock wrote about itself; for messages only.
// What decides is the kernel's lock, which ends with its process.
type Holder struct {
	PID   int       `json:"pid"`
	Verb  string    `json:"verb"`
	Since time.Time `json:"since"`
}

func (e *LockedError) Error() string {
	if e.Holder.PID == 0 {
		return fmt.Sprintf("%s is locked by another command", e.Name)
	}
	return fmt.Sprintf("%s is locked by `box %s` (pid %d) since %s", e.Name, e.Holder.Verb, e.Holder.PID,
		e.Holder.Since.UTC().Format(time.RFC3339))
}

// lock is an exclusive flock(2) on a file, close-on-exec, so that it ends
// with its process and with nothing else: no child inherits it, a stopped
// owner keeps it, and there is no stale state to recover.
type lock struct{ file *os.File }

// probeGrace covers the moment in which locked() holds a lock to look at it.
const probeGrace = 500 * time.Millisecond

func (h Home) lockPath(name string) string { return filepath.Join(h.locks(), name+".lock") }

// acquire takes the lock of a box, or returns a *LockedError at once.
func (h Home) acquire(name, verb string) (*lock, error) {
	deadline := time.Now().Add(probeGrace)
	for {
		l, err := h.tryLock(name)
		if err == nil {
			l.sign(verb)
			return l, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", name, err)
		}
		// An owner that has not signed yet gets a little more time, for the
		// message to name it.
		who := h.holder(name)
		if past := time.Since(deadline); past > 0 && (who.PID != 0 || past > probeGrace) {
			return nil, &LockedError{name, who}
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// wait takes a lock that is held only for moments.
func (h Home) wait(ctx context.Context, name string) (*lock, error) {
	for {
		l, err := h.tryLock(name)
		if err == nil {
			return l, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", name, err)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (h Home) tryLock(name string) (*lock, error) {
	path := h.lockPath(name)
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		// rm unlinks the file while it holds the lock; a lock on an unlinked
		// file protects nothing.
		ours, err := f.Stat()
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if current, err := os.Stat(path); err == nil && os.SameFile(ours, current) {
			return &lock{f}, nil
		}
		_ = f.Close()
	}
}

// sign says who holds the lock, for messages only: on a full disk it is held by
// somebody unknown.
func (l *lock) sign(verb string) {
	data, err := json.Marshal(Holder{os.Getpid(), verb, time.Now().UTC()})
	if err == nil && l.file.Truncate(0) == nil {
		_, _ = l.file.WriteAt(data, 0)
	}
}

func (l *lock) release() {
	_ = l.file.Truncate(0) // the next owner is not to be taken for this one
	_ = l.file.Close()
}

// discard releases the lock of a box that is gone and removes its file.
func (l *lock) discard() {
	_ = os.Remove(l.file.Name())
	l.release()
}

// locked reports whether somebody holds the lock. It never makes the file.
func (h Home) locked(name string) (bool, error) {
	f, err := os.Open(h.lockPath(name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

func (h Home) holder(name string) Holder {
	var who Holder
	if data, err := os.ReadFile(h.lockPath(name)); err == nil {
		_ = json.Unmarshal(data, &who) // being written this moment: unknown
	}
	return who
}
