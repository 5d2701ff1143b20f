// Package fake is a driver for tests: a machine is a directory, its commands
// are processes of this host that see the directory through HB_ROOT, and the
// real hb supervises it. Machines live in a directory, so that separate
// processes share them. It isolates nothing.
//
// Faults are injected by files, so that a test can prepare them for another
// process: DIR/faults/POINT holds what shall happen at a point, one of
//
//	error TEXT        the call fails and did nothing
//	hang              the call waits for its context to end
//	lie               the call reports success and does nothing
//	signal NAME       the calling process gets HUP, INT or TERM, and the call
//	                  waits for its context to end, for half a second at most
//	twice NAME        the same, and the signal once more at the next point
//	kill              the calling process dies by SIGKILL
//	after WHAT        one of these when the work is done
//
// Points are create, start, stop, inspect, list, delete, template, cached,
// evict, clone, exec, and exec.VERB
// for `hb VERB`, and those of the caller, see [Driver.Step]. The n-th time
// that a process is at POINT after its step STEP has the name STEP:POINT@n, or
// POINT@n before the first step; a fault of that name is preferred. When
// DIR/trace exists, all points get written there under these names as they are
// reached, and "fault NAME" when a fault happens.
package fake

import (
	"bytes"
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
	"sync"
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

	mu    sync.Mutex
	step  string         // the name of the last one that the caller reached
	steps map[string]int // how often each was
	count map[string]int // of points since the last step
	again syscall.Signal // to be raised at the next point; 0: none
}

var (
	_ vm.Driver = (*Driver)(nil)
	_ vm.Cacher = (*Driver)(nil)
	_ vm.Cloner = (*Driver)(nil)
)

// New returns a driver that keeps its machines in dir. The programs in the
// directory tools, if any, are the ones that a machine has.
func New(dir, tools string) *Driver { return &Driver{dir: dir, tools: tools} }

// Name implements vm.Driver.
func (d *Driver) Name() string { return "fake" }

// Place tells where the machines are, as drivers do whose engine may have
// several such places.
func (d *Driver) Place(context.Context) (string, error) { return d.dir, nil }

// record is a machine on disk.
type record struct {
	Name     string   `json:"name"`
	OwnerID  string   `json:"owner_id"`
	ID       string   `json:"id"`
	HostPort int      `json:"host_port"`
	Workload []string `json:"workload"`
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

// Trace has the points that are reached from now on written to the file that
// it returns, which starts empty.
func (d *Driver) Trace() (path string, err error) {
	path = filepath.Join(d.dir, "trace")
	return path, os.WriteFile(path, nil, 0o600)
}

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

// signals are those that a fault can raise.
func signals() map[string]syscall.Signal {
	return map[string]syscall.Signal{"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "TERM": syscall.SIGTERM}
}

// reach names the point that is reached and returns the fault prepared there.
func (d *Driver) reach(point string, isStep bool) (name, fault string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.again != 0 {
		_ = syscall.Kill(os.Getpid(), d.again)
		time.Sleep(5 * time.Second) // it ends the process
	}
	if isStep {
		d.steps = counted(d.steps, point)
		name = fmt.Sprintf("%s@%d", point, d.steps[point])
		d.step, d.count = strings.TrimSuffix(name, "@1"), nil
	} else {
		d.count = counted(d.count, point)
		name = fmt.Sprintf("%s@%d", point, d.count[point])
		if d.step != "" {
			name = d.step + ":" + name
		}
	}
	d.trace(name)
	for _, n := range []string{name, point} {
		if data, err := os.ReadFile(filepath.Join(d.dir, "faults", n)); err == nil {
			return name, strings.TrimSpace(string(data))
		}
	}
	return name, ""
}

func counted(m map[string]int, key string) map[string]int {
	if m == nil {
		m = map[string]int{}
	}
	m[key]++
	return m
}

func (d *Driver) trace(line string) {
	f, err := os.OpenFile(filepath.Join(d.dir, "trace"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return // nobody wants to know
	}
	_, _ = f.WriteString(line + "\n")
	_ = f.Close()
}

// strike lets a fault happen.
func (d *Driver) strike(ctx context.Context, name, what string) error {
	d.trace("fault " + name)
	kind, arg, _ := strings.Cut(what, " ")
	switch {
	case kind == "error":
		return errors.New(arg)
	case what == "hang":
		<-ctx.Done()
		return context.Cause(ctx)
	case what == "in use":
		return vm.ErrInUse
	case what == "lie":
		return errLie
	case what == "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case (kind == "signal" || kind == "twice") && signals()[arg] != 0:
		if kind == "twice" {
			d.mu.Lock()
			d.again = signals()[arg]
			d.mu.Unlock()
		}
		_ = syscall.Kill(os.Getpid(), signals()[arg])
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(500 * time.Millisecond):
			return nil // clean-up, which no signal ends
		}
	}
	return fmt.Errorf("unknown fault %q at %s", what, name)
}

// faulty wraps a call's work with the faults of its point.
func (d *Driver) faulty(ctx context.Context, point string, work func() error) error {
	return d.perform(ctx, point, false, work)
}

// Step does a durable step of the caller, such as a write of a record, which
// is a point of faults, too. Calls of the engine are counted anew after it.
func (d *Driver) Step(ctx context.Context, point string, work func() error) error {
	return d.perform(ctx, point, true, work)
}

func (d *Driver) perform(ctx context.Context, point string, isStep bool, work func() error) error {
	name, what := d.reach(point, isStep)
	what, after := strings.CutPrefix(what, "after ")
	if what != "" && !after {
		if err := d.strike(ctx, name, what); err != nil {
			if errors.Is(err, errLie) {
				return nil
			}
			return err
		}
	}
	if !isStep && ctx.Err() != nil {
		return context.Cause(ctx) // as an engine's client would
	}
	err := work()
	if after {
		// Whatever the work came to: its answer is lost.
		if struck := d.strike(ctx, name, what); struck != nil {
			return struck
		}
	}
	return err
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
		m, err = d.make(spec, func(root string) error {
			if spec.Template != "" {
				return d.fromTemplate(spec.Template, root)
			}
			for _, sub := range []string{"etc", "opt/hermes-box/bin", "usr/local/bin", "var/log"} {
				if err := os.MkdirAll(filepath.Join(root, sub), 0o755); err != nil {
					return err
				}
			}
			if d.tools == "" {
				return nil
			}
			if err := os.CopyFS(filepath.Join(root, "usr/local/bin"), os.DirFS(d.tools)); err != nil {
				return fmt.Errorf("copy the tools: %w", err)
			}
			return nil
		})
		return err
	})
	return m, err
}

// make makes a machine whose root is filled by fill; the record arrives with
// the directory, by one rename.
func (d *Driver) make(spec vm.Spec, fill func(root string) error) (vm.Machine, error) {
	unlock, err := d.lock(spec.Name)
	if err != nil {
		return vm.Machine{}, err
	}
	defer unlock()
	if _, err := os.Stat(d.machineDir(spec.Name)); err == nil {
		return vm.Machine{}, fmt.Errorf("fake machine %s: %w", spec.Name, vm.ErrExists)
	}
	tmp := d.machineDir(spec.Name) + ".making"
	if err := os.RemoveAll(tmp); err != nil {
		return vm.Machine{}, err
	}
	for _, sub := range []string{"data", "run", "tmp"} {
		if err := os.MkdirAll(filepath.Join(tmp, "root", sub), 0o755); err != nil {
			return vm.Machine{}, err
		}
	}
	if err := fill(filepath.Join(tmp, "root")); err != nil {
		return vm.Machine{}, errors.Join(err, os.RemoveAll(tmp))
	}
	r := record{
		Name: spec.Name, OwnerID: spec.OwnerID, ID: fmt.Sprintf("fake-%s-%d", spec.Name, time.Now().UnixNano()),
		HostPort: spec.HostPort, Workload: spec.Workload,
	}
	data, err := json.Marshal(r)
	if err != nil {
		return vm.Machine{}, err
	}
	if err := os.WriteFile(filepath.Join(tmp, "machine.json"), data, 0o600); err != nil {
		return vm.Machine{}, err
	}
	return d.describe(r), os.Rename(tmp, d.machineDir(spec.Name))
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
		argv := []string{"sleep", "1000000000"}
		if len(r.Workload) > 0 {
			argv = slices.Clone(r.Workload)
			// Its absolute paths are the machine's own.
			for i := range argv {
				argv[i] = strings.ReplaceAll(argv[i], "/opt/hermes-box/", d.Root(name)+"/opt/hermes-box/")
			}
		}
		cmd := exec.Command(argv[0], argv[1:]...)
		// Its own ports are the machine's for as long as it runs.
		door := r.HostPort
		if r.HostPort == 0 {
			port, held, err := HoldPort()
			if err != nil {
				return err
			}
			defer func() { _ = held.Close() }()
			door, cmd.ExtraFiles = port, append(cmd.ExtraFiles, held)
		}
		executor, held, err := HoldPort()
		if err != nil {
			return err
		}
		defer func() { _ = held.Close() }()
		cmd.ExtraFiles = append(cmd.ExtraFiles, held)
		r.DoorPort, r.ExecutorPort = strconv.Itoa(door), strconv.Itoa(executor)
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
	want := []byte("\x00HB_ROOT=" + d.Root(name) + "\x00")
	entries, _ := os.ReadDir("/proc")
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		environ, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if err == nil && bytes.Contains(append([]byte{0}, environ...), want) && process.Identify(pid).Alive() {
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
	var cmd *exec.Cmd
	if filepath.IsAbs(argv[0]) {
		cmd = exec.Command(argv[0], argv[1:]...)
	} else {
		// Looked up where the machine has its programs.
		cmd = exec.Command("/bin/sh", append([]string{"-c", `exec "$@"`, "sh"}, argv...)...)
	}
	cmd.Env = d.env(r, term)
	cmd.Dir = d.Root(r.Name)
	if c.TTY == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	}
	code, err := attach.Run(ctx, cmd, c)
	var exit *exec.ExitError
	switch {
	case err == nil || ctx.Err() != nil:
		return code, err
	case cmd.Process == nil: // as a shell puts it
		words := "cannot be run"
		code = 126
		if errors.Is(err, fs.ErrNotExist) {
			words, code = "not found", 127
		}
		if c.Stderr != nil {
			_, _ = fmt.Fprintf(c.Stderr, "fake: %s: %s\n", argv[0], words)
		}
		return code, nil
	case errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled():
		return 128 + int(exit.Sys().(syscall.WaitStatus).Signal()), nil
	}
	return code, err
}
