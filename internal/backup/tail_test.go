package backup

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
)

func newTestTail(t *testing.T) *tail {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return newTail(f)
}

// TestTail: what is written is read at once, and the end only when it is told.
func TestTail(t *testing.T) {
	tail := newTestTail(t)
	var ended atomic.Bool
	read := make(chan error)
	data := []byte(noise(300_000))
	go func() {
		first := make([]byte, 1000)
		_, err := io.ReadFull(tail, first)
		read <- err // while the writer has more
		rest, err := io.ReadAll(tail)
		if !ended.Load() {
			err = errors.Join(err, errors.New("it ended early"))
		}
		if !bytes.Equal(append(first, rest...), data) {
			err = errors.Join(err, errors.New("other bytes"))
		}
		read <- err
	}()
	write := func(p []byte) {
		if _, err := tail.Write(p); err != nil {
			t.Error(err)
		}
	}
	write(data[:1500])
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	for rest := data[1500:]; len(rest) > 0; {
		n := min(len(rest), 7777)
		write(rest[:n])
		rest = rest[n:]
	}
	if n, whole := tail.size(); whole || n != int64(len(data)) {
		t.Errorf("%d bytes, all %t", n, whole)
	}
	ended.Store(true)
	tail.end(nil)
	if err := <-read; err != nil {
		t.Error(err)
	}
}

func TestTailOfAFailedWriter(t *testing.T) {
	tail := newTestTail(t)
	if _, err := tail.Write([]byte("abc")); err != nil {
		t.Fatal(err)
	}
	tail.end(errors.New("the disk is full"))
	if data, err := io.ReadAll(tail); !errors.Is(err, errNotWritten) {
		t.Errorf("read %q, %v", data, err)
	}
}

// TestSaveOfAChangedFile: one that others made longer or shorter is found,
// however late.
func TestSaveOfAChangedFile(t *testing.T) {
	for name, by := range map[string]int64{"longer": 1, "shorter": -1} {
		dir := t.TempDir()
		o := options(t, filepath.Join(dir, "a"))
		var once sync.Once
		o.Verified = func(_, total int64) { // when all is written
			once.Do(func() {
				found, _ := filepath.Glob(filepath.Join(dir, ".hermes-box-*"))
				if len(found) != 1 {
					t.Errorf("%s: partial files %v", name, found)
					return
				}
				if err := os.Truncate(found[0], total+by); err != nil {
					t.Error(err)
				}
			})
		}
		if report, err := Save(context.Background(), o); err == nil {
			t.Errorf("%s: saved %+v", name, report)
		}
		if left := names(t, dir); left != "[]" {
			t.Errorf("%s: %s is left", name, left)
		}
	}
}

// TestTailIsAReader in the sense of package testing/iotest.
func TestTailIsAReader(t *testing.T) {
	tail := newTestTail(t)
	if _, err := tail.Write([]byte("some bytes")); err != nil {
		t.Fatal(err)
	}
	tail.end(nil)
	if err := iotest.TestReader(tail, []byte("some bytes")); err != nil {
		t.Error(err)
	}
}
