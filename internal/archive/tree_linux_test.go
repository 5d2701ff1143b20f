package archive

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// randomTree makes up a tree, parents first.
func randomTree(r *rand.Rand, xattrs bool) []node {
	moment := func() time.Time {
		// ext4 has seconds from 1901 to 2446 and nanoseconds.
		return time.Unix(r.Int64N(1<<34)-1<<31, r.Int64N(1e9)).UTC()
	}
	parts := []string{"a", "B", "name with space", "\xff\xfe", "new\nline", "\x1b[31mred", "é", "日本", "..x", "-rf", "'\"\\", "C:\\x", "\u202e", strings.Repeat("n", 255), ".hidden"}
	targets := []string{"/etc/passwd", "nowhere", "..", ".", "/", "a/../..", "\xff\n", strings.Repeat("../", 50) + "x", "loop", strings.Repeat("y", 4095)}
	attrs := func() map[string]string {
		if !xattrs || r.IntN(3) > 0 {
			return nil
		}
		m := map[string]string{"user.a": "1", "user.bin": "\x00\xff\n", "user.empty": ""}
		return m
	}
	mode := func() fs.FileMode { return fs.FileMode(r.IntN(0o1000)) }
	nodes := []node{{Entry: Entry{Name: "data", Type: Dir, Mode: 0o755, Owner: Agent, ModTime: moment()}}}
	dirs := []string{"data"}
	var files []string
	names := map[string]bool{"data": true}
	for range r.IntN(80) {
		dir := dirs[r.IntN(len(dirs))]
		if r.IntN(3) == 0 {
			dir = dirs[len(dirs)-1] // goes deep
		}
		name := dir + "/" + parts[r.IntN(len(parts))]
		if r.IntN(2) == 0 {
			name += fmt.Sprint(r.IntN(50))
		}
		if names[name] || len(name) > 2500 || len(filepath.Base(name)) > 255 {
			continue
		}
		names[name] = true
		e := Entry{Name: name, Mode: mode(), ModTime: moment(), Owner: Owner(r.IntN(2))}
		content := ""
		switch r.IntN(6) {
		case 0, 1:
			e.Type, e.Xattrs = Dir, attrs()
			dirs = append(dirs, name)
		case 2:
			e.Type, e.Mode, e.Target = Symlink, 0o777, targets[r.IntN(len(targets))]
		case 3:
			if len(files) > 0 {
				e = Entry{Name: name, Type: Link, Target: files[r.IntN(len(files))], ModTime: time.Unix(0, 0).UTC()}
				break
			}
			fallthrough
		default:
			e.Type, e.Xattrs = File, attrs()
			b := make([]byte, r.IntN(3000))
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			if r.IntN(4) == 0 {
				b = append(b, make([]byte, r.IntN(400<<10))...)
			}
			content = string(b)
			e.Size = int64(len(b))
			files = append(files, name)
		}
		nodes = append(nodes, node{e, content})
	}
	return nodes
}

// walk reads a tree back, with what the system says of its files. Names are
// given below "data". Owners are not looked at.
func walk(t testing.TB, dir string) (found map[string]node, stats map[string]*syscall.Stat_t) {
	t.Helper()
	found, stats = map[string]node{}, map[string]*syscall.Stat_t{}
	var visit func(root *os.Root, path, name string)
	visit = func(root *os.Root, base, name string) {
		info, err := root.Lstat(base)
		if err != nil {
			t.Fatal(err)
		}
		stat := info.Sys().(*syscall.Stat_t)
		e := Entry{Name: name, Mode: info.Mode().Perm(), ModTime: info.ModTime().UTC()}
		if os.Getuid() != 0 && info.Mode()&fs.ModeSymlink == 0 {
			if err := root.Chmod(base, 0o700); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = root.Chmod(base, info.Mode().Perm()) }()
		}
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			e.Type = Symlink
			if e.Target, err = root.Readlink(base); err != nil {
				t.Fatal(err)
			}
			found[name] = node{Entry: e}
		case info.IsDir():
			e.Type = Dir
			sub, err := root.OpenRoot(base)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = sub.Close() }()
			d, err := sub.Open(".")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = d.Close() }()
			e.Xattrs = xattrsOf(t, d)
			found[name] = node{Entry: e}
			names, err := d.Readdirnames(-1)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range names {
				visit(sub, n, name+"/"+n)
			}
		default:
			f, err := root.Open(base)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			b, err := io.ReadAll(f)
			if err != nil {
				t.Fatal(err)
			}
			e.Type, e.Size, e.Xattrs = File, info.Size(), xattrsOf(t, f)
			found[name] = node{e, string(b)}
			stats[name] = stat
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	visit(root, ".", "data")
	return found, stats
}

func xattrsOf(t testing.TB, f *os.File) map[string]string {
	t.Helper()
	path := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	buf := make([]byte, 64<<10)
	n, err := syscall.Listxattr(path, buf)
	if errors.Is(err, syscall.ENOTSUP) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]string
	for name := range strings.SplitSeq(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		if m == nil {
			m = map[string]string{}
		}
		value := make([]byte, 64<<10)
		n, err := syscall.Getxattr(path, name, value)
		if err != nil {
			t.Fatal(err)
		}
		m[name] = string(value[:n])
	}
	return m
}

func hasXattrs(dir string) bool {
	return syscall.Setxattr(dir, "user.probe", []byte("x"), 0) == nil
}

// inorder makes an archive's order of a walk: parents before children, links
// as files.
func inorder(found map[string]node) []node {
	var nodes []node
	for _, name := range slices.Sorted(maps.Keys(found)) {
		nodes = append(nodes, found[name])
	}
	return nodes
}

// plain is what a tree of nodes looks like when it is walked.
func plain(nodes []node) map[string]node {
	byName := map[string]node{}
	for _, n := range nodes {
		if n.Type == Link {
			target := byName[n.Target]
			target.Name = n.Name
			n = target
		}
		n.Owner = Root
		byName[n.Name] = n
	}
	return byName
}

func TestRoundTrip(t *testing.T) {
	xattrs := hasXattrs(t.TempDir())
	if !xattrs {
		t.Log("no extended attributes here")
	}
	rounds := 25
	if testing.Short() {
		rounds = 5
	}
	for seed := range uint64(rounds) {
		nodes := randomTree(rand.New(rand.NewPCG(seed, 1)), xattrs)
		var b, again bytes.Buffer
		end := write(t, &b, nodes)
		write(t, &again, nodes)
		if !bytes.Equal(b.Bytes(), again.Bytes()) {
			t.Fatalf("seed %d: not the same bytes twice", seed)
		}
		var seen recorder
		sum, err := Read(bytes.NewReader(b.Bytes()), DefaultLimits(), &seen)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if diff := cmp.Diff(nodes, seen.nodes, cmp.AllowUnexported(node{})); diff != "" {
			t.Fatalf("seed %d: %s", seed, diff)
		}
		if sum.Digest != end.Digest || sum.Entries != int64(len(nodes)) || sum.Legacy {
			t.Fatalf("seed %d: %+v, %+v", seed, sum, end)
		}
		if diff := cmp.Diff(testManifest(), sum.Manifest); diff != "" {
			t.Fatal(diff)
		}

		for _, strip := range []bool{true, false} {
			dir := t.TempDir()
			root, err := os.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			x := NewExtractor(root, ExtractOptions{Strip: strip})
			if _, err := Read(bytes.NewReader(b.Bytes()), DefaultLimits(), x); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if err := x.Finish(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if err := root.Close(); err != nil {
				t.Fatal(err)
			}
			top := dir
			if !strip {
				top = filepath.Join(dir, "data")
			}
			found, stats := walk(t, top)
			for _, n := range nodes {
				if n.Type == Link && stats[n.Name].Ino != stats[n.Target].Ino {
					t.Errorf("seed %d: %q is no link to %q", seed, n.Name, n.Target)
				}
				if half := n.Size / 2; n.Size >= 4*hole && zero([]byte(n.content[half:])) && stats[n.Name].Blocks*512 > half+2*hole {
					t.Errorf("seed %d: %q of %d bytes takes %d: a hole was filled", seed, n.Name, n.Size, stats[n.Name].Blocks*512)
				}
			}
			if diff := cmp.Diff(plain(nodes), found, cmp.AllowUnexported(node{})); diff != "" {
				t.Fatalf("seed %d: %s", seed, diff)
			}
			// Another order, links as files: the same state.
			if got := write(t, io.Discard, inorder(found)).Digest; got != end.Digest {
				t.Fatalf("seed %d: extracted state %s, want %s", seed, got, end.Digest)
			}
			makeRemovable(dir)
		}
	}
}
