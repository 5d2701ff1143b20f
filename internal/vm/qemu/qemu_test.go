//go:build linux

package qemu

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/vm/vmtest"
)

// TestConformance runs real virtual machines of the root filesystem that
// BOX_BASE names; scripts/e2e sets it up. BOX_QEMU_DIR keeps converted bases
// between runs.
func TestConformance(t *testing.T) {
	base := vmtest.BaseFromEnv(t)
	dir := os.Getenv("BOX_QEMU_DIR")
	if dir == "" {
		dir = t.TempDir()
		// The part of the suite that runs itself again, in a namespace without
		// a network, could not fetch a kernel there.
		t.Setenv("BOX_QEMU_DIR", dir)
	}
	hb := buildHB(t)
	d := New(Options{Dir: dir, HB: func() ([]byte, error) { return hb, nil }})
	_, release, err := d.convert(t.Context(), base)
	if err != nil {
		t.Fatal(err)
	}
	release()
	vmtest.Run(t, vmtest.Harness{
		Driver: d,
		Base:   base, Isolated: true, Patience: 10 * time.Minute,
		// An emulated machine moves 5 MB a second.
		Stream: 16 << 20,
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
