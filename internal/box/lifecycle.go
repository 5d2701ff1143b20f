package box

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// Start starts a stopped box and returns when its supervisor answers.
func (m *Manager) Start(ctx context.Context, name string) (err error) {
	mu, err := m.beginExisting(name, "start")
	if err != nil {
		return err
	}
	defer func() { err = mu.end(err) }()
	drv, err := m.usable(ctx, mu.rec)
	if err != nil {
		return err
	}
	if err := mu.enter(ctx, "start"); err != nil {
		return err
	}
	if err := m.startMachine(ctx, drv, mu.rec, mu.log); err != nil {
		return err
	}
	if was := mu.earlier; was != nil && (was.Verb == "stop" || was.Stop) {
		// The services were told that the machine stops, and it did not.
		if err := m.guest(drv, name, mu.log).run(ctx, "shutdown", "--undo"); err != nil {
			mu.log.line("hb shutdown --undo: %v", err) // it expires by itself
		}
	}
	return mu.complete(ctx)
}

// startMachine is idempotent.
func (m *Manager) startMachine(ctx context.Context, drv vm.Driver, rec Record, log io.Writer) error {
	if err := boot(ctx, drv, rec); err != nil {
		return err
	}
	ctx, cancel := m.supervisorLimit(ctx)
	defer cancel()
	g := m.guest(drv, rec.Name, log)
	if err := m.awaitSupervisor(ctx, g); err != nil {
		return err
	}
	machine, err := drv.Inspect(ctx, rec.Name)
	if err != nil {
		return err
	}
	return m.syncClock(ctx, g, machine.Isolation)
}

// boot starts the machine of a box that has its port already.
func boot(ctx context.Context, drv vm.Driver, rec Record) error {
	err := drv.Start(ctx, rec.Name)
	if errors.Is(err, vm.ErrPortTaken) {
		return fmt.Errorf("port %d of the box is used by another program on this host: %w", rec.HostPort, err)
	}
	return err
}

// usable returns the driver of a box whose machine is there and ours.
func (m *Manager) usable(ctx context.Context, rec Record) (vm.Driver, error) {
	drv, machine, err := m.inspect(ctx, rec)
	if err != nil {
		return nil, err
	}
	if machine.OwnerID != rec.OwnerID {
		return nil, fmt.Errorf("the machine named %s: %w (its owner id is not the one that this host recorded); it was left alone", rec.Name, vm.ErrNotOwner)
	}
	return drv, nil
}

func (m *Manager) inspect(ctx context.Context, rec Record) (vm.Driver, vm.Machine, error) {
	drv, err := m.driver(ctx, rec)
	if err != nil {
		return nil, vm.Machine{}, err
	}
	machine, err := drv.Inspect(ctx, rec.Name)
	if errors.Is(err, vm.ErrNotFound) {
		if err := lookedInPlace(ctx, drv, rec); err != nil {
			return nil, vm.Machine{}, err
		}
		return nil, vm.Machine{}, &GoneError{rec.Name, rec.Driver}
	}
	if err != nil {
		return nil, vm.Machine{}, fmt.Errorf("ask the %s driver for %s: %w", rec.Driver, rec.Name, err)
	}
	return drv, machine, nil
}

// Stop stops a running box, its services first.
func (m *Manager) Stop(ctx context.Context, name string) (err error) {
	mu, err := m.beginExisting(name, "stop")
	if err != nil {
		return err
	}
	defer func() { err = mu.end(err) }()
	drv, err := m.usable(ctx, mu.rec)
	if err != nil {
		return err
	}
	machine, err := drv.Inspect(ctx, name)
	if err != nil {
		return err
	}
	if machine.State == vm.Stopped {
		return mu.complete(ctx) // also for a stop that was interrupted
	}
	if err := mu.enter(ctx, "stop"); err != nil {
		return err
	}
	if err := m.stopMachine(ctx, mu, drv); err != nil {
		return err
	}
	return mu.complete(ctx)
}

// stopMachine stops a machine, its services first if they can be asked.
func (m *Manager) stopMachine(ctx context.Context, mu *mutation, drv vm.Driver) error {
	machine, err := drv.Inspect(ctx, mu.rec.Name)
	if err != nil {
		return err
	}
	if machine.State == vm.Running {
		shutdown, cancel := context.WithTimeout(ctx, m.opts.Deadlines.guest(time.Minute))
		if err := m.guest(drv, mu.rec.Name, mu.log).run(shutdown, "shutdown"); err != nil {
			mu.log.line("hb shutdown: %v", err) // the engine stops the machine all the same
		}
		cancel()
	}
	if err := drv.Stop(ctx, mu.rec.Name); err != nil {
		return err
	}
	machine, err = drv.Inspect(ctx, mu.rec.Name)
	if err == nil && machine.State == vm.Running {
		err = fmt.Errorf("the %s driver reports it stopped, and it still runs", drv.Name())
	}
	return err
}

// Repair refreshes tools and assets of a box, rewires it and examines it. A
// deliberate pause of Executor stays.
func (m *Manager) Repair(ctx context.Context, name string) (report wire.Report, err error) {
	mu, err := m.beginExisting(name, "repair")
	if err != nil {
		return wire.Report{}, err
	}
	defer func() { err = mu.end(err) }()
	if mu.rec.Source != "" {
		return wire.Report{}, &GuestError{Text: "the state of " + mu.rec.Source + " is not in the box, and only a new " + verbOf(mu.rec) + " puts it there", Fix: finisher(mu.rec)}
	}
	if mu.rec.Phase == Creating {
		mu.note("`box " + verbOf(mu.rec) + "` was interrupted; finishing it")
	}
	drv, err := m.usable(ctx, mu.rec)
	if err != nil {
		return wire.Report{}, err
	}
	if err := mu.enter(ctx, "start"); err != nil {
		return wire.Report{}, err
	}
	if err := boot(ctx, drv, mu.rec); err != nil {
		return wire.Report{}, err
	}
	g := m.guest(drv, name, mu.log)
	if err := mu.enter(ctx, "install hb"); err != nil {
		return wire.Report{}, err
	}
	if err := m.installHB(ctx, g); err != nil {
		return wire.Report{}, err
	}
	machine, err := drv.Inspect(ctx, name)
	if err != nil {
		return wire.Report{}, err
	}
	if err := m.syncClock(ctx, g, machine.Isolation); err != nil {
		return wire.Report{}, err
	}
	if err := m.provision(ctx, mu, g, true); err != nil {
		return wire.Report{}, err
	}
	for _, text := range m.notApplied(mu.rec) {
		mu.warn(text)
	}
	report, err = m.finish(ctx, mu, drv, g)
	if err != nil {
		return report, err
	}
	mu.rec.Phase = Ready
	return report, mu.complete(ctx)
}

// notApplied names the settings that only new and load apply.
func (m *Manager) notApplied(rec Record) []string {
	var out []string
	if m.config.BaseImage != rec.BaseImage {
		out = append(out, fmt.Sprintf("BASE_IMAGE is %s now, this box was made from %s and keeps it", m.config.BaseImage, rec.BaseImage))
	}
	if m.config.Driver != rec.Driver && m.config.Driver != "auto" {
		out = append(out, fmt.Sprintf("BOX_DRIVER is %s now, this box runs on %s and stays there", m.config.Driver, rec.Driver))
	}
	if exposed := rec.HostPort != 0; exposed != (m.config.ExposeExecutor && m.config.InstallExecutor) {
		out = append(out, "EXPOSE_EXECUTOR_WEB applies to new boxes; the port of this one stays as it is")
	}
	now, was := m.sizes(), rec.Sizes
	if was == (Sizes{}) {
		return out // of a box from before they were recorded
	}
	for _, size := range []struct {
		key      string
		now, was int
	}{
		{"BOX_CPUS", now.CPUs, was.CPUs},
		{"BOX_MEM_MIB", now.MemoryMiB, was.MemoryMiB},
		{"BOX_OVERLAY_GIB", now.OverlayGiB, was.OverlayGiB},
		{"BOX_STORAGE_GIB", now.StorageGiB, was.StorageGiB},
	} {
		if m.config.Given(size.key) && size.now != size.was {
			out = append(out, fmt.Sprintf("%s is %s now, this box was made with %s and keeps it", size.key, sizeText(size.now), sizeText(size.was)))
		}
	}
	return out
}

// sizeText is a size as the configuration has it.
func sizeText(n int) string {
	if n == 0 {
		return "the driver's own"
	}
	return strconv.Itoa(n)
}

// Remove deletes a box. The caller has looked it up and asked for confirmation;
// another box that has got its name since is left alone.
func (m *Manager) Remove(ctx context.Context, asked Record) (err error) {
	mu, err := m.beginExisting(asked.Name, "rm")
	if err != nil {
		return err
	}
	defer func() { err = mu.end(err) }()
	if mu.rec.OwnerID != asked.OwnerID {
		return fmt.Errorf("rm %s: nothing was removed: meanwhile the name has become that of another box", asked.Name)
	}
	drv, err := m.driver(ctx, mu.rec)
	if err != nil {
		return &CleanupError{Name: asked.Name, Driver: mu.rec.Driver, Err: err}
	}
	if err := mu.enter(ctx, "remove"); errors.Is(err, syscall.ENOSPC) {
		// That is how room is made. Wherever it ends, rm goes on from there.
		mu.warn("the journal does not know of it: " + err.Error())
	} else if err != nil {
		return err
	}
	return m.dispose(ctx, drv, mu.rec)
}

// Lookup returns the record of a box.
func (m *Manager) Lookup(name string) (Record, error) {
	if err := CheckName(name); err != nil {
		return Record{}, err
	}
	return m.registry.get(name)
}

// Names returns the names of all boxes of this host.
func (m *Manager) Names() ([]string, error) { return m.registry.names() }

// StateForeign is that of a machine that is not ours, whatever its name.
const StateForeign = "foreign"

// Status is one line of `box ls`.
type Status struct {
	Name        string
	State       string // creating, running, stopped, interrupted, unknown, or StateForeign
	Driver      string
	Isolation   string
	ExecutorURL string // without a token; "" when not exposed
	Note        string

	rec Record // none for a machine that is not ours, or a record that cannot be read
}

// List describes all boxes, and with all also the engines' other machines.
// It never locks and never starts anything; an engine that does not answer
// makes its boxes unknown.
func (m *Manager) List(ctx context.Context, all bool, engines []string) ([]Status, error) {
	names, err := m.registry.names()
	if err != nil {
		return nil, err
	}
	var list []Status
	records := map[string][]Record{} // by driver
	var mu sync.Mutex
	var readers errgroup.Group // none of them fails
	readers.SetLimit(runtime.GOMAXPROCS(0))
	for _, name := range names {
		readers.Go(func() error {
			rec, err := m.registry.get(name)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errors.Is(err, ErrNotFound): // removed meanwhile
			case err != nil:
				list = append(list, Status{Name: name, State: "unknown", Note: err.Error()})
			default:
				records[rec.Driver] = append(records[rec.Driver], rec)
			}
			return nil
		})
	}
	_ = readers.Wait()
	if all {
		for _, engine := range engines {
			records[engine] = append(records[engine], []Record{}...)
		}
	}
	var wg sync.WaitGroup
	for engine, recs := range records {
		wg.Go(func() {
			found := m.listEngine(ctx, engine, recs, all)
			mu.Lock()
			defer mu.Unlock()
			list = append(list, found...)
		})
	}
	wg.Wait()
	slices.SortFunc(list, func(a, b Status) int { return strings.Compare(a.Name+"\x00"+a.Driver, b.Name+"\x00"+b.Driver) })
	return list, nil
}

func (m *Manager) listEngine(ctx context.Context, engine string, recs []Record, all bool) []Status {
	ctx, cancel := context.WithTimeoutCause(ctx, m.opts.Deadlines.List,
		fmt.Errorf("the engine did not answer within %s", m.opts.Deadlines.List))
	defer cancel()
	machines := map[string]vm.Machine{}
	drv, err := m.opts.Driver(ctx, engine)
	if err == nil {
		var found []vm.Machine
		found, err = drv.List(ctx)
		for _, machine := range found {
			machines[machine.Name] = machine
		}
	}
	list := make([]Status, 0, len(recs))
	for _, rec := range recs {
		machine, known := machines[rec.Name]
		answer := err
		if !known && err == nil {
			// A list may be short; only Inspect is certain.
			machine, answer = drv.Inspect(ctx, rec.Name)
			known = answer == nil
			if errors.Is(answer, vm.ErrNotFound) {
				answer = lookedInPlace(ctx, drv, rec)
			}
		}
		if s, still := m.statusOf(rec, machine, known, answer); still {
			list = append(list, s)
		}
		if machine.OwnerID == rec.OwnerID {
			delete(machines, rec.Name)
		}
	}
	if all && err != nil && len(recs) == 0 {
		m.opts.Report.Warn(fmt.Sprintf("the machines of the %s driver are not listed: %v", engine, err))
	}
	if all && err == nil {
		for _, machine := range machines {
			list = append(list, Status{
				Name: machine.Name, State: StateForeign, Driver: engine, Isolation: string(machine.Isolation),
				Note: "not a box of this host; " + string(machine.State),
			})
		}
	}
	return list
}

// statusOf describes a box; still is false for one that was removed while the
// engine was asked.
func (m *Manager) statusOf(rec Record, machine vm.Machine, known bool, listErr error) (s Status, still bool) {
	var held bool
	var lockErr error
	// Of a box at rest nothing would be told otherwise.
	if rec.Operation != nil || rec.Phase != Ready || !known {
		if rec, held, lockErr = m.settled(rec); errors.Is(lockErr, ErrNotFound) {
			return Status{}, false
		}
	}
	s = Status{rec: rec, Name: rec.Name, Driver: rec.Driver, Isolation: rec.Isolation, State: "unknown", ExecutorURL: executorURL(rec)}
	switch {
	case listErr != nil:
		s.Note = listErr.Error()
	case !known:
		s.Note = "its machine is gone; `box rm " + rec.Name + "` forgets it"
	case machine.OwnerID != rec.OwnerID:
		s.Note = "a machine of this name is not ours and was left alone"
	case machine.State == vm.Running || machine.State == vm.Stopped:
		s.State = string(machine.State)
		s.Isolation = string(machine.Isolation)
	default:
		s.Note = "the engine does not say whether it runs; `box start " + rec.Name + "` tries"
	}
	switch op := rec.Operation; {
	case lockErr != nil || held && op == nil:
	case held && rec.Phase == Creating:
		s.State, s.Note = "creating", op.Verb+": "+op.Step
	case held:
		s.Note = "busy: box " + op.Verb + ": " + op.Step
	case rec.Phase == Creating:
		s.State = "interrupted"
		s.Note = interruptedCreation(rec, listErr == nil && !known)
	case op != nil && s.Note == "":
		s.Note = fmt.Sprintf("%s (%s): run `box %s %s` again", ending(op), op.Step, op.Verb, rec.Name)
		switch {
		case op.Verb == "fork" && op.Stop:
			s.Note = fmt.Sprintf("%s (%s): it was started for it, `box stop %s` stops it", ending(op), op.Step, rec.Name)
		case op.Verb == "fork":
			s.Note = fmt.Sprintf("%s (%s): nothing was changed here, `box start %s` is all", ending(op), op.Step, rec.Name)
		case op.Verb == "load": // the state is in
			s.Note = fmt.Sprintf("%s (%s): `box repair %s` finishes it", ending(op), op.Step, rec.Name)
		}
	}
	return s, true
}

// ending tells how a mutation ended that did not complete.
func ending(op *Operation) string {
	if op.Failed {
		return "the last `box " + op.Verb + "` failed"
	}
	return "interrupted while `box " + op.Verb + "`"
}

// interruptedCreation explains a box that never was ready; gone: certainly it
// has no machine.
func interruptedCreation(rec Record, gone bool) string {
	op, remove := rec.Operation, "`box rm "+rec.Name+"`"
	if op == nil {
		op = &Operation{Verb: "new"}
	}
	switch {
	case op.Verb == "rm":
		return ending(op) + ": run " + remove + " again"
	case rec.Source != "":
		return fmt.Sprintf("%s: `%s` begins again, %s removes what is there", ending(op), finisher(rec), remove)
	case gone:
		return fmt.Sprintf("%s, and its machine is gone: `box new %s` begins again, %s forgets it", ending(op), rec.Name, remove)
	}
	return fmt.Sprintf("%s: `%s` finishes it, %s removes it", ending(op), finisher(rec), remove)
}

// finisher is the command that takes a box to health that was never ready.
func finisher(rec Record) string {
	switch {
	case filepath.IsAbs(rec.Source):
		return "box load " + ShellWord(rec.Source) + " " + rec.Name
	case rec.Source != "":
		return "box fork " + rec.Source + " " + rec.Name
	}
	return "box repair " + rec.Name
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9@%_+=:,./-]+$`)

// ShellWord quotes a path for a shell.
func ShellWord(s string) string {
	if plainWord.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// settled reads a record and its lock so that they belong together: a
// mutation that ends between two looks must not seem interrupted.
func (m *Manager) settled(rec Record) (Record, bool, error) {
	for {
		held, err := m.home.locked(rec.Name)
		if err != nil || held {
			return rec, held, err
		}
		now, err := m.registry.get(rec.Name)
		if err != nil || now.sameState(rec) {
			return rec, false, err
		}
		rec = now
	}
}

// executorURL is the address of the box's UI. The host name, and not the
// port, keeps the cookies of two boxes apart in a browser.
func executorURL(rec Record) string {
	if rec.HostPort == 0 {
		return ""
	}
	return "http://" + rec.Name + ".localhost:" + strconv.Itoa(rec.HostPort) + "/"
}
