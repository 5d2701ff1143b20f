package guest

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/sqlitefile"
	"hermes-box-lite/internal/guest/supervise"
	"hermes-box-lite/internal/mcp"
	"hermes-box-lite/internal/wire"
)

func TestEveryVerbExplainsItself(t *testing.T) {
	var visible []string
	for _, cmd := range (&app{}).root().Commands() {
		if cmd.Long == "" || cmd.Short == "" || cmd.Example == "" || cmd.Args == nil {
			t.Errorf("%s lacks an explanation, an example or a check of its arguments", cmd.Name())
		}
		if cmd.IsAvailableCommand() && cmd.Name() != "help" {
			visible = append(visible, cmd.Name())
		}
	}
	want := []string{"doctor", "down", "executor-token", "logs", "status", "up", "versions", "wire-mcp"}
	if diff := cmp.Diff(want, visible); diff != "" {
		t.Error(diff)
	}
}

func TestUsageErrors(t *testing.T) {
	t.Setenv(layout.RootVar, t.TempDir())
	for _, args := range [][]string{
		{"nonsense"},
		{"status", "surplus"},
		{"down", "x"},
		{"up", "--nonsense"},
		{"doctor", "--json=maybe"},
		{"logs"},
		{"logs", "codex"},
		{"logs", "executor", "surplus"},
		{"logs", "executor", "-n", "-1"},
		{"token"},
		{"token", "operator"},
		{"run"},
		{"run", "ls"},
		{"ticket", "x"},
		{"executor-token", "x"},
	} {
		var out, errOut bytes.Buffer
		if code := Main(args, "1.2.3", nil, &out, &errOut); code != exitUsage {
			t.Errorf("hb %s: exit code %d", strings.Join(args, " "), code)
		}
		if out.Len() != 0 || !strings.HasPrefix(errOut.String(), "hb: ") {
			t.Errorf("hb %s: %q %q", strings.Join(args, " "), out.String(), errOut.String())
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	for _, args := range [][]string{{}, {"help"}, {"--help"}, {"--version"}, {"status", "--help"}} {
		var out, errOut bytes.Buffer
		if code := Main(args, "1.2.3", nil, &out, &errOut); code != 0 || out.Len() == 0 || errOut.Len() != 0 {
			t.Errorf("hb %v: %d %q %q", args, code, out.String(), errOut.String())
		}
		if len(args) == 1 && args[0] == "--version" && out.String() != "hb 1.2.3\n" {
			t.Errorf("version %q", out.String())
		}
	}
}

func TestErrorsAreEscaped(t *testing.T) {
	var errOut bytes.Buffer
	a := &app{stderr: &errOut}
	if code := a.report(errors.New("bad \x1b[31mred\nfirst: hb up")); code != exitFailed {
		t.Errorf("exit code %d", code)
	}
	if got, want := errOut.String(), "hb: bad \\x1b[31mred\nhb: first: hb up\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestProvisionRefusesBadRequests(t *testing.T) {
	t.Setenv(layout.RootVar, t.TempDir())
	for name, in := range map[string]string{
		"empty": "", "unknown field": `{"protocol":1,"evil":1}`, "another protocol": `{"protocol":99}`,
		"trailing": `{"protocol":1}{}`, "huge": `{"box_name":"` + strings.Repeat("a", wire.MaxDocument) + `"}`,
	} {
		var out, errOut bytes.Buffer
		code := Main([]string{"provision"}, "v", strings.NewReader(in), &out, &errOut)
		result, err := wire.ReadEvents(&out, nil, nil)
		if code != exitFailed || err != nil || result.Error == "" {
			t.Errorf("%s: %d %+v %v", name, code, result, err)
		}
	}
}

func TestSafeTerm(t *testing.T) {
	known := func(s string) bool { return s == "xterm-kitty" || s == "screen.xterm" || s == "dumb" }
	for in, want := range map[string]string{
		"xterm-kitty": "xterm-kitty", "screen.xterm": "screen.xterm", "dumb": "dumb",
		"": fallbackTerm, "xterm-ghostty": fallbackTerm, "$(id)": fallbackTerm, "../../x": fallbackTerm, "..": fallbackTerm,
		strings.Repeat("x", 500): fallbackTerm, "xterm\n": fallbackTerm, "a/b": fallbackTerm,
	} {
		if got := safeTerm(in, known); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if !hasTerminfo("xterm") {
		t.Skip("this machine has no terminfo")
	}
	if hasTerminfo("no-such-terminal") {
		t.Error("an unknown terminal is known")
	}
}

func TestFindProgram(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	for path, mode := range map[string]os.FileMode{a + "/data": 0o644, b + "/tool": 0o755, a + "/both": 0o644, b + "/both": 0o755} {
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name, want string
		err        error
	}{
		{"tool", b + "/tool", nil},
		{"both", b + "/both", nil},
		{"./x", "./x", nil},
		{"data", "", syscall.EACCES},
		{"none", "", os.ErrNotExist},
		{"", "", os.ErrNotExist},
	} {
		got, err := findProgram(tt.name, a+":"+b)
		if got != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("%q: %q, %v", tt.name, got, err)
		}
	}
}

func TestMountPoint(t *testing.T) {
	const info = "22 1 8:1 / / rw - ext4 /dev/a rw\n23 22 8:2 / /data rw - ext4 /dev/b rw\n24 22 8:3 /x /my\\040data rw - ext4 /dev/c rw\n"
	for dir, want := range map[string]bool{"/": true, "/data": true, "/my data": true, "/dat": false, "/data/home": false, "8:2": false} {
		if got := isMountPoint(info, dir); got != want {
			t.Errorf("%q: %v", dir, got)
		}
	}
}

func TestSpace(t *testing.T) {
	for _, tt := range []struct {
		free, inodes, freeInodes uint64
		want                     wire.Status
	}{
		{10 << 30, 1000, 500, wire.Pass},
		{600 << 20, 1000, 500, wire.Info},
		{255 << 20, 1000, 500, wire.Fail},
		{10 << 30, 1000, 9, wire.Fail},
		{10 << 30, 1000, 10, wire.Pass},
		{10 << 30, 0, 0, wire.Pass},
	} {
		c := spaceCheck("/data", tt.free, tt.inodes, tt.freeInodes)
		if c.Status != tt.want || (c.Status == wire.Fail) != (c.Fix != "") {
			t.Errorf("%+v: %+v", tt, c)
		}
	}
}

func TestExecutorCheck(t *testing.T) {
	for _, tt := range []struct {
		phase    supervise.Phase
		err      error
		expected bool
		want     wire.Status
	}{
		{supervise.PhaseRunning, nil, true, wire.Pass},
		{supervise.PhasePaused, nil, true, wire.Info},
		{supervise.PhaseHeld, nil, true, wire.Info},
		{supervise.PhasePausing, nil, true, wire.Fail},
		{supervise.PhaseWaiting, nil, true, wire.Fail},
		{supervise.PhaseDisabled, nil, false, wire.Skip},
		{"", supervise.ErrNoSupervisor, true, wire.Fail},
	} {
		c := executorCheck(supervise.Status{Phase: tt.phase}, tt.err, tt.expected, "box repair alpha")
		if c.Status != tt.want || c.Status == wire.Fail && c.Fix == "" {
			t.Errorf("%s: %+v", tt.phase, c)
		}
	}
	if c := guestMCPCheck("u", mcp.Result{Verdict: mcp.TokenRejected, Summary: "s"}, nil, "box repair alpha"); c.Status != wire.Fail || c.Fix == "" {
		t.Errorf("%+v", c)
	}
}

func TestRenderReport(t *testing.T) {
	got := renderReport(wire.NewReport("alpha", []wire.Check{
		{ID: "tool.claude", Status: wire.Pass, Summary: "claude 2.1"},
		{ID: "mcp", Status: wire.Fail, Summary: "down\x1b[31m", Evidence: "refused", Fix: "hb up"},
		{ID: "x", Status: wire.Info, Summary: "paused", Evidence: "unseen", Fix: "hb up"},
	}))
	want := "pass  tool.claude  claude 2.1\n" +
		"fail  mcp          down\\x1b[31m\n      seen: refused\n      fix: hb up\n" +
		"info  x            paused\nunhealthy\n"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// makeDatabase leaves a database in the given journal mode, open when keep is
// true.
func makeDatabase(t *testing.T, path, mode string, keep bool) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", sqlitefile.URI(path)+"?_pragma=synchronous(off)")
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	for _, q := range []string{"PRAGMA journal_mode=" + mode, "CREATE TABLE t(a TEXT, b INTEGER)", "CREATE INDEX i ON t(b)"} {
		if _, err := db.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 200 {
		if _, err := db.Exec("INSERT INTO t VALUES(?, ?)", strings.Repeat("x", 200), i); err != nil {
			t.Fatal(err)
		}
	}
	if keep {
		t.Cleanup(func() { _ = db.Close() })
		return
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

func filesBelow(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			names = append(names, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func TestDatabases(t *testing.T) {
	home := t.TempDir()
	path := func(name string) string { return filepath.Join(home, name) }
	makeDatabase(t, path(".executor/data.db"), "wal", true) // in use
	makeDatabase(t, path(".codex/a b?#.sqlite"), "delete", false)
	makeDatabase(t, path(".codex/closed.sqlite"), "wal", false)
	makeDatabase(t, path(".hermes/deep/bad.db"), "delete", false)
	data, err := os.ReadFile(path(".hermes/deep/bad.db"))
	if err != nil {
		t.Fatal(err)
	}
	for i := 4096 + 8; i < len(data); i += 7 {
		data[i] ^= 0xa5
	}
	for name, content := range map[string][]byte{".hermes/deep/bad.db": data, ".codex/not.db": []byte("SQLite format 4"), ".codex/lost.db": data[:8192], ".codex/lost.db-wal": []byte("x")} {
		if err := os.WriteFile(path(name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/dev/zero", path(".codex/link.db")); err != nil {
		t.Fatal(err)
	}
	before := filesBelow(t, home)

	paths, complete := sqlitefile.Find([]string{path(".executor"), path(".codex"), path(".hermes"), path("none")})
	if !complete {
		t.Error("not complete")
	}
	got := map[string]wire.Status{}
	var results []sqliteResult
	for _, p := range paths {
		status, detail := sqlitefile.Check(t.Context(), p)
		got[strings.TrimPrefix(p, home+"/")] = status
		results = append(results, sqliteResult{p, status, detail})
	}
	want := map[string]wire.Status{
		".executor/data.db": wire.Pass, ".codex/a b?#.sqlite": wire.Pass, ".codex/closed.sqlite": wire.Pass,
		".codex/lost.db": wire.Info, ".hermes/deep/bad.db": wire.Fail,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s\n%+v", diff, results)
	}
	if diff := cmp.Diff(before, filesBelow(t, home)); diff != "" {
		t.Errorf("the check changed files: %s", diff)
	}
	if c := summarizeSQLite(results); c.Status != wire.Fail || !strings.Contains(c.Evidence, "bad.db") || c.Fix == "" {
		t.Errorf("%+v", c)
	}
	if c := summarizeSQLite(nil); c.Status != wire.Pass {
		t.Errorf("%+v", c)
	}
}

// lineReader hands on what follow prints, line by line.
type lineReader struct{ lines chan string }

func (r *lineReader) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		r.lines <- strings.TrimRight(line, "\n")
	}
	return len(p), nil
}

func (r *lineReader) next(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-r.lines:
		if got != want {
			t.Fatalf("%q, want %q", got, want)
		}
	case <-time.After(10 * time.Second):
		t.Fatalf("never: %q", want)
	}
}

func TestLogsFollowAcrossRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	appendTo := func(s string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err == nil {
			_, err = io.WriteString(f, s)
		}
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	appendTo("old\n1\n2\x1b[0m\npart")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := &lineReader{make(chan string, 100)}
	done := make(chan error, 1)
	go func() { done <- showLog(ctx, r, path, 2, true) }()
	r.next(t, "1")
	r.next(t, `2\x1b[0m`)
	appendTo("ial\n")
	r.next(t, "partial")
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	appendTo("new\n")
	r.next(t, "new")
	appendTo("newer\n")
	r.next(t, "newer")
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}

	var out bytes.Buffer
	if err := showLog(t.Context(), &out, path, 3, false); err != nil || out.String() != "partial\nnew\nnewer\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	if err := showLog(t.Context(), &out, path+"x", 3, false); err == nil {
		t.Error("a missing log is no error")
	}
}

func TestPlumbingIsRoots(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("this test runs as root")
	}
	a := &app{layout: layout.At("")}
	err := a.mustBeRoot(func(context.Context) error { return nil })(&cobra.Command{}, nil)
	if err == nil {
		t.Error("allowed")
	}
}
