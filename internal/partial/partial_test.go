package partial

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

func gone(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err != nil
}

var makers = map[string]func(dir, prefix string) (*os.File, error){"file": Create, "directory": CreateDir}

func TestStale(t *testing.T) {
	for name, create := range makers {
		dir := t.TempDir()
		dead, err := create(dir, ".a.")
		if err != nil {
			t.Fatal(err)
		}
		if info, err := dead.Stat(); err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
		live, err := create(dir, ".a.")
		if err != nil {
			t.Fatal(err)
		}
		if name == "directory" { // one that keeps out even its owner
			if err := errors.Join(os.MkdirAll(filepath.Join(dead.Name(), "closed/in"), 0o700), os.Chmod(filepath.Join(dead.Name(), "closed"), 0)); err != nil {
				t.Fatal(err)
			}
		}
		if err := dead.Close(); err != nil {
			t.Fatal(err)
		}
		// What is not ours has names that are almost ours.
		others := []string{".a.partial", ".a.0123456789abcdeg.partial", ".a.0123456789abcdef", ".a.b.0123456789abcdef.partial", ".a.01234567.partial"}
		for _, other := range others {
			if err := os.WriteFile(filepath.Join(dir, other), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink(dir, filepath.Join(dir, ".a.aaaaaaaaaaaaaaaa.partial")); err != nil {
			t.Fatal(err)
		}
		RemoveStale(dir, ".a.")
		if !gone(t, dead.Name()) || gone(t, live.Name()) {
			t.Errorf("%s: the dead one is gone: %t, the live one: %t", name, gone(t, dead.Name()), gone(t, live.Name()))
		}
		for _, other := range append(others, ".a.aaaaaaaaaaaaaaaa.partial") {
			if gone(t, filepath.Join(dir, other)) {
				t.Errorf("%s: %s was removed", name, other)
			}
		}
		_ = live.Close()
	}
}

// Between its making and its lock it looks like one that nobody writes.
func TestTakenForStale(t *testing.T) {
	for name, create := range makers {
		dir := t.TempDir()
		stop := sweeping(t, dir)
		for range 300 {
			f, err := create(dir, ".a.")
			if err != nil {
				t.Fatal(err)
			}
			if gone(t, f.Name()) {
				t.Errorf("a %s without its name", name)
			}
			if err := errors.Join(os.Remove(f.Name()), f.Close()); err != nil {
				t.Fatal(err)
			}
		}
		stop()
	}
}

// sweeping removes what is stale, all the time.
func sweeping(t *testing.T, dir string) (stop func()) {
	t.Helper()
	quit := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-quit:
				return
			default:
				RemoveStale(dir, ".a.")
			}
		}
	})
	return func() { close(quit); wg.Wait() }
}
