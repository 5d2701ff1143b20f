package smolvm

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"hermes-box-lite/internal/vm"
)

// TestMarks cuts what a command and smolvm say in every way.
func TestMarks(t *testing.T) {
	const id = "0123"
	begin, end := "\x1ehbx-begin "+id+"\n", func(code string) string { return "\x1ehbx-end " + id + " " + code + "\n" }
	for _, tc := range []struct {
		name, in, out string
		began, ended  bool
		code          int
		words         string
	}{
		{"plain", begin + "hello\n" + end("7"), "hello\n", true, true, 7, ""},
		{"terminal", "\x1ehbx-begin " + id + "\r\nhello\r\n\x1ehbx-end " + id + " 0\r\n", "hello\r\n", true, true, 0, ""},
		{"nothing said", begin + end("0"), "", true, true, 0, ""},
		{"around", "WARN one\n" + begin + "x" + end("255") + "WARN two\n", "x", true, true, 255, "WARN two"},
		{"never began", "Error: agent operation failed: connect:\n  machine\n", "", false, false, 0, "agent operation failed: connect: machine"},
		{"broke", begin + "half", "half", true, false, 0, ""},
		{"broke in the mark", begin + "half\x1ehbx-end " + id + " 1", "half", true, false, 0, ""},
		{"another's mark", begin + "\x1ehbx-end 9999 3\n\x1e\x1e\x1ehbx" + end("1"), "\x1ehbx-end 9999 3\n\x1e\x1e\x1ehbx", true, true, 1, ""},
		{"no code", begin + end("x") + end("300") + end("1234567890") + end("2"), end("x") + end("300") + end("1234567890"), true, true, 2, ""},
		{"binary", begin + "\x00\xff\x1e\r\n" + end("0"), "\x00\xff\x1e\r\n", true, true, 0, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for size := 1; size <= len(tc.in); size++ {
				var out bytes.Buffer
				begun := 0
				m := newMarks(&out, id, func() { begun++ })
				for rest := []byte(tc.in); len(rest) > 0; {
					n := min(size, len(rest))
					if written, err := m.Write(rest[:n]); err != nil || written != n {
						t.Fatal(written, err)
					}
					rest = rest[n:]
				}
				began, ended, code, words := m.verdict()
				if out.String() != tc.out || began != tc.began || ended != tc.ended || code != tc.code || words != tc.words || (begun == 1) != began {
					t.Fatalf("in pieces of %d: out %q, began %v (told %d times), ended %v, code %d, words %q", size, out.String(), began, begun, ended, code, words)
				}
			}
		})
	}
}

func FuzzMarks(f *testing.F) {
	f.Add([]byte("\x1ehbx-begin a\nx\x1ehbx-end a 1\n"), 3)
	f.Fuzz(func(t *testing.T, in []byte, size int) {
		if size < 1 || size > 64 {
			return
		}
		m := newMarks(io.Discard, "a", nil)
		for rest := in; len(rest) > 0; {
			n := min(size, len(rest))
			if _, err := m.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if began, ended, code, _ := m.verdict(); ended && !began || code < 0 || code > 255 {
			t.Errorf("began %v, ended %v, code %d", began, ended, code)
		}
	})
}

func FuzzParseList(f *testing.F) {
	f.Add([]byte(`[{"name":"a","state":"running","labels":{"hermes-box.owner":"0123456789abcdef0123456789abcdef"}}]`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, in []byte) {
		machines, err := parseList(in)
		if err != nil {
			return
		}
		for _, m := range machines {
			if checkName(m.Name) != nil {
				t.Errorf("it lists %q", m.Name)
			}
		}
	})
}

// script makes a program that stands where smolvm should.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "smolvm")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestRefusesTheWrongProgram(t *testing.T) {
	for _, tc := range []struct {
		name, text, want string
	}{
		{"too old", "echo smolvm 1.8.0", "1.8.1 or newer is needed"},
		{"much too old", "echo smolvm 0.9.9", "1.8.1 or newer is needed"},
		{"CelestoAI's", "echo 'SmolVM 0.4.2 (celesto)'", "another program of that name"},
		{"one without a version", "echo 'usage: smolvm [command]' >&2; exit 2", "another program of that name"},
		{"one that says nothing", "exit 0", "another program of that name"},
		{"exact", "echo smolvm 1.8.1", ""},
		{"newer", "echo smolvm 1.14.0", ""},
		{"much newer", "echo smolvm 2.0.0-rc.1", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := New(Options{Dir: t.TempDir(), Program: script(t, tc.text)})
			_, err := d.program(t.Context())
			var engine *vm.EngineError
			if tc.want == "" && err != nil || tc.want != "" && (!errors.As(err, &engine) || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("said %v, want %q", err, tc.want)
			}
		})
	}
	d := New(Options{Dir: t.TempDir(), Program: filepath.Join(t.TempDir(), "smolvm")})
	var engine *vm.EngineError
	if _, err := d.program(t.Context()); !errors.As(err, &engine) || !strings.Contains(err.Error(), "not installed") {
		t.Errorf("without a program: %v", err)
	}
}

func TestHypervisor(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has the device")
	}
	dir := t.TempDir()
	d := New(Options{Dir: dir, Program: script(t, "echo smolvm 1.9.3"), KVM: filepath.Join(dir, "kvm")})
	_, err := d.Create(t.Context(), vm.Spec{Name: "a", OwnerID: strings.Repeat("a", 32)})
	var engine *vm.EngineError
	if !errors.As(err, &engine) || engine.Hint() == "" || !strings.Contains(err.Error(), "is not there") {
		t.Errorf("without KVM: %v", err)
	}
	if err := os.WriteFile(d.opts.KVM, nil, 0o000); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		t.Skip("root may open everything")
	}
	if err := d.Usable(t.Context()); !errors.As(err, &engine) || !strings.Contains(engine.Hint(), "usermod") {
		t.Errorf("without permission: %v", err)
	}
}

// TestInterruptedNotKilled: smolvm cleans up when it is interrupted; killed it
// leaves half a machine.
func TestInterruptedNotKilled(t *testing.T) {
	dir := t.TempDir()
	d := New(Options{Dir: dir, Program: script(t, `[ "$1" = --version ] && { echo smolvm 1.9.3; exit; }
trap 'echo interrupted >"`+dir+`/how"; exit 1' INT
echo >"`+dir+`/up"
while :; do sleep 0.01; done`)})
	c, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("the user has enough")
	go func() {
		for c.Err() == nil {
			if _, err := os.Stat(filepath.Join(dir, "up")); err == nil {
				cancel(stopped)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	if _, err := d.run(c, time.Minute, "machine", "start"); !errors.Is(err, stopped) {
		t.Errorf("it ended with %v", err)
	}
	if how, err := os.ReadFile(filepath.Join(dir, "how")); err != nil || string(how) != "interrupted\n" {
		t.Errorf("how it was ended: %q, %v", how, err)
	}
}

func TestAnswersAreBounded(t *testing.T) {
	d := New(Options{Dir: t.TempDir(), Program: script(t, `case "$1" in --version) echo smolvm 1.9.3;; loud) head -c 20000000 /dev/zero;; *) head -c 20000000 /dev/zero >&2; echo 'Error: the end' >&2; exit 1;; esac`)})
	if _, err := d.run(t.Context(), time.Minute, "loud"); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("a large answer: %v", err)
	}
	if _, err := d.run(t.Context(), time.Minute, "error"); err == nil || len(err.Error()) > 5000 {
		t.Errorf("a large message: %.100v", err)
	}
	if got := lastWords([]byte("one\nError: two\x1b[2J\n  three\n")); got != `two\x1b[2J three` {
		t.Errorf("last words %q", got)
	}
}

// TestNotes: a bar that moves is told once.
func TestNotes(t *testing.T) {
	var told []string
	l := &lineWriter{tell: func(text string) { told = append(told, text) }}
	for _, said := range []string{"Starting machine 'a'...\nPulling x", "...\n", "10% [##>   ]\r", "20.5% [####> ]\r", "\n\nlayer 1 of 9\nlayer 2 of 9\nDone in 3 s\x1b[0m\n", strings.Repeat("y", 10000) + "\n", "cut off"} {
		if n, err := io.WriteString(l, said); err != nil || n != len(said) {
			t.Fatal(n, err)
		}
	}
	want := []string{"Starting machine 'a'...", "Pulling x...", "layer 1 of 9", `Done in 3 s\x1b[0m`, strings.Repeat("y", 400)}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("told (-want +got):\n%s", diff)
	}
}

// TestEndWithoutItsOutput: the command ended, and then smolvm lost the rest.
func TestEndWithoutItsOutput(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	d := New(Options{Dir: t.TempDir(), Program: script(t, `case "$1 $2" in
"--version ") echo smolvm 1.9.3;;
"machine status") echo '{"name":"a","state":"running"}';;
"machine exec")
	while [ "$1" != sh ]; do shift; done
	case $FAKE in
	lost) printf '\036hbx-begin %s\n\036hbx-end %s 0\n' "$2" "$2" >&2; echo "Error: io operation failed: lost" >&2; exit 1;;
	gone) echo "Error: agent operation failed: connect: machine 'a' is not running. Use it first" >&2; exit 1;;
	usage) echo "error: unexpected argument" >&2; exit 2;;
	esac;;
esac`)})
	for fake, want := range map[string]string{"lost": "may be lost", "gone": "did not begin", "usage": "did not begin", "silent": "did not begin"} {
		t.Setenv("FAKE", fake)
		if code, err := d.Exec(t.Context(), "a", vm.Command{Argv: []string{"true"}}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: exit code %d, %v; want %q", fake, code, err, want)
		}
	}
}

// TestImage reads the archive as smolvm's guest does, with crane.
func TestImage(t *testing.T) {
	var base bytes.Buffer
	tw := tar.NewWriter(&base)
	for _, h := range []tar.Header{
		{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "etc/os-release", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5},
		{Name: "bin", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"},
	} {
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := io.WriteString(tw, "Linux"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	want := entries(t, bytes.NewReader(base.Bytes()))
	dir := t.TempDir()
	file := filepath.Join(dir, "base.tar")
	if err := os.WriteFile(file, base.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(base.Bytes())
	d := New(Options{Dir: dir})
	path, size, err := d.image(t.Context(), vm.Base{Digest: "sha256:" + hex.EncodeToString(sum[:]), Tar: file})
	if err != nil || size == 0 {
		t.Fatal(size, err)
	}
	img, err := tarball.ImageFromPath(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	root := mutate.Extract(img)
	defer func() { _ = root.Close() }()
	if diff := cmp.Diff(want, entries(t, root)); diff != "" {
		t.Errorf("the root filesystem (-want +got):\n%s", diff)
	}
	if cfg, err := img.ConfigFile(); err != nil || cfg.Architecture != runtime.GOARCH || cfg.OS != "linux" {
		t.Errorf("the configuration is %+v, %v", cfg, err)
	}
	// smolvm has hard links to it: it must not change in place.
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("something else"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.image(t.Context(), vm.Base{Digest: "sha256:" + hex.EncodeToString(sum[:]), Tar: file}); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) || after.Size() != size {
		t.Errorf("the image was made again: %v", err)
	}
	if _, _, err := d.image(t.Context(), vm.Base{Digest: "md5:x", Tar: file}); err == nil {
		t.Error("a digest of another kind was taken")
	}
	cached, err := d.Cached(t.Context())
	if err != nil || len(cached) != 1 || cached[0].Template || cached[0].InUse {
		t.Fatalf("kept: %+v, %v", cached, err)
	}
	if err := d.Evict(t.Context(), cached[0].ID); err != nil {
		t.Error(err)
	}
	if err := d.Evict(t.Context(), cached[0].ID); !errors.Is(err, vm.ErrNoTemplate) {
		t.Errorf("evicted twice: %v", err)
	}
}

func entries(t *testing.T, r io.Reader) []string {
	t.Helper()
	var all []string
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, fmt.Sprintf("%s %c %o %s %q", strings.TrimSuffix(h.Name, "/"), h.Typeflag, h.Mode, h.Linkname, content))
	}
}

// TestLargeImage: smolvm refuses more than 8 GiB unless told.
func TestLargeImage(t *testing.T) {
	d := New(Options{Dir: t.TempDir()})
	digest := strings.Repeat("a", 64)
	path := filepath.Join(d.imageDir(), digest+".tar")
	if err := os.MkdirAll(d.imageDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	for size, want := range map[int64]string{1 << 20: "", 9<<30 + 1: "10GiB"} {
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Truncate(size), f.Close()); err != nil { // sparse
			t.Fatal(err)
		}
		args, err := d.source(t.Context(), vm.Spec{Base: vm.Base{Digest: "sha256:" + digest}})
		if got := strings.Join(args, " "); err != nil || strings.HasSuffix(got, "--max-image-size "+want) != (want != "") {
			t.Errorf("an image of %d bytes: %q, %v", size, got, err)
		}
	}
}

func TestPlace(t *testing.T) {
	if runtime.GOOS == "darwin" {
		t.Skip("macOS has one place for a home")
	}
	t.Setenv("HOME", "/home/one")
	for _, tc := range []struct{ data, cache, root, want string }{
		{"", "", "", "/home/one/.local/share/smolvm, /home/one/.cache/smolvm"},
		{"/d", "/c", "", "/d/smolvm, /c/smolvm"},
		{"relative", "", "", "/home/one/.local/share/smolvm, /home/one/.cache/smolvm"},
		{"/d", "/c", "/srv", "/srv/.local/share/smolvm, /srv/.cache/smolvm"},
	} {
		t.Setenv("XDG_DATA_HOME", tc.data)
		t.Setenv("XDG_CACHE_HOME", tc.cache)
		t.Setenv("SMOLVM_DATA_DIR", tc.root)
		if got, err := New(Options{}).Place(t.Context()); err != nil || got != tc.want {
			t.Errorf("%+v: %q, %v", tc, got, err)
		}
	}
}
