package backup

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/partial"
)

func verified(t *testing.T, data []byte) *Archive {
	t.Helper()
	a := opened(t, onDisk(t, data), word)
	if _, err := a.Verify(context.Background(), nil); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestExtract(t *testing.T) {
	parent := inMemory(t)
	dir := filepath.Join(parent, "x")
	if err := verified(t, whole(t)).Extract(context.Background(), dir, nil); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode() != fs.ModeDir|0o700 {
		t.Errorf("%v, %v", info, err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "data/home/a"))
	if err != nil || string(data) != "planted plaintext" {
		t.Errorf("%q, %v", data, err)
	}
	if names(t, parent) != "[x]" || names(t, dir) != "[data]" {
		t.Errorf("%s, %s", names(t, parent), names(t, dir))
	}
	if info, err := os.Stat(filepath.Join(dir, "data/home/b")); err != nil || !info.ModTime().Equal(time.Unix(1, 0)) {
		t.Errorf("%v, %v", info, err)
	}
}

func TestExtractNeverReplaces(t *testing.T) {
	parent := inMemory(t)
	dir := filepath.Join(parent, "x")
	a := verified(t, whole(t))
	appear := func() {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	appear()
	if err := a.Extract(context.Background(), dir, nil); !errors.Is(err, ErrExists) {
		t.Errorf("there before: %v", err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	late := false
	err := a.Extract(context.Background(), dir, func(int64, int64) {
		if !late {
			late = true
			appear()
		}
	})
	if !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), dir) {
		t.Errorf("there meanwhile: %v", err)
	}
	if names(t, parent) != "[x]" || names(t, dir) != "[]" {
		t.Errorf("%s, %s", names(t, parent), names(t, dir))
	}
}

// TestExtractLeavesNothing also where modes keep out.
func TestExtractLeavesNothing(t *testing.T) {
	parent := inMemory(t)
	cause := errors.New("enough")
	a := verified(t, whole(t))
	ctx, cancel := context.WithCancelCause(context.Background())
	err := a.Extract(ctx, filepath.Join(parent, "x"), func(done, total int64) {
		if done == total {
			cancel(cause)
		}
	})
	if !errors.Is(err, cause) || names(t, parent) != "[]" {
		t.Errorf("%v: %s", err, names(t, parent))
	}
	closed := filepath.Join(parent, "closed", "in", "it")
	if err := os.MkdirAll(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	outside := filepath.Join(parent, "outside")
	if err := errors.Join(os.Mkdir(outside, 0o500), os.Symlink(outside, filepath.Join(closed, "link"))); err != nil {
		t.Fatal(err)
	}
	for dir := closed; dir != parent; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := partial.RemoveAll(filepath.Join(parent, "closed")); err != nil || names(t, parent) != "[outside]" {
		t.Errorf("%v: %s", err, names(t, parent))
	}
	if info, err := os.Stat(outside); err != nil || info.Mode().Perm() != 0o500 {
		t.Errorf("through a link: %v, %v", info, err)
	}
}

// TestExtractHostile: what a file system would take outside is not even
// verified.
func TestExtractHostile(t *testing.T) {
	parent := inMemory(t)
	plain := string(plainTar(t, state()))
	evil := gzipped(t, []byte(strings.Replace(plain, "data/home/a\x00", "../../home/a", 1)))
	a := opened(t, onDisk(t, sealed(t, evil)), word)
	if _, err := a.Verify(context.Background(), nil); !errors.Is(err, archive.ErrUnsafe) {
		t.Error(err)
	}
	if err := a.Extract(context.Background(), filepath.Join(parent, "in", "x"), nil); err == nil || names(t, parent) != "[]" {
		t.Errorf("%v: %s", err, names(t, parent))
	}
}

func TestExtractFolding(t *testing.T) {
	for name, files := range map[string][]file{
		"case":    {{"data/", ""}, {"data/Readme", "1"}, {"data/README", "2"}},
		"unicode": {{"data/", ""}, {"data/\u00e9", "1"}, {"data/e\u0301", "2"}},
	} {
		a := verified(t, sealed(t, gzipped(t, plainTar(t, files))))
		for _, folds := range []bool{true, false} {
			parent := inMemory(t)
			a.folds = func(dir string) (bool, error) {
				if filepath.Dir(dir) != parent {
					t.Errorf("asked about %s", dir)
				}
				return folds, nil
			}
			err := a.Extract(context.Background(), filepath.Join(parent, "x"), nil)
			if folds != (err != nil) {
				t.Errorf("%s, folds %t: %v", name, folds, err)
			}
			if folds && (names(t, parent) != "[]" || errors.Is(err, ErrChanged) || errors.Is(err, archive.ErrUnsafe)) {
				t.Errorf("%s: %v, %s", name, err, names(t, parent))
			}
		}
	}
	// The probe itself, where a file system is known not to fold.
	dir := inMemory(t)
	if folds, err := foldsNames(dir); err != nil || names(t, dir) != "[]" {
		t.Errorf("%t, %v, %s", folds, err, names(t, dir))
	}
	if _, err := foldsNames(filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that is not there")
	}
}

func TestStaleExtractions(t *testing.T) {
	parent := inMemory(t)
	make := func(name string) string {
		path := filepath.Join(parent, name)
		if err := os.MkdirAll(filepath.Join(path, "data"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(filepath.Join(path, "data/a"), []byte("planted plaintext"), 0o600), os.Chmod(filepath.Join(path, "data"), 0)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = partial.RemoveAll(path) })
		return path
	}
	stale, live, other := make(".hermes-box-extract.0123456789abcdef.partial"), make(".hermes-box-extract.fedcba9876543210.partial"), make(".hermes-box-extract.3")
	f, err := os.Open(live)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := verified(t, whole(t)).Extract(context.Background(), filepath.Join(parent, "x"), nil); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{live, other} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(stale); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the stale one: %v", err)
	}
}
