package guest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/guest/guesttest"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/secrets"
	"hermes-box-lite/internal/guest/supervise"
	"hermes-box-lite/internal/mcp"
	"hermes-box-lite/internal/vm/fake"
)

// TestMain removes what buildOnce made.
func TestMain(m *testing.M) {
	code := m.Run()
	if progs, err := buildOnce(); err == nil {
		_ = os.RemoveAll(filepath.Dir(progs.hb))
	}
	os.Exit(code)
}

// programs are built once for all tests.
type programs struct{ hb, executor string }

var buildOnce = sync.OnceValues(func() (programs, error) {
	dir, err := os.MkdirTemp("", "hb-test-")
	if err != nil {
		return programs{}, err
	}
	if err := guesttest.Build(dir, guesttest.HB, guesttest.Executor); err != nil {
		return programs{}, err
	}
	return programs{filepath.Join(dir, "hb"), filepath.Join(dir, "executor")}, nil
})

// box is a directory in which the real hb runs.
type box struct {
	t        *testing.T
	l        layout.Layout
	hb       string
	env      []string
	door     string // http://127.0.0.1:PORT
	guardian *exec.Cmd
	ended    chan error
	log      *syncBuffer
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// newBox lays out a provisioned box; mode is the stub's STUB_EXECUTOR.
func newBox(t *testing.T, mode string) *box {
	t.Helper()
	progs, err := buildOnce()
	if err != nil {
		t.Fatal(err)
	}
	l := layout.At(t.TempDir())
	for _, dir := range []string{l.Workspace(), l.Opt(), l.Path("/etc")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	guesttest.InstallExecutor(t, l, progs.executor)
	if mode != "" {
		if err := os.WriteFile(l.Environment(), []byte("STUB_EXECUTOR="+mode+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b := &box{t: t, l: l, hb: progs.hb, log: &syncBuffer{}}
	door, executor := holdPort(t), holdPort(t)
	b.door = "http://127.0.0.1:" + strconv.Itoa(door)
	b.env = []string{
		"PATH=" + os.Getenv("PATH"), layout.RootVar + "=" + l.Path(""),
		supervise.DoorAddrVar + "=127.0.0.1:" + strconv.Itoa(door),
		supervise.ExecutorPortVar + "=" + strconv.Itoa(executor),
	}
	return b
}

// holdPort returns a port that is the test's until it ends.
func holdPort(t *testing.T) int {
	t.Helper()
	port, held, err := fake.HoldPort()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = held.Close() })
	return port
}

func (b *box) provisioned() *box {
	b.t.Helper()
	if err := b.l.WriteSettings(layout.Settings{BoxName: "alpha", HostPort: 4790, Executor: true}); err != nil {
		b.t.Fatal(err)
	}
	return b
}

func (b *box) supervise() *box {
	b.t.Helper()
	b.guardian = exec.Command(b.hb, "supervise")
	b.guardian.Env = b.env
	b.guardian.Stderr = b.log
	if err := b.guardian.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.ended = make(chan error, 1)
	go func() { b.ended <- b.guardian.Wait() }()
	b.t.Cleanup(func() {
		_ = b.guardian.Process.Signal(syscall.SIGTERM)
		select {
		case <-b.ended: //nolint:errcheck // how it ends is not the question
		case <-time.After(20 * time.Second):
			b.t.Error("the guardian does not end")
			_ = b.guardian.Process.Kill()
		}
		if b.t.Failed() {
			b.t.Logf("supervisor:\n%s", b.log)
			if data, err := os.ReadFile(b.l.ExecutorLog()); err == nil {
				b.t.Logf("executor:\n%s", data)
			}
		}
		for _, pid := range b.alive() {
			b.t.Errorf("executor %d outlives its supervisor", pid)
		}
		if _, err := os.Stat(filepath.Join(b.l.Home(), ".executor/stub-double")); err == nil {
			b.t.Error("two executors ran at once")
		}
	})
	return b
}

// run runs hb with args.
func (b *box) run(args ...string) (stdout, stderr string, code int) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.hb, args...)
	cmd.Env = b.env
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		b.t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

func (b *box) must(args ...string) string {
	b.t.Helper()
	stdout, stderr, code := b.run(args...)
	if code != 0 {
		b.t.Fatalf("hb %s: exit code %d\n%s%s", strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout
}

func (b *box) status() (supervise.Status, error) {
	resp, err := supervise.Ask(b.t.Context(), b.l, supervise.OpStatus, time.Second)
	return resp.Status, err
}

// eventually polls until cond is true.
func (b *box) eventually(what string, cond func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			s, err := b.status()
			b.t.Fatalf("never: %s (status %+v, %v)", what, s, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (b *box) reaches(phase supervise.Phase) supervise.Status {
	b.t.Helper()
	var s supervise.Status
	b.eventually("phase "+string(phase), func() bool {
		var err error
		s, err = b.status()
		return err == nil && s.Phase == phase
	})
	return s
}

// starts are the pids of all executors so far.
func (b *box) starts() []int {
	data, err := os.ReadFile(filepath.Join(b.l.Home(), ".executor/stub-starts"))
	if err != nil {
		return nil
	}
	var pids []int
	for _, f := range strings.Fields(string(data)) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			b.t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// alive are those of them that run. One that nobody has reaped does not.
func (b *box) alive() []int {
	var pids []int
	for _, pid := range b.starts() {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err == nil && !strings.Contains(string(stat), ") Z ") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// workerPID is 0 while there is none. Any thread of the guardian may be the
// parent.
func (b *box) workerPID() int {
	b.t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", b.guardian.Process.Pid))
	if err != nil {
		b.t.Fatal(err)
	}
	var children []byte
	for _, list := range lists {
		data, err := os.ReadFile(list)
		if err == nil { // else the thread is gone
			children = append(children, data...)
		}
	}
	for _, f := range strings.Fields(string(children)) {
		cmdline, err := os.ReadFile("/proc/" + f + "/cmdline")
		if err == nil && strings.Contains(string(cmdline), "--worker") {
			pid, err := strconv.Atoi(f)
			if err != nil {
				b.t.Fatal(err)
			}
			return pid
		}
	}
	return 0
}

func (b *box) killWorker() int {
	b.t.Helper()
	pid := b.workerPID()
	if pid == 0 {
		b.t.Fatal("no worker found")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		b.t.Fatal(err)
	}
	return pid
}

func (b *box) get(path, token string) (int, string) {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), http.MethodGet, b.door+path, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestExecutorComesUpBehindTheDoor(t *testing.T) {
	for _, mode := range []string{"", "new"} {
		t.Run("generation "+mode, func(t *testing.T) {
			b := newBox(t, mode).supervise()
			b.reaches(supervise.PhaseNotProvisioned)
			b.provisioned()
			b.reaches(supervise.PhaseRunning)

			agent := strings.TrimSpace(b.must("token", "agent"))
			operator := strings.TrimSpace(b.must("executor-token"))
			if !secrets.ValidToken(agent) || !secrets.ValidToken(operator) || agent == operator {
				t.Fatal("the tokens are not two tokens")
			}
			if err := mcp.ProveDoor(t.Context(), b.door, agent); err != nil {
				t.Error(err)
			}
			res, err := mcp.Probe(t.Context(), mcp.Target{URL: b.door + "/mcp", Token: agent})
			if err != nil || !res.Healthy() {
				t.Errorf("probe through the door: %+v, %v", res, err)
			}
			for _, tt := range []struct {
				path, token string
				want        int
			}{
				{"/api/x", agent, 401}, {"/api/x", operator, 200}, {"/", "", 401}, {"/", operator, 200},
			} {
				if got, _ := b.get(tt.path, tt.token); got != tt.want {
					t.Errorf("GET %s: status %d, want %d", tt.path, got, tt.want)
				}
			}
			for _, token := range []string{agent, operator} {
				direct := "http://127.0.0.1:" + strings.TrimPrefix(b.env[3], supervise.ExecutorPortVar+"=") + "/mcp"
				res, err := mcp.Probe(t.Context(), mcp.Target{URL: direct, Token: token})
				if err != nil || res.Verdict != mcp.TokenRejected {
					t.Errorf("Executor's own port: %+v, %v", res, err)
				}
			}
			if ticket := strings.TrimSpace(b.must("ticket")); !secrets.ValidToken(ticket) {
				t.Error("no ticket")
			}
			if mode == "new" {
				s, err := b.status()
				if err != nil {
					t.Fatal(err)
				}
				cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", s.PID))
				if err != nil || bytes.Contains(cmdline, []byte("auth-token")) {
					t.Errorf("a token in the arguments: %q, %v", cmdline, err)
				}
			}
			for _, name := range []string{"server-control", "server-control/server.json"} {
				info, err := os.Stat(filepath.Join(b.l.Home(), ".executor", name))
				if err != nil || info.Mode().Perm()&0o077 != 0 {
					t.Errorf("%s: %v, %v", name, info.Mode(), err)
				}
			}
			if log := b.must("logs", "executor"); !strings.Contains(log, "base url http://alpha.localhost:4790") {
				t.Errorf("log:\n%s", log)
			}
			var hello struct {
				Supervised, Provisioned, Paused bool
			}
			if err := json.Unmarshal([]byte(b.must("hello")), &hello); err != nil || !hello.Supervised || !hello.Provisioned || hello.Paused {
				t.Errorf("hello: %+v, %v", hello, err)
			}
		})
	}
}

func TestPauseSurvivesTheWorkerAndTheGuardian(t *testing.T) {
	b := newBox(t, "").provisioned().supervise()
	b.reaches(supervise.PhaseRunning)
	b.must("down")
	if s := b.reaches(supervise.PhasePaused); s.PID != 0 || len(b.alive()) != 0 {
		t.Fatalf("paused with a process: %+v", s)
	}
	if code, body := b.get("/mcp", strings.TrimSpace(b.must("token", "agent"))); code != 503 || !strings.Contains(body, "paused") {
		t.Errorf("the door while paused: %d %q", code, body)
	}
	old := b.killWorker()
	b.eventually("a new worker", func() bool { pid := b.workerPID(); return pid != 0 && pid != old })
	b.reaches(supervise.PhasePaused)
	if n := len(b.starts()); n != 1 {
		t.Errorf("%d starts, want 1", n)
	}
	b.must("up")
	if len(b.alive()) != 1 {
		t.Errorf("alive: %v", b.alive())
	}
}

func TestExecutorIsRestarted(t *testing.T) {
	b := newBox(t, "").provisioned().supervise()
	s := b.reaches(supervise.PhaseRunning)
	if err := syscall.Kill(s.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.eventually("another executor", func() bool {
		next, err := b.status()
		return err == nil && next.Phase == supervise.PhaseRunning && next.PID != s.PID
	})
}

func TestKilledWorkerLeavesOneExecutor(t *testing.T) {
	b := newBox(t, "").provisioned().supervise()
	s := b.reaches(supervise.PhaseRunning)
	b.killWorker()
	b.eventually("a new worker's executor", func() bool {
		next, err := b.status()
		return err == nil && next.Phase == supervise.PhaseRunning && next.PID != s.PID
	})
	if alive := b.alive(); len(alive) != 1 {
		t.Errorf("alive: %v", alive)
	}
}

func TestHoldLastsAsLongAsTheConnection(t *testing.T) {
	b := newBox(t, "").provisioned().supervise()
	b.reaches(supervise.PhaseRunning)
	release, err := supervise.HoldExecutor(t.Context(), b.l, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	second, err := supervise.HoldExecutor(t.Context(), b.l, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if len(b.alive()) != 0 {
		t.Error("held, and alive")
	}
	if out := b.must("up"); !strings.Contains(out, "another operation") {
		t.Errorf("up while held: %q", out)
	}
	release()
	b.reaches(supervise.PhaseHeld)
	second()
	b.reaches(supervise.PhaseRunning)

	// A pause outlasts a hold.
	release, err = supervise.HoldExecutor(t.Context(), b.l, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	b.must("down")
	release()
	b.reaches(supervise.PhasePaused)
}

func TestConcurrentVerbsNeverMakeTwo(t *testing.T) {
	b := newBox(t, "").provisioned().supervise()
	b.reaches(supervise.PhaseRunning)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 4 {
				op := supervise.OpUp
				if (i+j)%3 == 0 {
					op = supervise.OpDown
				}
				// Each may lose against the other; what counts is the end.
				_, _ = supervise.Ask(t.Context(), b.l, op, 20*time.Second)
			}
		})
	}
	wg.Wait()
	b.must("up")
	if alive := b.alive(); len(alive) != 1 {
		t.Errorf("alive: %v", alive)
	}
}

func TestShutdown(t *testing.T) {
	b := newBox(t, "").provisioned().supervise()
	b.reaches(supervise.PhaseRunning)
	b.must("shutdown")
	b.reaches(supervise.PhaseShutDown)
	if paused, err := secrets.Paused(b.l); paused || err != nil {
		t.Errorf("paused %v, %v", paused, err)
	}
	b.must("up") // the stop did not come
	// Nor after this one, and a repair is what comes.
	b.must("shutdown")
	b.reaches(supervise.PhaseShutDown)
	if _, err := supervise.Ask(t.Context(), b.l, supervise.OpReload, time.Minute); err != nil {
		t.Fatal(err)
	}
	b.reaches(supervise.PhaseRunning)
	if err := b.guardian.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-b.ended:
		if err != nil {
			t.Errorf("the guardian: %v", err)
		}
		b.ended <- nil // for the clean-up
	case <-time.After(20 * time.Second):
		t.Fatal("the guardian does not end")
	}
	if alive := b.alive(); len(alive) != 0 {
		t.Errorf("alive: %v", alive)
	}
}

func TestTakenPortIsReported(t *testing.T) {
	b := newBox(t, "").provisioned()
	ln, err := net.Listen("tcp4", "127.0.0.1:"+strings.TrimPrefix(b.env[3], supervise.ExecutorPortVar+"="))
	if err != nil {
		t.Fatal(err)
	}
	b.supervise()
	s := b.reaches(supervise.PhaseWaiting)
	if !strings.Contains(s.Problem, "held by another program") || len(b.starts()) != 0 {
		t.Errorf("status %+v, starts %v", s, b.starts())
	}
	if out := b.must("status"); !strings.Contains(out, "held by another program") {
		t.Errorf("hb status:\n%s", out)
	}
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	b.must("up")
}

func TestCrashingExecutorIsReported(t *testing.T) {
	b := newBox(t, "crash").provisioned().supervise()
	s := b.reaches(supervise.PhaseWaiting)
	if !strings.Contains(s.Problem, "exit status 1") {
		t.Errorf("problem %q", s.Problem)
	}
	if err := os.WriteFile(b.l.Environment(), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	b.must("up")
}
