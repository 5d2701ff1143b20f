package box

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/backup"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// SaveOptions are the choices of one `save`.
type SaveOptions struct {
	Path       string // "": a new name in the backups directory
	Passphrase backup.Passphrase
	Keep       int // prune to so many verified archives; 0: none is pruned
}

// Saved is a new archive.
type Saved struct {
	Path   string
	Report backup.Report
	Pause  time.Duration // how long Executor was held
	Pruned []string
}

// Save writes an encrypted archive of a box's state. A stopped box is started
// for it and stopped again.
func (m *Manager) Save(ctx context.Context, name string, o SaveOptions) (saved Saved, err error) {
	mu, err := m.beginExisting(name, "save")
	if err != nil {
		return Saved{}, err
	}
	defer func() { err = mu.end(err) }()
	path, err := m.destination(name, o.Path)
	if err != nil {
		return Saved{}, err
	}
	drv, stop, err := m.awake(ctx, mu)
	if err != nil {
		return Saved{}, err
	}
	saved, err = m.saveAwake(ctx, mu, m.guest(drv, name, mu.log), path, o)
	if err := errors.Join(err, stop()); err != nil {
		return saved, err
	}
	return saved, mu.complete(ctx)
}

// saveAwake saves a running box.
func (m *Manager) saveAwake(ctx context.Context, mu *mutation, g guest, path string, o SaveOptions) (saved Saved, err error) {
	if err := mu.enter(ctx, "look at the state"); err != nil {
		return Saved{}, err
	}
	plan, err := g.plan(ctx)
	if err != nil {
		return Saved{}, err
	}
	if err := mu.checkRoom(filepath.Dir(path), plan.Bytes); err != nil {
		return Saved{}, err
	}
	if mu.rec.Lineage == "" {
		mu.rec.Lineage = newID() // a box from before there were archives
	}
	if err := mu.enter(ctx, "save"); err != nil {
		return Saved{}, err
	}
	saved, err = m.write(ctx, mu, g, path, plan, o)
	if err != nil {
		return Saved{}, err
	}
	mu.rec.LastArchive = path
	if mu.rec.Loaded { // it may have logged in to more since then
		mu.rec.Logins = append(mu.rec.Logins, saved.Report.Manifest.Logins...)
		slices.Sort(mu.rec.Logins)
		mu.rec.Logins = slices.Compact(mu.rec.Logins)
	}
	if err := m.home.noteVerified(path, saved.Report, m.opts.Now()); err != nil {
		mu.warn("remember that the archive was verified: " + err.Error())
	}
	if o.Keep > 0 {
		if saved.Pruned, err = m.prune(path, mu.rec.Name, mu.rec.Lineage, o.Keep); err != nil {
			// The archive is there; that is what counts.
			mu.warn("prune older archives: " + err.Error())
		}
	}
	return saved, nil
}

// destination returns the absolute path of the new archive, which is free.
func (m *Manager) destination(name, path string) (string, error) {
	if path == "" {
		if err := os.MkdirAll(m.home.Backups(), 0o700); err != nil {
			return "", err
		}
		path = filepath.Join(m.home.Backups(), backupName(name, m.opts.Now()))
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if info, err := os.Stat(filepath.Dir(path)); err != nil {
		return "", err
	} else if !info.IsDir() {
		return "", fmt.Errorf("%s is not a directory", filepath.Dir(path))
	}
	return path, backup.Free(path)
}

// awake makes sure that the box runs. stop stops it again if it was stopped.
func (m *Manager) awake(ctx context.Context, mu *mutation) (drv vm.Driver, stop func() error, err error) {
	if mu.rec.Phase != Ready {
		return nil, nil, &GuestError{Text: "the box was never finished", Fix: finisher(mu.rec)}
	}
	drv, err = m.usable(ctx, mu.rec)
	if err != nil {
		return nil, nil, err
	}
	machine, err := drv.Inspect(ctx, mu.rec.Name)
	if err != nil {
		return nil, nil, err
	}
	stop = func() error { return nil }
	// One that a killed save or fork has started is to be stopped, too. One of
	// which the engine does not say whether it runs may be in use.
	mu.stop = machine.State == vm.Stopped || mu.earlier != nil && mu.earlier.Stop
	if mu.stop {
		if err := mu.enter(ctx, "start"); err != nil {
			return nil, nil, err
		}
		stop = func() error {
			// Whatever ended the command: it was stopped before.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.opts.Deadlines.Cleanup)
			defer cancel()
			mu.m.opts.Report.Step("stop")
			return m.stopMachine(ctx, mu, drv)
		}
	}
	if err := m.startMachine(ctx, drv, mu.rec, mu.log); err != nil {
		return nil, nil, errors.Join(err, stop())
	}
	return drv, stop, nil
}

// plan asks what would travel.
func (g guest) plan(ctx context.Context) (wire.StatePlan, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, g.limits.guest(30*time.Minute), errors.New("looking at the state took more than half an hour"))
	defer cancel()
	_, out, err := g.call(ctx, nil, "pack", "--plan")
	if err != nil {
		return wire.StatePlan{}, err
	}
	var plan wire.StatePlan
	if err := wire.DecodeStrict(out, &plan); err != nil {
		return wire.StatePlan{}, fmt.Errorf("hb pack: %w", err)
	}
	if plan.Protocol != wire.Protocol || plan.Bytes < 0 || plan.Entries < 0 {
		return wire.StatePlan{}, errors.New("hb pack: the plan is not one of this version")
	}
	return plan, nil
}

// leastRatio is the compression that a preflight still believes in. Source
// code is packed to a quarter.
const leastRatio = 16

// checkRoom refuses what certainly does not fit and warns of what may not.
func (mu *mutation) checkRoom(dir string, size int64) error {
	free, err := backup.FreeSpace(dir)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("%s has %d MiB free and the state is %d MiB large", dir, free>>20, size>>20)
	if free < size/leastRatio {
		return fmt.Errorf("%s: %w", text, syscall.ENOSPC)
	}
	if free < size {
		mu.warn(text + " before compression")
	}
	return nil
}

// write streams the box's state into a verified archive.
func (m *Manager) write(ctx context.Context, mu *mutation, g guest, path string, plan wire.StatePlan, o SaveOptions) (Saved, error) {
	var packed wire.StateResult
	report, err := backup.Save(ctx, backup.SaveOptions{
		Path: path, Box: mu.rec.Name, Passphrase: o.Passphrase, Limits: archive.DefaultLimits(),
		Source: func(ctx context.Context, w io.Writer) (err error) {
			kept := &failure{w: w}
			packed, err = g.pack(ctx, mu, kept, plan.Bytes)
			if kept.err != nil {
				return kept.err // a full disk, not the broken pipe that follows
			}
			if err == nil {
				mu.subStep("save: verify")
			}
			return err
		},
		Accept:   func(r backup.Report) error { return sameState(packed, r) },
		Verified: m.opts.Report.Progress,
		Publish: func(publish func() error) error {
			return mu.durable(ctx, "publish", publish)
		},
	})
	if err != nil {
		return Saved{}, err
	}
	return Saved{Path: path, Report: report, Pause: time.Duration(packed.PauseMS) * time.Millisecond}, nil
}

// pack writes the state of a box, of that size, as a stream of the lineage that
// the mutation's record has.
func (g guest) pack(ctx context.Context, mu *mutation, w io.Writer, size int64) (wire.StateResult, error) {
	request, err := json.Marshal(wire.PackRequest{Protocol: wire.Protocol, Box: g.name, Time: mu.m.opts.Now().UTC(), Lineage: mu.rec.Lineage})
	if err != nil {
		return wire.StateResult{}, err
	}
	ev, err := g.perform(ctx, mu, bytes.NewReader(request), w, mu.stateEvent(size), "pack")
	if err == nil && ev.State == nil {
		err = errors.New("hb pack did not say what it packed")
	}
	if err != nil {
		return wire.StateResult{}, err
	}
	return *ev.State, nil
}

// failure keeps the first error of a writer.
type failure struct {
	w   io.Writer
	err error
}

func (f *failure) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err != nil && f.err == nil {
		f.err = err
	}
	return n, err
}

// sameState compares what a guest says that it packed or unpacked with what
// the host has read.
func sameState(guest wire.StateResult, host backup.Report) error {
	if !guest.Same(wire.StateResult{Stream: host.Stream, Entries: host.Entries, Bytes: host.Bytes, Digest: host.Digest}) {
		return fmt.Errorf("the box and this host do not agree on the state: %d entries with %d bytes there, %d with %d here, or other content",
			guest.Entries, guest.Bytes, host.Entries, host.Bytes)
	}
	return nil
}

// Explain tells what an archive of a box would hold.
func (m *Manager) Explain(ctx context.Context, name string) (plan wire.StatePlan, err error) {
	mu, err := m.beginExisting(name, "save")
	if err != nil {
		return wire.StatePlan{}, err
	}
	defer func() { err = mu.end(err) }()
	drv, stop, err := m.awake(ctx, mu)
	if err != nil {
		return wire.StatePlan{}, err
	}
	plan, err = m.guest(drv, name, mu.log).plan(ctx)
	if err := errors.Join(err, stop()); err != nil {
		return wire.StatePlan{}, err
	}
	return plan, mu.complete(ctx)
}
