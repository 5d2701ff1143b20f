package box

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// workload is a machine's main command: it waits for hb to arrive and becomes
// its supervisor. The owner id tells a copy of a machine that it is one.
func workload(ownerID string) []string {
	return []string{
		"/bin/sh", "-c",
		"trap 'exit 0' TERM INT; until [ -x " + wire.HBPath + " ]; do sleep 0.1; done; exec " + wire.HBPath + " supervise --owner " + ownerID,
	}
}

// NewOptions are the choices of one `new`.
type NewOptions struct {
	KeepOnFailure bool
	Fresh         bool // start from the base, whatever is kept
}

// New makes a box and brings it to health. When it fails, the machine that
// this very call made is removed, and nothing else is.
func (m *Manager) New(ctx context.Context, name string, o NewOptions) (report wire.Report, err error) {
	mu, err := m.begin(name, "new")
	if err != nil {
		return wire.Report{}, err
	}
	mu.rec.Name = name
	defer func() { err = mu.end(err) }()

	if err := mu.enter(ctx, "check"); err != nil {
		return wire.Report{}, err
	}
	if err := m.clearTheWay(ctx, mu); err != nil {
		return wire.Report{}, err
	}
	drv, from, err := m.prepare(ctx, mu, o.Fresh)
	if err != nil {
		return wire.Report{}, err
	}
	mu.rec = m.newRecord(name, newID(), drv, from.place, from.base)
	g := m.guest(drv, name, mu.log)
	if err := m.boot(ctx, mu, drv, g, &from); err != nil {
		return wire.Report{}, m.rollback(ctx, mu, drv, o.KeepOnFailure, err)
	}
	report, err = m.bringUp(ctx, mu, drv, g, from)
	if err != nil {
		m.distrust(ctx, mu, drv, from)
		return report, m.rollback(ctx, mu, drv, o.KeepOnFailure, err)
	}
	mu.ready()
	if err := mu.complete(ctx); err != nil {
		return report, m.rollback(ctx, mu, drv, o.KeepOnFailure, err)
	}
	return report, nil
}

// prepare does what can be done before anything of a new box exists.
func (m *Manager) prepare(ctx context.Context, mu *mutation, fresh bool) (vm.Driver, start, error) {
	if _, err := extraCAs(m.config.ExtraCAFile); err != nil {
		return nil, start{}, err // found now, not after the machine was made
	}
	drv, err := m.opts.Driver(ctx, m.config.Driver)
	if err != nil {
		return nil, start{}, err
	}
	// Some engines take a second to tell.
	var place string
	var placeErr error
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() { place, placeErr = placeOf(ctx, drv) })
	if err := absent(ctx, drv, mu.rec.Name); err != nil {
		return nil, start{}, err
	}
	if err := mu.enter(ctx, "base"); err != nil {
		return nil, start{}, err
	}
	base, err := m.opts.Base(ctx, m.config.BaseImage, mu.note)
	if err != nil {
		return nil, start{}, err
	}
	from, err := m.startFrom(mu, drv, base, fresh)
	if err != nil {
		return nil, start{}, err
	}
	asking.Wait()
	from.place = place
	return drv, from, placeErr
}

func (m *Manager) newRecord(name, lineage string, drv vm.Driver, place string, base vm.Base) Record {
	return Record{
		Name: name, OwnerID: newID(), Lineage: lineage, Driver: drv.Name(), Place: place, Phase: Creating, Created: m.opts.Now().UTC(),
		BaseImage: m.config.BaseImage, BaseDigest: base.Digest, Sizes: m.sizes(),
	}
}

func (m *Manager) sizes() Sizes {
	return Sizes{m.config.CPUs, m.config.MemoryMiB, m.config.OverlayGiB, m.config.StorageGiB}
}

// ready notes that only rm removes the box from now on.
func (mu *mutation) ready() {
	mu.rec.Phase, mu.rec.Source = Ready, ""
}

// clearTheWay removes what an interrupted `new` of the same name left behind:
// its record is still creating although nobody holds the box's lock.
func (m *Manager) clearTheWay(ctx context.Context, mu *mutation) error {
	old, err := m.registry.get(mu.rec.Name)
	switch {
	case errors.Is(err, ErrNotFound):
		return nil
	case err != nil:
		return err
	case old.Phase != Creating:
		return fmt.Errorf("box %s %w", old.Name, ErrExists)
	}
	mu.note("removing what an interrupted `box " + verbOf(old) + "` left")
	drv, err := m.driver(ctx, old)
	if err != nil {
		return &CleanupError{Name: old.Name, Driver: old.Driver, Err: err}
	}
	return m.dispose(ctx, drv, old)
}

func verbOf(rec Record) string {
	if rec.Operation != nil {
		return rec.Operation.Verb
	}
	return "new"
}

// absent is certain that the engine has no machine of the name.
func absent(ctx context.Context, drv vm.Driver, name string) error {
	_, err := drv.Inspect(ctx, name)
	switch {
	case errors.Is(err, vm.ErrNotFound):
		return nil
	case err != nil:
		return fmt.Errorf("ask the %s driver for %s: %w", drv.Name(), name, err)
	}
	return fmt.Errorf("a machine, disk or volume of the %s driver that is not a box of this host has the name %s; it was left alone: %w",
		drv.Name(), name, ErrExists)
}

// portAttempts bounds how often a port may be lost between its reservation
// and its use.
const portAttempts = 8

// boot makes and starts a machine and puts hb into it. A template from which a
// machine does not come that far is not taken again.
func (m *Manager) boot(ctx context.Context, mu *mutation, drv vm.Driver, g guest, from *start) error {
	err := m.create(ctx, mu, drv, from)
	if err == nil {
		err = mu.enter(ctx, "install hb")
	}
	if err == nil {
		err = m.installHB(ctx, g)
	}
	if err != nil && (mu.step == "start" || mu.step == "install hb") {
		m.distrust(ctx, mu, drv, *from)
	}
	return err
}

// create makes and starts a machine, from a template where there is one.
func (m *Manager) create(ctx context.Context, mu *mutation, drv vm.Driver, from *start) error {
	mu.prepared = from.template != ""
	return m.launch(ctx, mu, drv, func(ctx context.Context, spec vm.Spec) (vm.Machine, error) {
		spec.Base, spec.Template = from.base, from.template
		machine, err := drv.Create(ctx, spec)
		if errors.Is(err, vm.ErrNoTemplate) {
			mu.note("the system that was kept is no longer there; starting from the base")
			m.forgetTemplate(from.template)
			mu.prepared, from.template, spec.Template = false, "", ""
			machine, err = drv.Create(ctx, spec)
		}
		return machine, err
	})
}

// launch has a machine made and starts it. The record is on disk before the
// machine exists.
func (m *Manager) launch(ctx context.Context, mu *mutation, drv vm.Driver, make func(context.Context, vm.Spec) (vm.Machine, error)) error {
	taken := map[int]bool{}
	for range portAttempts {
		if err := m.record(ctx, mu, taken); err != nil {
			return err
		}
		if err := mu.enter(ctx, "create"); err != nil {
			return err
		}
		machine, err := make(ctx, vm.Spec{
			Name: mu.rec.Name, OwnerID: mu.rec.OwnerID, Workload: workload(mu.rec.OwnerID),
			CPUs: mu.rec.Sizes.CPUs, MemoryMiB: mu.rec.Sizes.MemoryMiB,
			SystemGiB: mu.rec.Sizes.OverlayGiB, StorageGiB: mu.rec.Sizes.StorageGiB,
			HostPort: mu.rec.HostPort, GuestPort: wire.DoorPort,
		})
		if err == nil {
			mu.rec.Isolation = string(machine.Isolation)
			if err := mu.enter(ctx, "start"); err != nil {
				return err
			}
			err = drv.Start(ctx, mu.rec.Name)
		}
		if !errors.Is(err, vm.ErrPortTaken) {
			return err
		}
		// Somebody bound the port between our check and the engine's use.
		mu.note(fmt.Sprintf("port %d was taken meanwhile, trying another", mu.rec.HostPort))
		taken[mu.rec.HostPort] = true
		if err := drv.Delete(ctx, mu.rec.Name, mu.rec.OwnerID); err != nil && !errors.Is(err, vm.ErrNotFound) {
			return err
		}
	}
	return fmt.Errorf("%d ports were taken one after the other: %w", portAttempts, vm.ErrPortTaken)
}

// record writes the owner id, with a port if the box is to be exposed.
func (m *Manager) record(ctx context.Context, mu *mutation, taken map[int]bool) error {
	if err := mu.enter(ctx, "record"); err != nil {
		return err
	}
	if !m.config.ExposeExecutor || !m.config.InstallExecutor {
		return nil
	}
	return m.reservePort(ctx, &mu.rec, taken)
}

// rollback removes the machine that this call made, unless it is to be kept.
func (m *Manager) rollback(ctx context.Context, mu *mutation, drv vm.Driver, keep bool, cause error) error {
	mu.log.line("error %v", cause)
	if keep && m.isThere(ctx, drv, mu.rec) {
		mu.warn("the machine was kept: `box enter " + mu.rec.Name + "` looks at it, `box rm " + mu.rec.Name + "` removes it")
		return cause
	}
	failed := mu.step
	mu.m.opts.Report.Step("clean up")
	err := m.dispose(ctx, drv, mu.rec)
	if errors.Is(err, vm.ErrNotOwner) && errors.Is(cause, vm.ErrExists) {
		// The name was lost to a foreign machine before anything of ours was
		// made, and that machine is not ours to touch.
		err = m.registry.remove(mu.rec.Name)
	}
	mu.step = failed
	return errors.Join(cause, err)
}

// isThere reports whether the machine of a record may be there. One that was
// never made, or lost its name to a foreign one, leaves nothing to look at.
func (m *Manager) isThere(ctx context.Context, drv vm.Driver, rec Record) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.opts.Deadlines.Cleanup)
	defer cancel()
	machine, err := drv.Inspect(ctx, rec.Name)
	if err != nil {
		return !errors.Is(err, vm.ErrNotFound)
	}
	return machine.OwnerID == rec.OwnerID
}

// bringUp takes a machine with hb to a healthy box.
func (m *Manager) bringUp(ctx context.Context, mu *mutation, drv vm.Driver, g guest, from start) (wire.Report, error) {
	if err := m.provision(ctx, mu, g, false); err != nil {
		return wire.Report{}, err
	}
	if err := m.keepTemplate(ctx, mu, drv, from); err != nil {
		return wire.Report{}, err
	}
	return m.finish(ctx, mu, drv, g)
}

// finish takes a provisioned box to health.
func (m *Manager) finish(ctx context.Context, mu *mutation, drv vm.Driver, g guest) (wire.Report, error) {
	if err := mu.enter(ctx, "start Executor"); err != nil {
		return wire.Report{}, err
	}
	// Both take seconds of one processor. The tools need nothing of Executor.
	var tools []wire.Check
	var checking sync.WaitGroup
	checkCtx, cancel := context.WithCancel(ctx)
	defer checking.Wait()
	defer cancel()
	checking.Go(func() { tools = m.guestChecks(checkCtx, g, wire.DoctorTools) })
	phase, err := g.ready(ctx)
	if err != nil {
		return wire.Report{}, err
	}
	checking.Wait()
	if err := m.wireMCP(ctx, mu, g, phase); err != nil {
		return wire.Report{}, err
	}
	if err := mu.enter(ctx, "doctor"); err != nil {
		return wire.Report{}, err
	}
	return m.mustBeHealthy(ctx, mu, drv, tools)
}

// mustBeHealthy runs the doctor, but for its checks of the tools, which were
// just made, and turns a fault into ErrUnhealthy.
func (m *Manager) mustBeHealthy(ctx context.Context, mu *mutation, drv vm.Driver, tools []wire.Check) (wire.Report, error) {
	report, machine, err := m.examine(ctx, drv, mu.rec, wire.DoctorRest, tools)
	if err != nil {
		return report, err
	}
	// Some engines know only of a running machine how strong its isolation is.
	mu.rec.Isolation = string(machine.Isolation)
	for _, c := range report.Checks {
		mu.log.line("doctor %-5s %s: %s (%s)", c.Status, c.ID, c.Summary, c.Evidence)
	}
	if !report.Healthy {
		return report, ErrUnhealthy
	}
	return report, nil
}

// provision has hb install or refresh the tools.
func (m *Manager) provision(ctx context.Context, mu *mutation, g guest, refresh bool) error {
	if err := mu.enter(ctx, "provision"); err != nil {
		return err
	}
	req, err := m.provisionRequest(mu.rec, refresh, mu.pins)
	if err != nil {
		return err
	}
	req.Prepared = mu.prepared && !refresh
	ctx, cancel := context.WithTimeoutCause(ctx, m.opts.Deadlines.guest(60*time.Minute), errors.New("provisioning took more than an hour"))
	defer cancel()
	err = g.provision(ctx, req, mu)
	mu.prepared = mu.prepared || err == nil // once more is not to look at the tools again
	return err
}

// pausedPhase is hb's word for an Executor that is deliberately down.
const pausedPhase = "paused"

// wireMCP registers the endpoint with the tools, when the configuration asks
// for it and Executor is not deliberately down. phase is what ready said of it.
func (m *Manager) wireMCP(ctx context.Context, mu *mutation, g guest, phase string) error {
	if !m.config.WireMCP || !m.config.InstallExecutor {
		return nil
	}
	if phase == pausedPhase {
		mu.note("Executor is deliberately down; `hb up` in the box wires it")
		return nil
	}
	if err := mu.enter(ctx, "wire MCP"); err != nil {
		return err
	}
	return g.run(ctx, "wire-mcp")
}
