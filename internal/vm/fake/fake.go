// Package fake is a driver for tests: a machine is a directory, its commands
// are processes of this host that see the directory through HB_ROOT, and the
// real hb supervises it. Machines live in a directory, so that separate
// processes share them. It isolates nothing.
//
// Faults are injected by files, so that a test can prepare them for another
// process: DIR/faults/POINT holds what shall happen at a point, one of
//
//	error TEXT        the call fails and did nothing
//	after error TEXT  the call does its work and then fails
//	hang              the call waits for its context to end
//	lie               the call reports success and does nothing
//	kill              the calling process dies by SIGKILL
//	after kill        the same, when the work is done
//
// Points are create, start, stop, inspect, list, delete, exec, and exec.VERB
// for `hb VERB`.
package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/attach"
)

// Driver implements vm.Driver below a directory.
type Driver struct {
	dir string
	// tools is copied into every machine's /usr/local/bin.
	tools string
}

var _ vm.Driver = (*Driver)(nil)

// New returns a driver that keeps its machines in dir. The programs in the
// directory tools, if any, are the ones that a machine has.
func New(dir, tools string) *Driver { return &Driver{dir: dir, tools: tools} }

// Name implements vm.Driver.
func (d *Driver) Name() string { return "fake" }

// record is a machine on disk.
type record struct {
	Name     string `json:"name"`
	OwnerID  string `json:"owner_id"`
	ID       string `json:"id"`
	HostPort int    `json:"host_port"`
	Workload bool   `json:"workload"` // it has a supervisor, waiting for hb
	// Main is the main process; none when stopped.
	Main process.ID `json:"main"`
	// Ports that only hb in this machine uses; a real machine has its own.
	DoorPort     string `json:"door_port"`
	ExecutorPort string `json:"executor_port"`
}

func (d *Driver) machineDir(name string) string { return filepath.Join(d.dir, "machines", name) }
func (d *Driver) recordPath(name string) string {
	return filepath.Join(d.machineDir(name), "machine.json")
}

// Root is the machine's root directory.
func (d *Driver) Root(name string) string { return filepath.Join(d.machineDir(name), "root") }

// Fault prepares (or, with "", removes) a fault.
func (d *Driver) Fault(point, what string) error {
	path := filepath.Join(d.dir, "faults", point)
	if what == "" {
		return os.Remove(path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(what), 0o600)
}

// errLie says that a call is to report success without doing anything.
var errLie = errors.New("a lie")

// at lets a fault happen; after tells the side of the work.
func (d *Driver) at(ctx context.Context, point string, after bool) error {
	data, err := os.ReadFile(filepath.Join(d.dir, "faults", point))
	if err != nil {
		return nil //nolint:nilerr // no fault was prepared
	}
	what, isAfter := strings.CutPrefix(strings.TrimSpace(string(data)), "after ")
	if isAfter != after {
		return nil
	}
	switch text, isError := strings.CutPrefix(what, "error "); {
	case isError:
		return errors.New(text)
	case what == "hang":
		<-ctx.Done()
		return context.Cause(ctx)
	case what == "lie":
		return errLie
	case what == "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	return fmt.Errorf("unknown fault %q at %s", what, point)
}

// faulty wraps a call's work with the faults of its point.
func (d *Driver) faulty(ctx context.Context, point string, work func() error) error {
	if err := d.at(ctx, point, false); err != nil {
		if errors.Is(err, errLie) {
			return nil
		}
		return err
	}
	if err := work(); err != nil {
		return err
	}
	return d.at(ctx, point, true)
}

// lock serializes the calls on one machine, across processes.
func (d *Driver) lock(name string) (unlock func(), err error) {
	dir := filepath.Join(d.dir, "locks")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

func (d *Driver) load(name string) (record, error) {
	data, err := os.ReadFile(d.recordPath(name))
	if errors.Is(err, fs.ErrNotExist) {
		if _, statErr := os.Stat(d.machineDir(name)); statErr == nil {
			return record{Name: name}, nil // left-over storage, nobody's
		}
		return record{}, fmt.Errorf("fake machine %s: %w", name, vm.ErrNotFound)
	}
	if err != nil {
		return record{}, err
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, fmt.Errorf("fake machine %s: %w", name, err)
	}
	return r, nil
}

func (d *Driver) save(r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	tmp := d.recordPath(r.Name) + ".new"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, d.recordPath(r.Name))
}

func (d *Driver) describe(r record) vm.Machine {
	m := vm.Machine{
		Name: r.Name, EngineID: r.ID, OwnerID: r.OwnerID, State: vm.Stopped,
		Isolation: vm.IsolationNone, HostPort: r.HostPort,
	}
	switch {
	case r.ID == "":
		m.State = vm.Unknown
	case r.Main.Alive():
		m.State = vm.Running
	}
	return m
}

// Create implements vm.Driver.
func (d *Driver) Create(ctx context.Context, spec vm.Spec) (m vm.Machine, err error) {
	err = d.faulty(ctx, "create", func() error {
		unlock, err := d.lock(spec.Name)
		if err != nil {
			return err
		}
		defer unlock()
		if _, err := os.Stat(d.machineDir(spec.Name)); err == nil {
			return fmt.Errorf("fake machine %s: %w", spec.Name, vm.ErrExists)
		}
		// The record arrives with the directory, by one rename.
		tmp := d.machineDir(spec.Name) + ".making"
		if err := os.RemoveAll(tmp); err != nil {
			return err
		}
		for _, sub := range []string{"data", "etc", "run", "tmp", "opt/hermes-box/bin", "usr/local/bin", "var/log"} {
			if err := os.MkdirAll(filepath.Join(tmp, "root", sub), 0o755); err != nil {
				return err
			}
		}
		if d.tools != "" {
			if err := os.CopyFS(filepath.Join(tmp, "root/usr/local/bin"), os.DirFS(d.tools)); err != nil {
				return fmt.Errorf("copy the tools: %w", err)
			}
		}
		r := record{
			Name: spec.Name, OwnerID: spec.OwnerID, ID: fmt.Sprintf("fake-%s-%d", spec.Name, time.Now().UnixNano()),
			HostPort: spec.HostPort, Workload: len(spec.Workload) > 0,
		}
		data, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(tmp, "machine.json"), data, 0o600); err != nil {
			return err
		}
		m = d.describe(r)
		return os.Rename(tmp, d.machineDir(spec.Name))
	})
	return m, err
}

// Inspect implements vm.Driver.
func (d *Driver) Inspect(ctx context.Context, name string) (m vm.Machine, err error) {
	err = d.faulty(ctx, "inspect", func() error {
		r, err := d.load(name)
		m = d.describe(r)
		return err
	})
	return m, err
}

// List implements vm.Driver.
func (d *Driver) List(ctx context.Context) (list []vm.Machine, err error) {
	err = d.faulty(ctx, "list", func() error {
		entries, err := os.ReadDir(filepath.Join(d.dir, "machines"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if strings.HasSuffix(e.Name(), ".making") {
				continue
			}
			r, err := d.load(e.Name())
			if errors.Is(err, vm.ErrNotFound) {
				continue
			}
			if err != nil {
				return err
			}
			list = append(list, d.describe(r))
		}
		return nil
	})
	return list, err
}

// Start implements vm.Driver.
func (d *Driver) Start(ctx context.Context, name string) error {
	return d.faulty(ctx, "start", func() error {
		unlock, err := d.lock(name)
		if err != nil {
			return err
		}
		defer unlock()
		r, err := d.load(name)
		if err != nil || r.Main.Alive() {
			return err
		}
		if r.HostPort != 0 {
			l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(r.HostPort)))
			if err != nil {
				return fmt.Errorf("127.0.0.1:%d: %w", r.HostPort, vm.ErrPortTaken)
			}
			_ = l.Close()
		}
		// /run does not survive a boot.
		if err := os.RemoveAll(filepath.Join(d.Root(name), "run")); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Join(d.Root(name), "run"), 0o755); err != nil {
			return err
		}
		console, err := os.OpenFile(filepath.Join(d.machineDir(name), "console.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			return err
		}
		defer func() { _ = console.Close() }()
		script := `exec sleep 1000000000`
		if r.Workload {
			script = `hb="$HB_ROOT/opt/hermes-box/bin/hb"; until [ -x "$hb" ]; do sleep 0.05; done; exec "$hb" supervise`
		}
		cmd := exec.Command("/bin/sh", "-c", script)
		r.DoorPort, r.ExecutorPort = strconv.Itoa(r.HostPort), freePort()
		if r.HostPort == 0 {
			r.DoorPort = freePort()
		}
		cmd.Env = d.env(r, "")
		cmd.Dir = d.Root(name)
		cmd.Stdout, cmd.Stderr = console, console
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			return err
		}
		r.Main = process.Identify(cmd.Process.Pid)
		go func() { _ = cmd.Wait() }() // reap it, should this process live on
		return d.save(r)
	})
}

func freePort() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "0"
	}
	defer func() { _ = l.Close() }()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

func (d *Driver) env(r record, term string) []string {
	root := d.Root(r.Name)
	env := []string{
		"HB_ROOT=" + root, "HOME=" + filepath.Join(root, "data/home/agent"), "LANG=C.UTF-8",
		"PATH=" + filepath.Join(root, "usr/local/bin") + ":" + os.Getenv("PATH"),
		"HB_DOOR_ADDR=" + net.JoinHostPort("127.0.0.1", r.DoorPort), "HB_EXECUTOR_PORT=" + r.ExecutorPort,
	}
	if term != "" {
		env = append(env, "TERM="+term)
	}
	return env
}

// Stop implements vm.Driver.
func (d *Driver) Stop(ctx context.Context, name string) error {
	return d.faulty(ctx, "stop", func() error {
		unlock, err := d.lock(name)
		if err != nil {
			return err
		}
		defer unlock()
		r, err := d.load(name)
		if err != nil {
			return err
		}
		return d.halt(ctx, r)
	})
}

// halt ends the main process, then everything that still has the machine's
// root in its environment.
func (d *Driver) halt(ctx context.Context, r record) error {
	if r.Main.Alive() {
		_ = syscall.Kill(r.Main.PID, syscall.SIGTERM)
		for deadline := time.Now().Add(15 * time.Second); r.Main.Alive() && time.Now().Before(deadline) && ctx.Err() == nil; {
			time.Sleep(20 * time.Millisecond)
		}
	}
	for range 100 {
		left := d.processes(r.Name)
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if len(left) == 0 {
			r.Main = process.ID{}
			return d.save(r)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("fake machine %s does not stop", r.Name)
}

// Kill ends the machine as a crash would.
func (d *Driver) Kill(name string) error {
	r, err := d.load(name)
	if err != nil {
		return err
	}
	for range 100 {
		left := d.processes(r.Name)
		if len(left) == 0 {
			return nil
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("fake machine %s does not die", name)
}

// processes finds what runs in the machine, by the environment that it was
// started with.
func (d *Driver) processes(name string) []int {
	want := "HB_ROOT=" + d.Root(name)
	stats, _ := filepath.Glob("/proc/[0-9]*/environ")
	var pids []int
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil || !slices.Contains(strings.Split(string(data), "\x00"), want) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil && pid != os.Getpid() && process.Identify(pid).Alive() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Delete implements vm.Driver.
func (d *Driver) Delete(ctx context.Context, name, ownerID string) error {
	return d.faulty(ctx, "delete", func() error {
		unlock, err := d.lock(name)
		if err != nil {
			return err
		}
		defer unlock()
		r, err := d.load(name)
		if err != nil {
			return err
		}
		if ownerID == "" || r.OwnerID != ownerID {
			return fmt.Errorf("fake machine %s: %w", name, vm.ErrNotOwner)
		}
		if err := d.halt(ctx, r); err != nil {
			return err
		}
		return os.RemoveAll(d.machineDir(name))
	})
}

// Exec implements vm.Driver.
func (d *Driver) Exec(ctx context.Context, name string, c vm.Command) (code int, err error) {
	if len(c.Argv) == 0 {
		return 0, errors.New("no command to execute")
	}
	work := func() error {
		r, err := d.load(name)
		if err != nil {
			return err
		}
		if !r.Main.Alive() {
			return fmt.Errorf("fake machine %s: %w", name, vm.ErrNotRunning)
		}
		code, err = d.exec(ctx, r, c)
		return err
	}
	point := "exec"
	if len(c.Argv) > 1 && filepath.Base(c.Argv[0]) == "hb" {
		point = "exec." + c.Argv[1]
	}
	err = d.faulty(ctx, point, work)
	return code, err
}

func (d *Driver) exec(ctx context.Context, r record, c vm.Command) (int, error) {
	argv := c.Argv
	if inside := d.Root(r.Name) + argv[0]; filepath.IsAbs(argv[0]) {
		if _, err := os.Stat(inside); err == nil {
			argv = append([]string{inside}, argv[1:]...)
		}
	}
	term := ""
	if c.TTY != nil {
		term = c.TTY.Term
	}
	// The shell turns the end by a signal into 128+n.
	cmd := exec.Command("/bin/sh", append([]string{"-c", `"$@"; exit $?`, "sh"}, argv...)...)
	cmd.Env = d.env(r, term)
	cmd.Dir = d.Root(r.Name)
	if c.TTY == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	}
	return attach.Run(ctx, cmd, c)
}
