package backup

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"hermes-box-lite/internal/archive"
)

// small mounts a file system of that many bytes.
func small(t *testing.T, size string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a small file system needs root")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skip("cannot mount a small file system: ", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestSaveFull: a full disk at the destination, noticed while writing and, with
// less than a buffer's worth, at the end.
func TestSaveFull(t *testing.T) {
	dir := small(t, "3M")
	for _, size := range []int{8 << 20, 3<<20 + 100} {
		o := options(t, filepath.Join(dir, "a"))
		o.Source = sourceOf(gzipped(t, plainTar(t, []file{{"data/", ""}, {"data/a", noise(size)}})))
		if _, err := Save(context.Background(), o); !errors.Is(err, syscall.ENOSPC) || errors.Is(err, archive.ErrUnsafe) {
			t.Errorf("%d bytes: %v", size, err)
		}
		if left := names(t, dir); left != "[]" {
			t.Errorf("%d bytes: %s is left", size, left)
		}
	}
	if _, err := Save(context.Background(), options(t, filepath.Join(dir, "a"))); err != nil {
		t.Errorf("what fits: %v", err)
	}
}

func TestExtractFull(t *testing.T) {
	a := verified(t, sealed(t, gzipped(t, plainTar(t, []file{{"data/", ""}, {"data/a", noise(8 << 20)}}))))
	// Known before.
	dir := small(t, "3M")
	if err := a.Extract(context.Background(), filepath.Join(dir, "x"), nil); !errors.Is(err, syscall.ENOSPC) || names(t, dir) != "[]" {
		t.Errorf("%v: %s", err, names(t, dir))
	}
	// Somebody else fills it meanwhile.
	dir = small(t, "80M")
	filler := filepath.Join(dir, "filler")
	err := a.Extract(context.Background(), filepath.Join(dir, "x"), func(done, total int64) {
		if done <= total/3 {
			_ = os.WriteFile(filler, bytes.Repeat([]byte("x"), 79<<20), 0o600)
		}
	})
	if !errors.Is(err, syscall.ENOSPC) || errors.Is(err, ErrChanged) || !strings.Contains(err.Error(), "data/a") || names(t, dir) != "[filler]" {
		t.Errorf("%v: %s", err, names(t, dir))
	}
}
