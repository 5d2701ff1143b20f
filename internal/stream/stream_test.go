package stream

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"
)

func random(n int) []byte {
	data := make([]byte, n)
	src := rand.NewChaCha8([32]byte{byte(n)})
	_, _ = src.Read(data) // never fails
	return data
}

func TestThrough(t *testing.T) {
	for _, n := range []int{0, 1, blockSize - 1, blockSize, blockSize + 1, 9*blockSize + 7} {
		data := random(n)
		var out bytes.Buffer
		w := Behind(&out)
		r := Ahead(iotest.HalfReader(bytes.NewReader(data)))
		if _, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		r.Stop()
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(out.Bytes(), data) {
			t.Errorf("%d bytes came out as %d, or others", n, out.Len())
		}
	}
}

var errBroken = errors.New("broken")

func TestReadError(t *testing.T) {
	data := random(3*blockSize + 5)
	r := Ahead(io.MultiReader(bytes.NewReader(data), iotest.ErrReader(errBroken)))
	defer r.Stop()
	got, err := io.ReadAll(r)
	if !errors.Is(err, errBroken) || !bytes.Equal(got, data) {
		t.Errorf("%d of %d bytes before %v", len(got), len(data), err)
	}
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, errBroken) {
		t.Errorf("read again: %v", err)
	}
}

// An early end is its own error and no good end.
func TestUnexpectedEnd(t *testing.T) {
	r := Ahead(io.MultiReader(bytes.NewReader(random(5)), iotest.ErrReader(io.ErrUnexpectedEOF)))
	defer r.Stop()
	if _, err := io.ReadAll(r); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
}

func TestStopEarly(t *testing.T) {
	source := &counting{}
	r := Ahead(source)
	if _, err := r.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	r.Stop()
	if n := source.n; n > (blocks+1)*blockSize {
		t.Errorf("read %d bytes ahead", n)
	}
}

type counting struct{ n int }

func (c *counting) Read(p []byte) (int, error) {
	c.n += len(p)
	return len(p), nil
}

type brokenAfter struct{ left int }

func (b *brokenAfter) Write(p []byte) (int, error) {
	if b.left -= len(p); b.left < 0 {
		return 0, errBroken
	}
	return len(p), nil
}

func TestWriteError(t *testing.T) {
	for _, n := range []int{0, 3 * blockSize, 7 * blockSize} {
		w := Behind(&brokenAfter{n})
		_, err := w.Write(random(20 * blockSize))
		closeErr := w.Close()
		if !errors.Is(err, errBroken) || !errors.Is(closeErr, errBroken) {
			t.Errorf("after %d bytes: write %v, close %v", n, err, closeErr)
		}
		if again := w.Close(); !errors.Is(again, errBroken) {
			t.Errorf("close again: %v", again)
		}
	}
	// What is still in the buffer fails in Close.
	w := Behind(&brokenAfter{0})
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); !errors.Is(err, errBroken) {
		t.Errorf("close: %v", err)
	}
}
