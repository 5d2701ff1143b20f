//go:build linux

package cli_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"hermes-box-lite/internal/cli/clitest"
)

// host is one user's home with an engine of its own; its box commands are
// separate processes.
type host struct {
	t      *testing.T
	engine string
	home   string
	env    []string
}

func newHost(t *testing.T) *host {
	t.Helper()
	engine, err := newEngine()
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, engine: engine, home: t.TempDir()}
	t.Cleanup(func() {
		for _, fault := range audit(engine, h.home) {
			t.Error(fault)
		}
		if err := endEngine(engine); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(h.home, "box.env"), []byte(baseSettings()), 0o644); err != nil {
		t.Fatal(err)
	}
	h.env = append(os.Environ(), "BOX_HOME="+h.home, "HOME="+h.home, clitest.EngineVar+"="+engine, clitest.SaidVar+"="+filepath.Join(engine, "said"))
	return h
}

// patience bounds what hangs. It is no measure of what is quick enough: many
// commands run side by side, beside whatever else the machine does.
const patience = 5 * time.Minute

// command is the real command line in a process of its own.
func (h *host) command(args ...string) *exec.Cmd {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	h.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, boxPath(), args...)
	cmd.Env = h.env
	return cmd
}

// run runs a command and returns its exit code and output.
func (h *host) run(args ...string) (code int, stdout, stderr string) {
	h.t.Helper()
	var out, errOut bytes.Buffer
	cmd := h.command(args...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		h.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

// must is run for a command that has to succeed.
func (h *host) must(args ...string) string {
	h.t.Helper()
	code, stdout, stderr := h.run(args...)
	if code != 0 {
		h.t.Fatalf("box %v: exit code %d\n%s", args, code, stderr)
	}
	return stdout
}

// together runs commands side by side and returns their exit codes and errors.
func (h *host) together(lines [][]string) (codes []int, errs []string) {
	codes, errs = make([]int, len(lines)), make([]string, len(lines))
	var wg sync.WaitGroup
	for i, args := range lines {
		wg.Go(func() { codes[i], _, errs[i] = h.run(args...) })
	}
	wg.Wait()
	return codes, errs
}

func TestSixteenNewOfOneName(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	lines := slices.Repeat([][]string{{"new", "alpha"}}, 16)
	codes, errs := h.together(lines)
	won := 0
	for i, code := range codes {
		switch {
		case code == 0:
			won++
		case code == 5 && strings.Contains(errs[i], "alpha is locked by"):
		case code == 1 && strings.Contains(errs[i], "box alpha already exists"):
		default:
			t.Errorf("exit code %d: %s", code, errs[i])
		}
	}
	if won != 1 {
		t.Errorf("%d of 16 won", won)
	}
	if out := h.must("ls"); !regexp.MustCompile(`(?m)^alpha +running `).MatchString(out) {
		t.Error("the winner's box did not stay:", out)
	}
	h.must("doctor", "alpha")
}

func TestEightNewOfDifferentNames(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	var lines [][]string
	for i := range 8 {
		lines = append(lines, []string{"new", fmt.Sprintf("box%d", i)})
	}
	codes, errs := h.together(lines)
	for i, code := range codes {
		if code != 0 {
			t.Errorf("new %s: exit code %d: %s", lines[i][1], code, errs[i])
		}
	}
	ports := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^box\d +running .*localhost:(\d+)/`).FindAllStringSubmatch(h.must("ls"), -1) {
		ports[m[1]] = true
	}
	if len(ports) != 8 {
		t.Errorf("%d different ports, not 8", len(ports))
	}
	for i := range lines {
		lines[i] = []string{"rm", lines[i][1], "--force"}
	}
	codes, errs = h.together(lines)
	if !slices.Equal(codes, make([]int, 8)) {
		t.Errorf("rm side by side: %v %v", codes, errs)
	}
}

func TestSeveralEnterAStoppedBox(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	h.must("stop", "alpha")
	codes, errs := h.together(slices.Repeat([][]string{{"enter", "alpha", "--", "hb", "status"}}, 6))
	if !slices.Equal(codes, make([]int, 6)) {
		t.Errorf("%v %q", codes, errs)
	}
}

func TestEnterIsBinarySafe(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	// What a stream could hold that something in between would change.
	block := make([]byte, 1<<20)
	_, _ = rand.Read(block)
	copy(block, "\x00\x03\x04\x11\x13\x1a\r\n\r\r\n\x1b[0m\xff\xfe~.")
	in := io.LimitReader(repeat(block), 64<<20)
	sent, received := sha256.New(), sha256.New()
	cmd := h.command("enter", "alpha", "--", "sh", "-c", "cat; echo done >&2")
	var errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = io.TeeReader(in, sent), received, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatal(err, errOut.String())
	}
	if !bytes.Equal(sent.Sum(nil), received.Sum(nil)) {
		t.Error("64 MiB came back changed")
	}
	if errOut.String() != "done\n" {
		t.Errorf("stderr is %q", errOut.String())
	}
}

func repeat(block []byte) io.Reader {
	readers := make([]io.Reader, 64)
	for i := range readers {
		readers[i] = bytes.NewReader(block)
	}
	return io.MultiReader(readers...)
}

// console is a person at a terminal.
type console struct {
	t    *testing.T
	tty  *os.File
	mu   sync.Mutex
	seen bytes.Buffer
	done chan error
}

func (h *host) console(args ...string) *console {
	h.t.Helper()
	cmd := h.command(args...)
	cmd.Env = append(cmd.Env, "TERM=xterm")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 30, Cols: 100})
	if err != nil {
		h.t.Fatal(err)
	}
	c := &console{t: h.t, tty: tty, done: make(chan error, 1)}
	h.t.Cleanup(func() { _ = tty.Close() })
	go func() {
		r := bufio.NewReader(tty)
		for {
			b, err := r.ReadByte()
			if err != nil {
				break // EIO: the other end is closed
			}
			c.mu.Lock()
			c.seen.WriteByte(b)
			c.mu.Unlock()
		}
		c.done <- cmd.Wait()
	}()
	return c
}

func (c *console) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen.String()
}

func (c *console) await(what string) {
	c.t.Helper()
	for deadline := time.Now().Add(patience); !strings.Contains(c.text(), what); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("never saw %q in %q", what, c.text())
		}
	}
}

func (c *console) write(text string) {
	c.t.Helper()
	if _, err := c.tty.WriteString(text); err != nil {
		c.t.Fatal(err)
	}
}

// end waits for the command and returns its exit code.
func (c *console) end() int {
	c.t.Helper()
	select {
	case err := <-c.done:
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			c.t.Fatal(err)
		}
		if exit != nil {
			return exit.ExitCode()
		}
		return 0
	case <-time.After(patience):
		c.t.Fatalf("does not end; seen %q", c.text())
		return -1
	}
}

func TestRemoveAsksForTheName(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	for _, answer := range []string{"alph", "y", "", " alpha", "ALPHA"} {
		c := h.console("rm", "alpha")
		c.await("Type its name to confirm: ")
		c.write(answer + "\n")
		if code := c.end(); code != 1 || !strings.Contains(c.text(), "nothing was removed") {
			t.Errorf("answer %q: exit code %d, %q", answer, code, c.text())
		}
	}
	h.must("doctor", "alpha")
	c := h.console("rm", "alpha")
	c.await("Type its name to confirm: ")
	c.write("alpha\n")
	if code := c.end(); code != 0 {
		t.Errorf("exit code %d, %q", code, c.text())
	}
	if code, _, _ := h.run("doctor", "alpha"); code != 4 {
		t.Errorf("the box is still there: exit code %d", code)
	}
}

func TestRemoveInterruptedAtTheQuestion(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	c := h.console("rm", "alpha")
	c.await("Type its name to confirm: ")
	c.write("\x03")
	if code := c.end(); code != 130 {
		t.Errorf("exit code %d, %q", code, c.text())
	}
	h.must("doctor", "alpha")
}

func TestEnterAtATerminal(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	c := h.console("enter", "alpha", "--", "sh", "-c", `stty size; echo "term $TERM"; read line; echo "got $line"; stty size; exit 5`)
	c.await("30 100")
	c.await("term xterm")
	if err := pty.Setsize(c.tty, &pty.Winsize{Rows: 50, Cols: 200}); err != nil {
		t.Fatal(err)
	}
	c.write("hello\n")
	c.await("got hello")
	if code := c.end(); code != 5 {
		t.Errorf("exit code %d, %q", code, c.text())
	}
}

func TestEnterAttachesTmux(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skip("tmux is not installed on this host")
	}
	h := newHost(t)
	h.must("new", "alpha")
	c := h.console("enter", "alpha")
	c.write("echo in-$((40+2)) $(tmux display-message -p '#S') $PWD\n")
	c.await("in-42 main")
	c.write("\x02d")
	c.await("detached")
	if code := c.end(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	// Everything in it went on, and the next enter finds it.
	again := h.console("enter", "alpha")
	again.await("in-42 main")
	again.write("exit\n")
	if code := again.end(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// recorder is a foreign program on a box's port.
type recorder struct {
	mu   sync.Mutex
	seen bytes.Buffer
	hits int
}

func (r *recorder) serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = c.Close() }()
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			buf := make([]byte, 64<<10)
			n, _ := c.Read(buf)
			r.mu.Lock()
			r.seen.Write(buf[:n])
			r.hits++
			r.mu.Unlock()
			// As Executor would, so that a credential is what it seems to want.
			_, _ = io.WriteString(c, "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer realm=\"executor\"\r\n"+
				"Content-Type: text/plain\r\nContent-Length: 12\r\nConnection: close\r\n\r\nUnauthorized")
		}()
	}
}

func TestForeignListenerGetsNoCredential(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	l := listenOn(t, "tcp4", "127.0.0.1:0")
	r := &recorder{}
	go r.serve(l)
	// The box runs, and its recorded port is answered by somebody else.
	path := filepath.Join(h.home, ".box/boxes/alpha.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	edited := regexp.MustCompile(`"host_port": \d+`).ReplaceAll(data, []byte(`"host_port": `+port))
	if err := os.WriteFile(path, edited, 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, _ := h.run("doctor", "alpha")
	if code != 3 || !regexp.MustCompile(`(?m)^fail  mcp.host `).MatchString(out) {
		t.Errorf("doctor: exit code %d\n%s", code, out)
	}
	h.env = append(h.env, "BOX_BROWSER="+script(t, `touch "$0.ran"`))
	if code, _, errOut := h.run("open", "alpha"); code == 0 {
		t.Error("open succeeded", errOut)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hits == 0 {
		t.Error("the listener was never asked: this test proves nothing")
	}
	for path, secret := range secretsIn(h.engine) {
		if bytes.Contains(r.seen.Bytes(), secret) {
			t.Errorf("the foreign listener was sent %s", path)
		}
	}
	if strings.Contains(strings.ToLower(r.seen.String()), "authorization") || strings.Contains(r.seen.String(), "_token") {
		t.Errorf("the foreign listener was sent a credential: %q", r.seen.String())
	}
}

// script makes an executable shell script.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestStoppedBoxWhosePortIsTaken(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	h.must("stop", "alpha")
	m := regexp.MustCompile(`localhost:(\d+)/`).FindStringSubmatch(h.must("ls"))
	l := listenOn(t, "tcp4", "127.0.0.1:"+m[1])
	r := &recorder{}
	go r.serve(l)
	h.env = append(h.env, "BOX_BROWSER=true")
	for _, args := range [][]string{{"open", "alpha"}, {"start", "alpha"}, {"repair", "alpha"}} {
		if code, _, errOut := h.run(args...); code != 1 || !strings.Contains(errOut, "port "+m[1]+" of the box is used by another program") {
			t.Errorf("%v: exit code %d: %s", args, code, errOut)
		}
	}
	if code, _, _ := h.run("doctor", "alpha"); code != 3 {
		t.Errorf("doctor: exit code %d", code)
	}
	if r.hits != 0 {
		t.Errorf("the foreign listener was spoken to: %q", r.seen.String())
	}
}

// TestNothingSecretInTheProcessList looks at all command lines and at the
// environments of everything that box starts while it makes a box.
func TestNothingSecretInTheProcessList(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	settings, err := os.OpenFile(filepath.Join(h.home, "box.env"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	const passphrase, password = "planted-list-passphrase", "planted-list-password"
	_, err = settings.WriteString("HTTPS_PROXY=http://user:" + password + "@127.0.0.1:9\n")
	if err := errors.Join(err, settings.Close()); err != nil {
		t.Fatal(err)
	}
	h.env = append(h.env, "BOX_PASSPHRASE="+passphrase, "BOX_PASSPHRASE_FILE=/planted-list-passphrase-file")
	for _, line := range []string{"new new%d", "save new0 " + h.home + "/%d.gpg", "load " + h.home + "/0.gpg load%d"} {
		// Where a look takes long, one command is over before there were many.
		looks := 0
		for i := 0; i < 5 && looks < 5; i++ {
			looks += h.watched(passphrase, password, strings.Fields(fmt.Sprintf(line, i))...)
		}
		if looks < 5 {
			t.Errorf("%q: only %d looks: this test proves nothing", line, looks)
		}
	}
}

// watched runs a command and returns how often it looked at all processes
// meanwhile.
func (h *host) watched(passphrase, password string, args ...string) (looks int) {
	h.t.Helper()
	cmd := h.command(args...)
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for ; ; looks++ {
		select {
		case err := <-ended:
			if err != nil {
				h.t.Fatalf("%q: %v", args, err)
			}
			return looks
		default:
			h.lookAtProcesses(cmd.Process.Pid, passphrase, password)
			time.Sleep(5 * time.Millisecond) // leave it some of the processor
		}
	}
}

func (h *host) lookAtProcesses(self int, passphrase, password string) {
	h.t.Helper()
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range procs {
		args, _ := os.ReadFile(proc + "/cmdline")
		for _, secret := range []string{passphrase, password} {
			if bytes.Contains(args, []byte(secret)) {
				h.t.Errorf("%s: a planted secret is in the process list: %q", proc, args)
			}
		}
		if filepath.Base(proc) == strconv.Itoa(self) || filepath.Base(proc) == strconv.Itoa(os.Getpid()) {
			continue
		}
		// A fork of box may become another program between the first two looks; then
		// the third one is at that program's environment.
		if told(proc, passphrase) && !isFork(proc, self) && told(proc, passphrase) {
			h.t.Errorf("%s: the passphrase is in the environment of %q", proc, args)
		}
	}
}

// told reports whether a process has a text in its environment now.
func told(proc, text string) bool {
	env, err := os.ReadFile(proc + "/environ")
	return err == nil && bytes.Contains(env, []byte(text))
}

// isFork reports whether a process is box itself, between fork and exec.
func isFork(proc string, self int) bool {
	a, errA := os.Readlink(proc + "/exe")
	b, errB := os.Readlink("/proc/" + strconv.Itoa(self) + "/exe")
	return errA != nil || errB != nil || a == b
}

func TestBrowserKeepsRunningWithoutTheLock(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	h.must("stop", "alpha")
	// An opener that is the browser itself stays. It was started by a box that
	// had locked the machine to start it, and must hold nothing of that.
	pidFile := filepath.Join(h.home, "pid")
	h.env = append(h.env, "BOX_BROWSER="+script(t, `echo $$ >"`+pidFile+`.new"; mv "`+pidFile+`.new" "`+pidFile+`"; exec sleep 300`))
	h.must("open", "alpha")
	data, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil || len(fds) == 0 {
		t.Fatal("the opener is gone", err)
	}
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && strings.Contains(target, h.home) {
			t.Errorf("the opener holds %s", target)
		}
	}
	h.must("stop", "alpha")
}
