//go:build linux

package container_test

import (
	"os/exec"
	"testing"

	"hermes-box-lite/internal/vm/container"
	"hermes-box-lite/internal/vm/vmtest"
)

// TestConformance runs on a real podman with the root filesystem that BOX_BASE
// names; scripts/e2e sets both up.
func TestConformance(t *testing.T) {
	base := vmtest.BaseFromEnv(t)
	engine := "podman"
	podman := func(t *testing.T, args ...string) {
		t.Helper()
		if out, err := exec.Command(engine, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v\n%s", engine, args, err, out)
		}
	}
	vmtest.Run(t, vmtest.Harness{
		Driver: container.New(engine), Base: base, Isolated: true,
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
