package backup

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"

	"hermes-box-lite/internal/archive"
)

// cheap is the smallest cost of a guess: tests make thousands.
const cheap = 1024

const word = "correct horse battery staple"

func passphrase(t testing.TB, s string) Passphrase {
	t.Helper()
	p, err := NewPassphrase(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func manifest() archive.Manifest {
	return archive.Manifest{
		Format: archive.Version, Box: "alpha", Time: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC),
		Lineage: strings.Repeat("0f", 16), HB: "0.1.0",
	}
}

// file is one file of a synthetic state; a name that ends in a slash is a
// directory's.
type file struct{ name, content string }

// state is a small one.
func state() []file {
	return []file{{"data/", ""}, {"data/home/", ""}, {"data/home/a", "planted plaintext"}, {"data/home/b", ""}}
}

// plainTar is a state in the closed grammar.
func plainTar(t testing.TB, files []file) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := archive.NewWriter(&out, manifest(), archive.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		e := archive.Entry{Name: strings.TrimSuffix(f.name, "/"), Mode: 0o755, Owner: archive.Agent, ModTime: time.Unix(1, 0), Size: int64(len(f.content))}
		if e.Name != f.name {
			err = w.Dir(e)
		} else {
			err = w.File(e, strings.NewReader(f.content))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func gzipped(t testing.TB, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, 3)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := z.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func sealed(t testing.TB, content []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := encrypt(&out, passphrase(t, word), cheap)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// whole is a good archive.
func whole(t testing.TB) []byte {
	t.Helper()
	return sealed(t, gzipped(t, plainTar(t, state())))
}

func onDisk(t testing.TB, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "archive")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func opened(t testing.TB, path, word string) *Archive {
	t.Helper()
	a, err := Open(path, passphrase(t, word), archive.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// verify verifies bytes as a file.
func verify(t testing.TB, data []byte) (Report, error) {
	t.Helper()
	return opened(t, onDisk(t, data), word).Verify(context.Background(), nil)
}

// sourceOf writes bytes in pieces.
func sourceOf(data []byte) func(context.Context, io.Writer) error {
	return func(_ context.Context, w io.Writer) error {
		_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{bytes.NewReader(data)}, make([]byte, 100))
		return err
	}
}

func accept(Report) error { return nil }

// options of a Save that works.
func options(t testing.TB, path string) SaveOptions {
	t.Helper()
	return SaveOptions{
		Path: path, Box: "alpha", Passphrase: passphrase(t, word), Limits: archive.DefaultLimits(),
		Source: sourceOf(gzipped(t, plainTar(t, state()))), Accept: accept, cost: cheap,
	}
}

// names of what is in a directory.
func names(t testing.TB, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return fmt.Sprint(list)
}

// inMemory is a directory in memory where there is a place for it: every
// extraction syncs its file system.
func inMemory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "hermes-box-") //nolint:usetesting // see above
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// noise cannot be compressed.
func noise(size int) string {
	data := make([]byte, size)
	src := rand.NewChaCha8([32]byte{1})
	_, _ = src.Read(data) // never fails
	return string(data)
}
