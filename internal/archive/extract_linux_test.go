package archive

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// extractor begins to write into a new directory.
func extractor(t *testing.T, o ExtractOptions) (string, *Extractor) {
	t.Helper()
	dir := t.TempDir()
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	return dir, NewExtractor(root, o)
}

// into extracts an archive into a new directory.
func into(t *testing.T, archive []byte, o ExtractOptions, prepare func(dir string)) (string, *Extractor) {
	t.Helper()
	dir, x := extractor(t, o)
	if prepare != nil {
		prepare(dir)
	}
	if _, err := Read(bytes.NewReader(archive), DefaultLimits(), x); err != nil {
		t.Fatal(err)
	}
	if err := x.Finish(); err != nil {
		t.Fatal(err)
	}
	return dir, x
}

func TestDrop(t *testing.T) {
	b := begin(t)
	b.good(dir("data/d"), file("data/d/login", "secret"), dir("data/d/cache"), file("data/d/cache/f", "x"),
		link("data/alias", "data/d/login"), symlink("data/s", "d/login"), file("data/keep", "kept"), link("data/kept", "data/keep"))
	b.end()
	dropped := []string{"data/d/login", "data/d/cache", "data/s"}
	out, _ := into(t, b.Bytes(), ExtractOptions{Strip: true, Drop: func(name string) bool { return slices.Contains(dropped, name) }}, nil)
	found, _ := walk(t, out)
	var got []string
	for _, n := range inorder(found) {
		got = append(got, n.Name)
	}
	if strings.Join(got, " ") != "data data/d data/keep data/kept" {
		t.Errorf("%v", got)
	}
}

// An attribute for which the file system has no place costs nothing else, and is
// counted.
func TestSkippedXattrs(t *testing.T) {
	large := map[string]string{"user.large": strings.Repeat("x", 70000)} // Linux takes 64 KiB at most, xattr(7)
	out, x := extractor(t, ExtractOptions{})
	if err := errors.Join(
		x.Dir(Entry{Name: "d", Type: Dir, Mode: 0o755, Xattrs: large}),
		x.File(Entry{Name: "d/f", Type: File, Mode: 0o644, Xattrs: large, Size: 7}, strings.NewReader("content")),
		x.Finish(), x.Close(),
	); err != nil {
		t.Fatal(err)
	}
	if n := x.SkippedXattrs(); n != 2 {
		t.Errorf("%d skipped", n)
	}
	if data, err := os.ReadFile(filepath.Join(out, "d/f")); err != nil || string(data) != "content" {
		t.Errorf("%q, %v", data, err)
	}
}

func TestExisting(t *testing.T) {
	b := begin(t)
	b.good(node{Entry: Entry{Name: "data/lost+found", Type: Dir, Mode: 0o700}}, file("data/f", "x"))
	b.end()
	existing := map[string]bool{"lost+found": true, ".hermes-box": true}
	make2 := func(dir string) {
		for name := range existing {
			if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	out, _ := into(t, b.Bytes(), ExtractOptions{Strip: true, Existing: existing}, make2)
	if info, err := os.Stat(filepath.Join(out, "lost+found")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info, err)
	}

	for name, c := range map[string]struct {
		existing map[string]bool
		prepare  func(string)
	}{
		"not expected": {nil, make2},
		"a symlink": {existing, func(dir string) {
			if err := os.Symlink("/", filepath.Join(dir, "lost+found")); err != nil {
				t.Fatal(err)
			}
		}},
		"a file in the way": {existing, func(dir string) {
			if err := os.WriteFile(filepath.Join(dir, "f"), []byte("mine"), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		"a dangling symlink in the way": {existing, func(dir string) {
			if err := os.Symlink("through", filepath.Join(dir, "f")); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		out := t.TempDir()
		c.prepare(out)
		root, err := os.Open(out)
		if err != nil {
			t.Fatal(err)
		}
		x := NewExtractor(root, ExtractOptions{Strip: true, Existing: c.existing})
		_, err = Read(bytes.NewReader(b.Bytes()), DefaultLimits(), x)
		if err == nil {
			err = x.Finish()
		}
		if !errors.Is(err, fs.ErrExist) || errors.Is(err, ErrUnsafe) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(filepath.Join(out, "through")); err == nil {
			t.Errorf("%s: was followed", name)
		}
		if err := errors.Join(x.Close(), root.Close()); err != nil {
			t.Error(err)
		}
	}
}

func TestChown(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	b := begin(t)
	b.good(dir("data/root"), node{Entry: Entry{Name: "data/agent", Type: Dir, Mode: 0o700, Owner: Agent}},
		node{Entry{Name: "data/agent/f", Type: File, Mode: 0o755, Owner: Agent}, "x"},
		node{Entry: Entry{Name: "data/agent/s", Type: Symlink, Target: "/nowhere", Owner: Agent}},
		link("data/agent/l", "data/agent/f"), file("data/root/f", "x"), symlink("data/root/s", "../agent"))
	b.end()
	out, _ := into(t, b.Bytes(), ExtractOptions{Chown: true, AgentUID: 1001, AgentGID: 1002, RootUID: 7, RootGID: 8}, nil)
	for name, want := range map[string][2]uint32{
		"data": {7, 8}, "data/root": {7, 8}, "data/root/f": {7, 8}, "data/root/s": {7, 8},
		"data/agent": {1001, 1002}, "data/agent/f": {1001, 1002}, "data/agent/s": {1001, 1002}, "data/agent/l": {1001, 1002},
	} {
		info, err := os.Lstat(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		stat := info.Sys().(*syscall.Stat_t)
		if stat.Uid != want[0] || stat.Gid != want[1] {
			t.Errorf("%s: %d:%d, want %v", name, stat.Uid, stat.Gid, want)
		}
		if !info.ModTime().Equal(time.Unix(1700000000, 0)) {
			t.Errorf("%s: time %s", name, info.ModTime())
		}
	}
}

// TestHoles: a terabyte of nothing costs nothing but its stream; here less.
func TestHoles(t *testing.T) {
	for _, size := range []int64{hole, hole + 1, 64 << 20, 64<<20 + 4097} {
		for _, data := range []string{"", "begins"} {
			b := begin(t)
			e := Entry{Name: "data/f", Size: size, Mode: 0o600, ModTime: time.Unix(1, 0)}
			if err := b.w.File(e, io.MultiReader(strings.NewReader(data), io.LimitReader(zeros{}, size-int64(len(data))))); err != nil {
				t.Fatal(err)
			}
			b.end()
			out, _ := into(t, b.Bytes(), ExtractOptions{}, nil)
			info, err := os.Stat(filepath.Join(out, "data/f"))
			if err != nil || info.Size() != size {
				t.Fatalf("%v, %v", info, err)
			}
			if blocks := info.Sys().(*syscall.Stat_t).Blocks * 512; blocks > 3*hole {
				t.Errorf("%d bytes of zeros take %d", size, blocks)
			}
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestPartial: what is not finished is private.
func TestPartial(t *testing.T) {
	b := begin(t)
	b.good(node{Entry{Name: "data/f", Type: File, Mode: 0o777}, strings.Repeat("secret", 100000)})
	b.end()
	out, x := extractor(t, ExtractOptions{})
	if _, err := Read(bytes.NewReader(b.Bytes()[:100000]), DefaultLimits(), x); !errors.Is(err, ErrUnsafe) {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{"data": 0o700, "data/f": 0o600} {
		if info, err := os.Stat(filepath.Join(out, name)); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	if err := x.Close(); err != nil {
		t.Error(err)
	}
}
