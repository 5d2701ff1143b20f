package archive

import (
	"bytes"
	"compress/gzip"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func gnuTar(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("tar")
	if err != nil {
		t.Skip("no tar")
	}
	if out, err := exec.Command(path, "--version").Output(); err != nil || !bytes.Contains(out, []byte("GNU tar")) {
		t.Skip("not GNU tar")
	}
	return path
}

// TestGNUTarReadsOurs: the escape hatch `gpg -d | tar xz`.
func TestGNUTarReadsOurs(t *testing.T) {
	program := gnuTar(t)
	attrs := hasXattrs(t.TempDir())
	for seed := range uint64(5) {
		nodes := randomTree(rand.New(rand.NewPCG(seed, 2)), false)
		if attrs {
			nodes[0].Xattrs = map[string]string{"user.a": "1"}
		}
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		end := write(t, z, nodes)
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}

		list := exec.Command(program, "-tzf", "-", "--quoting-style=literal", "--show-transformed-names")
		list.Stdin = bytes.NewReader(b.Bytes())
		out, err := list.CombinedOutput()
		if err != nil {
			t.Fatalf("tar tz: %v: %s", err, out)
		}
		var want strings.Builder
		want.WriteString("manifest\n")
		for _, n := range nodes {
			want.WriteString(n.Name)
			if n.Type == Dir {
				want.WriteString("/")
			}
			want.WriteString("\n")
		}
		want.WriteString("end\n")
		if diff := cmp.Diff(want.String(), string(out)); diff != "" {
			t.Fatalf("seed %d: tar tz: %s", seed, diff)
		}

		into := t.TempDir()
		extract := exec.Command(program, "-xzpf", "-", "--no-same-owner", "--delay-directory-restore", "-C", into)
		if attrs {
			extract.Args = append(extract.Args, "--xattrs")
		}
		extract.Stdin = bytes.NewReader(b.Bytes())
		if out, err := extract.CombinedOutput(); err != nil {
			t.Fatalf("seed %d: tar xz: %v: %s", seed, err, out)
		}
		found, _ := walk(t, filepath.Join(into, "data"))
		if diff := cmp.Diff(plain(nodes), found, cmp.AllowUnexported(node{})); diff != "" {
			t.Fatalf("seed %d: %s", seed, diff)
		}
		if got := write(t, io.Discard, inorder(found)).Digest; got != end.Digest {
			t.Errorf("seed %d: digest %s, want %s", seed, got, end.Digest)
		}
		makeRemovable(into)
	}
}

// TestGNUTarLegacy: what the shell tool's `tar czf - -C DIR .` wrote.
func TestGNUTarLegacy(t *testing.T) {
	program := gnuTar(t)
	for seed := range uint64(5) {
		src := t.TempDir()
		r := rand.New(rand.NewPCG(seed, 3))
		nodes := randomTree(r, false)
		for i := range nodes {
			// GNU tar's own format has whole seconds.
			nodes[i].ModTime = nodes[i].ModTime.Truncate(time.Second)
			nodes[i].Mode |= 0o600 // for tar, as not-root
			if nodes[i].Type == Dir {
				nodes[i].Mode |= 0o700
			}
		}
		at := time.Unix(1700000000, 0).UTC()
		for _, name := range []string{"data/home", "data/home/agent", "data/home/agent/" + strings.Repeat("long", 60)} {
			nodes = append(nodes, node{Entry: Entry{Name: name, Type: Dir, Mode: 0o755, ModTime: at}})
		}
		name := "data/home/agent/" + strings.Repeat("long", 60) + "/file"
		nodes = append(nodes, node{Entry{Name: name, Type: File, Mode: 0o644, ModTime: at, Size: 3}, "abc"})
		var b bytes.Buffer
		write(t, &b, nodes)
		root, err := os.Open(src)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = root.Close() }()
		x := NewExtractor(root, ExtractOptions{Strip: true})
		if _, err := Read(&b, DefaultLimits(), x); err != nil {
			t.Fatal(err)
		}
		if err := x.Finish(); err != nil {
			t.Fatal(err)
		}
		// Masked away when it is read.
		if err := os.Chmod(filepath.Join(src, "home/agent"), 0o755|os.ModeSetgid|os.ModeSticky); err != nil {
			t.Fatal(err)
		}
		found, _ := walk(t, src)
		want := write(t, io.Discard, inorder(found)).Digest

		for _, format := range []string{"", "--format=pax"} {
			args := []string{"-czf", "-", "--owner=agent:1001", "--group=agent:1001"}
			if format != "" {
				args = append(args, format)
			}
			cmd := exec.Command(program, append(args, "-C", src, ".")...)
			var errs bytes.Buffer
			cmd.Stderr = &errs
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("tar cz: %v: %s", err, errs.Bytes())
			}
			z, err := gzip.NewReader(bytes.NewReader(out))
			if err != nil {
				t.Fatal(err)
			}
			into := t.TempDir()
			root, err := os.Open(into)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = root.Close() }()
			x := NewExtractor(root, ExtractOptions{Strip: true})
			var seen recorder
			sum, err := Read(z, DefaultLimits(), both{x, &seen})
			if err != nil {
				t.Fatalf("seed %d %s: %v", seed, format, err)
			}
			if err := x.Finish(); err != nil {
				t.Fatal(err)
			}
			if !sum.Legacy || sum.Digest != want {
				t.Errorf("seed %d %s: %+v, want digest %s", seed, format, sum, want)
			}
			for _, n := range seen.nodes {
				if n.Owner != Agent {
					t.Errorf("%q is not the agent's", n.Name)
				}
			}
			again, _ := walk(t, into)
			if diff := cmp.Diff(found, again, cmp.AllowUnexported(node{})); diff != "" {
				t.Errorf("seed %d %s: %s", seed, format, diff)
			}
		}
	}
}

// both hands entries to an extractor and a recorder.
type both struct {
	*Extractor
	r *recorder
}

func (b both) File(e Entry, r io.Reader) error {
	_ = b.r.Dir(e)
	return b.Extractor.File(e, r)
}

func (b both) Dir(e Entry) error {
	_ = b.r.Dir(e)
	return b.Extractor.Dir(e)
}

// TestLegacyOwners: by name, and below the agent's home any stranger is him.
func TestLegacyOwners(t *testing.T) {
	program := gnuTar(t)
	src := t.TempDir()
	if err := os.MkdirAll(filepath.Join(src, "home/agent/d"), 0o755); err != nil {
		t.Fatal(err)
	}
	for owner, want := range map[string]string{
		"agent:1":     "data:1 data/home:1 data/home/agent:1 data/home/agent/d:1",
		"root:0":      "data:0 data/home:0 data/home/agent:0 data/home/agent/d:0",
		"ubuntu:1000": "data:0 data/home:0 data/home/agent:1 data/home/agent/d:1",
	} {
		out, err := exec.Command(program, "-cf", "-", "--owner="+owner, "-C", src, ".").Output()
		if err != nil {
			t.Fatal(err)
		}
		var seen recorder
		if _, err := Read(bytes.NewReader(out), DefaultLimits(), &seen); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, n := range seen.nodes {
			got = append(got, n.Name+":"+string('0'+rune(n.Owner)))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %s", owner, got, want)
		}
	}
}
