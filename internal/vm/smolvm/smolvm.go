// Package smolvm runs boxes as libkrun microVMs of smolvm (smol-machines), on
// macOS and on Linux with KVM. It is the only place that builds smolvm's
// command lines and reads its output. What it relies on was read from smolvm's
// source at v1.9.3; file names in comments are of that tree.
//
// A box NAME is the smolvm machine NAME in the user's own smolvm root, so that
// `smolvm machine ls` shows it. The owner id is a label, given by the very call
// that creates the machine. Labels alone prove little: smolvm copies them to
// clones, and may write a deleted machine's record back. So a machine is ours
// only if its labels carry its own name too, its time of creation is the one
// that was noted (a claim, on this host), and its disk holds the marker that
// was put there when it first ran.
//
// Only `machine ls --json` tells that a machine is absent, and only together
// with the absence of its directory: smolvm gives a left-over disk to the next
// machine of that name.
//
// smolvm's live fork is not used: it freezes the source for as long as a clone
// exists, and a clone's disks lie on those of the source. A copy of a box is
// made from its state instead.
package smolvm

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"hermes-box-lite/internal/vm"
)

// Labels of our machines. Clones made by the user copy them, hence the name.
const (
	labelOwner    = "hermes-box.owner"
	labelName     = "hermes-box.name"
	labelPort     = "hermes-box.port"
	labelTemplate = "hermes-box.template"
)

// Options are what a Driver is made of.
type Options struct {
	// Dir keeps claims, locks, sessions, bases and templates.
	Dir string
	// Program is smolvm's name or path; "" is smolvm on the PATH.
	Program string
	// KVM is the device that Linux needs; "" is /dev/kvm.
	KVM string
	// Note is told what a long start does, a line at a time; may be nil.
	Note func(text string)
	// Patience is the built-in one where it is zero.
	Patience Patience
}

// Patience bounds the waiting for smolvm.
type Patience struct {
	Ask     time.Duration // for an answer that takes no work
	Work    time.Duration // for a creation, a stop, a deletion, a pack
	Start   time.Duration // for a start: the first one unpacks the image
	Settle  time.Duration // for a started machine's first command
	Probe   time.Duration // for a machine that is said to be unreachable
	Pause   time.Duration // between two probes
	Goodbye time.Duration // for the services of a machine that is to stop
	Session time.Duration // for one of a machine's sessions to become free
	Kill    time.Duration // for a command in the guest to end
}

func (p Patience) withDefaults() Patience {
	for _, limit := range []struct {
		of      *time.Duration
		builtIn time.Duration
	}{
		{&p.Ask, time.Minute},
		{&p.Work, 15 * time.Minute},
		{&p.Start, 20 * time.Minute},
		{&p.Settle, time.Minute},
		{&p.Probe, 10 * time.Second},
		{&p.Pause, 2 * time.Second},
		{&p.Goodbye, 40 * time.Second},
		{&p.Session, 30 * time.Second},
		{&p.Kill, 20 * time.Second},
	} {
		if *limit.of == 0 {
			*limit.of = limit.builtIn
		}
	}
	return p
}

// Driver implements vm.Driver and vm.Cacher.
type Driver struct {
	opts Options

	mu   sync.Mutex
	path string // of the program, once it was found to be the right one
}

var (
	_ vm.Driver = (*Driver)(nil)
	_ vm.Cacher = (*Driver)(nil)
)

// New returns a driver; it touches nothing yet.
func New(o Options) *Driver {
	if o.Program == "" {
		o.Program = "smolvm"
	}
	if o.KVM == "" {
		o.KVM = "/dev/kvm"
	}
	o.Patience = o.Patience.withDefaults()
	return &Driver{opts: o}
}

// Name implements vm.Driver.
func (d *Driver) Name() string { return "smolvm" }

func (d *Driver) note(text string) {
	if d.opts.Note != nil {
		d.opts.Note(text)
	}
}

// machineName is smolvm's own grammar (src/data/mod.rs), which is also safe
// for file names. Its length in the pattern would cost every start of box time.
var machineName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

const machineNameMost = 128 // bytes

func checkName(name string) error {
	if len(name) > machineNameMost || !machineName.MatchString(name) {
		return fmt.Errorf("%q is no name of a machine", name)
	}
	return nil
}

var hexID = regexp.MustCompile(`^[0-9a-f]{32}$`)

func isolation() vm.Isolation {
	if runtime.GOOS == "darwin" {
		return vm.IsolationHypervisor
	}
	return vm.IsolationKVM
}

// owner is the owner id of a machine that is ours, "" of any other.
func owner(m listed, c claim) string {
	id := m.Labels[labelOwner]
	switch {
	case !hexID.MatchString(id), m.Labels[labelName] != m.Name:
		return "" // not labelled by us, or a clone: those copy the labels of another name
	case c.Owner == id && c.Created != 0 && c.Created != m.CreatedAt:
		return "" // another machine than the one that was made here
	}
	return id
}

// machine translates what smolvm says.
func machine(m listed, c claim) vm.Machine {
	out := vm.Machine{
		Name: m.Name, EngineID: m.Name + "@" + strconv.FormatInt(m.CreatedAt, 10), OwnerID: owner(m, c),
		State: vm.Unknown, Isolation: isolation(),
	}
	switch m.State {
	case "running":
		out.State = vm.Running
	case "created", "stopped":
		out.State = vm.Stopped
	case "frozen":
		out.Notes = append(out.Notes, "it is frozen as the base of clones that smolvm made")
	case "unreachable":
		out.Notes = append(out.Notes, "smolvm says that it is unreachable, which may be out of date")
	default:
		out.Notes = append(out.Notes, "smolvm tells its state as "+strconv.QuoteToASCII(m.State))
	}
	if out.OwnerID != "" {
		if port, err := strconv.ParseUint(m.Labels[labelPort], 10, 16); err == nil {
			out.HostPort = int(port)
		}
	}
	return out
}

// Inspect implements vm.Driver.
func (d *Driver) Inspect(ctx context.Context, name string) (vm.Machine, error) {
	if err := checkName(name); err != nil {
		return vm.Machine{}, err
	}
	m, found, err := d.find(ctx, name)
	if err != nil {
		return vm.Machine{}, err
	}
	c, err := d.readClaim(name)
	if err != nil {
		return vm.Machine{}, err
	}
	if found {
		return d.sounded(ctx, machine(m, c)), nil
	}
	left, err := d.leftOver(name)
	if err != nil {
		return vm.Machine{}, err
	}
	if left == "" {
		return vm.Machine{}, fmt.Errorf("smolvm machine %s: %w", name, vm.ErrNotFound)
	}
	out := vm.Machine{Name: name, State: vm.Unknown, Isolation: isolation(), Notes: []string{left}}
	if c.covers(d.dataDir(name)) {
		out.OwnerID = c.Owner
	}
	return out, nil
}

// sounded asks a machine of ours that is said to be unreachable. smolvm writes
// that word down when a command could not connect, and keeps saying it after
// the machine answers again (src/cli/vm_common.rs, state_probe.rs).
func (d *Driver) sounded(ctx context.Context, m vm.Machine) vm.Machine {
	if m.OwnerID == "" || m.State != vm.Unknown || !slices.ContainsFunc(m.Notes, func(n string) bool { return strings.Contains(n, "unreachable") }) {
		return m
	}
	// A lifecycle call in progress has its own view, and must not be disturbed.
	held, err := d.tryShared(m.Name)
	if err != nil || held == nil {
		return m
	}
	defer held.release()
	if d.answers(ctx, m.Name) {
		m.State, m.Notes = vm.Running, nil
	}
	return m
}

// List implements vm.Driver.
func (d *Driver) List(ctx context.Context) ([]vm.Machine, error) {
	all, err := d.list(ctx)
	if err != nil {
		return nil, err
	}
	machines := make([]vm.Machine, len(all))
	var wg sync.WaitGroup
	for i, m := range all {
		c, err := d.readClaim(m.Name)
		if err != nil {
			return nil, err
		}
		machines[i] = machine(m, c)
		wg.Go(func() { machines[i] = d.sounded(ctx, machines[i]) })
	}
	wg.Wait()
	return machines, nil
}

// Place tells where smolvm keeps its machines: its database and its disks. Both
// follow the user's environment, and in another place its list is empty.
func (d *Driver) Place(context.Context) (string, error) {
	r, err := smolvmRoots()
	if err != nil {
		return "", err
	}
	return filepath.Join(r.data, "smolvm") + ", " + filepath.Join(r.cache, "smolvm"), nil
}
