//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/vm/smolvm/smolvmtest"
	"hermes-box-lite/internal/wire"
)

// TestSmolvm takes boxes through their lives on the smolvm driver with the
// stand-in for smolvm, whose machines are containers of podman; with
// BOX_E2E_SMOLVM=1 on the smolvm that is installed.
func TestSmolvm(t *testing.T) {
	h := newHome(t, map[string]string{"BOX_DRIVER": "smolvm", "BOX_CPUS": "2", "BOX_MEM_MIB": "2048", "BOX_OVERLAY_GIB": "16"})
	s := &smol{home: h, real: os.Getenv("BOX_E2E_SMOLVM") == "1"}
	s.prepare(t)
	name, copied := h.name("smol"), h.name("smol-copy")
	step := func(what string, part func(t *testing.T)) {
		t.Helper()
		if !h.within(t, what, part) {
			t.FailNow() // the steps build on each other
		}
	}
	step("new", func(*testing.T) { h.must("new", name) })
	step("healthy", func(t *testing.T) {
		sound(t, h.doctor(name, 0), allChecks, "mcp.hermes")
		h.wants(0, []string{name, "running", "vm ("}, "ls")
		if out := s.smolvm("machine", "ls", "--json"); !strings.Contains(out, `"`+name+`"`) {
			t.Errorf("the user's own smolvm lists %s", out)
		}
	})
	step("exit codes", func(t *testing.T) { exitCodes(t, h, name) })
	step("binary streams", func(t *testing.T) { binaryStreams(t, h, name) })
	step("enter", func(t *testing.T) { enterAndReturn(t, h, name) })
	step("pause", func(t *testing.T) {
		h.in(name, "hb down")
		if c := check(t, h.doctor(name, 0), "executor.process"); c.Status != wire.Info {
			t.Errorf("after hb down: %+v", c)
		}
		h.in(name, "hb up")
	})
	step("state survives", func(t *testing.T) { s.survives(t, name) })
	step("foreign machines", func(t *testing.T) { s.foreign(t) })
	step("save and load", func(t *testing.T) {
		h.fill(name)
		file := h.save(name)
		h.must("load", "--pinned", file, copied)
		h.checkState(copied)
		h.doctor(copied, 0)
	})
	step("killed new", func(t *testing.T) { s.killed(t) })
	step("remove", func(t *testing.T) {
		for _, n := range []string{name, copied} {
			s.remove(t, n)
		}
	})
}

// smol looks behind box's back at what smolvm has.
type smol struct {
	*home
	real    bool
	program string
}

// prepare puts the stand-in on box's PATH, or leaves the user's smolvm there.
func (s *smol) prepare(t *testing.T) {
	if f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		t.Skipf("the driver looks at /dev/kvm before it starts anything: %v", err)
	} else {
		_ = f.Close()
	}
	if s.real {
		program, err := exec.LookPath("smolvm")
		if err != nil {
			t.Fatal(err)
		}
		s.program = program
		s.setenv("HOME", os.Getenv("HOME")) // smolvm keeps its own parts there
		return
	}
	dir := t.TempDir()
	program, err := smolvmtest.Build(dir)
	if err != nil {
		t.Fatal(err)
	}
	s.program = program
	s.setenv("PATH", dir+":"+os.Getenv("PATH"))
	s.setenv("SMOLVM_STANDIN_ENGINE", "")
	t.Cleanup(func() {
		if out, err := podman("image", "prune", "--all", "--force", "--filter", "reference=localhost/smolvm-standin-pack"); err != nil {
			t.Log(out, err)
		}
	})
}

func (s *smol) smolvm(args ...string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.program, args...)
	// Not box's own environment: that has the passphrase.
	cmd.Env = slices.DeleteFunc(slices.Clone(s.env), func(entry string) bool { return strings.HasPrefix(entry, "BOX_") })
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("smolvm %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (s *smol) survives(t *testing.T, name string) {
	s.in(name, "echo precious >~/workspace/kept")
	s.must("stop", name)
	s.wants(0, []string{"stopped"}, "ls")
	s.wants(3, []string{"hint: box start " + name}, "doctor", name)
	s.must("start", name)
	s.must("start", name)
	if got := s.in(name, "cat ~/workspace/kept"); got != "precious" {
		t.Errorf("after stop and start the file holds %q", got)
	}
	eventually(t, 5*time.Minute, "a healthy box", func() error {
		if r := s.box("doctor", name); r.code != 0 {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
}

// foreign has machines that the user made: they are shown, and never touched.
func (s *smol) foreign(t *testing.T) {
	name := run.prefix + "theirs"
	create := []string{"machine", "create", "--name", name, "--net"}
	s.smolvm(create...)
	defer s.smolvm("machine", "delete", "--name", name, "-f")
	s.wants(0, []string{name, "not a box of this host"}, "ls", "--all")
	s.wants(1, []string{"already"}, "new", name)
	s.wants(4, []string{"no such box"}, "rm", name, "--force")
	if out := s.smolvm("machine", "ls", "--json"); !strings.Contains(out, `"`+name+`"`) {
		t.Errorf("the foreign machine is gone: %s", out)
	}
}

// killed kills `box new` while the machine starts. What is left is told, and
// removed by rm.
func (s *smol) killed(t *testing.T) {
	name := s.name("smol-cut")
	s.cut("start", syscall.SIGKILL, "new", name)
	s.wants(0, []string{"interrupted", "box rm " + name}, "ls")
	s.must("rm", name, "--force")
	s.gone(t, name)
}

func (s *smol) remove(t *testing.T, name string) {
	port := s.record(name).HostPort
	s.must("rm", name, "--force")
	s.gone(t, name)
	_ = s.listen(port).Close()
}

// gone fails when smolvm, the driver or the registry knows anything of the box.
func (s *smol) gone(t *testing.T, name string) {
	t.Helper()
	if out := s.smolvm("machine", "ls", "--json"); strings.Contains(out, `"`+name+`"`) {
		t.Errorf("smolvm still lists %s: %s", name, out)
	}
	for _, left := range []string{"claims/" + name + ".json", "sessions/" + name} {
		if _, err := os.Lstat(filepath.Join(s.dir, ".box/machines/smolvm", left)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the driver still has %s (%v)", left, err)
		}
	}
	if r := s.box("ls", "--json"); r.code != 0 || strings.Contains(r.stdout, `"`+name+`"`) {
		t.Errorf("ls still knows %s: %s", name, r)
	}
}
