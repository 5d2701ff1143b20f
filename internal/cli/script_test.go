//go:build linux

package cli_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"hermes-box-lite/internal/cli"
	"hermes-box-lite/internal/cli/clitest"
	"hermes-box-lite/internal/guest/guesttest"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/fake"
)

// boxPath is the program box that TestMain built, the only one of its directory.
func boxPath() string { return filepath.Join(os.Getenv(clitest.BuiltVar), "bin/box") }

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// run builds what all tests share and runs them.
func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "box-test-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := buildAll(dir); err != nil {
		return 0, err
	}
	if err := os.Setenv(clitest.BuiltVar, dir); err != nil {
		return 0, err
	}
	if err := os.Setenv("PATH", filepath.Dir(boxPath())+":"+os.Getenv("PATH")); err != nil {
		return 0, err
	}
	// Much of a script is waiting for other processes.
	if err := flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// buildAll makes box, hb, the stand-ins for the tools and a base.
func buildAll(dir string) error {
	for _, made := range []string{"bin", "tools", "stand-ins", "base/etc"} {
		if err := os.MkdirAll(filepath.Join(dir, made), 0o755); err != nil {
			return err
		}
	}
	programs := filepath.Join(dir, "programs")
	if err := guesttest.Build(programs, guesttest.HB, guesttest.Executor, clitest.Box, clitest.Tools); err != nil {
		return err
	}
	for program, place := range map[string]string{"box": "bin/box", "hb": "hb"} {
		if err := os.Rename(filepath.Join(programs, program), filepath.Join(dir, place)); err != nil {
			return err
		}
	}
	// The fake driver copies the directory of tools into each machine: links
	// and scripts keep that cheap. What needs no program is said by the script,
	// in a quarter of a program's time.
	executor := filepath.Join(programs, "executor")
	executorSays := map[string]string{}
	for _, line := range []string{"--version", "daemon run --help"} {
		out, err := exec.Command(executor, strings.Fields(line)...).Output()
		if err != nil {
			return fmt.Errorf("executor %s: %w", line, err)
		}
		executorSays[line] = string(out)
	}
	stub := filepath.Join(programs, "tools")
	for tool, t := range map[string]struct {
		program string
		answers map[string]string // by the whole line of arguments
	}{
		"claude":   {stub, map[string]string{"--version": "2.1.332 (Claude Code)"}},
		"codex":    {stub, map[string]string{"--version": "codex-cli 0.171.0"}},
		"hermes":   {stub, map[string]string{"--version": "Hermes Agent v0.21.5"}},
		"node":     {stub, map[string]string{"--version": "v22.11.0"}},
		"npm":      {stub, map[string]string{"--version": "10.9.0"}},
		"executor": {executor, executorSays},
	} {
		standIn := filepath.Join(dir, "stand-ins", tool)
		if err := os.Symlink(t.program, standIn); err != nil {
			return err
		}
		script := "#!/bin/sh\ncase \"$STUB_EXECUTOR:$*\" in\n"
		for line, answer := range t.answers {
			script += fmt.Sprintf("\":%s\") echo '%s'; exit ;;\n", line, strings.TrimSpace(answer))
		}
		script += "esac\nexec " + standIn + " \"$@\"\n"
		if err := os.WriteFile(filepath.Join(dir, "tools", tool), []byte(script), 0o755); err != nil {
			return err
		}
	}
	return nil
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

// portRanges hands out ranges of ports. The port behind each is held for as long
// as this process lives: so whatever shares the network with it, other tests
// here or another run of this very package, takes other ranges.
var portRanges struct {
	sync.Mutex
	next   int
	guards []net.Listener
}

const portsPerScript = 12

// nextPorts returns a range that is the caller's. All are below the ports that
// the kernel gives to connections.
func nextPorts() (lo, hi int) {
	portRanges.Lock()
	defer portRanges.Unlock()
	const first, end = 9000, 32000
	for lo = max(first, portRanges.next); lo+portsPerScript < end; lo = portRanges.next {
		guard := lo + portsPerScript
		portRanges.next = guard + 1
		l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(guard)))
		if err == nil {
			portRanges.guards = append(portRanges.guards, l)
			return lo, guard - 1
		}
	}
	panic("all ranges of ports are in use")
}

// TestPortsOfAnotherRun has another run of the package use the network, too. It
// is not parallel, so that nothing here takes a range meanwhile.
func TestPortsOfAnotherRun(t *testing.T) {
	guard := func(lo int) (net.Listener, error) {
		return net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(lo+portsPerScript)))
	}
	lo, hi := nextPorts()
	if l, err := guard(lo); err == nil {
		_ = l.Close()
		t.Errorf("%d to %d: another run would take them, too", lo, hi)
	}
	for range 2 {
		theirs := hi + 2
		if l, err := guard(theirs); err == nil { // else there really is another run
			t.Cleanup(func() { _ = l.Close() })
			if lo, hi = nextPorts(); lo <= theirs {
				t.Errorf("%d to %d: another run has them", lo, hi)
			}
		}
	}
}

// baseSettings is the box.env that a test starts from.
func baseSettings() string {
	lo, hi := nextPorts()
	return fmt.Sprintf("BASE_IMAGE=%s\nINSTALL_HERMES=false\nEXECUTOR_PORT_LO=%d\nEXECUTOR_PORT_HI=%d\n",
		filepath.Join(os.Getenv(clitest.BuiltVar), "base"), lo, hi)
}

// newEngine makes a directory for the fake driver. It is short, because hb's
// socket lies in it and the kernel bounds such paths to 107 bytes.
func newEngine() (dir string, err error) { return newScratch("bx") }

func newScratch(prefix string) (dir string, err error) { return os.MkdirTemp(scratch(), prefix) }

// scratch is where the engines are, and the homes of the many: in memory where
// there is room. No test here cuts the power, and a disk makes each wait for
// what all others write.
func scratch() string {
	const memory, enough = "/dev/shm", 4 << 30
	var fs syscall.Statfs_t
	if err := syscall.Statfs(memory, &fs); err != nil || fs.Bavail*uint64(fs.Bsize) < enough {
		return "/tmp"
	}
	return memory
}

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
		{clitest.EngineVar, dir},
		{clitest.BuiltVar, os.Getenv(clitest.BuiltVar)},
		{clitest.SaidVar, filepath.Join(dir, "said")},
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
		file = strings.Trim(file, "'") // a path that a shell must not split
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
	code := cli.Main(cli.Program{Version: clitest.Version, Args: args, Stdout: &out, Stderr: &out})
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
	ts.Check(fake.New(ts.Getenv(clitest.EngineVar), "").Fault(args[0], strings.Join(args[1:], " ")))
}

// foreign NAME: a machine of another owner.
func cmdForeign(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: foreign NAME")
	}
	_, err := fake.New(ts.Getenv(clitest.EngineVar), "").Create(context.Background(), vm.Spec{Name: args[0], OwnerID: strings.Repeat("f", 32)})
	ts.Check(err)
}

// [!] machine NAME: the engine has a machine of that name.
func cmdMachine(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: [!] machine NAME")
	}
	_, err := os.Stat(filepath.Join(ts.Getenv(clitest.EngineVar), "machines", args[0]))
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

// eventually CMD...: the command succeeds in time.
func cmdEventually(ts *testscript.TestScript, neg bool, args []string) {
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
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
