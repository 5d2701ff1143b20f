//go:build linux

package container_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"hermes-box-lite/internal/vm"
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

// Root in the box does not fill the host's disk by way of the engine's log.
func TestLogIsBounded(t *testing.T) {
	base := vmtest.BaseFromEnv(t)
	d := container.New("podman")
	spec := vm.Spec{
		Name: fmt.Sprintf("log%d", os.Getpid()), OwnerID: strings.Repeat("0d", 16), Base: base, CPUs: 1, MemoryMiB: 256,
		Workload: []string{"/bin/sh", "-c", "while :; do sleep 1; done"},
	}
	t.Cleanup(func() {
		if err := d.Delete(context.Background(), spec.Name, spec.OwnerID); err != nil {
			t.Error(err)
		}
	})
	if _, err := d.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context(), spec.Name); err != nil {
		t.Fatal(err)
	}
	const bound = 1 << 20
	say := fmt.Sprintf("head -c %d /dev/zero | tr '\\0' '\\n' >/proc/1/fd/1", 4*bound)
	if code, err := d.Exec(t.Context(), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", say}}); err != nil || code != 0 {
		t.Fatalf("%d, %v", code, err)
	}
	path, err := exec.Command("podman", "inspect", "--format", "{{.HostConfig.LogConfig.Path}}", "hermes-box-"+spec.Name).Output()
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(strings.TrimSpace(string(path))); err != nil || info.Size() > bound {
		t.Errorf("the log: %v, %v", info, err)
	}
}
