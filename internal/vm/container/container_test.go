//go:build linux

package container_test

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"os/exec"
	"testing"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/container"
	"hermes-box-lite/internal/vm/vmtest"
)

// TestConformance runs on a real podman with the root filesystem that BOX_BASE
// names; scripts/e2e sets both up.
func TestConformance(t *testing.T) {
	base := os.Getenv("BOX_BASE")
	if base == "" {
		t.Skip("BOX_BASE names no base; scripts/e2e runs this")
	}
	engine := "podman"
	podman := func(t *testing.T, args ...string) {
		t.Helper()
		if out, err := exec.Command(engine, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v\n%s", engine, args, err, out)
		}
	}
	vmtest.Run(t, vmtest.Harness{
		Driver: container.New(engine), Base: vm.Base{Digest: digest(t, base), Tar: base}, Isolated: true,
		Crash: func(t *testing.T, name string) { podman(t, "kill", "--signal", "KILL", "hermes-box-"+name) },
		Foreign: func(t *testing.T, name string) {
			full := "hermes-box-" + name
			podman(t, "network", "create", full)
			t.Cleanup(func() { podman(t, "network", "rm", "--force", full) })
		},
		LeftOver: func(t *testing.T, name string) {
			full := "hermes-box-" + name
			podman(t, "volume", "create", full)
			t.Cleanup(func() { podman(t, "volume", "rm", full) })
		},
	})
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
