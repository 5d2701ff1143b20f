package smolvm

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/rootfs"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/vmtest"
)

// TestConformanceOnSmolvm runs the suite on the smolvm that is installed, in the
// user's own root of it. BOX_BASE is a root filesystem or an image to pull. The
// machines are called by names that begin with "vt".
func TestConformanceOnSmolvm(t *testing.T) {
	if os.Getenv("BOX_E2E_SMOLVM") != "1" {
		t.Skip("BOX_E2E_SMOLVM=1 make e2e-smolvm runs this on an installed smolvm")
	}
	smolvm := func(t *testing.T, args ...string) {
		t.Helper()
		if out, err := exec.Command("smolvm", args...).CombinedOutput(); err != nil {
			t.Fatalf("smolvm %v: %v\n%s", args, err, out)
		}
	}
	d := New(Options{Dir: t.TempDir(), Note: func(text string) { t.Log(text) }})
	vmtest.Run(t, vmtest.Harness{
		Driver: d, Base: realBase(t), Isolated: true, Patience: 25 * time.Minute,
		Foreign: func(t *testing.T, name string) {
			smolvm(t, "machine", "create", "--name", name, "--net")
			t.Cleanup(func() { smolvm(t, "machine", "delete", "--name", name, "-f") })
		},
		LeftOver: func(t *testing.T, name string) {
			if err := exec.Command("smolvm", "machine", "exec", "--name", name, "--", "true").Run(); err == nil {
				t.Fatal("a command ran in a machine that is not there")
			}
			t.Cleanup(func() {
				if err := os.RemoveAll(d.dataDir(name)); err != nil {
					t.Error(err)
				}
			})
		},
		Crash: func(t *testing.T, name string) {
			data, err := os.ReadFile(filepath.Join(d.dataDir(name), "agent.pid"))
			if err != nil {
				t.Fatal(err)
			}
			first, _, _ := strings.Cut(string(data), "\n")
			pid, err := strconv.Atoi(strings.TrimSpace(first))
			if err != nil || pid <= 1 {
				t.Fatalf("the machine's process is %q", first)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
	})
}

func realBase(t *testing.T) vm.Base {
	t.Helper()
	ref := os.Getenv("BOX_BASE")
	if ref == "" {
		ref = "ubuntu:24.04"
	}
	base, err := rootfs.NewStore(t.TempDir()).Prepare(t.Context(), ref, ".", func(text string) { t.Log(text) })
	var unreachable *rootfs.UnreachableError
	if errors.As(err, &unreachable) {
		t.Fatalf("%v; name another base by BOX_BASE", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return base
}
