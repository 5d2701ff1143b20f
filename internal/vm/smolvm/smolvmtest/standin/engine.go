//go:build linux

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/process"
)

// engine runs what stands for a virtual machine. dir is the machine's directory.
type engine interface {
	// boot starts the machine's command; the first time on a new disk.
	boot(r record, dir string) (process.ID, error)
	// halt kills everything in the machine, without a word.
	halt(dir string) error
	// remove removes its disk.
	remove(dir string) error
	// command prepares a command in it.
	command(dir string, argv, env []string, input, terminal bool) *exec.Cmd
	// pack keeps its system, without /workspace.
	pack(dir, out string) (string, error)
	// soil leaves a disk with something on it.
	soil(dir string) error
}

// exec has three ways of smolvm's: plain, -i, and -i -t.
func (w *world) exec(a arguments) (int, error) {
	_, release, err := w.attach(a.get("name"))
	if err != nil {
		return 1, err
	}
	defer release()
	if len(a.rest) == 0 {
		return 2, errUsage
	}
	if os.Getenv("RUST_LOG") == "" {
		fmt.Fprintln(os.Stderr, "2026-08-21T00:00:00Z  WARN smolvm: something that nobody asked for")
	}
	cmd := w.engine.command(w.dir(a.get("name")), a.rest, a.values["e"], a.has("i"), a.has("t"))
	switch {
	case a.has("t"):
		// Raw mode and non-blocking, until the end, if we reach it.
		_ = syscall.SetNonblock(0, true)
		defer func() { _ = syscall.SetNonblock(0, false) }()
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		if _, direct := w.engine.(local); direct {
			// Not blocking is for us alone: podman's client has a terminal of its own
			// in the container, this command needs another file of the same one.
			tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
			if err != nil {
				return 1, err
			}
			cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
		}
		if err := cmd.Start(); err != nil {
			return 1, fmt.Errorf("agent operation failed: vm exec interactive: %w", err)
		}
		return codeOf(cmd.Wait())
	case a.has("i"):
		return interactive(cmd)
	}
	return plain(cmd)
}

// interactive passes all three streams on. The end is the command's, not that of
// its output.
func interactive(cmd *exec.Cmd) (int, error) {
	_ = syscall.SetNonblock(0, true)
	defer func() { _ = syscall.SetNonblock(0, false) }()
	stdin := os.NewFile(0, "stdin") // of the poller, as it does not block now
	in, err := cmd.StdinPipe()
	if err != nil {
		return 1, err
	}
	var copied [2]chan struct{}
	var mine []io.Closer
	for i, to := range []*os.File{os.Stdout, os.Stderr} {
		r, wr, err := os.Pipe()
		if err != nil {
			return 1, err
		}
		mine = append(mine, wr)
		if i == 0 {
			cmd.Stdout = wr
		} else {
			cmd.Stderr = wr
		}
		copied[i] = make(chan struct{})
		go func() {
			defer close(copied[i])
			_, _ = io.Copy(to, r) // the other side may be gone
		}()
	}
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("agent operation failed: vm exec interactive: %w", err)
	}
	for _, c := range mine {
		_ = c.Close() // the command has its own
	}
	go func() {
		_, _ = io.Copy(in, stdin) // until the command has had enough
		_ = in.Close()
	}()
	state, err := cmd.Process.Wait()
	if err != nil {
		return 1, err
	}
	for _, c := range copied {
		select {
		case <-c:
		case <-time.After(200 * time.Millisecond): // a daemon has the pipe
		}
	}
	return codeOfStatus(state), nil
}

// cap is where the output of a plain exec is cut, by stream.
const capacity = 11 << 20

// plain keeps the output to itself until the end, and cuts it.
func plain(cmd *exec.Cmd) (int, error) {
	var bufs [2]bytes.Buffer
	var done [2]chan struct{}
	var mine []io.Closer
	for i := range bufs {
		r, wr, err := os.Pipe()
		if err != nil {
			return 1, err
		}
		mine = append(mine, wr)
		if i == 0 {
			cmd.Stdout = wr
		} else {
			cmd.Stderr = wr
		}
		done[i] = make(chan struct{})
		go func() {
			defer close(done[i])
			_, _ = io.CopyN(&bufs[i], r, capacity)
			_ = r.Close() // what writes on gets EPIPE
		}()
	}
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("agent operation failed: vm exec: %w", err)
	}
	for _, c := range mine {
		_ = c.Close()
	}
	state, err := cmd.Process.Wait()
	if err != nil {
		return 1, err
	}
	<-done[0]
	<-done[1]
	_, _ = os.Stdout.Write(bufs[0].Bytes())
	_, _ = os.Stderr.Write(bufs[1].Bytes())
	return codeOfStatus(state), nil
}

func codeOf(err error) (int, error) {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return codeOfStatus(exit.ProcessState), nil
	}
	if err != nil {
		return 1, err
	}
	return 0, nil
}

func codeOfStatus(s *os.ProcessState) int {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return s.ExitCode()
}

// podman has a container stand for a machine. The machine's command is its main
// process, with which the machine ends: in smolvm the machine would stay.
type podman struct {
	w       *world
	program string
}

// container is called by the machine's directory, so that two homes do not meet.
func container(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return "smolvm-standin-" + hex.EncodeToString(sum[:8])
}

func (p podman) run(args ...string) (string, error) {
	cmd := exec.Command(p.program, args...)
	var out, words bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &words
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", p.program, args[0], err, strings.TrimSpace(words.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

func (p podman) exists(kind, name string) bool {
	return exec.Command(p.program, kind, "exists", name).Run() == nil
}

func (p podman) boot(r record, dir string) (process.ID, error) {
	c := container(dir)
	if !p.exists("container", c) {
		if err := p.make(r, c); err != nil {
			return process.ID{}, err
		}
	}
	if _, err := p.run("start", c); err != nil {
		return process.ID{}, err
	}
	out, err := p.run("inspect", "--format", "{{.State.Pid}}", c)
	if err != nil {
		return process.ID{}, err
	}
	pid, err := strconv.Atoi(out)
	if err != nil || pid == 0 {
		return process.ID{}, fmt.Errorf("start background CMD: it ended at once (%s)", out)
	}
	return process.Identify(pid), nil
}

// make makes the container of a first start: the image is read only now.
func (p podman) make(r record, c string) error {
	image := ""
	if r.Pack != nil {
		image = r.Pack.Content
	} else {
		config, err := configOf(r.Image)
		if err != nil {
			return err
		}
		if image = config; !p.exists("image", image) {
			if _, err := p.run("load", "--quiet", "--input", r.Image); err != nil {
				return err
			}
		}
	}
	// Other machines are out of reach only under the strict floor. Without one
	// they share podman's own network, as smolvm's guests reach each other's
	// published ports by the host's loopback.
	network := "podman"
	if os.Getenv("SMOLVM_EGRESS_FLOOR") == "strict" {
		network = c
		if !p.exists("network", c) {
			if _, err := p.run("network", "create", "--disable-dns", "--opt", "isolate=true", c); err != nil {
				return err
			}
		}
	}
	args := []string{
		"create", "--name", c, "--hostname", r.Name, "--network", network, "--no-hosts", "--pids-limit", "8192",
		"--volume", c + ":/workspace", "--tmpfs", "/run:rw,exec,mode=755", "--tmpfs", "/tmp:rw,exec,mode=1777", "--cap-drop", "all",
	}
	for _, capability := range []string{
		"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETUID", "SYS_ADMIN",
	} {
		args = append(args, "--cap-add", capability)
	}
	for _, port := range r.Ports {
		args = append(args, "--publish", "127.0.0.1:"+port+"/tcp")
	}
	_, err := p.run(append(append(args, image), r.Command...)...)
	return err
}

func (p podman) halt(dir string) error {
	c := container(dir)
	if !p.exists("container", c) {
		return nil
	}
	_, err := p.run("stop", "--time", "0", c) // KILL at once
	return err
}

func (p podman) remove(dir string) error {
	c := container(dir)
	var errs []error
	for _, kind := range []string{"container", "volume", "network"} {
		if p.exists(kind, c) {
			_, err := p.run(kind, "rm", "--force", c)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (p podman) command(dir string, argv, env []string, input, terminal bool) *exec.Cmd {
	args := []string{"exec"}
	if input {
		args = append(args, "--interactive")
	}
	if terminal {
		args = append(args, "--tty")
	}
	for _, e := range env {
		args = append(args, "--env", e)
	}
	cmd := exec.Command(p.program, append(append(args, container(dir)), argv...)...)
	// With us dies the client, and only the client.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

func (p podman) pack(dir, _ string) (string, error) {
	return p.run("commit", "--quiet", container(dir), "localhost/smolvm-standin-pack:"+strings.TrimPrefix(container(dir), "smolvm-standin-"))
}

func (p podman) soil(string) error { return nil }

// local has a directory and processes of the host stand for a machine, for tests
// that need no engine. HB_ROOT tells what runs "in" it where its root is. Being
// no container it has neither network nor users of its own.
type local struct{ w *world }

const mark = "SMOLVM_STANDIN_MACHINE="

func root(dir string) string { return filepath.Join(dir, "root") }

// mountScript takes the place of mount(8): nothing may be mounted on the host.
const mountScript = `#!/bin/sh
[ "$1" = --bind ] || exit 32
[ -L "$3" ] && exit 0
rmdir "$3" && ln -s "$2" "$3"
`

func (l local) boot(r record, dir string) (process.ID, error) {
	if _, err := os.Stat(root(dir)); err != nil && r.Pack != nil {
		if out, err := exec.Command("cp", "-a", r.Pack.Content, root(dir)).CombinedOutput(); err != nil {
			return process.ID{}, fmt.Errorf("unpack: %w: %s", err, out)
		}
	}
	bin := filepath.Join(dir, "bin")
	for _, volatile := range []string{"run", "tmp"} {
		if err := os.RemoveAll(filepath.Join(root(dir), volatile)); err != nil {
			return process.ID{}, err
		}
	}
	for _, d := range []string{filepath.Join(root(dir), "run"), filepath.Join(root(dir), "tmp"), filepath.Join(root(dir), "etc"), bin} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return process.ID{}, err
		}
	}
	if err := os.WriteFile(filepath.Join(bin, "mount"), []byte(mountScript), 0o755); err != nil {
		return process.ID{}, err
	}
	if err := os.WriteFile(filepath.Join(dir, "floor"), []byte(os.Getenv("SMOLVM_EGRESS_FLOOR")), 0o600); err != nil {
		return process.ID{}, err
	}
	if len(r.Command) == 0 {
		r.Command = []string{"sleep", "1000000"}
	}
	cmd := l.command(dir, r.Command, nil, false, false)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return process.ID{}, fmt.Errorf("start background CMD: %w", err)
	}
	return process.Identify(cmd.Process.Pid), nil
}

func (l local) command(dir string, argv, env []string, _, _ bool) *exec.Cmd {
	program := argv[0]
	cmd := exec.Command(program, argv[1:]...)
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "PATH=") {
			cmd.Env = append(cmd.Env, e)
		}
	}
	cmd.Env = append(cmd.Env, "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"), "HB_ROOT="+root(dir), mark+dir)
	cmd.Env = append(cmd.Env, env...)
	return cmd
}

// members are the machine's processes, by what is in their environment.
func (l local) members(dir string) []int {
	var pids []int
	paths, _ := filepath.Glob("/proc/[0-9]*/environ") // the pattern is fine
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(append([]byte{0}, data...), []byte("\x00"+mark+dir+"\x00")) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil && process.Identify(pid).Alive() {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (l local) halt(dir string) error {
	for range 500 {
		pids := l.members(dir)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.New("process is still alive after stop")
}

func (l local) remove(dir string) error { return os.RemoveAll(root(dir)) }

func (l local) pack(dir, out string) (string, error) {
	// Beside the pack, wherever that is moved: a test keeps both in one home.
	keep := filepath.Join(l.w.settings, "pack-"+filepath.Base(dir)+"-"+strconv.Itoa(os.Getpid()))
	if out, err := exec.Command("cp", "-a", root(dir), keep).CombinedOutput(); err != nil {
		return "", fmt.Errorf("pack: %w: %s", err, out)
	}
	_ = out
	for _, gone := range []string{"workspace", "run", "tmp"} {
		if err := os.RemoveAll(filepath.Join(keep, gone)); err != nil {
			return "", err
		}
	}
	// What was mounted leaves an empty directory.
	data := filepath.Join(keep, "data")
	if info, err := os.Lstat(data); err == nil && info.Mode().Type() == os.ModeSymlink {
		return keep, errors.Join(os.Remove(data), os.Mkdir(data, 0o755))
	}
	return keep, nil
}

func (l local) soil(dir string) error {
	old := filepath.Join(root(dir), "workspace/data")
	return errors.Join(os.MkdirAll(old, 0o755), os.WriteFile(filepath.Join(old, "old"), []byte("of another\n"), 0o600))
}
