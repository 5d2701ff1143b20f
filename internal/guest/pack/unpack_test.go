package pack

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/guest/layout"
)

// TestUnpackClears what provisioning has put there, and nothing else.
func TestUnpackClears(t *testing.T) {
	from := newBox(t)
	put(t, filepath.Join(from.Workspace(), "new"), "new")
	p := pack(t, from)
	l := newBox(t)
	outside := put(t, l.Path("/outside/f"), "kept")
	token := put(t, filepath.Join(l.Secrets(), "token"), "kept")
	found := put(t, l.Path("/data/lost+found/x"), "kept")
	closed := filepath.Join(l.Home(), "closed")
	gone := []string{put(t, filepath.Join(l.Workspace(), "old"), ""), put(t, l.Path("/data/.hidden"), ""), put(t, filepath.Join(closed, "in"), ""), l.Path("/data/link")}
	if err := os.Symlink(l.Path("/outside"), l.Path("/data/link")); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 { // as in a box
		if err := os.Chmod(closed, 0); err != nil {
			t.Fatal(err)
		}
	}
	unpack(t, l, p.stream)
	for _, path := range []string{outside, token, found} {
		if data, err := os.ReadFile(path); err != nil || string(data) != "kept" {
			t.Errorf("%s: %q, %v", path, data, err)
		}
	}
	for _, path := range gone {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	if data, err := os.ReadFile(filepath.Join(l.Workspace(), "new")); err != nil || string(data) != "new" {
		t.Errorf("%q, %v", data, err)
	}
	// Again, as after a first try that failed.
	unpack(t, l, p.stream)
}

// TestFreshLogins: exactly the logins stay out.
func TestFreshLogins(t *testing.T) {
	from := newBox(t)
	for _, login := range logins() {
		put(t, from.Path("/"+login.file), "{}")
		put(t, from.Path("/"+login.file+".old"), "{}")
	}
	for _, name := range []string{"workspace/.claude/.credentials.json", ".codex/sessions/auth.json", "auth.json"} {
		put(t, filepath.Join(from.Home(), name), "{}")
	}
	if err := os.Link(filepath.Join(from.Home(), ".codex/auth.json"), filepath.Join(from.Workspace(), "another name")); err != nil {
		t.Fatal(err)
	}
	p := pack(t, from)
	l := newBox(t)
	result, err := Unpack(context.Background(), l, 0, true, bytes.NewReader(p.stream))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"/data/home/agent/.claude/.credentials.json", "/data/home/agent/.codex/auth.json", "/data/home/agent/.hermes/auth.json"}
	if !cmp.Equal(result.Dropped, want) || result.Digest != p.result.Digest {
		t.Errorf("%+v", result)
	}
	was, is := look(t, from.Data()), look(t, l.Data())
	for name := range was {
		_, there := is[name]
		dropped := name == "home/agent/workspace/another name" // of a login
		for _, login := range logins() {
			dropped = dropped || "data/"+name == login.file
		}
		if there == dropped {
			t.Errorf("%s there: %t", name, there)
		}
	}
	// A directory of that name counts once.
	from = newBox(t)
	for _, name := range []string{"a", "b", "c"} {
		put(t, filepath.Join(from.Home(), ".codex/auth.json", name), "{}")
	}
	result, err = Unpack(context.Background(), newBox(t), 0, true, bytes.NewReader(pack(t, from).stream))
	if err != nil || !cmp.Equal(result.Dropped, want[1:2]) {
		t.Errorf("%+v, %v", result, err)
	}
}

// TestUnpackRefuses what is not one whole stream of a state.
func TestUnpackRefuses(t *testing.T) {
	from := newBox(t)
	put(t, filepath.Join(from.Workspace(), "f"), strings.Repeat("x", 1000))
	good := pack(t, from).stream
	broken := errors.New("broken")
	flipped := bytes.Clone(good)
	flipped[len(flipped)-6] ^= 1
	for name, c := range map[string]struct {
		r    io.Reader
		want error
	}{
		"nothing":       {bytes.NewReader(nil), io.EOF},
		"cut off":       {bytes.NewReader(good[:len(good)-1]), io.ErrUnexpectedEOF},
		"half":          {bytes.NewReader(good[:len(good)/2]), io.ErrUnexpectedEOF},
		"check sum":     {bytes.NewReader(flipped), nil},
		"junk after":    {io.MultiReader(bytes.NewReader(good), strings.NewReader("x")), archive.ErrUnsafe},
		"twice":         {io.MultiReader(bytes.NewReader(good), bytes.NewReader(good)), archive.ErrUnsafe},
		"broken":        {io.MultiReader(bytes.NewReader(good[:len(good)/2]), iotest.ErrReader(broken)), broken},
		"broken at end": {io.MultiReader(bytes.NewReader(good), iotest.ErrReader(broken)), broken},
	} {
		_, err := Unpack(context.Background(), newBox(t), 0, false, c.r)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || strings.HasPrefix(name, "broken") && errors.Is(err, archive.ErrUnsafe) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Unpack(context.Background(), newBox(t), 0, false, iotest.OneByteReader(bytes.NewReader(good))); err != nil {
		t.Errorf("byte by byte: %v", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(broken)
	if _, err := Unpack(ctx, newBox(t), 0, false, bytes.NewReader(good)); !errors.Is(err, broken) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestUnpackFull: a full disk, known before and noticed on the way.
func TestUnpackFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a small file system needs root")
	}
	from := newBox(t)
	put(t, filepath.Join(from.Workspace(), "f"), strings.Repeat("x", 70<<20))
	p := pack(t, from)
	root := t.TempDir()
	l := layout.At(root)
	if err := os.Mkdir(l.Data(), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", l.Data(), "tmpfs", 0, "size=66M"); err != nil {
		t.Skip("cannot mount a small file system: ", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(l.Data(), syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for _, size := range []int64{p.result.Bytes, 1 << 62, 0} {
		_, err := Unpack(context.Background(), l, size, false, bytes.NewReader(p.stream))
		if !errors.Is(err, syscall.ENOSPC) || errors.Is(err, archive.ErrUnsafe) {
			t.Errorf("size %d: %v", size, err)
		}
	}
}
