// Package container runs boxes as containers of podman, through its command
// line. A container shares the host's kernel, so this driver is used only
// when it is asked for by name; its isolation says what it is.
//
// A box NAME is three objects of the engine, all called hermes-box-NAME and
// all labelled with the owner id in the call that makes them: a container, a
// volume for /data and a network of its own. A machine exists while any of
// the three does. Nothing of the host is mounted; the only way in is one port
// on 127.0.0.1.
//
// Docker has the same verbs and is accepted as an engine, but no test of ours
// has run on it.
package container

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"hermes-box-lite/internal/vm"
)

const (
	prefix     = "hermes-box-"      // of every object's name
	ownerLabel = "hermes-box.owner" // the owner id
	baseRepo   = "localhost/hermes-box-base"
)

// capabilities are what sudo, apt and tmux need, and no more; in particular
// no NET_RAW or NET_ADMIN, with which a guest could address the host's
// loopback through the bridge (podman sets route_localnet on it), and no
// MKNOD.
var capabilities = []string{
	"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL",
	"NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETUID",
}

// Driver implements vm.Driver.
type Driver struct {
	engine string
}

var (
	_ vm.Driver = (*Driver)(nil)
	_ vm.Cacher = (*Driver)(nil)
)

// New returns a driver for the engine of that name or path; "" is podman.
func New(engine string) *Driver {
	if engine == "" {
		engine = "podman"
	}
	return &Driver{engine: engine}
}

// Name implements vm.Driver.
func (d *Driver) Name() string { return "container" }

// Place tells where the engine keeps its objects. Another user, another HOME
// or another daemon has another place, and an empty list there.
func (d *Driver) Place(ctx context.Context) (string, error) {
	format := "{{.ID}}" // of the daemon
	if d.isPodman() {
		format = "{{.Store.GraphRoot}}"
	}
	out, err := d.run(ctx, "info", "--format", format)
	return strings.TrimSpace(string(out)), err
}

func (d *Driver) isPodman() bool { return filepath.Base(d.engine) != "docker" }

// run executes one engine command and returns its standard output. Its error
// carries the engine's own last words.
func (d *Driver) run(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, d.engine, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	// A terminated engine cleans up after itself, a killed one leaves
	// half-made objects.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	err := cmd.Run()
	if err == nil {
		return stdout.Bytes(), nil
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%s %s: %w", d.engine, args[0], context.Cause(ctx))
	}
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		return nil, d.missing()
	}
	return nil, fmt.Errorf("%s %s: %w", d.engine, args[0], describe(err, stderr.Bytes()))
}

func (d *Driver) missing() error {
	e := &vm.EngineError{Engine: d.engine, Reason: "is not installed or not on the PATH"}
	if d.engine == "podman" {
		e.Fix = "sudo apt-get install podman"
	}
	return e
}

// describe prefers the last line that the engine wrote to the exit status.
func describe(err error, stderr []byte) error {
	lines := strings.Split(strings.TrimSpace(string(stderr)), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return errors.New(strings.TrimPrefix(last, "Error: "))
	}
	return err
}

// object is what the engine says of a container, a volume or a network.
type object struct {
	id    string // name for a volume, which has no id
	name  string // without the prefix
	owner string
	state vm.State // containers only
	port  int      // containers only
}

// objects of one box, or of all: containers first.
type objects struct{ containers, volumes, networks []object }

func (o objects) all() []object { return slices.Concat(o.containers, o.volumes, o.networks) }

// find returns the objects of one box, by exact name. No error and no object
// means certain absence: every list was answered cleanly.
func (d *Driver) find(ctx context.Context, name string) (objects, error) {
	return d.list(ctx, func(full string) bool { return full == prefix+name })
}

// list returns every object whose full name is wanted. The kinds are asked for
// side by side: an answer takes little more than the start of the engine's
// program.
func (d *Driver) list(ctx context.Context, wanted func(string) bool) (objects, error) {
	var all objects
	var wg sync.WaitGroup
	var errs [3]error
	wg.Go(func() { all.containers, errs[0] = d.listKind(ctx, "container", wanted) })
	wg.Go(func() { all.volumes, errs[1] = d.listKind(ctx, "volume", wanted) })
	wg.Go(func() { all.networks, errs[2] = d.listKind(ctx, "network", wanted) })
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return objects{}, err
		}
	}
	return all, nil
}

// listKind lists names, then inspects those that are wanted. An object may
// vanish between the two calls, so the pair is tried again; docker and podman
// share both calls and the parts of the JSON that are used.
func (d *Driver) listKind(ctx context.Context, kind string, wanted func(string) bool) ([]object, error) {
	list := []string{kind, "ls", "--format", "{{.Name}}"}
	if kind == "container" {
		list = []string{kind, "ls", "--all", "--format", "{{.Names}}"}
	}
	var lastErr error
	for range 5 {
		out, err := d.run(ctx, list...)
		if err != nil {
			return nil, err
		}
		args := []string{kind, "inspect"}
		for _, name := range strings.Fields(string(out)) {
			if wanted(name) {
				args = append(args, name)
			}
		}
		if len(args) == 2 {
			return nil, nil
		}
		out, err = d.run(ctx, args...)
		if err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			lastErr = err
			continue
		}
		return parseObjects(kind, out)
	}
	return nil, lastErr
}

// inspected is the part of `inspect` that we use, for all three kinds.
type inspected struct {
	ID       string            `json:"Id"` // docker's networks, all containers; matches podman's "id"
	Name     string            `json:"Name"`
	Labels   map[string]string `json:"Labels"`
	State    *struct{ Status string }
	Config   *struct{ Labels map[string]string }
	HostInfo *struct {
		PortBindings map[string][]struct{ HostIP, HostPort string }
	} `json:"HostConfig"`
}

func parseObjects(kind string, out []byte) ([]object, error) {
	var list []inspected
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("read the engine's answer about its %ss: %w", kind, err)
	}
	var objs []object
	for _, in := range list {
		in.Name = strings.TrimPrefix(in.Name, "/") // docker
		name, ok := strings.CutPrefix(in.Name, prefix)
		if !ok || name == "" {
			continue
		}
		o := object{id: in.ID, name: name, owner: in.Labels[ownerLabel]}
		switch kind {
		case "volume":
			o.id = in.Name
		case "container":
			if in.Config == nil || in.State == nil || in.ID == "" {
				return nil, fmt.Errorf("the engine's answer about container %s lacks its state", in.Name)
			}
			o.owner = in.Config.Labels[ownerLabel]
			o.state = stateOf(in.State.Status)
			if in.HostInfo != nil {
				for _, bindings := range in.HostInfo.PortBindings {
					for _, b := range bindings {
						o.port, _ = strconv.Atoi(b.HostPort)
					}
				}
			}
		}
		objs = append(objs, o)
	}
	return objs, nil
}

func stateOf(status string) vm.State {
	switch status {
	case "running":
		return vm.Running
	case "created", "configured", "initialized", "exited", "stopped":
		return vm.Stopped
	}
	return vm.Unknown // paused, stopping, removing, dead, restarting
}

// machine describes a box by its objects. Without a container it is what an
// interrupted call left over: unknown, ours only if all of it is.
func machine(name string, o objects) vm.Machine {
	m := vm.Machine{Name: name, State: vm.Unknown, Isolation: vm.IsolationContainer}
	all := o.all()
	m.OwnerID = all[0].owner
	for _, obj := range all {
		if obj.owner != m.OwnerID {
			m.OwnerID = "" // mixed: ambiguous, so not ours
		}
	}
	if len(o.containers) == 1 {
		c := o.containers[0]
		m.EngineID, m.State, m.HostPort = c.id, c.state, c.port
	}
	return m
}

// Inspect implements vm.Driver.
func (d *Driver) Inspect(ctx context.Context, name string) (vm.Machine, error) {
	if c, ok := d.inspectContainer(ctx, name); ok {
		return machine(name, objects{containers: []object{c}}), nil
	}
	o, err := d.find(ctx, name)
	if err != nil {
		return vm.Machine{}, err
	}
	if len(o.all()) == 0 {
		return vm.Machine{}, fmt.Errorf("%s: %w", prefix+name, vm.ErrNotFound)
	}
	return machine(name, o), nil
}

// List implements vm.Driver. It lists what carries our prefix, ours or not;
// other containers of the engine are no machines of this driver.
func (d *Driver) List(ctx context.Context) ([]vm.Machine, error) {
	all, err := d.list(ctx, func(full string) bool { return strings.HasPrefix(full, prefix) })
	if err != nil {
		return nil, err
	}
	byName := map[string]objects{}
	for _, c := range all.containers {
		o := byName[c.name]
		o.containers = append(o.containers, c)
		byName[c.name] = o
	}
	for _, v := range all.volumes {
		o := byName[v.name]
		o.volumes = append(o.volumes, v)
		byName[v.name] = o
	}
	for _, n := range all.networks {
		o := byName[n.name]
		o.networks = append(o.networks, n)
		byName[n.name] = o
	}
	machines := make([]vm.Machine, 0, len(byName))
	for name, o := range byName {
		machines = append(machines, machine(name, o))
	}
	slices.SortFunc(machines, func(a, b vm.Machine) int { return strings.Compare(a.Name, b.Name) })
	return machines, nil
}

// Create implements vm.Driver.
func (d *Driver) Create(ctx context.Context, spec vm.Spec) (vm.Machine, error) {
	o, err := d.find(ctx, spec.Name)
	if err != nil {
		return vm.Machine{}, err
	}
	if err := alreadyThere(spec.Name, o); err != nil {
		return vm.Machine{}, err
	}
	image, err := d.systemImage(ctx, spec)
	if err != nil {
		return vm.Machine{}, err
	}
	full := prefix + spec.Name
	label := ownerLabel + "=" + spec.OwnerID
	// The engine refuses a taken name, so a race with another creator of the
	// same name is lost here and not shared. Hence one after the other.
	if _, err := d.run(ctx, "volume", "create", "--label", label, full); err != nil {
		return vm.Machine{}, d.existsOr(ctx, spec, err)
	}
	if _, err := d.run(ctx, d.networkArgs(full, label)...); err != nil {
		return vm.Machine{}, d.existsOr(ctx, spec, err)
	}
	out, err := d.run(ctx, d.createArgs(spec, full, label, image)...)
	if err != nil {
		return vm.Machine{}, d.existsOr(ctx, spec, err)
	}
	c := object{id: strings.TrimSpace(string(out)), name: spec.Name, owner: spec.OwnerID, state: vm.Stopped, port: spec.HostPort}
	return machine(spec.Name, objects{containers: []object{c}}), nil
}

// networkArgs asks for a bridge of the box's own, from which no other bridge
// is reached.
func (d *Driver) networkArgs(full, label string) []string {
	args := []string{"network", "create", "--label", label}
	if d.isPodman() {
		// Without its DNS helper: containers have nobody to look up here, and
		// the helper listens on the host.
		args = append(args, "--disable-dns", "--opt", "isolate=true")
	}
	return append(args, full)
}

func (d *Driver) createArgs(spec vm.Spec, full, label, image string) []string {
	args := []string{
		"container", "create", "--name", full, "--hostname", spec.Name, "--label", label,
		"--network", full, "--volume", full + ":/data", "--cap-drop", "all",
		"--pids-limit", "8192", "--stop-timeout", "30",
	}
	logs := "json-file"
	if d.isPodman() {
		args = append(args, "--no-hosts") // the host's own names are not the guest's business
		logs = "k8s-file"
	}
	// Of the drivers that both engines have, those that can be bounded: what
	// root in the box writes lands on the host's disk.
	args = append(args, "--log-driver", logs, "--log-opt", "max-size=1m")
	for _, c := range capabilities {
		args = append(args, "--cap-add", c)
	}
	if spec.CPUs > 0 {
		args = append(args, "--cpus", strconv.Itoa(spec.CPUs))
	}
	if spec.MemoryMiB > 0 {
		args = append(args, "--memory", strconv.Itoa(spec.MemoryMiB)+"m")
	}
	if spec.HostPort > 0 {
		args = append(args, "--publish", fmt.Sprintf("127.0.0.1:%d:%d/tcp", spec.HostPort, spec.GuestPort))
	}
	return append(append(args, image), spec.Workload...)
}

func alreadyThere(name string, o objects) error {
	var found []string
	if len(o.containers) > 0 {
		found = append(found, "container")
	}
	if len(o.volumes) > 0 {
		found = append(found, "volume")
	}
	if len(o.networks) > 0 {
		found = append(found, "network")
	}
	if found == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", strings.Join(found, " and "), prefix+name, vm.ErrExists)
}

// existsOr turns the engine's refusal of a name into ErrExists when somebody
// else's object is there now.
func (d *Driver) existsOr(ctx context.Context, spec vm.Spec, err error) error {
	o, findErr := d.find(ctx, spec.Name)
	if findErr != nil {
		return err
	}
	for _, obj := range o.all() {
		if obj.owner != spec.OwnerID {
			return fmt.Errorf("%w: %w", alreadyThere(spec.Name, o), err)
		}
	}
	return err
}

// systemImage is the image that a machine starts from.
func (d *Driver) systemImage(ctx context.Context, spec vm.Spec) (string, error) {
	if spec.Template != "" {
		return d.templateImage(ctx, spec.Template)
	}
	return d.importBase(ctx, spec.Base)
}

// importBase makes the base's image, once per digest.
func (d *Driver) importBase(ctx context.Context, base vm.Base) (string, error) {
	_, hex, ok := strings.Cut(base.Digest, ":")
	if !ok || len(hex) < 32 {
		return "", fmt.Errorf("base digest %q is not algorithm:hex", base.Digest)
	}
	image := baseRepo + ":" + hex[:32]
	out, err := d.run(ctx, "image", "ls", "--quiet", "--filter", "reference="+image)
	if err != nil {
		return "", err
	}
	if strings.TrimSpace(string(out)) == "" {
		if _, err := d.run(ctx, "import", base.Tar, image); err != nil {
			return "", fmt.Errorf("import the base: %w", err)
		}
	}
	return image, nil
}

// Start implements vm.Driver.
func (d *Driver) Start(ctx context.Context, name string) error {
	// To start what runs is no error.
	_, startErr := d.run(ctx, "container", "start", prefix+name)
	c, err := d.container(ctx, name)
	switch {
	case err != nil:
		return err
	case startErr != nil && strings.Contains(startErr.Error(), "address already in use"):
		return fmt.Errorf("127.0.0.1:%d: %w", c.port, vm.ErrPortTaken)
	case startErr != nil:
		return startErr
	}
	if c.state != vm.Running {
		return fmt.Errorf("container %s ended at once (%s logs %s tells why)", prefix+name, d.engine, prefix+name)
	}
	return nil
}

// Stop implements vm.Driver.
func (d *Driver) Stop(ctx context.Context, name string) error {
	c, err := d.container(ctx, name)
	if err != nil {
		return err
	}
	if c.state == vm.Stopped {
		return nil
	}
	if _, err := d.run(ctx, "container", "stop", c.id); err != nil {
		return err
	}
	c, err = d.container(ctx, name)
	if err != nil {
		return err
	}
	if c.state != vm.Stopped {
		return fmt.Errorf("container %s is %s after stop", prefix+name, c.state)
	}
	return nil
}

// inspectContainer is the quick way to a container that is there. When it is
// not ok, nothing is known yet: find tells absence from failure.
func (d *Driver) inspectContainer(ctx context.Context, name string) (c object, ok bool) {
	out, err := d.run(ctx, "container", "inspect", prefix+name)
	if err != nil {
		return object{}, false
	}
	objs, err := parseObjects("container", out)
	if err != nil || len(objs) != 1 || objs[0].name != name {
		return object{}, false
	}
	return objs[0], true
}

func (d *Driver) container(ctx context.Context, name string) (object, error) {
	if c, ok := d.inspectContainer(ctx, name); ok {
		return c, nil
	}
	o, err := d.find(ctx, name)
	if err != nil {
		return object{}, err
	}
	if len(o.containers) == 0 {
		if len(o.all()) > 0 {
			return object{}, fmt.Errorf("container %s is gone, its volume or network is still there", prefix+name)
		}
		return object{}, fmt.Errorf("%s: %w", prefix+name, vm.ErrNotFound)
	}
	return o.containers[0], nil
}

// Delete implements vm.Driver.
func (d *Driver) Delete(ctx context.Context, name, ownerID string) error {
	o, err := d.find(ctx, name)
	if err != nil {
		return err
	}
	all := o.all()
	if len(all) == 0 {
		return fmt.Errorf("%s: %w", prefix+name, vm.ErrNotFound)
	}
	ours := 0
	for _, obj := range all {
		if ownerID != "" && obj.owner == ownerID {
			ours++
		}
	}
	switch ours {
	case len(all):
	case 0:
		return fmt.Errorf("%s: %w", prefix+name, vm.ErrNotOwner)
	default:
		return fmt.Errorf("some of the container, volume and network %s is not ours, so none of it was removed", prefix+name)
	}
	// By id, so that a machine which took the name meanwhile is safe. Removal
	// errors are kept, but what decides is whether everything is gone.
	var errs []error
	for _, c := range o.containers {
		_, err := d.run(ctx, "container", "rm", "--force", c.id)
		errs = append(errs, err)
	}
	for _, n := range o.networks {
		_, err := d.run(ctx, "network", "rm", n.id)
		errs = append(errs, err)
	}
	for _, v := range o.volumes {
		// Volumes have no id: look once more at the label. The engine refuses
		// while any container uses it.
		_, err := d.removeVolume(ctx, v.id, ownerID)
		errs = append(errs, err)
	}
	left, err := d.find(ctx, name)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	if len(left.all()) > 0 {
		return errors.Join(append([]error{fmt.Errorf("%s is still there after its removal", prefix+name)}, errs...)...)
	}
	_ = d.pruneTemplates(ctx) // the next removal tries again
	return nil
}

func (d *Driver) removeVolume(ctx context.Context, volume, ownerID string) ([]byte, error) {
	out, err := d.run(ctx, "volume", "inspect", volume)
	if err != nil {
		return nil, err
	}
	objs, err := parseObjects("volume", out)
	if err != nil {
		return nil, err
	}
	if len(objs) != 1 || objs[0].owner != ownerID {
		return nil, fmt.Errorf("volume %s: %w", volume, vm.ErrNotOwner)
	}
	return d.run(ctx, "volume", "rm", volume)
}
