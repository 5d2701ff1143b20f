package archive

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// node is an entry with its content.
type node struct {
	Entry
	content string
}

func testManifest() Manifest {
	return Manifest{
		Format: Version, Box: "alpha", Time: time.Date(2026, 3, 4, 5, 6, 7, 890, time.UTC),
		Lineage: strings.Repeat("0f", 16), HB: "0.1.0",
		Tools: []Tool{{"claude", "2.0.1"}, {"codex", "0.9 (beta)"}}, Logins: []string{"claude"},
	}
}

// write makes an archive of nodes.
func write(t testing.TB, w io.Writer, nodes []node) End {
	t.Helper()
	a, err := NewWriter(w, testManifest(), DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		if err := put(a, n); err != nil {
			t.Fatal(err)
		}
	}
	end, err := a.Close()
	if err != nil {
		t.Fatal(err)
	}
	return end
}

func put(a *Writer, n node) error {
	switch n.Type {
	case Dir:
		return a.Dir(n.Entry)
	case File:
		return a.File(n.Entry, strings.NewReader(n.content))
	case Symlink:
		return a.Symlink(n.Entry)
	}
	return a.Link(n.Entry)
}

// recorder is a Handler that remembers.
type recorder struct{ nodes []node }

func (r *recorder) Dir(e Entry) error     { r.nodes = append(r.nodes, node{Entry: e}); return nil }
func (r *recorder) Symlink(e Entry) error { return r.Dir(e) }
func (r *recorder) Link(e Entry) error    { return r.Dir(e) }
func (r *recorder) File(e Entry, f io.Reader) error {
	b, err := io.ReadAll(f)
	r.nodes = append(r.nodes, node{e, string(b)})
	return err
}

// makeRemovable lets a test that is not root's clean up.
func makeRemovable(dir string) {
	if os.Getuid() == 0 {
		return
	}
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, _ error) error {
		if d.IsDir() {
			_ = os.Chmod(path, 0o700)
		}
		return nil
	})
}
