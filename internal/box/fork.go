package box

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sync"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// ForkOptions are the choices of one `fork`.
type ForkOptions struct {
	FreshLogins   bool // leave out the files that log tools in
	KeepOnFailure bool
}

// Fork makes a new box with the state of another one, which may be running or
// stopped and stays as it is. Drivers that can clone machines copy nothing;
// elsewhere, and for fresh logins, the state is streamed from box to box. When
// it fails, the machine that this very call made is removed.
func (m *Manager) Fork(ctx context.Context, source, name string, o ForkOptions) (report wire.Report, err error) {
	if err := CheckName(source); err != nil {
		return wire.Report{}, err
	}
	if _, err := m.registry.get(source); err != nil {
		return wire.Report{}, err
	}
	mu, err := m.begin(name, "fork")
	if err != nil {
		return wire.Report{}, err
	}
	mu.rec.Name = name
	defer func() { err = mu.end(err) }()
	if old, err := m.registry.get(name); err == nil && old.Phase != Creating {
		return wire.Report{}, fmt.Errorf("box %s %w", name, ErrExists)
	}
	from, err := m.beginExisting(source, "fork")
	if err != nil {
		return wire.Report{}, err
	}
	var once sync.Once
	release := func(err error) {
		once.Do(func() {
			from.step = "" // it is mu that names the step
			_ = from.end(err)
		})
	}
	defer func() { release(err) }()
	if from.rec.Phase != Ready {
		return wire.Report{}, &GuestError{Text: "the box " + source + " was never finished", Fix: finisher(from.rec)}
	}
	drv, err := m.usable(ctx, from.rec)
	if err != nil {
		return wire.Report{}, err
	}
	if err := mu.enter(ctx, "check"); err != nil {
		return wire.Report{}, err
	}
	if err := m.clearTheWay(ctx, mu); err != nil {
		return wire.Report{}, err
	}
	if err := absent(ctx, drv, name); err != nil {
		return wire.Report{}, err
	}
	if from.rec.Lineage == "" { // a box from before there were archives
		from.rec.Lineage = newID()
		if err := m.registry.put(from.rec); err != nil {
			return wire.Report{}, err
		}
	}
	if mu.rec, err = m.forkRecord(ctx, from.rec, name, drv); err != nil {
		return wire.Report{}, err
	}
	if err := m.copyBox(ctx, mu, from, drv, o, func() { release(nil) }); err != nil {
		return wire.Report{}, m.rollback(ctx, mu, drv, o.KeepOnFailure, err)
	}
	report, err = m.finish(ctx, mu, drv, m.guest(drv, name, mu.log))
	if err != nil {
		return report, m.rollback(ctx, mu, drv, o.KeepOnFailure, err)
	}
	mu.ready()
	if err := mu.complete(ctx); err != nil {
		return report, m.rollback(ctx, mu, drv, o.KeepOnFailure, err)
	}
	return report, nil
}

// forkRecord begins the record of a fork.
func (m *Manager) forkRecord(ctx context.Context, source Record, name string, drv vm.Driver) (Record, error) {
	place := source.Place // in which the source was just found
	var err error
	if place == "" {
		place, err = placeOf(ctx, drv)
	}
	rec := m.newRecord(name, source.Lineage, drv, place, vm.Base{Digest: source.BaseDigest})
	rec.BaseImage, rec.Source = source.BaseImage, source.Name
	return rec, err
}

// copyBox makes a machine with the source's state, provisioned and with what
// its record must say of its logins. It calls release as soon as the source is
// no longer needed.
func (m *Manager) copyBox(ctx context.Context, mu, from *mutation, drv vm.Driver, o ForkOptions, release func()) error {
	g := m.guest(drv, mu.rec.Name, mu.log)
	err := m.clone(ctx, mu, from, drv, o)
	switch {
	case errors.Is(err, vm.ErrCannotClone):
		mu.note("the state is streamed from box to box: " + err.Error())
		if err = m.streamBox(ctx, mu, from, drv, o); err == nil {
			release()
		}
	case err == nil:
		if disks := from.rec.Sizes; disks != (Sizes{}) { // copied as they were
			mu.rec.Sizes.OverlayGiB, mu.rec.Sizes.StorageGiB = disks.OverlayGiB, disks.StorageGiB
		}
		release()
		err = m.settleClone(ctx, mu, g)
	}
	if err != nil {
		return err
	}
	logins, err := g.logins(ctx)
	if err != nil {
		return err
	}
	mu.rec.Loaded, mu.rec.Logins = true, logins
	if len(logins) == 0 { // no login is shared with anybody
		mu.rec.Loaded, mu.rec.Lineage = false, newID()
	}
	if text := m.sharedLogins(mu.rec); text != "" {
		mu.warn(text + "; --fresh-logins leaves them out")
	}
	return nil
}

// clone has the driver copy the source's disks, which show one moment of a
// guest that was brought to rest for it.
func (m *Manager) clone(ctx context.Context, mu, from *mutation, drv vm.Driver, o ForkOptions) error {
	cloner, ok := power[vm.Cloner](drv)
	if !ok {
		return fmt.Errorf("the %s driver copies no machines: %w", drv.Name(), vm.ErrCannotClone)
	}
	if o.FreshLogins {
		return fmt.Errorf("without the logins: %w", vm.ErrCannotClone)
	}
	machine, err := drv.Inspect(ctx, from.rec.Name)
	if err != nil {
		return err
	}
	mu.prepared = true // as far as the copy knows itself what was verified in it
	return m.launch(ctx, mu, drv, func(ctx context.Context, spec vm.Spec) (copied vm.Machine, err error) {
		work := func() error {
			limited, cancel := within(ctx, m.opts.Deadlines.Engine)
			defer cancel()
			copied, err = cloner.Clone(limited, from.rec.Name, from.rec.OwnerID, spec)
			return err
		}
		if machine.State != vm.Running {
			return copied, work()
		}
		return copied, m.guest(drv, from.rec.Name, mu.log).frozen(ctx, mu, work)
	})
}

// freezeLimit is a little more than hb's own, and the time to write everything
// to the disks before.
const freezeLimit = 5 * time.Minute

// frozen does work while the guest writes nothing to its disks.
func (g guest) frozen(ctx context.Context, mu *mutation, work func() error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, g.limits.guest(freezeLimit), errors.New("the guest did not bring its disks to rest in time"))
	defer cancel()
	release, releasing := io.Pipe()
	var workErr error
	done := false
	_, err := g.perform(ctx, mu, release, nil, func(ev wire.Event) {
		if ev.Type == wire.EventStep && ev.Step == wire.FrozenStep && !done {
			done = true
			workErr = work()
			_ = releasing.Close()
		}
	}, "freeze")
	_ = release.Close()
	switch {
	case workErr != nil:
		return workErr
	case err != nil:
		return err
	case !done:
		return errors.New("hb freeze did not say that the disks are at rest")
	}
	return nil
}

// settleClone makes a started copy the box that it is to be.
func (m *Manager) settleClone(ctx context.Context, mu *mutation, g guest) error {
	if err := mu.enter(ctx, "install hb"); err != nil {
		return err
	}
	if err := m.installHB(ctx, g); err != nil {
		return err
	}
	return m.provision(ctx, mu, g, false)
}

// streamBox makes a box and streams the source's state into it.
func (m *Manager) streamBox(ctx context.Context, mu, from *mutation, drv vm.Driver, o ForkOptions) error {
	if err := mu.enter(ctx, "base"); err != nil {
		return err
	}
	base, err := m.opts.Base(ctx, m.config.BaseImage, mu.note)
	if err != nil {
		return err
	}
	begin, err := m.startFrom(mu, drv, base, false)
	if err != nil {
		return err
	}
	mu.rec.BaseImage, mu.rec.BaseDigest = m.config.BaseImage, base.Digest
	_, stop, err := m.awake(ctx, from)
	if err != nil {
		return err
	}
	g := m.guest(drv, mu.rec.Name, mu.log)
	err = m.fill(ctx, mu, drv, begin, g, func() error {
		return m.pipeState(ctx, mu, m.guest(drv, from.rec.Name, mu.log), g, o)
	})
	if err := errors.Join(err, stop()); err != nil {
		return err
	}
	if err := from.complete(ctx); err != nil {
		return err
	}
	return m.provision(ctx, mu, g, false)
}

// pipeState streams the state of one box into another. Both count and digest
// what has passed, and must agree.
func (m *Manager) pipeState(ctx context.Context, mu *mutation, source, target guest, o ForkOptions) error {
	plan, err := source.plan(ctx)
	if err != nil {
		return err
	}
	var packed wire.StateResult
	unpacked, err := target.unpack(ctx, mu, plan.Bytes, o.FreshLogins, func(wire.Event) {}, func(ctx context.Context, w io.Writer) (err error) {
		packed, err = source.pack(ctx, mu, w, plan.Bytes)
		return err
	})
	if err != nil {
		return err
	}
	if !packed.Same(unpacked) {
		return fmt.Errorf("the boxes do not agree on the state: %d entries with %d bytes in %s, %d with %d in %s, or other content",
			packed.Entries, packed.Bytes, source.name, unpacked.Entries, unpacked.Bytes, target.name)
	}
	mu.leftOut(unpacked)
	return nil
}

var loginName = regexp.MustCompile(`^[a-z]{1,20}$`)

// logins names the tools that are logged in by files of the box's state.
func (g guest) logins(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, g.limits.guest(time.Minute))
	defer cancel()
	_, out, err := g.call(ctx, nil, "logins")
	if err != nil {
		return nil, err
	}
	var names []string
	if err := wire.DecodeStrict(out, &names); err != nil {
		return nil, fmt.Errorf("hb logins: %w", err)
	}
	for _, name := range names {
		if !loginName.MatchString(name) {
			return nil, fmt.Errorf("hb logins: %q is no tool", name)
		}
	}
	return names, nil
}
