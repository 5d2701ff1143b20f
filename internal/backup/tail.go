package backup

import (
	"errors"
	"io"
	"os"
	"sync"
)

// tail is a file that is read while it is written: its reader waits at what is
// written so far, and is told of the end by end only.
type tail struct {
	file *os.File
	read int64 // by Read

	mu      sync.Mutex
	changed *sync.Cond // of what follows
	written int64
	ended   bool
	failed  bool
}

func newTail(file *os.File) *tail {
	t := &tail{file: file}
	t.changed = sync.NewCond(&t.mu)
	return t
}

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	n, err := t.file.Write(p)
	t.mu.Lock()
	from := t.written
	t.written += int64(n)
	t.mu.Unlock()
	t.changed.Broadcast()
	startWriteback(t.file, from, int64(n))
	return n, err
}

func (t *tail) sync() error { return t.file.Sync() }

// end lets the reader see the end, or fail when the writing has.
func (t *tail) end(err error) {
	t.mu.Lock()
	t.ended, t.failed = true, err != nil
	t.mu.Unlock()
	t.changed.Broadcast()
}

// size is how much was written, and whether that is all.
func (t *tail) size() (n int64, whole bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.written, t.ended
}

// errNotWritten is never seen by a caller of Save: the writer's own error is.
var errNotWritten = errors.New("the file was not written to its end")

// Read implements io.Reader. Its end is the file's own, whoever made it longer
// or shorter.
func (t *tail) Read(p []byte) (int, error) {
	t.mu.Lock()
	for t.read >= t.written && !t.ended {
		t.changed.Wait()
	}
	ready, ended, failed := t.written-t.read, t.ended, t.failed
	t.mu.Unlock()
	if failed {
		return 0, errNotWritten
	}
	if !ended && ready < int64(len(p)) {
		p = p[:ready]
	}
	n, err := t.file.ReadAt(p, t.read)
	t.read += int64(n)
	if n > 0 && err == io.EOF {
		err = nil
	}
	return n, err
}
