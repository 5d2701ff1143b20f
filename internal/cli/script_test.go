//go:build linux

package cli_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/cli"
	"hermes-box-lite/internal/config"
	"hermes-box-lite/internal/guest/guesttest"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/fake"
)

// Variables by which a test tells its box processes where everything is.
const (
	fakeDirVar  = "FAKE_DIR"         // the engine: machines and faults
	builtVar    = "FAKE_BUILT"       // what TestMain built
	listVar     = "FAKE_LIST_LIMIT"  // deadline of ls
	cleanupVar  = "FAKE_CLEAN_LIMIT" // deadline of clean-up
	engineVar   = "FAKE_CALL_LIMIT"  // deadline of the engine's other calls
	guestVar    = "FAKE_GUEST_LIMIT" // deadline of calls of hb
	saidVar     = "FAKE_SAID"        // file that collects all that box says
	testVersion = "dev"              // what hb says when it is built without a version
)

// boxMain is the command box of the scripts: the real one, with the fake
// driver for everything. All that it says is kept, so that the end of every
// script can look for secrets and for hints that do not work.
func boxMain() {
	// One for all, because it counts how often a point is reached.
	engine := fake.New(os.Getenv(fakeDirVar), filepath.Join(os.Getenv(builtVar), "tools"))
	build := func(config.Config) vm.Driver { return engine }
	p := cli.Program{
		Version: testVersion, Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Drivers: map[string]func(config.Config) vm.Driver{"auto": build, "fake": build},
		HB:      func() ([]byte, error) { return os.ReadFile(filepath.Join(os.Getenv(builtVar), "hb")) },
		Deadlines: box.Deadlines{
			List: duration(listVar), Cleanup: duration(cleanupVar),
			Ask: duration(engineVar), Engine: duration(engineVar), Guest: duration(guestVar),
		},
		Step: engine.Step,
	}
	if info, err := os.Stderr.Stat(); err == nil && info.Mode()&os.ModeCharDevice == 0 {
		said, err := os.OpenFile(os.Getenv(saidVar), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			panic(err)
		}
		p.Stderr = io.MultiWriter(os.Stderr, said)
		if !slices.Contains(p.Args, "--") { // the output of CMD is CMD's
			p.Stdout = io.MultiWriter(os.Stdout, said)
		}
	}
	os.Exit(cli.Main(p))
}

func duration(name string) time.Duration {
	d, _ := time.ParseDuration(os.Getenv(name)) // absent: the built-in one
	return d
}

// suite builds what all tests share before they run.
type suite struct{ m *testing.M }

func (s suite) Run() int {
	dir, err := os.MkdirTemp("", "box-test-")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := buildAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := os.Setenv(builtVar, dir); err != nil {
		panic(err)
	}
	return s.m.Run()
}

// buildAll makes hb, the stand-ins for the tools and a base.
func buildAll(dir string) error {
	const stub = "hermes-box-lite/internal/cli/clitest/tools"
	if err := guesttest.Build(dir, guesttest.HB, guesttest.Executor, stub); err != nil {
		return err
	}
	// The fake driver copies the directory of tools into each machine: links
	// keep that cheap.
	bin := filepath.Join(dir, "tools.bin")
	if err := os.Rename(filepath.Join(dir, "tools"), bin); err != nil {
		return err
	}
	tools := filepath.Join(dir, "tools")
	for _, made := range []string{tools, filepath.Join(dir, "base/etc")} {
		if err := os.MkdirAll(made, 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{"claude", "codex", "hermes", "node", "npm"} {
		if err := os.Symlink(bin, filepath.Join(tools, name)); err != nil {
			return err
		}
	}
	return os.Symlink(filepath.Join(dir, "executor"), filepath.Join(tools, "executor"))
}

func TestMain(m *testing.M) {
	testscript.Main(suite{m}, map[string]func(){"box": boxMain})
}

func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       os.Getenv("UPDATE_SCRIPTS") != "", // rewrites the golden files
		Setup:               setUp,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"fault": cmdFault, "foreign": cmdForeign, "machine": cmdMachine, "exit": cmdExit, "eventually": cmdEventually,
			"private": cmdPrivate, "settings": cmdSettings, "subst": cmdSubst, "signal": cmdSignal,
		},
	})
}

// portsOf hands out ranges of ports, so that scripts that run side by side
// with registries of their own do not take each other's.
var portRanges atomic.Int64

const portsPerScript = 12

func nextPorts() (lo, hi int) {
	// Other runs of this very package start elsewhere.
	lo = 9000 + (os.Getpid()%19)*1200 + int(portRanges.Add(1)-1)*portsPerScript
	return lo, lo + portsPerScript - 1
}

// baseSettings is the box.env that a test starts from.
func baseSettings() string {
	lo, hi := nextPorts()
	return fmt.Sprintf("BASE_IMAGE=%s\nINSTALL_HERMES=false\nEXECUTOR_PORT_LO=%d\nEXECUTOR_PORT_HI=%d\n",
		filepath.Join(os.Getenv(builtVar), "base"), lo, hi)
}

// newEngine makes a directory for the fake driver. It is short, because hb's
// socket lies in it and the kernel bounds such paths to 107 bytes.
func newEngine() (dir string, err error) { return os.MkdirTemp("/tmp", "bx") }

// endEngine ends all that still runs in the machines and removes them.
func endEngine(dir string) error {
	d := fake.New(dir, "")
	machines, err := filepath.Glob(filepath.Join(dir, "machines", "*"))
	if err != nil {
		return err
	}
	for _, m := range machines {
		if err := d.Kill(filepath.Base(m)); err != nil && !strings.HasSuffix(m, ".making") {
			return err
		}
	}
	return os.RemoveAll(dir)
}

func setUp(env *testscript.Env) error {
	dir, err := newEngine()
	if err != nil {
		return err
	}
	home := filepath.Join(env.WorkDir, "home")
	for _, made := range []string{home, filepath.Join(env.WorkDir, "tmp"), filepath.Join(home, "box")} {
		if err := os.MkdirAll(made, 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(home, "box/box.env"), []byte(baseSettings()), 0o644); err != nil {
		return err
	}
	for _, kv := range [][2]string{
		{fakeDirVar, dir},
		{builtVar, os.Getenv(builtVar)},
		{saidVar, filepath.Join(dir, "said")},
		{"BOX_HOME", filepath.Join(home, "box")},
		{"HOME", home},
		{"TMPDIR", filepath.Join(env.WorkDir, "tmp")},
		{"XDG_DATA_HOME", filepath.Join(home, "xdg-data")},
		{"XDG_CONFIG_HOME", filepath.Join(home, "xdg-config")},
		{"B", filepath.Join(home, "box/.box")},
		{"M", filepath.Join(dir, "machines")},
	} {
		env.Setenv(kv[0], kv[1])
	}
	env.Defer(func() {
		t, ok := env.T().(interface{ Errorf(string, ...any) })
		if !ok {
			panic("testscript's T cannot report errors")
		}
		for _, fault := range audit(dir, env.WorkDir) {
			t.Errorf("%s", fault)
		}
		if err := endEngine(dir); err != nil {
			t.Errorf("end the machines: %v", err)
		}
	})
	return nil
}

// audit holds what is true at the end of every test: no token of a box is in
// anything that box said or wrote, and every hint is a command that exists.
func audit(dir, work string) []string {
	var faults []string
	said, _ := os.ReadFile(filepath.Join(dir, "said"))
	hints := map[string]bool{}
	var evidence []string
	for line := range strings.Lines(string(said)) {
		hint, ok := strings.CutPrefix(strings.TrimSpace(line), "hint: ")
		if ok && strings.HasPrefix(hint, "less ") {
			evidence = append(evidence, hint)
		} else if ok {
			hints[hint] = true
		}
	}
	// Of transcripts the newest twenty stay, so an old one may have gone. A fork
	// begins two at once.
	for _, hint := range evidence[max(0, len(evidence)-10):] {
		kept, _ := filepath.Glob(filepath.Join(filepath.Dir(strings.TrimPrefix(hint, "less ")), "*.log"))
		if len(kept) < 18 {
			hints[hint] = true
		}
	}
	for hint := range hints {
		if err := checkHint(hint); err != nil {
			faults = append(faults, fmt.Sprintf("hint %q: %v", hint, err))
		}
	}
	for path, secret := range secretsIn(dir) {
		if bytes.Contains(said, secret) {
			faults = append(faults, "box printed the secret in "+path)
		}
		_ = filepath.WalkDir(work, func(file string, e os.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return nil //nolint:nilerr // it was removed meanwhile
			}
			if data, err := os.ReadFile(file); err == nil && bytes.Contains(data, secret) {
				if info, err := e.Info(); err == nil && info.Mode().Perm()&0o077 != 0 {
					faults = append(faults, fmt.Sprintf("%s, which others can read, holds the secret in %s", file, path))
				}
			}
			return nil
		})
	}
	return faults
}

var tokenFile = regexp.MustCompile(`^[0-9a-f]{64}\n?$`)

// secretsIn returns the tokens of all machines, by file.
func secretsIn(dir string) map[string][]byte {
	found := map[string][]byte{}
	files, _ := filepath.Glob(filepath.Join(dir, "machines/*/root/data/.hermes-box/*"))
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && tokenFile.Match(data) {
			found[f] = bytes.TrimSpace(data)
		}
	}
	return found
}

// checkHint reports whether a hint is a command that exists.
func checkHint(hint string) error {
	if file, ok := strings.CutPrefix(hint, "less "); ok {
		_, err := os.Stat(file)
		return err
	}
	if hint == "make base" {
		return nil // a target of this repository's Makefile
	}
	line, ok := strings.CutPrefix(hint, "box ")
	if !ok {
		return fmt.Errorf("not a command")
	}
	args := strings.Fields(line)
	if !slices.Contains(args, "help") && !slices.Contains(args, "--help") {
		if i := slices.Index(args, "--"); i >= 0 {
			args = args[:i]
		}
		args = append(args, "--help") // parsed, and nothing done
	}
	var out bytes.Buffer
	code := cli.Main(cli.Program{Version: testVersion, Args: args, Stdout: &out, Stderr: &out})
	if code != 0 {
		return fmt.Errorf("exit code %d: %s", code, out.String())
	}
	// The help of a command that does not exist is that of box itself.
	if verb := args[0]; verb != "help" && !strings.HasPrefix(verb, "-") && !strings.Contains(out.String(), "box "+verb) {
		return fmt.Errorf("there is no such command")
	}
	return nil
}

// fault POINT [WHAT...]: see package fake; without WHAT the fault is removed.
func cmdFault(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: fault POINT [WHAT...]")
	}
	ts.Check(fake.New(ts.Getenv(fakeDirVar), "").Fault(args[0], strings.Join(args[1:], " ")))
}

// foreign NAME: a machine of another owner.
func cmdForeign(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: foreign NAME")
	}
	_, err := fake.New(ts.Getenv(fakeDirVar), "").Create(context.Background(), vm.Spec{Name: args[0], OwnerID: strings.Repeat("f", 32)})
	ts.Check(err)
}

// [!] machine NAME: the engine has a machine of that name.
func cmdMachine(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: [!] machine NAME")
	}
	_, err := os.Stat(filepath.Join(ts.Getenv(fakeDirVar), "machines", args[0]))
	if neg == (err == nil) {
		ts.Fatalf("machine %s: there=%v", args[0], err == nil)
	}
}

// exit CODE CMD...: the command ends with that very code.
func cmdExit(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exit CODE CMD...")
	}
	err := ts.Exec(args[1], args[2:]...)
	code := 0
	if err != nil {
		exit, ok := err.(*exec.ExitError) //nolint:errorlint // testscript hands it over bare
		if !ok {
			ts.Fatalf("%v: %v", args[1:], err)
		}
		if code = exit.ExitCode(); exit.Sys().(syscall.WaitStatus).Signaled() {
			code = 128 + int(exit.Sys().(syscall.WaitStatus).Signal())
		}
	}
	if strconv.Itoa(code) != args[0] {
		ts.Fatalf("exit code %d, not %s, of %v\nstderr: %s", code, args[0], args[1:], ts.ReadFile("stderr"))
	}
}

// eventually CMD...: the command succeeds within half a minute.
func cmdEventually(ts *testscript.TestScript, neg bool, args []string) {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if err := ts.Exec(args[0], args[1:]...); (err == nil) != neg {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("never happened: %v", args)
		}
	}
}

// private DIR...: everything below is closed to others.
func cmdPrivate(ts *testscript.TestScript, neg bool, args []string) {
	for _, dir := range args {
		ts.Check(filepath.WalkDir(ts.MkAbs(dir), func(path string, e os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err == nil && info.Mode()&os.ModeSymlink == 0 && info.Mode().Perm()&0o077 != 0 {
				err = fmt.Errorf("%s has mode %v", path, info.Mode())
			}
			return err
		}))
	}
}

// settings KEY=VALUE...: box.env with these beside the usual ones.
func cmdSettings(ts *testscript.TestScript, neg bool, args []string) {
	path := filepath.Join(ts.Getenv("BOX_HOME"), "box.env")
	set := map[string]string{}
	for line := range strings.Lines(ts.ReadFile(path)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		set[key] = value
	}
	for _, a := range args {
		key, value, _ := strings.Cut(a, "=")
		set[key] = value
	}
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(set)) {
		fmt.Fprintf(&b, "%s=%s\n", key, set[key])
	}
	ts.Check(os.WriteFile(path, []byte(b.String()), 0o644))
}

// subst FILE REGEXP REPLACEMENT: edits a file in place.
func cmdSubst(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: subst FILE REGEXP REPLACEMENT")
	}
	path := ts.MkAbs(args[0])
	if args[0] == "stdout" || args[0] == "stderr" {
		path = ts.MkAbs(args[0] + ".txt")
	}
	re, err := regexp.Compile("(?m)" + args[1])
	ts.Check(err)
	text := ts.ReadFile(args[0])
	if !re.MatchString(text) {
		ts.Fatalf("%s does not match %s:\n%s", args[0], args[1], text)
	}
	ts.Check(os.WriteFile(path, []byte(re.ReplaceAllString(text, args[2])), 0o600))
}

// signal SIGNAL NAME: signals the command that holds the lock of a box.
func cmdSignal(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: signal SIGNAL NAME")
	}
	sig := map[string]syscall.Signal{"INT": syscall.SIGINT, "TERM": syscall.SIGTERM, "HUP": syscall.SIGHUP, "KILL": syscall.SIGKILL, "STOP": syscall.SIGSTOP, "CONT": syscall.SIGCONT}[args[0]]
	pid := regexp.MustCompile(`"pid":(\d+)`).FindStringSubmatch(ts.ReadFile(filepath.Join(ts.Getenv("BOX_HOME"), ".box/locks", args[1]+".lock")))
	if sig == 0 || pid == nil {
		ts.Fatalf("no signal or no owner: %v", args)
	}
	n, err := strconv.Atoi(pid[1])
	ts.Check(err)
	ts.Check(syscall.Kill(n, sig))
}

// listenOn is a listener on a port of the loopback that the test names.
func listenOn(t *testing.T, network, addr string) net.Listener {
	t.Helper()
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}
