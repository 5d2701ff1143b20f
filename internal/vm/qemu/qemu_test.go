//go:build linux

package qemu

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/vmtest"
)

// TestConformance runs real virtual machines of the root filesystem that
// BOX_BASE names; scripts/e2e sets it up. BOX_QEMU_DIR keeps converted bases
// between runs.
func TestConformance(t *testing.T) {
	base := os.Getenv("BOX_BASE")
	if base == "" {
		t.Skip("BOX_BASE names no base; scripts/e2e runs this")
	}
	dir := os.Getenv("BOX_QEMU_DIR")
	if dir == "" {
		dir = t.TempDir()
		// The part of the suite that runs itself again, in a namespace without
		// a network, could not fetch a kernel there.
		t.Setenv("BOX_QEMU_DIR", dir)
	}
	hb := buildHB(t)
	d := New(Options{Dir: dir, HB: func() ([]byte, error) { return hb, nil }})
	prepared := vm.Base{Digest: digest(t, base), Tar: base}
	if _, err := d.convert(t.Context(), prepared); err != nil {
		t.Fatal(err)
	}
	vmtest.Run(t, vmtest.Harness{
		Driver: d,
		Base:   prepared, Isolated: true, Patience: 10 * time.Minute,
		Crash: func(t *testing.T, name string) {
			data, err := os.ReadFile(filepath.Join(dir, "machines", name, "machine.json"))
			if err != nil {
				t.Fatal(err)
			}
			var r struct{ QEMU struct{ PID int } }
			if err := json.Unmarshal(data, &r); err != nil || r.QEMU.PID == 0 {
				t.Fatalf("no process in %s: %v", data, err)
			}
			if err := syscall.Kill(r.QEMU.PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
		LeftOver: func(t *testing.T, name string) {
			path := filepath.Join(dir, "machines", name)
			if err := os.MkdirAll(path, 0o700); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(path) })
		},
	})
}

func buildHB(t *testing.T) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hb")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "hermes-box-lite/cmd/hb")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build hb: %v\n%s", err, bytes.TrimSpace(out))
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func digest(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil))
}
