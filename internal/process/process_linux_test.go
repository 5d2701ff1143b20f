package process

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	rest := " R 3 4 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 987654 1 2"
	want := Stat{State: 'R', Group: 4, Session: 5, Start: 987654}
	for _, tt := range []struct {
		in   string
		want Stat
		bad  bool
	}{
		{in: "12 (cat)" + rest + "\n", want: want},
		{in: "12 (a b)" + rest, want: want},
		{in: "12 (x) S 9 9 (9)" + rest, want: want},
		{in: "12 ()" + rest, want: want},
		{in: "12 (a\nb) R )" + rest, want: want},
		{in: "", bad: true},
		{in: "12 (cat", bad: true},
		{in: "12 (cat) R 3 4 5", bad: true},
		{in: "12 (cat)" + strings.Replace(rest, "987654", "x", 1), bad: true},
		{in: "12 (cat)" + strings.Replace(rest, " 4 ", " x ", 1), bad: true},
		{in: "12 (cat)" + strings.Replace(rest, " 5 ", " x ", 1), bad: true},
	} {
		got, err := parse(tt.in)
		if (err != nil) != tt.bad {
			t.Errorf("%q: %v", tt.in, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.in, diff)
		}
	}
}

// sleeper runs a program called name, in a session of its own.
func sleeper(t *testing.T, name string) *exec.Cmd {
	t.Helper()
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skip(err)
	}
	data, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "600")
	cmd.Args[0] = "sleep" // where one program is many, it goes by this
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed, or waited for already
	})
	return cmd
}

// A process calls itself what it likes, also something that looks like the end
// of its name and the fields of another.
func TestHostileName(t *testing.T) {
	const name = "x) Z 1 1 (y"
	cmd := sleeper(t, name)
	pid := cmd.Process.Pid
	if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err != nil || strings.TrimSpace(string(comm)) != name {
		t.Fatalf("the process is called %q (%v), so this shows nothing", comm, err)
	}
	s, err := ReadStat(pid)
	if err != nil || s.Dead() || s.Group != pid || s.Session != pid || s.Start == 0 {
		t.Errorf("status %+v, %v", s, err)
	}
	if id := Identify(pid); !id.Alive() || id.PID != pid {
		t.Errorf("%+v is not alive", id)
	}
}

// Every part of the identity counts, and a zombie is dead.
func TestAlive(t *testing.T) {
	cmd := sleeper(t, "sleeper")
	id := Identify(cmd.Process.Pid)
	if !id.Alive() {
		t.Fatalf("%+v is not alive", id)
	}
	for what, other := range map[string]ID{
		"no process":    {},
		"another start": {PID: id.PID, Started: id.Started + "1", BootID: id.BootID},
		"no start":      {PID: id.PID, BootID: id.BootID},
		"another boot":  {PID: id.PID, Started: id.Started, BootID: "11111111-2222-3333-4444-555555555555"},
		"another pid":   {PID: os.Getpid(), Started: id.Started, BootID: id.BootID},
	} {
		if other.Alive() {
			t.Errorf("%s: %+v is alive", what, other)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// Not waited for yet: a zombie.
	for deadline := time.Now().Add(10 * time.Second); id.Alive(); {
		if time.Now().After(deadline) {
			t.Fatal("killed, and still alive")
		}
		time.Sleep(time.Millisecond)
	}
	if s, err := ReadStat(id.PID); err != nil || !s.Dead() {
		t.Errorf("the zombie's status is %+v, %v", s, err)
	}
	if again := Identify(id.PID); again.Alive() {
		t.Errorf("the zombie is alive: %+v", again)
	}
	_ = cmd.Wait() // killed
	if _, err := ReadStat(id.PID); err == nil {
		t.Error("a process that is gone has a status")
	}
	if id.Alive() {
		t.Error("a process that is gone is alive")
	}
}
