package smolvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/vm"
)

// Each test here is of one trap of smolvm's, and fails when its handling is
// taken away; docs/proven.md has the list.

func TestListIsSorted(t *testing.T) {
	r := newRig(t, "none")
	var want []string
	for i := range 12 {
		name := fmt.Sprintf("m%02d", i)
		r.foreign(t, name)
		want = append(want, name)
	}
	machines, err := r.List(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range machines {
		got = append(got, m.Name)
	}
	if !slices.Equal(got, want) {
		t.Errorf("listed as %q", got)
	}
}

// TestUnknownIsNotAbsent: nothing but a whole, clean list proves absence.
func TestUnknownIsNotAbsent(t *testing.T) {
	r := newRig(t, "none")
	for setting, said := range map[string]string{
		"ls-fails": "database operation failed: a row cannot be decoded",
		"ls-says":  `[{"name":"a","state":"running"},{"name":"b"`,
	} {
		r.world.Set(t, setting, said)
		unknown(t, r, setting)
		r.world.Set(t, setting, "")
	}
	for _, said := range []string{"null", "{}", `"x"`, "No machines", `[{"name":"../x","state":"running"}]`, `[{"name":"a"}]`, `[{"name":"a","state":"stopped"},{"name":"a","state":"running"}]`} {
		r.world.Set(t, "ls-says", said)
		unknown(t, r, said)
	}
}

func unknown(t *testing.T, r *rig, what string) {
	t.Helper()
	if _, err := r.Inspect(ctx(t), "nobody"); err == nil || errors.Is(err, vm.ErrNotFound) {
		t.Errorf("%s: inspect says %v", what, err)
	}
	if err := r.Delete(ctx(t), "nobody", r.spec("nobody").OwnerID); err == nil || errors.Is(err, vm.ErrNotFound) {
		t.Errorf("%s: delete says %v", what, err)
	}
}

// TestLostDatabase: smolvm makes an empty database where it finds none.
func TestLostDatabase(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "lost")
	db, err := database()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(db), os.RemoveAll(r.dataDir(spec.Name))); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Inspect(ctx(t), spec.Name); err == nil || errors.Is(err, vm.ErrNotFound) || !strings.Contains(err.Error(), "was gone") {
		t.Errorf("with the database lost: %v", err)
	}
}

// TestQuestionsLeaveNothing: smolvm makes a directory for names that it is asked
// to stop or execute in.
func TestQuestionsLeaveNothing(t *testing.T) {
	r := newRig(t, "none")
	_, execErr := r.Exec(ctx(t), "nobody", vm.Command{Argv: []string{"true"}})
	_, inspectErr := r.Inspect(ctx(t), "nobody")
	for what, err := range map[string]error{
		"exec": execErr, "inspect": inspectErr, "start": r.Start(ctx(t), "nobody"), "stop": r.Stop(ctx(t), "nobody"),
		"delete": r.Delete(ctx(t), "nobody", r.spec("nobody").OwnerID),
	} {
		if !errors.Is(err, vm.ErrNotFound) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if dir := r.dataDir("nobody"); exists(dir) {
		t.Errorf("the questions made %s", dir)
	}
}

func TestDeletionIsVerified(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "stays")
	r.world.Set(t, "delete-lies-stays", "1")
	if err := r.Delete(ctx(t), spec.Name, spec.OwnerID); err == nil {
		t.Error("a deletion that deleted nothing succeeded")
	}
	if m, err := r.Inspect(ctx(t), spec.Name); err != nil || m.OwnerID != spec.OwnerID {
		t.Errorf("afterwards: %+v, %v", m, err)
	}
	r.world.Set(t, "delete-lies-stays", "")
}

func TestGhostIsDeletedToo(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "ghost")
	r.world.Set(t, "ghost-ghost", "1")
	if err := r.Delete(ctx(t), spec.Name, spec.OwnerID); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Inspect(ctx(t), spec.Name); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("after the deletion: %v", err)
	}
}

// TestDeletionWaitsForConnections: a command that cannot connect writes the
// record back that it had read, also when the machine was deleted meanwhile.
func TestDeletionWaitsForConnections(t *testing.T) {
	r := newRig(t, "none")
	spec := r.up(t, "racing")
	r.world.Set(t, "ping", "20ms")
	r.world.Set(t, "deaf-racing", "1")
	r.world.Run(t, "machine", "exec", "--name", "racing", "-i", "--", "true") // marks it as unreachable: lists no longer ask it
	r.world.Set(t, "ping", "2s")
	before := len(r.world.Calls(t))
	done := make(chan error, 1)
	go func() {
		_, err := r.Exec(ctx(t), spec.Name, vm.Command{Argv: []string{"true"}})
		done <- err
	}()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if called(r.world.Calls(t)[before:], "exec") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the command was never tried")
		}
	}
	if err := r.Delete(ctx(t), spec.Name, spec.OwnerID); err != nil {
		t.Error(err)
	}
	if err := <-done; err == nil {
		t.Error("a command ran in a deaf machine")
	}
	if out := r.world.Must(t, "machine", "ls"); strings.Contains(out, "racing") {
		t.Errorf("after the deletion smolvm lists %q", out)
	}
}

// TestLostDisks: what smolvm would start on new disks is not started,
// and if it was, that is said.
func TestLostDisks(t *testing.T) {
	r := newRig(t, "none")
	spec := r.up(t, "empty")
	r.sh(t, spec.Name, `echo precious >"$HB_ROOT/data/file"`)
	if err := r.Stop(ctx(t), spec.Name); err != nil {
		t.Fatal(err)
	}
	kept := t.TempDir()
	if err := os.Rename(filepath.Join(r.dataDir(spec.Name), "root"), filepath.Join(kept, "root")); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(ctx(t), spec.Name); err == nil || !strings.Contains(err.Error(), "new disk") {
		t.Errorf("start on a new disk: %v", err)
	}
	if err := r.Stop(ctx(t), spec.Name); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(r.dataDir(spec.Name)); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(ctx(t), spec.Name); err == nil || !strings.Contains(err.Error(), "disks") {
		t.Errorf("start without a disk: %v", err)
	}
	if exists(r.dataDir(spec.Name)) {
		t.Error("smolvm was asked to start it")
	}
}

// TestUnreachableThatAnswers: the word stays when the machine is long back.
func TestUnreachableThatAnswers(t *testing.T) {
	r := newRig(t, "none")
	spec := r.up(t, "sticky")
	before := r.pid(t, spec.Name)
	r.world.Set(t, "ping", "50ms")
	r.world.Set(t, "deaf-sticky", "1")
	if out, code := r.world.Run(t, "machine", "exec", "--name", "sticky", "-i", "--", "true"); code != 1 {
		t.Fatalf("a command in a deaf machine: %d, %s", code, out)
	}
	if m, err := r.Inspect(ctx(t), spec.Name); err != nil || m.State != vm.Unknown || m.OwnerID != spec.OwnerID {
		t.Errorf("a deaf machine is %+v, %v; want unknown", m, err)
	}
	r.world.Set(t, "deaf-sticky", "")
	if m, err := r.Inspect(ctx(t), spec.Name); err != nil || m.State != vm.Running {
		t.Errorf("a machine that answers again is %+v, %v", m, err)
	}
	machines, err := r.List(ctx(t))
	if err != nil || len(machines) != 1 || machines[0].State != vm.Running {
		t.Errorf("a machine that answers again is listed as %+v, %v", machines, err)
	}
	if err := r.Start(ctx(t), spec.Name); err != nil {
		t.Error(err)
	}
	if after := r.pid(t, spec.Name); after != before {
		t.Errorf("start killed process %d; %d runs now", before, after)
	}
}

// TestBusyIsNotDead: a machine whose connections are all in use looks dead.
func TestBusyIsNotDead(t *testing.T) {
	r := newRig(t, "none")
	r.Driver = r.another(r.opts.Dir, Patience{Pause: time.Millisecond})
	spec := r.up(t, "busy")
	before := r.pid(t, spec.Name)
	end := r.openSession(t, r.Driver, spec.Name)
	r.world.Set(t, "ping", "50ms")
	r.world.Set(t, "deaf-busy", "1")
	r.world.Run(t, "machine", "exec", "--name", "busy", "-i", "--", "true") // marks it as unreachable
	for what, err := range map[string]error{"start": r.Start(ctx(t), spec.Name), "stop": r.Stop(ctx(t), spec.Name)} {
		if err == nil || !strings.Contains(err.Error(), "sessions") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if after := r.pid(t, spec.Name); after != before || syscall.Kill(before, 0) != nil {
		t.Errorf("its process is %d, was %d", after, before)
	}
	end()
	// Without a session it is taken for dead, and started anew.
	restarted := make(chan error, 1)
	go func() { restarted <- r.Start(ctx(t), spec.Name) }()
	for deadline := time.Now().Add(time.Minute); syscall.Kill(before, 0) == nil && !zombie(before); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the dead machine was not started anew")
		}
	}
	r.world.Set(t, "deaf-busy", "")
	if err := <-restarted; err != nil {
		t.Error(err)
	}
}

func zombie(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(data), ") Z ")
}

// openSession has a command run in a machine until the returned function is
// called.
func (r *rig) openSession(t *testing.T, d *Driver, name string) (end func()) {
	t.Helper()
	c, cancel := context.WithCancel(t.Context())
	begun, ended := make(chan struct{}), make(chan struct{})
	var once sync.Once
	go func() {
		defer close(ended)
		_, err := d.Exec(c, name, vm.Command{
			Argv:   []string{"/bin/sh", "-c", "echo up; exec sleep 1000"},
			Stdout: writer(func(p []byte) (int, error) { once.Do(func() { close(begun) }); return len(p), nil }),
		})
		if c.Err() == nil {
			t.Errorf("a session ended: %v", err)
		}
	}()
	select {
	case <-begun:
	case <-ended:
		t.FailNow()
	}
	end = sync.OnceFunc(func() { cancel(); <-ended })
	t.Cleanup(end)
	return end
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// TestStartsDoNotKillEachOther: for smolvm the machine that one start boots is
// an orphan to the next, and to a stop.
func TestStartsDoNotKillEachOther(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "twice")
	r.world.Set(t, "start-takes", "500ms")
	other := r.another(r.opts.Dir, Patience{}) // as another process would have
	var wg sync.WaitGroup
	for _, d := range []*Driver{r.Driver, other} {
		wg.Go(func() {
			if err := d.Start(ctx(t), spec.Name); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if m, err := r.Inspect(ctx(t), spec.Name); err != nil || m.State != vm.Running {
		t.Errorf("after two starts it is %+v, %v", m, err)
	}
}

// TestSixSessions: the guest's agent serves eight connections, and a machine
// whose ninth waits too long is taken for dead.
func TestSixSessions(t *testing.T) {
	r := newRig(t, "none")
	r.Driver = r.another(r.opts.Dir, Patience{Session: time.Minute})
	spec := r.up(t, "many")
	r.world.Set(t, "ping", "100ms")
	other := r.another(r.opts.Dir, Patience{Session: time.Minute})
	// Ten commands at once, all of which wait for a file.
	results := make(chan error, 10)
	for i := range 10 {
		d := []*Driver{r.Driver, other}[i%2]
		go func() {
			code, err := d.Exec(ctx(t), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", `echo >"$HB_ROOT/tmp/begun-$$"; while [ ! -e "$HB_ROOT/tmp/go" ]; do sleep 0.02; done`}})
			if err == nil && code != 0 {
				err = fmt.Errorf("exit code %d", code)
			}
			results <- err
		}()
	}
	// Those that may are in, and the others do not follow.
	root := filepath.Join(r.dataDir(spec.Name), "root/tmp")
	begun := func() int {
		found, err := filepath.Glob(filepath.Join(root, "begun-*"))
		if err != nil {
			t.Fatal(err)
		}
		return len(found)
	}
	for deadline := time.Now().Add(time.Minute); begun() < sessions; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d sessions began", begun())
		}
	}
	// Questions still find a connection, and the machine is not called dead.
	for range 3 {
		if m, err := r.Inspect(ctx(t), spec.Name); err != nil || m.State != vm.Running {
			t.Errorf("with %d sessions it is %+v, %v", begun(), m, err)
		}
	}
	if out := r.world.Must(t, "machine", "ls"); !strings.Contains(out, "many running") {
		t.Errorf("smolvm says %q", out)
	}
	if n := begun(); n > sessions {
		t.Errorf("%d sessions at once", n)
	}
	if err := os.WriteFile(filepath.Join(root, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

// TestSessionsComeBack: those of a process that dies are free, and a program
// that it started does not keep them.
func TestSessionsComeBack(t *testing.T) {
	dir := t.TempDir()
	holder := exec.Command(os.Args[0], "-test.run=^TestHoldSessions$")
	holder.Env = append(os.Environ(), "SMOLVMTEST_HOLD="+dir)
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = holder.Process.Kill(); _ = holder.Wait() })
	line := make([]byte, 64)
	n, err := io.ReadAtLeast(out, line, 1)
	if err != nil {
		t.Fatal(err)
	}
	var sleeper int
	if _, err := fmt.Sscanf(string(line[:n]), "held %d", &sleeper); err != nil {
		t.Fatalf("%q: %v", line[:n], err)
	}
	t.Cleanup(func() { _ = syscall.Kill(sleeper, syscall.SIGKILL) })

	d := New(Options{Dir: dir, Patience: Patience{Session: 100 * time.Millisecond}})
	if _, err := d.session(ctx(t), "box", sessions); err == nil || !strings.Contains(err.Error(), "all its 6 sessions") {
		t.Fatalf("a seventh session: %v", err)
	}
	if n, err := d.busy("box"); err != nil || n != sessions {
		t.Errorf("%d sessions are in use, %v", n, err)
	}
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait() // killed
	if err := syscall.Kill(sleeper, 0); err != nil {
		t.Fatalf("the program that it started is gone: %v", err)
	}
	h, err := d.session(ctx(t), "box", sessions)
	if err != nil {
		t.Fatalf("after the death of the owner: %v", err)
	}
	h.release()
}

// TestHoldSessions is the other process of TestSessionsComeBack.
func TestHoldSessions(t *testing.T) {
	dir := os.Getenv("SMOLVMTEST_HOLD")
	if dir == "" {
		t.Skip("it is run by TestSessionsComeBack")
	}
	d := New(Options{Dir: dir})
	for range sessions {
		if _, err := d.session(t.Context(), "box", sessions); err != nil {
			t.Fatal(err)
		}
	}
	sleeper := exec.Command("sleep", "1000")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	fmt.Println("held", sleeper.Process.Pid)
	select {} // until it is killed
}

// TestTerminalsLeaveSessions: those who sit in a box do not keep it from being
// saved and stopped.
func TestTerminalsLeaveSessions(t *testing.T) {
	r := newRig(t, "none")
	r.Driver = r.another(r.opts.Dir, Patience{Session: 100 * time.Millisecond})
	spec := r.up(t, "seats")
	for range terminals {
		h, err := r.session(ctx(t), spec.Name, terminals)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(h.release)
	}
	if code, err := r.Exec(ctx(t), spec.Name, vm.Command{Argv: []string{"true"}, TTY: &vm.TTY{}}); err == nil || !strings.Contains(err.Error(), "sessions") {
		t.Errorf("one more terminal: %d, %v", code, err)
	}
	if code, err := r.Exec(ctx(t), spec.Name, vm.Command{Argv: []string{"true"}}); err != nil || code != 0 {
		t.Errorf("a command without one: %d, %v", code, err)
	}
}

// TestProcessOfADeadStart: deletion alone would leave it.
func TestProcessOfADeadStart(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "halfway")
	r.world.Set(t, "start-dies-halfway", "1")
	if err := r.Start(ctx(t), spec.Name); err == nil {
		t.Fatal("a start that died succeeded")
	}
	dir := r.dataDir(spec.Name)
	for deadline := time.Now().Add(time.Minute); !exists(filepath.Join(dir, "root/run/hermes-box/main")); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nothing was left to be found")
		}
	}
	if err := r.Delete(ctx(t), spec.Name, spec.OwnerID); err != nil {
		t.Fatal(err)
	}
	if left := processes(t, dir); len(left) > 0 {
		t.Errorf("after the deletion these run: %v", left)
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// TestKilledCaller: a start that goes on after its caller was killed would write
// the record of a machine that was deleted meanwhile.
func TestKilledCaller(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "orphan")
	r.world.Set(t, "start-takes", "1m")
	caller := exec.Command(os.Args[0], "-test.run=^TestStartToBeKilled$")
	caller.Env = append(os.Environ(), "SMOLVMTEST_START="+r.opts.Dir, "SMOLVMTEST_KVM="+r.kvm)
	if err := caller.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = caller.Process.Kill(); _ = caller.Wait() })
	for deadline := time.Now().Add(time.Minute); !exists(filepath.Join(r.dataDir(spec.Name), "agent.pid")); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the start was never tried")
		}
	}
	if err := caller.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = caller.Wait() // killed
	for deadline := time.Now().Add(20 * time.Second); len(starts(t, spec.Name)) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error("the start goes on")
			for _, pid := range starts(t, spec.Name) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			break
		}
	}
	r.world.Set(t, "start-takes", "")
	if err := r.Start(ctx(t), spec.Name); err != nil {
		t.Errorf("after an interrupted start: %v", err)
	}
}

// TestStartToBeKilled is the other process of TestKilledCaller.
func TestStartToBeKilled(t *testing.T) {
	dir := os.Getenv("SMOLVMTEST_START")
	if dir == "" {
		t.Skip("it is run by TestKilledCaller")
	}
	d := New(Options{Dir: dir, Program: os.Getenv(standinPath), KVM: os.Getenv("SMOLVMTEST_KVM")})
	_ = d.Start(t.Context(), "orphan") // killed
}

// TestOwnFailureIsNotTheCommands: both are exit code 1.
func TestOwnFailureIsNotTheCommands(t *testing.T) {
	r := newRig(t, "none")
	spec := r.up(t, "one")
	if code, err := r.Exec(ctx(t), spec.Name, vm.Command{Argv: []string{"sh", "-c", "echo 'Error: x' >&2; exit 1"}}); err != nil || code != 1 {
		t.Errorf("exit 1 came back as %d, %v", code, err)
	}
	r.world.Set(t, "ping", "50ms")
	r.world.Set(t, "deaf-one", "1")
	if code, err := r.Exec(ctx(t), spec.Name, vm.Command{Argv: []string{"true"}}); err == nil || errors.Is(err, vm.ErrNotRunning) || !strings.Contains(err.Error(), "not running") {
		t.Errorf("in a deaf machine: %d, %v", code, err)
	}
}

// TestMachineDiesUnderACommand: the command began, and its end is not known.
func TestMachineDiesUnderACommand(t *testing.T) {
	r := newRig(t, "none")
	spec := r.up(t, "dies")
	end := make(chan error, 1)
	begun := make(chan struct{})
	var once sync.Once
	go func() {
		_, err := r.Exec(ctx(t), spec.Name, vm.Command{
			Argv:   []string{"sh", "-c", "echo up; sleep 1000"},
			Stdout: writer(func(p []byte) (int, error) { once.Do(func() { close(begun) }); return len(p), nil }),
		})
		end <- err
	}()
	<-begun
	r.world.Must(t, "machine", "stop", "--name", spec.Name)
	if err := <-end; !errors.Is(err, vm.ErrNotRunning) || !strings.Contains(err.Error(), "broke") {
		t.Errorf("the command ended with %v", err)
	}
}

// TestStdinStaysBlocking: smolvm makes its standard input non-blocking, and
// leaves it so when it is killed. Whose terminal it was could not use it.
func TestStdinStaysBlocking(t *testing.T) {
	r := newRig(t, "none")
	spec := r.up(t, "stdin")
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil { // Go's own pipes do not block
		t.Fatal(err)
	}
	stdin := os.NewFile(uintptr(fds[0]), "stdin")
	t.Cleanup(func() { _ = stdin.Close() })
	c, cancel := context.WithCancel(ctx(t))
	begun, ended := make(chan struct{}), make(chan struct{})
	var once sync.Once
	go func() {
		defer close(ended)
		_, _ = r.Exec(c, spec.Name, vm.Command{
			Argv: []string{"sh", "-c", "echo up; cat"}, Stdin: stdin,
			Stdout: writer(func(p []byte) (int, error) { once.Do(func() { close(begun) }); return len(p), nil }),
		})
	}()
	select {
	case <-begun:
	case <-ended:
		t.Fatal("the command did not begin")
	}
	cancel()
	<-ended
	flags, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_NONBLOCK != 0 {
		t.Errorf("the caller's standard input has flags %#o, %v", flags, err)
	}
	_ = syscall.Close(fds[1]) // ends the reader
}

// TestFirstStart: it unpacks an image, takes long, and tells what it does.
func TestFirstStart(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "first")
	var mu sync.Mutex
	var notes []string
	r.Driver = New(Options{
		Dir: r.opts.Dir, Program: r.world.Program, KVM: r.kvm, Patience: Patience{Work: 2 * time.Second},
		Note: func(text string) {
			mu.Lock()
			defer mu.Unlock()
			notes = append(notes, text)
		},
	})
	r.world.Set(t, "start-takes", "3s")
	if err := r.Start(ctx(t), spec.Name); err != nil {
		t.Fatal(err)
	}
	if told := strings.Join(notes, "\n"); !strings.Contains(told, "Pulling") {
		t.Errorf("it told %q", told)
	}
}

// TestBootIsTriedAgain: smolvm waits 30 seconds for a boot, whatever the host
// is busy with.
func TestBootIsTriedAgain(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "slow")
	r.world.Set(t, "boot-fails-slow", "2")
	if err := r.Start(ctx(t), spec.Name); !says(err, "did not become ready") {
		t.Errorf("after two failed boots: %v", err)
	}
	r.world.Set(t, "boot-fails-slow", "1")
	if err := r.Start(ctx(t), spec.Name); err != nil {
		t.Errorf("after one failed boot: %v", err)
	}
}

// TestFailedCreation: what it leaves is the next machine's disk.
func TestFailedCreation(t *testing.T) {
	r := newRig(t, "none")
	spec := r.spec("again")
	r.sweep(t, spec.Name)
	r.world.Set(t, "create-fails-again", "agent operation failed: create: no space left on device")
	if _, err := r.Create(ctx(t), spec); !says(err, "no space") {
		t.Fatalf("create: %v", err)
	}
	r.world.Set(t, "create-fails-again", "")
	m, err := r.Inspect(ctx(t), spec.Name)
	if err != nil || m.OwnerID != spec.OwnerID || m.State != vm.Unknown {
		t.Errorf("what a failed creation left is %+v, %v", m, err)
	}
	if _, err := r.Create(ctx(t), spec); !errors.Is(err, vm.ErrExists) {
		t.Errorf("creation over it: %v, want ErrExists", err)
	}
	if err := r.Delete(ctx(t), spec.Name, strings.Repeat("f", 32)); !errors.Is(err, vm.ErrNotOwner) {
		t.Errorf("deletion by another: %v", err)
	}
	if err := r.Delete(ctx(t), spec.Name, spec.OwnerID); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Create(ctx(t), spec); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(ctx(t), spec.Name); err != nil {
		t.Fatal(err)
	}
	if got := r.sh(t, spec.Name, `ls -A "$HB_ROOT/data/"`); got != "" {
		t.Errorf("the new machine's /data holds %q", got)
	}
}

// TestStopSaysGoodbye: smolvm's own stop kills.
func TestStopSaysGoodbye(t *testing.T) {
	r := newRig(t, "none")
	spec := r.spec("polite")
	spec.Workload = []string{"/bin/sh", "-c", `trap 'sleep 0.3; echo bye >"$HB_ROOT/data/bye"; exit 0' TERM; while :; do sleep 0.1; done`}
	r.sweep(t, spec.Name)
	if _, err := r.Create(ctx(t), spec); err != nil {
		t.Fatal(err)
	}
	for _, op := range []func(context.Context, string) error{r.Start, r.Stop, r.Start} {
		if err := op(ctx(t), spec.Name); err != nil {
			t.Fatal(err)
		}
	}
	if got := r.sh(t, spec.Name, `cat "$HB_ROOT/data/bye" 2>&1; true`); got != "bye" {
		t.Errorf("what the workload wrote at its end: %q", got)
	}
}

// TestClonesAreNotOurs: they have all labels of their source.
func TestClonesAreNotOurs(t *testing.T) {
	r := newRig(t, "none")
	spec := r.create(t, "golden")
	r.world.Must(t, "machine", "fork", "--golden", "golden", "-n", "clone")
	r.sweep(t, "clone")
	if m, err := r.Inspect(ctx(t), "clone"); err != nil || m.OwnerID != "" || m.HostPort != 0 {
		t.Errorf("the clone is %+v, %v", m, err)
	}
	if err := r.Delete(ctx(t), "clone", spec.OwnerID); !errors.Is(err, vm.ErrNotOwner) {
		t.Errorf("deletion of the clone: %v", err)
	}
	for what, err := range map[string]error{
		"delete": r.Delete(ctx(t), "golden", spec.OwnerID), "start": r.Start(ctx(t), "golden"), "stop": r.Stop(ctx(t), "golden"),
	} {
		if err == nil || !strings.Contains(err.Error(), "frozen") {
			t.Errorf("%s of a frozen machine: %v", what, err)
		}
	}
	if m, err := r.Inspect(ctx(t), "golden"); err != nil || m.State != vm.Unknown || m.OwnerID != spec.OwnerID {
		t.Errorf("the frozen machine is %+v, %v", m, err)
	}
}

// TestAnotherMachineOfTheName has the labels right and the rest wrong.
func TestAnotherMachineOfTheName(t *testing.T) {
	r := newRig(t, "none")
	spec := r.up(t, "same")
	c, err := r.readClaim(spec.Name)
	if err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func() func(){
		"another time of creation": func() func() {
			other := c
			other.Created++
			return func() { r.put(t, other) }
		},
		"another machine's disk": func() func() {
			r.sh(t, spec.Name, `cp "$HB_ROOT/var/lib/hermes-box/machine" "$HB_ROOT/tmp/kept"; echo "1 other same 1" >"$HB_ROOT/var/lib/hermes-box/machine"`)
			return func() {}
		},
	} {
		change()()
		if err := r.Delete(ctx(t), spec.Name, spec.OwnerID); !errors.Is(err, vm.ErrNotOwner) {
			t.Errorf("%s: delete says %v", what, err)
		}
		if what == "another machine's disk" {
			if err := r.Start(ctx(t), spec.Name); !errors.Is(err, vm.ErrNotOwner) {
				t.Errorf("%s: start says %v", what, err)
			}
			r.sh(t, spec.Name, `mv "$HB_ROOT/tmp/kept" "$HB_ROOT/var/lib/hermes-box/machine"`)
		} else if m, err := r.Inspect(ctx(t), spec.Name); err != nil || m.OwnerID != "" {
			t.Errorf("%s: it is %+v, %v", what, m, err)
		}
		r.put(t, c)
	}
	if err := r.Delete(ctx(t), spec.Name, spec.OwnerID); err != nil {
		t.Errorf("with everything right: %v", err)
	}
}

func (r *rig) put(t *testing.T, c claim) {
	t.Helper()
	if err := r.writeClaim(c); err != nil {
		t.Fatal(err)
	}
}

// TestEveryCall looks at all calls of a machine's life.
func TestEveryCall(t *testing.T) {
	t.Setenv("SMOLVM_PUBLISH_ADDR", "0.0.0.0")
	t.Setenv("SMOLVM_EGRESS_FLOOR", "off")
	r := newRig(t, "none")
	spec := r.up(t, "watched")
	code, err := r.Exec(ctx(t), spec.Name, vm.Command{Argv: []string{"cat"}, Stdin: bytes.NewReader([]byte("x")), Stdout: io.Discard})
	if err != nil || code != 0 {
		t.Fatal(code, err)
	}
	if _, err := r.Exec(ctx(t), spec.Name, vm.Command{Argv: []string{"true"}, TTY: &vm.TTY{Term: "dumb"}}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Stop(ctx(t), spec.Name), r.Delete(ctx(t), spec.Name, spec.OwnerID)); err != nil {
		t.Fatal(err)
	}
	own := syscall.Getpgrp()
	for _, call := range r.world.Calls(t) {
		what := strings.Join(call.Args[:min(2, len(call.Args))], " ")
		if call.Group == own {
			t.Errorf("%s was in this program's process group", what)
		}
		if call.Stdin != "/dev/null" && !strings.HasPrefix(call.Stdin, "pipe:") && !strings.HasPrefix(call.Stdin, "/dev/pts/") {
			t.Errorf("%s had the standard input %q", what, call.Stdin)
		}
		if call.Floor != "strict" || call.Publish != "" {
			t.Errorf("%s had the egress floor %q and would publish at %q", what, call.Floor, call.Publish)
		}
		if what == "machine create" && !slices.Contains(call.Args, "virtio-net") {
			t.Errorf("created by %q", call.Args)
		}
	}
}

// TestTerminal: TERM is the caller's, and the marks are not on the screen.
func TestTerminal(t *testing.T) {
	r := newRig(t, "none")
	spec := r.up(t, "screen")
	var mu sync.Mutex
	var screen bytes.Buffer
	code, err := r.Exec(ctx(t), spec.Name, vm.Command{
		Argv: []string{"sh", "-c", `echo "[$TERM]"; exit 1`}, TTY: &vm.TTY{Term: "xterm-kitty"},
		Stdout: writer(func(p []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return screen.Write(p)
		}),
	})
	mu.Lock()
	defer mu.Unlock()
	if err != nil || code != 1 || screen.String() != "[xterm-kitty]\r\n" {
		t.Errorf("exit code %d, %v, screen %q", code, err, screen.String())
	}
}
