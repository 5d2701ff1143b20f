package supervise

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/process"
)

func fixedNow() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC) }

func newLog(t *testing.T, maxSize int64) *rotatingLog {
	return &rotatingLog{path: filepath.Join(t.TempDir(), "d", "x.log"), maxSize: maxSize, gid: -1, now: fixedNow}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(data), "2026-01-02T03:04:05.006Z ", "")
}

func TestLines(t *testing.T) {
	secret := strings.Repeat("5", 64)
	long := strings.Repeat("x", logLineLimit)
	for _, tt := range []struct {
		name   string
		writes []string
		want   string
	}{
		{"whole", []string{"a\nb\n"}, "a\nb\n"},
		{"in pieces", []string{"a", "b\nc", "d\n"}, "ab\ncd\n"},
		{"no newline at the end", []string{"a\nb"}, "a\nb\n"},
		{"carriage return", []string{"a\r\n"}, "a\n"},
		{"secret", []string{"T=" + secret + ";\n"}, "T=[redacted];\n"},
		{"secret in pieces", []string{secret[:20], secret[20:] + "\n"}, "[redacted]\n"},
		{"endless", []string{long, long, "y\nz\n"}, long + " […]\nz\n"},
		{"secret at the cut", []string{long[:logLineLimit-10] + secret + "\n"}, long[:logLineLimit-10] + " […]\n"},
		{"limit exactly", []string{long + "\n"}, long + "\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := newLog(t, 1<<20)
			w := &lineWriter{log: g, secret: secret}
			for _, s := range tt.writes {
				if n, err := w.Write([]byte(s)); n != len(s) || err != nil {
					t.Fatalf("%d, %v", n, err)
				}
			}
			w.flush()
			if diff := cmp.Diff(tt.want, read(t, g.path)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestRotation(t *testing.T) {
	g := newLog(t, 100)
	for i := range 40 {
		g.line(fmt.Sprintf("line %02d", i)) // 33 bytes with time and newline: three a file
	}
	entries, err := os.ReadDir(filepath.Dir(g.path))
	if err != nil || len(entries) != logFiles {
		t.Fatalf("%v, %v", entries, err)
	}
	got := read(t, rotated(g.path, 2)) + read(t, rotated(g.path, 1)) + read(t, g.path)
	want := ""
	for i := 33; i < 40; i++ {
		want += fmt.Sprintf("line %02d\n", i)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	info, err := os.Stat(g.path)
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// child starts a sleeping process with a mark in its environment.
func child(t *testing.T, mark string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	cmd.Env = []string{runVar + "=" + mark}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-done })
	return cmd
}

// Only what carries the mark, the group and the start time is ended: a number
// that was reused is somebody else.
func TestEndOrphan(t *testing.T) {
	for _, tt := range []struct {
		name   string
		bend   func(*record)
		ended  int
		marker string
	}{
		{"ours", func(*record) {}, 1, "run-a"},
		{"killed before the pid was known", func(r *record) { r.PID, r.Start = 0, 0 }, 1, "run-b"},
		{"reused number", func(r *record) { r.Start++ }, 0, "run-c"},
		{"another run", func(r *record) { r.Run = "other" }, 0, "run-d"},
		{"no run", func(r *record) { r.Run = "" }, 0, "run-e"},
		{"another group", func(r *record) { r.PID = 1 }, 0, "run-f"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := layout.At(t.TempDir())
			if err := os.MkdirAll(l.Run(), 0o700); err != nil {
				t.Fatal(err)
			}
			cmd := child(t, tt.marker)
			st, err := process.ReadStat(cmd.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			r := record{Run: tt.marker, PID: cmd.Process.Pid, Start: st.Start}
			tt.bend(&r)
			if err := r.write(l); err != nil {
				t.Fatal(err)
			}
			if n, err := endOrphan(l); n != tt.ended || err != nil {
				t.Errorf("ended %d, %v", n, err)
			}
			if alive := syscall.Kill(cmd.Process.Pid, 0) == nil; alive && tt.ended == 1 {
				if st, err := process.ReadStat(cmd.Process.Pid); err == nil && !st.Dead() {
					t.Error("it lives")
				}
			} else if !alive && tt.ended == 0 {
				t.Error("it was killed")
			}
			if _, err := os.Stat(recordPath(l)); !errors.Is(err, os.ErrNotExist) {
				t.Error("the record stays")
			}
		})
	}
}

func TestDamagedRecordIsForgotten(t *testing.T) {
	l := layout.At(t.TempDir())
	if err := os.MkdirAll(l.Run(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(recordPath(l), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := endOrphan(l); err == nil {
		t.Error("no error")
	}
	if n, err := endOrphan(l); n != 0 || err != nil {
		t.Errorf("the second time: %d, %v", n, err)
	}
}

// sun_path has 108 bytes; a box may lie deeper.
func TestControlSocketInADeepDirectory(t *testing.T) {
	l := layout.At(filepath.Join(t.TempDir(), strings.Repeat("deep/", 30)))
	if err := os.MkdirAll(l.Run(), 0o700); err != nil {
		t.Fatal(err)
	}
	ln, err := listenControl(l)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	info, err := os.Stat(l.ControlSocket())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	accepted := make(chan error, 1)
	go func() {
		conn, err := ln.Accept()
		if err == nil {
			err = conn.Close()
		}
		accepted <- err
	}()
	conn, err := dialControl(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if err := <-accepted; err != nil {
		t.Error(err)
	}
}

func TestNoSupervisor(t *testing.T) {
	l := layout.At(t.TempDir())
	if _, err := Ask(t.Context(), l, OpStatus, time.Second); !errors.Is(err, ErrNoSupervisor) {
		t.Errorf("no directory: %v", err)
	}
	if err := os.MkdirAll(l.Run(), 0o700); err != nil {
		t.Fatal(err)
	}
	// Something that hangs up without an answer is no supervisor either.
	ln, err := net.Listen("unix", l.ControlSocket())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	if _, err := HoldExecutor(t.Context(), l, time.Second); !errors.Is(err, ErrNoSupervisor) {
		t.Errorf("hangs up: %v", err)
	}
}

func TestAskEndsWithItsContext(t *testing.T) {
	l := layout.At(t.TempDir())
	if err := os.MkdirAll(l.Run(), 0o700); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("unix", l.ControlSocket()) // accepts, by the backlog, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Ask(ctx, l, OpStatus, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestPortsMoveOnlyOutsideARealBox(t *testing.T) {
	t.Setenv(DoorAddrVar, "127.0.0.1:41234")
	t.Setenv(ExecutorPortVar, "41235")
	if p := PortsOf(layout.At("")); p != (Ports{"0.0.0.0:4788", 4787}) || p.MCPURL() != "http://127.0.0.1:4788/mcp" {
		t.Errorf("real: %+v", p)
	}
	if p := PortsOf(layout.At("/x")); p != (Ports{"127.0.0.1:41234", 41235}) || p.DoorURL() != "http://127.0.0.1:41234" {
		t.Errorf("moved: %+v", p)
	}
	t.Setenv(DoorAddrVar, "nonsense")
	t.Setenv(ExecutorPortVar, "99999999")
	if p := PortsOf(layout.At("/x")); p != (Ports{"127.0.0.1:4788", 4787}) {
		t.Errorf("nonsense: %+v", p)
	}
}

// Releases of the older generation are known without asking, but only in our
// own directory, and no release that nobody has tried.
func TestOlderRelease(t *testing.T) {
	for _, tt := range []struct {
		dir, pkg string
		want     bool
	}{
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor","version":"1.5.9"}`, true},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor","version":"1.5.11","bin":{}}`, true},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor","version":"0.9.99"}`, true},
		{"/opt/hermes-box/npm/lib/node_modules/executor/node_modules/executor-linux-x64", `{"name":"executor-linux-x64","version":"1.5.9"}`, true},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor","version":"1.5.12"}`, false},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor","version":"1.6.0"}`, false},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor","version":"2.0.0"}`, false},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor","version":"1.5.11-beta.1"}`, false},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor","version":"1.5.-1"}`, false},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"executor"}`, false},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{"name":"another","version":"1.5.9"}`, false},
		{"/opt/hermes-box/npm/lib/node_modules/executor", `{`, false},
		{"/data/home/agent/.npm/executor", `{"name":"executor","version":"1.5.9"}`, false},
		{"/opt/hermes-boxes/executor", `{"name":"executor","version":"1.5.9"}`, false},
	} {
		l := layout.At(t.TempDir())
		dir := l.Path(tt.dir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "package.json"), []byte(tt.pkg), 0o644); err != nil {
			t.Fatal(err)
		}
		e := &executor{l: l}
		if got := e.olderRelease(binaryFile{real: filepath.Join(dir, "bin/executor")}); got != tt.want {
			t.Errorf("%s in %s: %v", tt.pkg, tt.dir, got)
		}
	}
	l := layout.At(t.TempDir())
	if (&executor{l: l}).olderRelease(binaryFile{real: l.Path("/opt/hermes-box/bin/executor")}) {
		t.Error("a program without a package is known")
	}
}
