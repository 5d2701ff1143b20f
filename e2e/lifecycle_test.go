//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/wire"
)

// allChecks is every check that the doctor makes of a box without Hermes.
// Only mcp.hermes may be skipped.
var allChecks = []string{
	"isolation", "hb", "clock",
	"tool.claude", "tool.codex", "tool.executor", "tool.node", "tool.npm", "tool.git", "tool.curl", "tool.tmux",
	"tool.nvim", "tool.rg", "tool.jq", "tool.sudo", "tool.less", "tool.ssh",
	"state.mounted", "state.space", "state.writable", "state.owner", "state.secrets", "state.sqlite",
	"supervisor", "executor.process", "mcp.guest", "mcp.claude", "mcp.codex", "mcp.hermes", "mcp.host",
}

// sound fails unless the report has every check and nothing was skipped.
func sound(t *testing.T, report wire.Report, ids []string, maySkip ...string) {
	t.Helper()
	var got []string
	for _, c := range report.Checks {
		got = append(got, c.ID)
		if c.Status == wire.Skip && !slices.Contains(maySkip, c.ID) {
			t.Errorf("%s was skipped: %s", c.ID, c.Summary)
		}
		if c.Status == wire.Info && c.ID != "isolation" {
			t.Errorf("%s is not a pass: %s", c.ID, c.Summary)
		}
	}
	want := slices.Clone(ids)
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("checks of the doctor (-want +got):\n%s", diff)
	}
}

// TestLifecycle takes one box through everything that happens to boxes.
func TestLifecycle(t *testing.T) {
	h := newHome(t, nil)
	name := h.create("life")
	step := func(what string, part func(t *testing.T)) {
		if !h.within(t, what, part) {
			t.FailNow() // the steps build on each other
		}
	}
	step("healthy", func(t *testing.T) {
		sound(t, h.doctor(name, 0), allChecks, "mcp.hermes")
		if mode := h.in(name, "stat -c '%a %U' ~/.config/hermes-box/runtime-manifest"); mode != "600 agent" {
			t.Errorf("the runtime manifest is %s", mode)
		}
		if got := h.in(name, "sudo -n id -u 2>&1; getent hosts localhost"); !strings.HasPrefix(got, "0\n") || !strings.Contains(got, "localhost") {
			t.Errorf("sudo and names in the box: %q", got)
		}
	})
	step("enter", func(t *testing.T) { enterAndReturn(t, h, name) })
	step("exit codes", func(t *testing.T) { exitCodes(t, h, name) })
	step("binary streams", func(t *testing.T) { binaryStreams(t, h, name) })
	step("state survives", func(t *testing.T) { stateSurvives(t, h, name) })
	step("pause", func(t *testing.T) { pause(t, h, name) })
	step("processes come back", func(t *testing.T) { processesComeBack(t, h, name) })
	step("wiring is repaired", func(t *testing.T) { wiringIsRepaired(t, h, name) })
	step("tools are repaired", func(t *testing.T) { toolsAreRepaired(t, h, name) })
	step("remove", func(t *testing.T) { removeWithAQuestion(t, h, name) })
}

func enterAndReturn(t *testing.T, h *home, name string) {
	s := h.terminal("enter", name)
	s.expect("$ ")
	s.send("echo I-am-$(whoami)-in-$(pwd)\r")
	s.expect("I-am-agent-in-/data/home/agent/workspace")
	s.send("kept=of-this-session; echo pane-$TMUX_PANE-$(tmux display -p '#S')\r")
	s.expect("pane-%0-main")
	s.send("\x02d") // the prefix of tmux and d
	s.expect("detached")
	if code := s.exit(); code != 0 {
		t.Errorf("exit code %d after detaching", code)
	}
	s = h.terminal("enter", name)
	s.send("echo still-$kept-in-$TMUX_PANE\r")
	s.expect("still-of-this-session-in-%0")
	s.send("\x02d")
	s.expect("detached")
	if code := s.exit(); code != 0 {
		t.Errorf("exit code %d after detaching again", code)
	}
	if got := h.in(name, "tmux list-sessions -F '#S'"); got != "main" {
		t.Errorf("sessions: %q", got)
	}
}

func exitCodes(t *testing.T, h *home, name string) {
	for _, code := range []int{0, 1, 7, 125, 126, 127, 130, 254, 255} {
		if r := h.box("enter", name, "--", "sh", "-c", "exit "+strconv.Itoa(code)); r.code != code {
			t.Errorf("want %d: %s", code, r)
		} else if r.stderr != "" {
			t.Errorf("box has something to say: %s", r)
		}
	}
	h.wants(127, []string{"no-such-command", "not found"}, "enter", name, "--", "no-such-command")
	h.wants(126, []string{"permission denied"}, "enter", name, "--", "/etc/hostname")
	h.wants(137, nil, "enter", name, "--", "sh", "-c", "kill -9 $$")
	h.wants(4, []string{"no such box"}, "start", run.prefix+"nobody")
	h.wants(255, []string{"no such box"}, "enter", run.prefix+"nobody", "--", "true")
	h.wants(2, nil, "enter", name, "true")
	// One argument stays one, whatever is in it.
	odd := "a  b'\"$HOME;`id`\n*"
	if got := h.must("enter", name, "--", "printf", "%s", odd); got != odd {
		t.Errorf("an argument arrived as %q", got)
	}
}

func binaryStreams(t *testing.T, h *home, name string) {
	const size = 64 << 20
	sent, received := sha256.New(), sha256.New()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := h.command(ctx, "enter", name, "--", "cat")
	cmd.Stdin = io.TeeReader(io.LimitReader(rand.Reader, size), sent)
	count := &counter{}
	cmd.Stdout = io.MultiWriter(received, count)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	if err := cmd.Run(); err != nil || errOut.Len() > 0 {
		t.Fatalf("cat: %v %s", err, errOut.String())
	}
	if count.n != size || !bytes.Equal(sent.Sum(nil), received.Sum(nil)) {
		t.Errorf("%d bytes came back of %d, or others", count.n, size)
	}
	// Both outputs, apart.
	r := h.wants(3, nil, "enter", name, "--", "sh", "-c", "printf 'a\\000\\377b'; printf c >&2; exit 3")
	if r.stdout != "a\x00\xffb" || r.stderr != "c" {
		t.Errorf("stdout %q, stderr %q", r.stdout, r.stderr)
	}
	// Without an input there is an end of it, not a wait.
	if got := h.must("enter", name, "--", "cat"); got != "" {
		t.Errorf("cat printed %q", got)
	}
}

type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}

func stateSurvives(t *testing.T, h *home, name string) {
	kept := func(when string) {
		t.Helper()
		if got := h.in(name, "cat ~/workspace/kept"); got != "precious" {
			t.Fatalf("%s: the file holds %q", when, got)
		}
	}
	h.in(name, "echo precious >~/workspace/kept")
	h.must("stop", name)
	h.wants(0, []string{"stopped"}, "ls")
	h.wants(3, []string{"hint: box start " + name}, "doctor", name)
	h.must("stop", name)
	h.must("start", name)
	h.must("start", name)
	kept("after stop and start")
	if _, err := podman("kill", "hermes-box-"+name); err != nil {
		t.Fatal(err)
	}
	h.wants(0, []string{"stopped"}, "ls")
	kept("after the machine was killed") // enter starts it
	healthySoon(t, h, name)
	if r := h.box("rm", name); r.code != 1 || !strings.Contains(r.stderr, "--force") {
		t.Errorf("rm without a terminal: %s", r)
	}
}

// healthySoon waits until Executor is up again and the doctor finds no fault.
func healthySoon(t *testing.T, h *home, name string) {
	t.Helper()
	eventually(t, 2*time.Minute, "a healthy box", func() error {
		if r := h.box("doctor", name); r.code != 0 {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
}

func pause(t *testing.T, h *home, name string) {
	paused := func(when string) {
		t.Helper()
		report := h.doctor(name, 0)
		for _, id := range []string{"executor.process", "mcp.host"} {
			if c := check(t, report, id); c.Status != wire.Info || !strings.Contains(c.Summary, "deliberately down") || !strings.Contains(c.Fix, "hb up") {
				t.Errorf("%s: %+v", when, c)
			}
		}
		if got := h.in(name, "pgrep -fc '[e]xecutor daemon run' || true"); got != "0" {
			t.Errorf("%s: %s processes of Executor", when, got)
		}
	}
	h.in(name, "hb down")
	paused("hb down")
	h.must("stop", name)
	h.must("start", name)
	paused("after a reboot")
	h.must("repair", name)
	paused("after repair")
	h.setenv("BOX_BROWSER", "/bin/true")
	h.wants(1, []string{"hb up"}, "open", name)
	h.in(name, "hb up")
	sound(t, h.doctor(name, 0), allChecks, "mcp.hermes")
}

var executorPID = regexp.MustCompile(`(?m)^executor +running, pid ([0-9]+)$`)

// executor returns Executor's process id, 0 when it does not run.
func executor(h *home, name string) int {
	m := executorPID.FindStringSubmatch(h.in(name, "hb status"))
	if m == nil {
		return 0
	}
	pid, _ := strconv.Atoi(m[1]) // digits by the pattern
	return pid
}

// one fails unless there is one Executor, which is the supervisor's. npm's
// launcher and the program that it starts are two processes.
func one(t *testing.T, h *home, name string) {
	t.Helper()
	got := h.in(name, `for p in $(pgrep -f '[e]xecutor daemon run'); do
		echo "$(ps -o ppid= -p $p | tr -d ' ') $p"
	done`)
	supervised, pid := 0, executor(h, name)
	pids := map[string]bool{}
	lines := strings.Split(got, "\n")
	for _, line := range lines {
		_, p, _ := strings.Cut(line, " ")
		pids[p] = true
	}
	for _, line := range lines {
		if parent, _, _ := strings.Cut(line, " "); !pids[parent] {
			supervised++
		}
	}
	if supervised != 1 || pid == 0 || !pids[strconv.Itoa(pid)] {
		t.Errorf("%d daemons, hb says pid %d; parent and pid of each process:\n%s", supervised, pid, got)
	}
}

func processesComeBack(t *testing.T, h *home, name string) {
	one(t, h, name)
	before := executor(h, name)
	h.in(name, fmt.Sprintf("sudo kill -9 %d", before))
	eventually(t, time.Minute, "another Executor", func() error {
		if pid := executor(h, name); pid == 0 || pid == before {
			return fmt.Errorf("pid %d", pid)
		}
		return nil
	})
	healthySoon(t, h, name)
	one(t, h, name)

	// A killed supervisor leaves its Executor behind, which the next one has
	// to find and end, also where root may not read other users' environment
	// (no CAP_SYS_PTRACE in a container).
	before = executor(h, name)
	worker := h.in(name, "pgrep -f '^hb supervise --worker'")
	h.in(name, "sudo kill -9 "+worker)
	eventually(t, time.Minute, "another worker and Executor", func() error {
		now := h.in(name, "pgrep -f '^hb supervise --worker' || true")
		if r := h.box("enter", name, "--", "hb", "status"); now == "" || now == worker || r.code != 0 {
			return fmt.Errorf("worker %q, status %s", now, r)
		}
		if pid := executor(h, name); pid == 0 || pid == before {
			return fmt.Errorf("Executor has pid %d", pid)
		}
		return nil
	})
	healthySoon(t, h, name)
	one(t, h, name)
}

func wiringIsRepaired(t *testing.T, h *home, name string) {
	const wrong = "0000000000000000000000000000000000000000000000000000000000000000"
	breakIt := func(file string) {
		h.in(name, "sed -i -E 's/Bearer [0-9a-f]{64}/Bearer "+wrong+"/' ~/"+file+" && grep -q "+wrong+" ~/"+file)
	}
	faulty := func(id string) {
		t.Helper()
		report := h.doctor(name, 3)
		for _, c := range report.Checks {
			if c.Status == wire.Fail && c.ID != id {
				t.Errorf("%s fails too: %s (%s)", c.ID, c.Summary, c.Evidence)
			}
		}
		if c := check(t, report, id); c.Status != wire.Fail || !strings.Contains(c.Fix, "hb wire-mcp") {
			t.Errorf("%+v", c)
		}
	}
	breakIt(".claude.json")
	faulty("mcp.claude")
	h.must("repair", name)
	sound(t, h.doctor(name, 0), allChecks, "mcp.hermes")

	breakIt(".codex/config.toml")
	faulty("mcp.codex")
	h.must("enter", name, "--", "hb", "wire-mcp") // the doctor's own advice
	sound(t, h.doctor(name, 0), allChecks, "mcp.hermes")

	breakIt(".codex/config.toml")
	h.must("repair", name)
	sound(t, h.doctor(name, 0), allChecks, "mcp.hermes")
	if got := h.in(name, "stat -c '%a' ~/.claude.json ~/.codex/config.toml"); got != "600\n600" {
		t.Errorf("modes of the repaired files: %s", got)
	}
}

// toolsAreRepaired loses one tool and damages another: the doctor names both, a
// repair brings them back, and it leaves alone what it has no business with.
func toolsAreRepaired(t *testing.T, h *home, name string) {
	h.in(name, "sudo rm /usr/local/bin/codex && f=$(readlink -f /usr/local/bin/claude) && printf '#!/bin/sh\\nexit 1\\n' | sudo tee $f >/dev/null")
	// A repair that took the whole home for the agent's would change these.
	const theirs = "stat -c '%u %g %Z' ~/workspace/deep/theirs"
	h.in(name, "mkdir -p ~/workspace/deep && sudo touch ~/workspace/deep/theirs")
	before := h.in(name, theirs)
	report := h.doctor(name, 3)
	for _, id := range []string{"tool.claude", "tool.codex"} {
		if c := check(t, report, id); c.Status != wire.Fail || c.Fix != "box repair "+name {
			t.Errorf("%+v", c)
		}
	}
	h.must("repair", name)
	sound(t, h.doctor(name, 0), allChecks, "mcp.hermes")
	if after := h.in(name, theirs); after != before {
		t.Errorf("a file of root's in the home changed from %q to %q", before, after)
	}
}

func removeWithAQuestion(t *testing.T, h *home, name string) {
	port := h.record(name).HostPort
	s := h.terminal("rm", name)
	s.expect("there is no backup of " + name)
	s.expect("Type its name")
	s.send(name + "x\r")
	s.expect("nothing was removed")
	if code := s.exit(); code != 1 {
		t.Errorf("exit code %d for a wrong name", code)
	}
	h.doctor(name, 0)
	s = h.terminal("rm", name)
	s.expect("Type its name")
	s.send(name + "\r")
	if code := s.exit(); code != 0 {
		t.Fatalf("exit code %d for the right name: %s", code, s.screen.String())
	}
	h.noTraces(name)
	_ = h.listen(port).Close()
	h.wants(4, nil, "rm", name, "--force")
}
