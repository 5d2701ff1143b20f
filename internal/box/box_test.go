//go:build linux

package box

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/config"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/fake"
	"hermes-box-lite/internal/wire"
)

// ownerVar makes this test binary the owner of a lock, in the home it names.
const ownerVar = "BOX_TEST_LOCK_OWNER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(ownerVar); dir != "" {
		ownLock(dir)
		return
	}
	os.Exit(m.Run())
}

// ownLock takes the lock of alpha, starts a child that outlives it, says so
// and waits to be killed.
func ownLock(dir string) {
	if _, err := HomeAt(dir).acquire("alpha", "repair"); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	child := exec.Command("sleep", "300")
	if err := child.Start(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("child", child.Process.Pid)
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
}

func testHome(t *testing.T) Home {
	t.Helper()
	h := HomeAt(t.TempDir())
	if err := h.ensure(); err != nil {
		t.Fatal(err)
	}
	return h
}

// owner is another process that holds the lock of alpha.
type owner struct {
	cmd   *exec.Cmd
	child int
}

func startOwner(t *testing.T, h Home) owner {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerVar+"="+h.dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	o := owner{cmd: cmd}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if o.child > 0 {
			_ = syscall.Kill(o.child, syscall.SIGKILL)
		}
	})
	if _, err := fmt.Fscanf(out, "child %d\n", &o.child); err != nil {
		t.Fatal(err)
	}
	return o
}

func TestLockOfALiveOwner(t *testing.T) {
	h := testHome(t)
	o := startOwner(t, h)
	refused := func(when string) {
		t.Helper()
		var locked *LockedError
		if _, err := h.acquire("alpha", "rm"); !errors.As(err, &locked) {
			t.Fatalf("%s: the lock was given away: %v", when, err)
		}
		if locked.Holder.PID != o.cmd.Process.Pid || locked.Holder.Verb != "repair" {
			t.Errorf("%s: the holder is %+v", when, locked.Holder)
		}
		if held, err := h.locked("alpha"); !held || err != nil {
			t.Errorf("%s: locked says %v, %v", when, held, err)
		}
	}
	refused("running")
	if err := o.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	refused("stopped")
	if l, err := h.acquire("beta", "rm"); err != nil {
		t.Errorf("another box is locked too: %v", err)
	} else {
		l.release()
	}
}

func TestLockEndsWithItsOwner(t *testing.T) {
	h := testHome(t)
	o := startOwner(t, h)
	if err := o.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = o.cmd.Wait()
	if err := syscall.Kill(o.child, 0); err != nil {
		t.Fatal("the child is gone, this test proves nothing", err)
	}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", o.child))
	if err != nil || len(fds) == 0 {
		t.Fatal("the child's descriptors cannot be seen", err)
	}
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && strings.HasPrefix(target, h.dir) {
			t.Errorf("the child holds %s", target)
		}
	}
	// Two recoverers: exactly one wins.
	var wg sync.WaitGroup
	var mu sync.Mutex
	var won []*lock
	for range 8 {
		wg.Go(func() {
			if l, err := h.acquire("alpha", "rm"); err == nil {
				mu.Lock()
				defer mu.Unlock()
				won = append(won, l)
			}
		})
	}
	wg.Wait()
	if len(won) != 1 {
		t.Fatalf("%d hold the lock", len(won))
	}
	won[0].release()
}

// What is written in the file is for messages only: a foreign pid in it, even
// a live one, keeps nobody out.
func TestLockFileOfAnotherBoot(t *testing.T) {
	h := testHome(t)
	for _, text := range []string{`{"pid":1,"verb":"new","since":"2020-01-01T00:00:00Z"}`, "garbage", ""} {
		if err := os.WriteFile(h.lockPath("alpha"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := h.acquire("alpha", "rm")
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		l.release()
	}
}

// A waiter that opened the file before rm unlinked it must not end up with a
// lock that protects nothing.
func TestDiscardedLock(t *testing.T) {
	h := testHome(t)
	for range 50 {
		l, err := h.acquire("alpha", "rm")
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		var holders []*lock // held until all have tried
		for range 4 {
			wg.Go(func() {
				if l, err := h.tryLock("alpha"); err == nil {
					mu.Lock()
					defer mu.Unlock()
					holders = append(holders, l)
				}
			})
		}
		l.discard()
		wg.Wait()
		if len(holders) > 1 {
			t.Fatalf("%d hold the lock", len(holders))
		}
		for _, l := range holders {
			l.release()
		}
	}
}

// silent is a Reporter that keeps what it is told.
type silent struct {
	mu    sync.Mutex
	lines []string
}

func (s *silent) add(kind, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, kind+" "+text)
}
func (s *silent) Step(name string) { s.add("step", name) }
func (s *silent) Note(text string) { s.add("note", text) }
func (s *silent) Warn(text string) { s.add("warn", text) }

func (s *silent) Progress(int64, int64) {}

func testManager(t *testing.T, lo, hi int) (*Manager, *silent) {
	t.Helper()
	report := &silent{}
	drv := fake.New(t.TempDir(), "")
	cfg, err := config.Parse("box.env", nil, config.Machine{Cores: 2, MemoryMiB: 4096})
	if err != nil {
		t.Fatal(err)
	}
	cfg.PortLo, cfg.PortHi = lo, hi
	m := NewManager(Options{
		Home: testHome(t), Config: cfg, Version: "1", Report: report, Now: time.Now,
		Driver: func(context.Context, string) (vm.Driver, error) { return drv, nil },
	})
	return m, report
}

// freeRange finds a range of ports that nobody uses at the moment.
func freeRange(t *testing.T, n int) (lo, hi int) {
	t.Helper()
	for lo = 17000 + os.Getpid()%2000; lo < 60000; lo += n {
		free := true
		for p := lo; p < lo+n && free; p++ {
			free = portFree(p)
		}
		if free {
			return lo, lo + n - 1
		}
	}
	t.Fatal("no free range")
	return 0, 0
}

func listen(t *testing.T, network, host string, port int) {
	t.Helper()
	l, err := net.Listen(network, net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
}

func TestThirtyReservationsSideBySide(t *testing.T) {
	lo, hi := freeRange(t, 40)
	m, _ := testManager(t, lo, hi)
	foreign := []int{lo, lo + 7, lo + 8}
	listen(t, "tcp4", "127.0.0.1", lo)
	listen(t, "tcp4", "0.0.0.0", lo+8)
	if hasIPv6Loopback() {
		listen(t, "tcp6", "::1", lo+7)
	} else {
		foreign = []int{lo, lo + 8}
	}
	ports := make([]int, 30)
	errs := make([]error, 30)
	var wg sync.WaitGroup
	for i := range ports {
		wg.Go(func() {
			rec := Record{Name: fmt.Sprintf("box%d", i), OwnerID: newID(), Phase: Creating}
			errs[i] = m.reservePort(t.Context(), &rec, nil)
			ports[i] = rec.HostPort
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for _, p := range ports {
		if seen[p] || p < lo || p > hi || slices.Contains(foreign, p) {
			t.Errorf("port %d of %v", p, ports)
		}
		seen[p] = true
	}
	// Seven or so are left; then the range is exhausted, in clear words, and
	// nothing of the failed reservation stays.
	var exhausted *PortsExhaustedError
	for i := 30; ; i++ {
		rec := Record{Name: fmt.Sprintf("box%d", i), OwnerID: newID(), Phase: Creating}
		if err := m.reservePort(t.Context(), &rec, nil); err != nil {
			if !errors.As(err, &exhausted) {
				t.Fatal(err)
			}
			if _, err := m.registry.get(rec.Name); !errors.Is(err, ErrNotFound) {
				t.Errorf("a failed reservation left a record: %v", err)
			}
			break
		}
		if i > 40 {
			t.Fatal("more reservations than ports")
		}
	}
	if err := m.registry.remove("box3"); err != nil {
		t.Fatal(err)
	}
	rec := Record{Name: "again", OwnerID: newID()}
	if err := m.reservePort(t.Context(), &rec, nil); err != nil || rec.HostPort != ports[3] {
		t.Errorf("the port of a removed box is not free again: %d, %v", rec.HostPort, err)
	}
}

func TestReservationAvoidsLostPorts(t *testing.T) {
	lo, hi := freeRange(t, 3)
	m, _ := testManager(t, lo, hi)
	rec := Record{Name: "alpha", OwnerID: newID()}
	if err := m.reservePort(t.Context(), &rec, map[int]bool{lo: true, lo + 1: true}); err != nil || rec.HostPort != lo+2 {
		t.Errorf("port %d, %v", rec.HostPort, err)
	}
}

func TestRegistry(t *testing.T) {
	h := testHome(t)
	r := registry{h}
	want := Record{
		Name: "alpha", OwnerID: newID(), Driver: "fake", Phase: Creating, HostPort: 4790, BaseImage: "x",
		Operation: &Operation{Verb: "new", Step: "create", Started: time.Unix(1e9, 0).UTC()}, Created: time.Unix(1e9, 0).UTC(),
	}
	if err := r.put(want); err != nil {
		t.Fatal(err)
	}
	got, err := r.get("alpha")
	want.Schema = 1
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if info, err := os.Stat(r.path("alpha")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	for name, text := range map[string]string{
		"damaged": "{", "empty": "", "renamed": `{"schema":1,"name":"other","owner_id":"x"}`,
		"future": `{"schema":2,"name":"future","owner_id":"x"}`, "anonymous": `{"schema":1,"name":"anonymous"}`,
	} {
		if err := os.WriteFile(r.path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := r.get(name); err == nil || errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), r.path(name)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, junk := range []string{"UPPER.json", "alpha.json.tmp", ".json", "a--b.json"} {
		if err := os.WriteFile(filepath.Join(h.records(), junk), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	names, err := r.names()
	if diff := cmp.Diff([]string{"alpha", "anonymous", "damaged", "empty", "future", "renamed"}, names); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if err := errors.Join(r.remove("alpha"), r.remove("alpha")); err != nil {
		t.Error(err)
	}
	if _, err := r.get("alpha"); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

// impatient presses Ctrl-C as soon as it reads of a step.
type impatient struct {
	silent
	press func()
}

func (i *impatient) Step(string) { i.press() }

// Whoever is told of a step and ends the command at once finds its trace.
func TestAnAnnouncedStepIsRecorded(t *testing.T) {
	m, _ := testManager(t, 17000, 17001)
	if err := m.registry.put(Record{Name: "alpha", OwnerID: newID(), Driver: "fake", Phase: Ready}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	m.opts.Report = &impatient{press: cancel}
	mu, err := m.beginExisting("alpha", "save")
	if err != nil {
		t.Fatal(err)
	}
	if err := mu.end(errors.Join(mu.enter(ctx, "look at the state"), ctx.Err())); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	rec, err := m.registry.get("alpha")
	if err != nil {
		t.Fatal(err)
	}
	if op := rec.Operation; op == nil || op.Step != "look at the state" || op.Failed {
		t.Errorf("the journal has %+v", op)
	}
}

func TestCheckName(t *testing.T) {
	for name, ok := range map[string]bool{
		"a": true, "alpha-2": true, "a" + strings.Repeat("b", 38): true, "a" + strings.Repeat("b", 39): false,
		"": false, "-a": false, "A": false, "a--b": false, "a-": false, "..": false, "a\n": false, "1a": false,
		"ä": false, "a_b": false, "a/b": false, "_ports": false, strings.Repeat("a", 64): false,
	} {
		if err := CheckName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestTranscriptsAreBounded(t *testing.T) {
	h := testHome(t)
	start := time.Unix(1e9, 0)
	var last string
	for i := range keptTranscripts + 5 {
		tr, err := h.newTranscript("alpha", "new", start.Add(time.Duration(i)*time.Second), nil)
		if err != nil {
			t.Fatal(err)
		}
		last = tr.close(true)
		if err := os.Chtimes(last, start, start.Add(time.Duration(i)*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	logs, err := filepath.Glob(filepath.Join(h.transcripts(), "*"))
	if err != nil || len(logs) != keptTranscripts || !slices.Contains(logs, last) {
		t.Errorf("%d transcripts, %v", len(logs), err)
	}
	for _, l := range logs {
		if info, err := os.Stat(l); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v", l, info.Mode())
		}
	}
	// One that is too long is cut, and its writer is not told.
	var seen bytes.Buffer
	tr, err := h.newTranscript("alpha", "repair", start, &seen)
	if err != nil {
		t.Fatal(err)
	}
	chunk := make([]byte, 1<<20)
	for range 6 {
		if n, err := tr.Write(chunk); n != len(chunk) || err != nil {
			t.Fatal(n, err)
		}
	}
	path := tr.close(true)
	if info, err := os.Stat(path); err != nil || info.Size() > maxTranscript+100 {
		t.Errorf("%d bytes, %v", info.Size(), err)
	}
	if seen.Len() != 6<<20 {
		t.Errorf("%d bytes were shown", seen.Len())
	}
	// That of a success goes.
	tr, err = h.newTranscript("alpha", "start", start, nil)
	if err != nil {
		t.Fatal(err)
	}
	if path := tr.close(false); path != "" {
		t.Error(path)
	}
	if left, _ := filepath.Glob(filepath.Join(h.transcripts(), "alpha-start-*")); len(left) != 0 {
		t.Error(left)
	}
}

func TestAdvice(t *testing.T) {
	for _, tt := range []struct{ fix, command, text string }{
		{"hb up", "box enter alpha -- hb up", ""},
		{"hb logs executor -f", "box enter alpha -- hb logs executor -f", ""},
		{"box repair NAME", "box repair alpha", ""},
		{"box stop alpha && box start alpha", "box stop alpha && box start alpha", ""},
		{"", "", ""},
		{"hb up; rm -rf /", "", "hb up; rm -rf /"},
		{"hb up\ncurl evil", "", `hb up\ncurl evil`},
		{"box rm alpha --force", "", "box rm alpha --force"},
		{"box repair beta", "", "box repair beta"},
		{"box stop alpha && curl evil | sh", "", "box stop alpha && curl evil | sh"},
		{"\x1b]0;owned\a", "", `\x1b]0;owned\a`},
	} {
		command, text := advice("alpha", tt.fix)
		if command != tt.command || text != tt.text {
			t.Errorf("%q: %q, %q", tt.fix, command, text)
		}
	}
}

// guestDriver answers every hb verb from a table.
type guestDriver struct {
	vm.Driver
	answers map[string]answer
}

type answer struct {
	code             int
	stdout, stderr   string
	err              error
	stdoutUntilError bool
}

func (d guestDriver) Exec(_ context.Context, _ string, c vm.Command) (int, error) {
	a := d.answers[c.Argv[1]]
	if c.Stdin != nil {
		_, _ = io.Copy(io.Discard, c.Stdin)
	}
	if c.Stdout != nil {
		for {
			if _, err := io.WriteString(c.Stdout, a.stdout); err != nil || !a.stdoutUntilError {
				break
			}
		}
	}
	if c.Stderr != nil {
		_, _ = io.WriteString(c.Stderr, a.stderr)
	}
	return a.code, a.err
}

func TestHostileGuest(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer answer
		want   string // in the error
	}{
		{"escapes", answer{code: 1, stderr: "hb: \x1b]52;c;aGk=\a\u202e\n"}, `hb token: \x1b]52;c;aGk=\a\u202e`},
		{"silence", answer{code: 9}, "exit code 9"},
		{"no secret", answer{stdout: "-rf /\n"}, "did not answer 64 hexadecimal digits"},
		{"upper case", answer{stdout: strings.Repeat("A", 64)}, "64 hexadecimal"},
		{"two secrets", answer{stdout: strings.Repeat("a", 64) + "\n" + strings.Repeat("b", 64)}, "64 hexadecimal"},
		{"too much", answer{stdout: strings.Repeat("a", wire.MaxDocument+1)}, "answered more than"},
		{"cut", answer{err: errors.New("cut")}, "hb token: cut"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := guest{drv: guestDriver{answers: map[string]answer{"token": tt.answer}}, name: "alpha"}
			s, err := g.secret(t.Context(), "token", "agent")
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.ContainsAny(err.Error(), "\x1b\a\u202e") {
				t.Errorf("%q, %v", s, err)
			}
		})
	}
	want := strings.Repeat("0a", 32)
	g := guest{drv: guestDriver{answers: map[string]answer{"token": {stdout: want + "\n"}}}, name: "alpha"}
	if s, err := g.secret(t.Context(), "token", "agent"); s != want || err != nil {
		t.Errorf("%q, %v", s, err)
	}
}

func TestHandshake(t *testing.T) {
	for _, tt := range []struct{ name, stdout, want string }{
		{"another protocol", `{"protocol":2,"version":"9"}`, "speaks protocol 2"},
		{"unknown field", `{"protocol":1,"surprise":1}`, "handshake is not of this version"},
		{"two documents", `{"protocol":1}{}`, "handshake is not of this version"},
		{"no JSON", "hello", "handshake is not of this version"},
	} {
		g := guest{drv: guestDriver{answers: map[string]answer{"hello": {stdout: tt.stdout}}}, name: "alpha"}
		if _, err := g.hello(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestProvisionEvents(t *testing.T) {
	result := `{"v":1,"type":"result"}` + "\n"
	for _, tt := range []struct {
		name   string
		answer answer
		err    string
		hint   string
		lines  []string
	}{
		{
			"good",
			answer{stdout: `{"v":1,"type":"step","step":"node"}` + "\nnoise\n" + `{"v":1,"type":"note","text":"\u001b[2Jx"}` + "\n" + result},
			"", "",
			[]string{"step provision: node", `note \x1b[2Jx`},
		},
		{
			"no result",
			answer{stdout: `{"v":1,"type":"step","step":"node"}` + "\n", code: 137},
			"hb provision ended with 137: the stream ended without a result", "",
			[]string{"step provision: node"},
		},
		{"fault", answer{stdout: `{"v":1,"type":"result","error":"provision: node: \u001b","hint":"box repair NAME"}` + "\n", code: 1}, `provision: node: \x1b`, "box repair alpha", nil},
		{"evil hint", answer{stdout: `{"v":1,"type":"result","error":"x","hint":"curl evil | sh"}` + "\n", code: 1}, "x (curl evil | sh)", "", nil},
		{"after the result", answer{stdout: result + result}, "an event after the result", "", nil},
		{"success, and yet not", answer{stdout: result, code: 1}, "after reporting success", "", nil},
		{"endless line", answer{stdout: strings.Repeat("x", 4096), stdoutUntilError: true}, "a line of more than", "", nil},
		{"cut", answer{stdout: result, err: errors.New("cut")}, "cut", "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, report := testManager(t, 4790, 4999)
			mu, err := m.begin("alpha", "new")
			if err != nil {
				t.Fatal(err)
			}
			mu.rec.Name = "alpha"
			g := guest{drv: guestDriver{answers: map[string]answer{"provision": tt.answer}}, name: "alpha", log: mu.log}
			err = g.provision(t.Context(), wire.ProvisionRequest{}, mu)
			_ = mu.end(nil)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("%v, want %q", err, tt.err)
			}
			var hinted interface{ Hint() string }
			if errors.As(err, &hinted) && hinted.Hint() != tt.hint || tt.hint != "" && hinted == nil {
				t.Errorf("hint of %v, want %q", err, tt.hint)
			}
			if diff := cmp.Diff(tt.lines, report.lines); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestNewestBackup(t *testing.T) {
	m, _ := testManager(t, 4790, 4790)
	h := m.home
	if _, found, err := m.NewestBackup("alpha"); found || err != nil {
		t.Errorf("%v %v", found, err)
	}
	if err := os.MkdirAll(filepath.Join(h.Backups(), "alpha-20300101-000000.tar.gz.gpg"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		"alpha-20250102-030405.tar.gz.gpg", "alpha-20260102-030405.tar.gz.gpg", "alpha-20270102-030405.tar.gz.gpg.part",
		"alpha-2-20280102-030405.tar.gz.gpg", "alpha-2028.tar.gz.gpg", "beta-20290102-030405.tar.gz.gpg",
	} {
		if err := os.WriteFile(filepath.Join(h.Backups(), name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, found, err := m.NewestBackup("alpha")
	if err != nil || !found || filepath.Base(got.Path) != "alpha-20260102-030405.tar.gz.gpg" || !got.Time.Equal(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)) {
		t.Errorf("%+v %v %v", got, found, err)
	}
}
