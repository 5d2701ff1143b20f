//go:build e2e && linux

package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"hermes-box-lite/internal/wire"
)

// TestVM takes boxes on virtual machines of qemu through their lives. All of
// them share one home, so that the base becomes a disk once. Without KVM
// everything is emulated and takes its time.
func TestVM(t *testing.T) {
	h := newHome(t, map[string]string{"BOX_DRIVER": "qemu", "BOX_CPUS": "2", "BOX_MEM_MIB": "2048"})
	v := &machines{h}
	t.Cleanup(func() {
		if t.Failed() {
			v.lastWords(t)
		}
	})
	name := h.name("vm")
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
	})
	step("exit codes", func(t *testing.T) { exitCodes(t, h, name) })
	step("binary streams", func(t *testing.T) { v.streams(t, name) })
	step("terminals", func(t *testing.T) { v.terminals(t, name) })
	step("two clients", func(t *testing.T) { v.twoClients(t, name) })
	step("pause", func(t *testing.T) {
		h.in(name, "hb down")
		if c := check(t, h.doctor(name, 0), "executor.process"); c.Status != wire.Info {
			t.Errorf("after hb down: %+v", c)
		}
		h.in(name, "hb up")
	})
	step("clock", func(t *testing.T) { v.clock(t, name) })
	step("damaged disk", func(t *testing.T) { v.damaged(t, name) })
	step("fork", func(t *testing.T) { v.fork(t, name) })
	step("state survives", func(t *testing.T) { v.survives(t, name) })
	step("killed save", func(t *testing.T) { v.killedSave(t, name) })
	step("killed rm, and remove", func(t *testing.T) { v.remove(t, name) })
	names := []string{h.name("cut"), h.name("two")}
	step("killed new", func(t *testing.T) { v.killed(t, names[0]) })
	step("two at once", func(t *testing.T) { v.parallel(t, names) })
}

// machines looks behind box's back at what qemu has.
type machines struct{ *home }

func (v *machines) dir() string { return filepath.Join(v.home.dir, ".box/machines/qemu/machines") }

func (v *machines) lastWords(t *testing.T) {
	logs, _ := filepath.Glob(filepath.Join(v.dir(), "*/*.log")) // the pattern is fine
	for _, path := range logs {
		if data, err := os.ReadFile(path); err == nil {
			t.Logf("%s:\n%s", path, clip(string(data)))
		}
	}
}

// qemuPID is the process of a running machine, from its record.
func (v *machines) qemuPID(t *testing.T, name string) int {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(v.dir(), name, "machine.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r struct{ QEMU struct{ PID int } }
	if err := json.Unmarshal(data, &r); err != nil || r.QEMU.PID == 0 {
		t.Fatalf("no process in %d bytes of machine.json: %v", len(data), err)
	}
	return r.QEMU.PID
}

// gone fails when a file, directory or process of the box is left.
func (v *machines) gone(t *testing.T, name string) {
	t.Helper()
	v.noTraces(name)
	found, err := filepath.Glob(filepath.Join(v.dir(), "*"+name+"*"))
	if err != nil || len(found) > 0 {
		t.Errorf("left: %q (%v)", found, err)
	}
	// Programs that a killed box had started end by themselves.
	eventually(t, time.Minute, "the end of all processes of "+name, func() error {
		procs, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return err
		}
		for _, p := range procs {
			cmdline, _ := os.ReadFile(filepath.Join(p, "cmdline")) // it may have ended
			cwd, _ := os.Readlink(filepath.Join(p, "cwd"))
			if bytes.Contains(cmdline, []byte("hermes-box-"+name)) || strings.HasPrefix(cwd, filepath.Join(v.dir(), name)) {
				return fmt.Errorf("%s: %q in %s", p, cmdline, cwd)
			}
		}
		return nil
	})
}

func (v *machines) streams(t *testing.T, name string) {
	sent := make([]byte, 4<<20)
	_, _ = rand.Read(sent) // never fails
	r := v.pipe(bytes.NewReader(sent), "enter", name, "--", "sh", "-c", "cat; printf 'a\\000\\377b' >&2; exit 3")
	if r.code != 3 || r.stdout != string(sent) || r.stderr != "a\x00\xffb" {
		t.Errorf("exit code %d, %d bytes came back of %d, or others; stderr %q", r.code, len(r.stdout), len(sent), clip(r.stderr))
	}
}

// terminals has terminals that the box does not know, and one that grows.
func (v *machines) terminals(t *testing.T, name string) {
	before := v.env
	defer func() { v.env = before }()
	for _, term := range []string{"xterm-ghostty", "xterm-kitty", "dumb", "", strings.Repeat("x", 500), "$(id)", "../x"} {
		v.setenv("TERM", term)
		s := v.terminal("enter", name, "--", "sh", "-c", `infocmp "$TERM" >/dev/null && echo "term $TERM is known"; stty size; read line; stty size`)
		s.expect(" is known")
		s.expect("40 120")
		if err := pty.Setsize(s.tty, &pty.Winsize{Rows: 50, Cols: 150}); err != nil {
			t.Fatal(err)
		}
		// The size travels apart from the keys, so it is asked for again.
		s.send("\r")
		if code := s.exit(); code != 0 {
			t.Errorf("TERM=%q: exit code %d: %q", term, code, s.screen.String())
		}
	}
	v.setenv("TERM", "xterm-256color")
	s := v.terminal("enter", name, "--", "sh", "-c", `while [ "$(stty size)" != "50 150" ]; do sleep 0.2; done; echo grown`)
	if err := pty.Setsize(s.tty, &pty.Winsize{Rows: 50, Cols: 150}); err != nil {
		t.Fatal(err)
	}
	s.expect("grown")
	if code := s.exit(); code != 0 {
		t.Errorf("exit code %d after growing", code)
	}
}

func (v *machines) twoClients(t *testing.T, name string) {
	a := v.terminal("enter", name)
	a.expect("$ ")
	b := v.terminal("enter", name)
	a.send("echo typed-$((40+2))-by-a\r")
	a.expect("typed-42-by-a")
	b.expect("typed-42-by-a")
	b.send("echo typed-$((40+3))-by-b\r")
	a.expect("typed-43-by-b")
	for _, s := range []*session{a, b} {
		s.send("\x02d")
		s.expect("detached")
		if code := s.exit(); code != 0 {
			t.Errorf("exit code %d after detaching", code)
		}
	}
}

// clock sets the box's clock wrong, as a machine that slept has it.
func (v *machines) clock(t *testing.T, name string) {
	for _, c := range []struct {
		by, says string
		fix      []string
	}{
		{"-2700", "behind", []string{"start", name}},
		{"+86400", "ahead", []string{"enter", name, "--", "true"}},
	} {
		v.in(name, "sudo date -s @$(($(date +%s)"+c.by+")) >/dev/null")
		r := v.box("doctor", name, "--json")
		var report wire.Report
		if err := wire.DecodeStrict([]byte(r.stdout), &report); err != nil {
			t.Fatalf("%v: %s", err, r)
		}
		if got := check(t, report, "clock"); r.code != 3 || got.Status != wire.Fail || !strings.Contains(got.Summary, c.says) || got.Fix != "box start "+name {
			t.Errorf("clock wrong by %s: exit code %d, %+v", c.by, r.code, got)
		}
		v.must(c.fix...)
		seconds, err := strconv.ParseInt(v.in(name, "date +%s"), 10, 64)
		if off := time.Since(time.Unix(seconds, 0)).Abs(); err != nil || off > time.Minute {
			t.Errorf("after box %s the clock is off by %s (%v)", strings.Join(c.fix, " "), off, err)
		}
	}
}

func (v *machines) survives(t *testing.T, name string) {
	kept := func(when string) {
		t.Helper()
		if got := v.in(name, "cat ~/workspace/kept"); got != "precious" {
			t.Fatalf("%s: the file holds %q", when, got)
		}
	}
	v.in(name, "echo precious >~/workspace/kept")
	v.must("stop", name)
	v.wants(0, []string{"stopped"}, "ls")
	v.wants(3, []string{"hint: box start " + name}, "doctor", name)
	v.must("start", name)
	kept("after stop and start")
	v.in(name, "sync")
	if err := syscall.Kill(v.qemuPID(t, name), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "a stopped box", func() error {
		if r := v.box("ls"); !strings.Contains(r.stdout, "stopped") {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
	kept("after its process was killed") // enter starts it
	eventually(t, 5*time.Minute, "a healthy box", func() error {
		if r := v.box("doctor", name); r.code != 0 {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
}

// damaged damages the state's disk while the machine is off: more than e2fsck
// mends unasked. The box comes up, can be read, and what the doctor advises
// mends it.
func (v *machines) damaged(t *testing.T, name string) {
	v.in(name, "echo precious >~/workspace/kept; echo x >~/workspace/twin")
	v.must("stop", name)
	disk := filepath.Join(v.dir(), name, "data.raw")
	for _, edit := range []string{"set_inode_field /home/agent/workspace/twin block[0] 1", "set_super_value state 2"} {
		if out, err := exec.Command("debugfs", "-w", "-R", edit, disk).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	v.must("start", name)
	if c := check(t, v.doctor(name, 3), "state.writable"); !strings.Contains(c.Summary, "damaged") || !strings.Contains(c.Fix, "sudo touch /forcefsck") {
		t.Errorf("the doctor of a damaged state: %+v", c)
	}
	if got := v.in(name, "cat ~/workspace/kept; touch ~/x 2>&1 || true"); !strings.HasPrefix(got, "precious") || !strings.Contains(got, "Read-only") {
		t.Errorf("in the damaged state: %q", got)
	}
	v.in(name, "sudo touch /forcefsck")
	v.must("stop", name)
	v.must("start", name)
	eventually(t, 5*time.Minute, "a healthy box", func() error {
		if r := v.box("doctor", name); r.code != 0 {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
	if got := v.in(name, "cat ~/workspace/kept; ls /forcefsck 2>&1 || true"); !strings.HasPrefix(got, "precious") || !strings.Contains(got, "No such file") {
		t.Errorf("in the mended state: %q", got)
	}
}

// killedSave kills a save. The next one removes what it left, and Executor is
// back.
func (v *machines) killedSave(t *testing.T, name string) {
	file := filepath.Join(v.home.dir, "killed.gpg")
	v.in(name, "head -c 20000000 /dev/urandom >~/random") // so that the step takes a while
	v.cut("save: pack the state", syscall.SIGKILL, "save", name, file)
	if !v.afterKill(name) {
		t.Error("ls does not tell of the killed save")
	}
	v.must("save", name, file)
	if left, err := filepath.Glob(filepath.Join(v.home.dir, ".hermes-box-*")); err != nil || len(left) > 0 {
		t.Errorf("partial files are left: %q (%v)", left, err)
	}
	eventually(t, 5*time.Minute, "Executor as before", func() error {
		if executor(v.home, name) == 0 {
			return errors.New("it is down")
		}
		return nil
	})
}

// remove kills a rm, and has the next one get over it.
func (v *machines) remove(t *testing.T, name string) {
	port := v.record(name).HostPort
	v.signalled("remove", 0, syscall.SIGKILL, "rm", name, "--force")
	v.afterKill(name)
	if v.recorded(name) != "" {
		v.must("rm", name, "--force")
	}
	v.gone(t, name)
	_ = v.listen(port).Close()
}

// killed kills `box new` at three steps. What is left is told, removed by rm
// and by the next new.
func (v *machines) killed(t *testing.T, name string) {
	steps := []string{"create", "start", "provision: packages"}
	if run.full {
		steps = append(steps, "start Executor")
	}
	for i, step := range steps {
		v.cut(step, syscall.SIGKILL, "new", name)
		v.wants(0, []string{"interrupted", "box rm " + name}, "ls")
		if run.full || i == 1 {
			v.must("rm", name, "--force")
			v.gone(t, name)
		}
	}
}

// parallel makes two boxes at once, one of them over what a killed `box new`
// of that name left.
func (v *machines) parallel(t *testing.T, names []string) {
	results := make([]result, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { results[i] = v.box("new", name) })
	}
	wg.Wait()
	for i, r := range results {
		if r.code != 0 {
			t.Error(r)
		} else if _, err := os.Stat(filepath.Join(v.dir(), names[i])); err != nil {
			t.Errorf("%s has no machine: %v", names[i], err)
		}
	}
	if t.Failed() {
		return
	}
	if a, b := v.record(names[0]), v.record(names[1]); a.HostPort == b.HostPort || a.OwnerID == b.OwnerID {
		t.Errorf("the boxes share a port or an owner: %d", a.HostPort)
	}
	for _, name := range names {
		v.must("rm", name, "--force")
		v.gone(t, name)
	}
}
