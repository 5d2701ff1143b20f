//go:build linux

package smolvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/smolvm/smolvmtest"
	"hermes-box-lite/internal/vm/vmtest"
)

// standinPath is where TestMain built the stand-in.
const standinPath = "SMOLVMTEST_STANDIN"

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Getenv(standinPath) == "" { // a test that runs itself again has it
			dir, err := os.MkdirTemp("", "smolvm-standin-")
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			defer func() { _ = os.RemoveAll(dir) }() // of temporary files
			program, err := smolvmtest.Build(dir)
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			if err := os.Setenv(standinPath, program); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
		return m.Run()
	}())
}

// rig is a driver and the stand-in's world that it works in.
type rig struct {
	*Driver
	world *smolvmtest.World
	base  vm.Base
	kvm   string
}

// newRig makes a driver on a stand-in; engine "none" needs none.
func newRig(t *testing.T, engine string) *rig {
	t.Helper()
	r := &rig{world: smolvmtest.New(t, os.Getenv(standinPath), engine), kvm: filepath.Join(t.TempDir(), "kvm")}
	if err := os.WriteFile(r.kvm, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.Driver = r.another(t.TempDir(), Patience{})
	tar := filepath.Join(t.TempDir(), "base.tar")
	if err := os.WriteFile(tar, make([]byte, 10240), 0o600); err != nil { // an empty tar
		t.Fatal(err)
	}
	r.base = vm.Base{Digest: "sha256:" + fmt.Sprintf("%064x", 1), Tar: tar}
	return r
}

// another is a second driver in the same world.
func (r *rig) another(dir string, p Patience) *Driver {
	return New(Options{Dir: dir, Program: r.world.Program, KVM: r.kvm, Patience: p})
}

// TestConformanceWithoutAnEngine runs the suite on machines that are processes
// of this host, as the fake driver's are.
func TestConformanceWithoutAnEngine(t *testing.T) {
	r := newRig(t, "none")
	vmtest.Run(t, vmtest.Harness{
		Driver: r.Driver, Base: r.base, Stream: 16 << 20,
		Crash: func(t *testing.T, name string) { r.crash(t, name) }, Foreign: r.foreign, LeftOver: r.leftOverDir,
	})
}

// TestConformance runs on the stand-in with podman, and the root filesystem that
// BOX_BASE names; scripts/e2e sets both up.
func TestConformance(t *testing.T) {
	base := vmtest.BaseFromEnv(t)
	if os.Getenv("BOX_E2E_SMOLVM") == "1" {
		t.Skip("TestConformanceOnSmolvm runs in its place")
	}
	if _, err := exec.LookPath("podman"); err != nil {
		t.Skip("the stand-in needs podman")
	}
	r := newRig(t, "")
	t.Cleanup(func() { prunePacks(t) })
	vmtest.Run(t, vmtest.Harness{
		Driver: r.Driver, Base: base, Isolated: true,
		Crash: func(t *testing.T, name string) { r.crash(t, name) }, Foreign: r.foreign, LeftOver: r.leftOverDir,
	})
}

// prunePacks removes the images that templates of the stand-in were.
func prunePacks(t *testing.T) {
	out, err := exec.Command("podman", "image", "prune", "--all", "--force", "--filter", "reference=localhost/smolvm-standin-pack").CombinedOutput()
	if err != nil {
		t.Logf("prune: %v %s", err, out)
	}
}

// foreign makes a machine as the user would.
func (r *rig) foreign(t *testing.T, name string) {
	t.Helper()
	r.world.Must(t, "machine", "create", "--name", name, "--net")
	t.Cleanup(func() { r.world.Must(t, "machine", "delete", "--name", name, "-f") })
}

// leftOverDir has smolvm make a directory for a machine that it does not know.
func (r *rig) leftOverDir(t *testing.T, name string) {
	t.Helper()
	if _, code := r.world.Run(t, "machine", "exec", "--name", name, "--", "true"); code == 0 {
		t.Fatal("a command ran in a machine that is not there")
	}
	t.Cleanup(func() { _ = os.RemoveAll(r.dataDir(name)) })
}

func (r *rig) crash(t *testing.T, name string) {
	t.Helper()
	m, found, err := r.find(t.Context(), name)
	if err != nil || !found {
		t.Fatalf("%s: %v", name, err)
	}
	kill(t, r.pid(t, m.Name))
}

// ctx is a context that ends before the test is given up.
func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return c
}

func (r *rig) spec(name string) vm.Spec {
	return vm.Spec{
		Name: name, OwnerID: "0123456789abcdef0123456789abcdef", Base: r.base, CPUs: 1, MemoryMiB: 512, SystemGiB: 8,
		Workload: []string{"/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.1; done"},
	}
}

// create makes a machine that is gone at the end of the test.
func (r *rig) create(t *testing.T, name string) vm.Spec {
	t.Helper()
	spec := r.spec(name)
	r.sweep(t, name)
	if _, err := r.Create(ctx(t), spec); err != nil {
		t.Fatal(err)
	}
	return spec
}

// sweep removes a machine at the end, whatever the test did to it.
func (r *rig) sweep(t *testing.T, name string) {
	t.Cleanup(func() {
		if out, err := exec.Command(r.world.Program, "machine", "delete", "--name", name, "-f").CombinedOutput(); err != nil && !errors.Is(err, exec.ErrNotFound) {
			t.Logf("at the end: %s", out)
		}
	})
}

// up is create and start.
func (r *rig) up(t *testing.T, name string) vm.Spec {
	t.Helper()
	spec := r.create(t, name)
	if err := r.Start(ctx(t), name); err != nil {
		t.Fatal(err)
	}
	return spec
}
