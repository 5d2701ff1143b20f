// Package vmtest is the conformance suite of vm.Driver. Every driver runs it
// whole; what it says is what package box relies on.
package vmtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"hermes-box-lite/internal/vm"
)

// Harness is a driver under test.
type Harness struct {
	Driver vm.Driver
	Base   vm.Base
	// Crash ends a running machine as a power cut would.
	Crash func(t *testing.T, name string)
	// Foreign makes a machine of the name that no box owns, and removes it at
	// the end of the test. LeftOver does the same with storage alone; nil when
	// the engine has none apart from machines.
	Foreign, LeftOver func(t *testing.T, name string)
	// Isolated: machines have a network of their own, so that ports and
	// reachability can be tried.
	Isolated bool
	// Patience bounds every step of a test that waits for something; 0 is two
	// minutes.
	Patience time.Duration
	// Stream is what goes each way in one command of the stream test, in
	// bytes; 0 is 64 MiB.
	Stream int
}

const guestPort = 4788

// suite carries what the tests share.
type suite struct {
	Harness
	prefix string
	probe  string
}

// Run runs the suite. Machines are called by names that no other run uses and
// are gone at its end.
func Run(t *testing.T, h Harness) {
	s := &suite{Harness: h, prefix: "vt" + strings.ToLower(randomHex(3))}
	if s.Patience == 0 {
		s.Patience = 2 * time.Minute
	}
	if s.Stream == 0 {
		s.Stream = 64 << 20
	}
	if h.Isolated {
		s.probe = buildProbe(t)
	}
	for _, tc := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"lifecycle", s.lifecycle},
		{"never adopts", s.neverAdopts},
		{"absence", s.absence},
		{"ownership", s.ownership},
		{"exec", s.exec},
		{"streams", s.streams},
		{"cancel", s.cancel},
		{"tty", s.tty},
		{"crash", s.crash},
		{"list", s.list},
		{"parallel", s.parallel},
		{"port", s.port},
		{"reach", s.reach},
		{"template", s.template},
		{"clone", s.clone},
	} {
		t.Run(tc.name, tc.run)
	}
}

// BaseFromEnv is the root filesystem that BOX_BASE names; without one the test
// is skipped, as it needs an engine that scripts/e2e sets up.
func BaseFromEnv(t *testing.T) vm.Base {
	t.Helper()
	path := os.Getenv("BOX_BASE")
	if path == "" {
		t.Skip("BOX_BASE names no base; scripts/e2e runs this")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	return vm.Base{Digest: "sha256:" + hex.EncodeToString(sum.Sum(nil)), Tar: path}
}

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

func buildProbe(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "probe")
	cmd := exec.Command("go", "build", "-o", bin, "hermes-box-lite/internal/vm/vmtest/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the probe: %v\n%s", err, out)
	}
	return bin
}

func (s *suite) ctx(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), s.Patience)
	t.Cleanup(cancel)
	return ctx
}

func (s *suite) spec(t *testing.T, name string) vm.Spec {
	t.Helper()
	return vm.Spec{
		Name: name, OwnerID: randomHex(16), Base: s.Base, CPUs: 1, MemoryMiB: 512, SystemGiB: 4, // the smallest that box.env takes
		Workload: []string{"/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.1; done"},
	}
}

// create makes a running machine that is gone at the end of the test.
func (s *suite) create(t *testing.T, spec vm.Spec) vm.Machine {
	t.Helper()
	t.Cleanup(func() { s.remove(t, spec) })
	m, err := s.Driver.Create(s.ctx(t), spec)
	if err != nil {
		t.Fatalf("create %s: %v", spec.Name, err)
	}
	if err := s.Driver.Start(s.ctx(t), spec.Name); err != nil {
		t.Fatalf("start %s: %v", spec.Name, err)
	}
	return m
}

func (s *suite) remove(t *testing.T, spec vm.Spec) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), s.Patience)
	defer cancel()
	if err := s.Driver.Delete(ctx, spec.Name, spec.OwnerID); err != nil && !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("delete %s: %v", spec.Name, err)
	}
}

// sh runs a script and returns its output.
func (s *suite) sh(t *testing.T, name, script string) string {
	t.Helper()
	var out, errOut bytes.Buffer
	code, err := s.Driver.Exec(s.ctx(t), name, vm.Command{Argv: []string{"/bin/sh", "-c", script}, Stdout: &out, Stderr: &errOut})
	if err != nil || code != 0 {
		t.Fatalf("%q in %s: exit %d, %v, stderr %q", script, name, code, err, errOut.String())
	}
	return strings.TrimSpace(out.String())
}

func (s *suite) lifecycle(t *testing.T) {
	spec := s.spec(t, s.prefix+"-life")
	m := s.create(t, spec)
	if m.OwnerID != spec.OwnerID || m.Name != spec.Name || m.EngineID == "" || m.Isolation == "" {
		t.Errorf("created machine %+v", m)
	}
	ctx := s.ctx(t)
	for range 2 { // idempotent
		if err := s.Driver.Start(ctx, spec.Name); err != nil {
			t.Fatal(err)
		}
	}
	if got := s.state(t, spec.Name); got != vm.Running {
		t.Errorf("state %s after start", got)
	}
	if got := s.sh(t, spec.Name, `ls -A "$HB_ROOT/data"`); got != "" {
		t.Errorf("/data of a new machine holds %q", got)
	}
	s.sh(t, spec.Name, `echo precious >"$HB_ROOT/data/file" && echo system >"$HB_ROOT/etc/marker" && sync`)
	for range 2 {
		if err := s.Driver.Stop(ctx, spec.Name); err != nil {
			t.Fatal(err)
		}
	}
	if got := s.state(t, spec.Name); got != vm.Stopped {
		t.Errorf("state %s after stop", got)
	}
	if _, err := s.Driver.Exec(ctx, spec.Name, vm.Command{Argv: []string{"true"}}); !errors.Is(err, vm.ErrNotRunning) {
		t.Errorf("exec in a stopped machine: %v, want ErrNotRunning", err)
	}
	if err := s.Driver.Start(ctx, spec.Name); err != nil {
		t.Fatal(err)
	}
	if got := s.sh(t, spec.Name, `cat "$HB_ROOT/data/file" "$HB_ROOT/etc/marker"`); got != "precious\nsystem" {
		t.Errorf("after stop and start: %q", got)
	}
	if err := s.Driver.Delete(ctx, spec.Name, spec.OwnerID); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Driver.Inspect(ctx, spec.Name); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("inspect after delete: %v, want ErrNotFound", err)
	}
	// A name used again starts with nothing of its predecessor.
	again := s.spec(t, spec.Name)
	s.create(t, again)
	if got := s.sh(t, spec.Name, `ls -A "$HB_ROOT/data"`); got != "" {
		t.Errorf("/data after the name was used again holds %q", got)
	}
}

func (s *suite) state(t *testing.T, name string) vm.State {
	t.Helper()
	m, err := s.Driver.Inspect(s.ctx(t), name)
	if err != nil {
		t.Fatalf("inspect %s: %v", name, err)
	}
	return m.State
}

func (s *suite) neverAdopts(t *testing.T) {
	ours := s.spec(t, s.prefix+"-adopt")
	s.create(t, ours)
	s.sh(t, ours.Name, `echo mine >"$HB_ROOT/data/file"`)
	other := s.spec(t, ours.Name)
	if _, err := s.Driver.Create(s.ctx(t), other); !errors.Is(err, vm.ErrExists) {
		t.Errorf("second create: %v, want ErrExists", err)
	}
	if m, err := s.Driver.Inspect(s.ctx(t), ours.Name); err != nil || m.OwnerID != ours.OwnerID {
		t.Errorf("after a refused create: %+v, %v", m, err)
	}
	if got := s.sh(t, ours.Name, `cat "$HB_ROOT/data/file"`); got != "mine" {
		t.Errorf("after a refused create /data/file is %q", got)
	}
	for kind, plant := range map[string]func(*testing.T, string){"machine": s.Foreign, "storage": s.LeftOver} {
		if plant == nil {
			continue
		}
		t.Run("foreign "+kind, func(t *testing.T) {
			spec := s.spec(t, s.prefix+"-foreign")
			plant(t, spec.Name)
			if _, err := s.Driver.Create(s.ctx(t), spec); !errors.Is(err, vm.ErrExists) {
				t.Errorf("create over a foreign %s: %v, want ErrExists", kind, err)
			}
			m, err := s.Driver.Inspect(s.ctx(t), spec.Name)
			if err != nil || m.OwnerID != "" {
				t.Errorf("a foreign %s is %+v, %v; want no owner", kind, m, err)
			}
			if err := s.Driver.Delete(s.ctx(t), spec.Name, spec.OwnerID); !errors.Is(err, vm.ErrNotOwner) {
				t.Errorf("delete of a foreign %s: %v, want ErrNotOwner", kind, err)
			}
			if _, err := s.Driver.Inspect(s.ctx(t), spec.Name); err != nil {
				t.Errorf("the foreign %s after all that: %v", kind, err)
			}
		})
	}
}

func (s *suite) absence(t *testing.T) {
	name := s.prefix + "-nobody"
	ctx := s.ctx(t)
	if _, err := s.Driver.Inspect(ctx, name); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("inspect: %v, want ErrNotFound", err)
	}
	for op, err := range map[string]error{
		"start":  s.Driver.Start(ctx, name),
		"stop":   s.Driver.Stop(ctx, name),
		"delete": s.Driver.Delete(ctx, name, randomHex(16)),
	} {
		if !errors.Is(err, vm.ErrNotFound) {
			t.Errorf("%s: %v, want ErrNotFound", op, err)
		}
	}
	// What cannot be known is not absence.
	dead, cancel := context.WithCancel(ctx)
	cancel()
	if s.Isolated { // a directory cannot be unreachable
		if _, err := s.Driver.Inspect(dead, name); err == nil || errors.Is(err, vm.ErrNotFound) {
			t.Errorf("inspect that could not ask: %v, want an error that is not ErrNotFound", err)
		}
	}
}

func (s *suite) ownership(t *testing.T) {
	spec := s.spec(t, s.prefix+"-own")
	s.create(t, spec)
	for _, id := range []string{"", randomHex(16), spec.OwnerID[:31]} {
		if err := s.Driver.Delete(s.ctx(t), spec.Name, id); !errors.Is(err, vm.ErrNotOwner) {
			t.Errorf("delete with owner id %q: %v, want ErrNotOwner", id, err)
		}
	}
	if got := s.state(t, spec.Name); got != vm.Running {
		t.Errorf("after refused deletes it is %s", got)
	}
}

func (s *suite) exec(t *testing.T) {
	spec := s.spec(t, s.prefix+"-exec")
	s.create(t, spec)
	for _, want := range []int{0, 1, 7, 100, 124, 125, 126, 127, 128, 130, 137, 255} {
		code, err := s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", "exit " + strconv.Itoa(want)}})
		if err != nil || code != want {
			t.Errorf("exit %d came back as %d, %v", want, code, err)
		}
	}
	if code, err := s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", "kill -KILL $$"}}); err != nil || code != 137 {
		t.Errorf("a command killed by KILL came back as %d, %v", code, err)
	}
	if code, err := s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"/no/such/program"}}); err != nil || code != 127 {
		t.Errorf("a missing program came back as %d, %v; want 127", code, err)
	}
	// Arguments arrive as they are.
	args := []string{"a b", "", "--", "-x", "$(id)", "`id`", "'\"\\", "ü\n\t*"}
	var out bytes.Buffer
	code, err := s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{
		Argv: append([]string{"/bin/sh", "-c", `printf '%s\0' "$@"`, "sh"}, args...), Stdout: &out,
	})
	if want := strings.Join(args, "\x00") + "\x00"; err != nil || code != 0 || out.String() != want {
		t.Errorf("arguments arrived as %q, %d, %v", out.String(), code, err)
	}
	// stdout and stderr stay apart.
	var stdout, stderr bytes.Buffer
	code, err = s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", "echo out; echo err >&2"}, Stdout: &stdout, Stderr: &stderr})
	if err != nil || code != 0 || stdout.String() != "out\n" || stderr.String() != "err\n" {
		t.Errorf("stdout %q stderr %q, %d, %v", stdout.String(), stderr.String(), code, err)
	}
	// A command that does not read its input ends all the same, even though
	// the input never does.
	pr, pw := io.Pipe()
	defer func() { _ = pw.Close() }()
	if code, err := s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", "exit 3"}, Stdin: pr}); err != nil || code != 3 {
		t.Errorf("with an endless input: %d, %v", code, err)
	}
	// A command ends when nobody takes its output, which never ends.
	full := errors.New("no space")
	begun := time.Now()
	code, err = s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", "exec cat /dev/zero"}, Stdout: &failing{after: 64 << 10, err: full}})
	if !errors.Is(err, full) || time.Since(begun) > s.Patience {
		t.Errorf("with an output that takes no more: %d, %v", code, err)
	}
	// A command that closed its output is still awaited.
	if code, err := s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 9"}}); err != nil || code != 9 {
		t.Errorf("with its output closed: %d, %v", code, err)
	}
}

func (s *suite) streams(t *testing.T) {
	spec := s.spec(t, s.prefix+"-bulk")
	s.create(t, spec)
	data := make([]byte, s.Stream)
	_, _ = rand.Read(data)
	copy(data[1000:], "\r\n\x00\x04\x1a\x1b[2J") // bytes that terminals act upon
	want := sha256.Sum256(data)

	var sum bytes.Buffer
	code, err := s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{
		Argv: []string{"/bin/sh", "-c", `tee "$HB_ROOT/data/bulk" | sha256sum`}, Stdin: bytes.NewReader(data), Stdout: &sum,
	})
	if got, _, _ := strings.Cut(sum.String(), " "); err != nil || code != 0 || got != hex.EncodeToString(want[:]) {
		t.Fatalf("in: sha256 %q, %d, %v; want %x", got, code, err, want)
	}
	back := sha256.New()
	code, err = s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", `cat "$HB_ROOT/data/bulk"`}, Stdout: back})
	if err != nil || code != 0 || !bytes.Equal(back.Sum(nil), want[:]) {
		t.Fatalf("out: sha256 %x, %d, %v; want %x", back.Sum(nil), code, err, want)
	}
	both := sha256.New()
	code, err = s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{Argv: []string{"cat"}, Stdin: bytes.NewReader(data), Stdout: both})
	if err != nil || code != 0 || !bytes.Equal(both.Sum(nil), want[:]) {
		t.Fatalf("both at once: sha256 %x, %d, %v; want %x", both.Sum(nil), code, err, want)
	}
}

// failing takes some bytes, and then no more.
type failing struct {
	after int
	err   error
}

func (f *failing) Write(p []byte) (int, error) {
	if f.after -= len(p); f.after < 0 {
		return 0, f.err
	}
	return len(p), nil
}

func (s *suite) cancel(t *testing.T) {
	spec := s.spec(t, s.prefix+"-cancel")
	s.create(t, spec)
	for _, kind := range []string{"polite", "deaf to TERM"} {
		t.Run(kind, func(t *testing.T) {
			trap := ""
			if kind != "polite" {
				trap = "trap '' TERM; "
			}
			mark := randomHex(6)
			ctx, cancel := context.WithCancel(s.ctx(t))
			defer cancel()
			started := make(chan struct{})
			done := make(chan error, 1)
			go func() {
				_, err := s.Driver.Exec(ctx, spec.Name, vm.Command{
					Argv:   []string{"/bin/sh", "-c", trap + `echo up; while :; do sleep 0.1; date +%s%N >"$HB_ROOT/tmp/` + mark + `"; done`},
					Stdout: onFirstWrite(started),
				})
				done <- err
			}()
			select {
			case <-started:
			case err := <-done:
				t.Fatalf("ended before it was cancelled: %v", err)
			}
			cancel()
			select {
			case err := <-done:
				if !errors.Is(err, context.Canceled) {
					t.Errorf("error %v, want context.Canceled", err)
				}
			case <-time.After(s.Patience):
				t.Fatal("exec did not return after it was cancelled")
			}
			// The guest's process is dead: its file no longer changes.
			before := s.sh(t, spec.Name, `cat "$HB_ROOT/tmp/`+mark+`" 2>/dev/null; true`)
			if after := s.sh(t, spec.Name, `sleep 0.5; cat "$HB_ROOT/tmp/`+mark+`" 2>/dev/null; true`); after != before {
				t.Errorf("the command still runs: %q, then %q", before, after)
			}
		})
	}
}

// onFirstWrite closes the channel when something is written.
func onFirstWrite(ch chan struct{}) io.Writer {
	var once sync.Once
	return writerFunc(func(p []byte) (int, error) {
		once.Do(func() { close(ch) })
		return len(p), nil
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// screen collects what a terminal shows and waits for parts of it.
type screen struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (sc *screen) Write(p []byte) (int, error) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	return sc.buf.Write(p)
}

func (sc *screen) String() string {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	return sc.buf.String()
}

func (sc *screen) await(t *testing.T, patience time.Duration, text string) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if strings.Contains(sc.String(), text) {
			return
		}
	}
	t.Fatalf("the terminal never showed %q, but %q", text, sc.String())
}

func (s *suite) tty(t *testing.T) {
	spec := s.spec(t, s.prefix+"-tty")
	s.create(t, spec)
	var sc screen
	in, typed := io.Pipe()
	resize := make(chan vm.WinSize)
	done := make(chan struct{})
	var code int
	var err error
	go func() {
		defer close(done)
		code, err = s.Driver.Exec(s.ctx(t), spec.Name, vm.Command{
			Argv:  []string{"/bin/sh", "-c", `[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo "tty $TERM"; stty size; read line; echo "got $line"; stty size; read line; exit 5`},
			Stdin: in, Stdout: &sc, TTY: &vm.TTY{Term: "xterm-256color", Size: vm.WinSize{Rows: 33, Cols: 99}, Resize: resize},
		})
	}()
	sc.await(t, s.Patience, "tty xterm-256color")
	sc.await(t, s.Patience, "33 99")
	select {
	case resize <- vm.WinSize{Rows: 50, Cols: 200}:
	case <-done:
		t.Fatalf("ended early: %d, %v, %q", code, err, sc.String())
	}
	// The engine passes the size on in its own time.
	for deadline := time.Now().Add(s.Patience); ; {
		if got := s.sh(t, spec.Name, `for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline 2>/dev/null | grep -q 'stty size; read line; exit 5' && stty size <$p/fd/0 2>/dev/null; done; true`); strings.Contains(got, "50 200") {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("the size never became 50 200, but %q", got)
		}
	}
	_, _ = typed.Write([]byte("hello\n"))
	sc.await(t, s.Patience, "got hello")
	sc.await(t, s.Patience, "50 200")
	_, _ = typed.Write([]byte("bye\n"))
	select {
	case <-done:
	case <-time.After(s.Patience):
		t.Fatal("the command did not end")
	}
	if err != nil || code != 5 {
		t.Errorf("ended with %d, %v; want 5", code, err)
	}
}

func (s *suite) crash(t *testing.T) {
	if s.Crash == nil {
		t.Skip("the harness cannot crash a machine")
	}
	spec := s.spec(t, s.prefix+"-crash")
	s.create(t, spec)
	s.sh(t, spec.Name, `echo synced >"$HB_ROOT/data/file" && sync`)
	s.Crash(t, spec.Name)
	for deadline := time.Now().Add(s.Patience); s.state(t, spec.Name) != vm.Stopped; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after a crash it is %s, want stopped", s.state(t, spec.Name))
		}
	}
	if err := s.Driver.Start(s.ctx(t), spec.Name); err != nil {
		t.Fatal(err)
	}
	if got := s.sh(t, spec.Name, `cat "$HB_ROOT/data/file"`); got != "synced" {
		t.Errorf("after a crash /data/file is %q", got)
	}
}

func (s *suite) list(t *testing.T) {
	spec := s.spec(t, s.prefix+"-list")
	created := s.create(t, spec)
	foreign := s.prefix + "-alien"
	if s.Foreign != nil {
		s.Foreign(t, foreign)
	}
	machines, err := s.Driver.List(s.ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]vm.Machine{}
	for _, m := range machines {
		found[m.Name] = m
	}
	if m := found[spec.Name]; m.OwnerID != spec.OwnerID || m.State != vm.Running || m.EngineID != created.EngineID {
		t.Errorf("ours is listed as %+v", m)
	}
	if m, ok := found[foreign]; s.Foreign != nil && (!ok || m.OwnerID != "") {
		t.Errorf("the foreign one is listed as %+v (%v)", m, ok)
	}
}

func (s *suite) parallel(t *testing.T) {
	const n = 4
	specs := make([]vm.Spec, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		specs[i] = s.spec(t, fmt.Sprintf("%s-par%d", s.prefix, i))
		t.Cleanup(func() { s.remove(t, specs[i]) })
		wg.Go(func() {
			ctx, name := s.ctx(t), specs[i].Name
			errs[i] = func() error {
				if _, err := s.Driver.Create(ctx, specs[i]); err != nil {
					return fmt.Errorf("create: %w", err)
				}
				if err := s.Driver.Start(ctx, name); err != nil {
					return fmt.Errorf("start: %w", err)
				}
				var out bytes.Buffer
				if _, err := s.Driver.Exec(ctx, name, vm.Command{Argv: []string{"echo", name}, Stdout: &out}); err != nil || out.String() != name+"\n" {
					return fmt.Errorf("exec: %q: %w", out.String(), err)
				}
				if err := s.Driver.Stop(ctx, name); err != nil {
					return fmt.Errorf("stop: %w", err)
				}
				return s.Driver.Delete(ctx, name, specs[i].OwnerID)
			}()
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("%s: %v", specs[i].Name, err)
		}
		if _, err := s.Driver.Inspect(s.ctx(t), specs[i].Name); !errors.Is(err, vm.ErrNotFound) {
			t.Errorf("%s after its deletion: %v", specs[i].Name, err)
		}
	}
	// One name, several creators: one wins, and what is there is the winner's.
	spec := s.spec(t, s.prefix+"-race")
	owners := make([]vm.Spec, n)
	results := make([]error, n)
	for i := range n {
		owners[i] = s.spec(t, spec.Name)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), s.Patience)
			defer cancel()
			err := s.Driver.Delete(ctx, spec.Name, owners[i].OwnerID)
			if err != nil && !errors.Is(err, vm.ErrNotFound) && !errors.Is(err, vm.ErrNotOwner) {
				t.Errorf("delete: %v", err)
			}
		})
		wg.Go(func() { _, results[i] = s.Driver.Create(s.ctx(t), owners[i]) })
	}
	wg.Wait()
	m, err := s.Driver.Inspect(s.ctx(t), spec.Name)
	if err != nil {
		t.Fatalf("nobody won: %v, %v", err, results)
	}
	for i, err := range results {
		if won := m.OwnerID == owners[i].OwnerID; won != (err == nil) {
			t.Errorf("creator %d: %v, but the machine's owner is its own: %v", i, err, won)
		}
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// serve has the probe listen in the machine until the test ends.
func (s *suite) serve(t *testing.T, name, addr, text string) {
	t.Helper()
	s.push(t, name)
	ctx, cancel := context.WithCancel(context.Background())
	listening := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := s.Driver.Exec(ctx, name, vm.Command{Argv: []string{"/tmp/probe", "listen", addr, text}, Stdout: onFirstWrite(listening)})
		if ctx.Err() == nil {
			t.Errorf("the listener ended: %v", err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	select {
	case <-listening:
	case <-done:
		t.FailNow()
	}
}

func (s *suite) push(t *testing.T, name string) {
	t.Helper()
	f, err := os.Open(s.probe)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	code, err := s.Driver.Exec(s.ctx(t), name, vm.Command{Argv: []string{"/bin/sh", "-c", "cat >/tmp/probe.new && chmod 755 /tmp/probe.new && mv /tmp/probe.new /tmp/probe"}, Stdin: f})
	if err != nil || code != 0 {
		t.Fatalf("push the probe: %d, %v", code, err)
	}
}

// dial returns what an address of this host says, or "".
func dial(addr string) string {
	conn, err := net.DialTimeout("tcp", addr, 2*time.Second)
	if err != nil {
		return ""
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	text, _ := io.ReadAll(io.LimitReader(conn, 100))
	return strings.TrimSpace(string(text))
}

func (s *suite) port(t *testing.T) {
	if !s.Isolated {
		t.Skip("machines of this driver share the host's network")
	}
	spec := s.spec(t, s.prefix+"-port")
	spec.HostPort, spec.GuestPort = freePort(t), guestPort
	if m := s.create(t, spec); m.HostPort != spec.HostPort {
		t.Errorf("the machine's port is %d, want %d", m.HostPort, spec.HostPort)
	}
	s.serve(t, spec.Name, fmt.Sprintf("0.0.0.0:%d", guestPort), "from the guest")
	loopback := net.JoinHostPort("127.0.0.1", strconv.Itoa(spec.HostPort))
	if got := dial(loopback); got != "from the guest" {
		t.Errorf("%s says %q", loopback, got)
	}
	// Nothing but loopback is bound: the kernel's own list of listeners.
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		data, _ := os.ReadFile(table)
		for line := range strings.Lines(string(data)) {
			fields := strings.Fields(line)
			if len(fields) < 4 || fields[3] != "0A" || !strings.HasSuffix(fields[1], fmt.Sprintf(":%04X", spec.HostPort)) {
				continue
			}
			// 127.0.0.1, and ::1 where an engine binds both.
			if addr, _, _ := strings.Cut(fields[1], ":"); addr != "0100007F" && addr != "00000000000000000000000001000000" {
				t.Errorf("%s: a listener on %s", table, fields[1])
			}
		}
	}

	// A port that somebody else has is told as such.
	foreign, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = foreign.Close() }()
	taken := s.spec(t, s.prefix+"-taken")
	taken.HostPort, taken.GuestPort = foreign.Addr().(*net.TCPAddr).Port, guestPort
	t.Cleanup(func() { s.remove(t, taken) })
	_, err = s.Driver.Create(s.ctx(t), taken)
	if err == nil {
		err = s.Driver.Start(s.ctx(t), taken.Name)
	}
	if !errors.Is(err, vm.ErrPortTaken) {
		t.Errorf("with the port taken: %v, want ErrPortTaken", err)
	}
}
