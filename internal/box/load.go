package box

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/backup"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// LoadOptions are the choices of one `load`.
type LoadOptions struct {
	Passphrase    backup.Passphrase
	Pinned        bool // install the versions that the manifest names
	FreshLogins   bool // leave out the files that log tools in
	KeepOnFailure bool
}

// Load makes a new box with the state of an archive. The whole archive is
// verified before anything is made. Until the state is in, a failure removes
// what this very call made; from then on the box stays, and ErrUnhealthy says
// that it needs a repair.
func (m *Manager) Load(ctx context.Context, path, name string, o LoadOptions) (report wire.Report, err error) {
	mu, err := m.begin(name, "load")
	if err != nil {
		return wire.Report{}, err
	}
	mu.rec.Name = name
	defer func() { err = mu.end(err) }()
	if old, err := m.registry.get(name); err == nil && old.Phase != Creating {
		return wire.Report{}, fmt.Errorf("box %s %w", name, ErrExists) // no need to read the archive for that
	}
	if err := mu.enter(ctx, "verify the archive"); err != nil {
		return wire.Report{}, err
	}
	a, found, err := m.openArchive(ctx, path, o.Passphrase)
	if err != nil {
		return wire.Report{}, err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	if o.Pinned {
		if mu.pins, err = pinsOf(found.Summary); err != nil {
			return wire.Report{}, err
		}
	}
	if err := m.clearTheWay(ctx, mu); err != nil {
		return wire.Report{}, err
	}
	loaded := origin(found.Summary, o)
	loaded.Name = name
	m.describe(mu, found, loaded)
	drv, from, err := m.prepare(ctx, mu, false)
	if err != nil {
		return wire.Report{}, err
	}
	mu.rec = m.newRecord(name, loaded.Lineage, drv, from.place, from.base)
	mu.rec.Loaded, mu.rec.Logins = loaded.Loaded, loaded.Logins
	if mu.rec.Source, err = filepath.Abs(path); err != nil {
		return wire.Report{}, err
	}
	g := m.guest(drv, name, mu.log)
	if err := m.fill(ctx, mu, drv, from, g, func() error { return m.restoreArchive(ctx, mu, g, a, found, o) }); err != nil {
		return wire.Report{}, m.rollback(ctx, mu, drv, o.KeepOnFailure, err)
	}
	mu.ready()
	// From here on the box stays, and its record is the first to know.
	if err := mu.durable(ctx, "ready", func() error { return m.registry.put(mu.rec) }); err != nil {
		return wire.Report{}, m.rollback(ctx, mu, drv, o.KeepOnFailure, err)
	}
	report, err = m.refresh(ctx, mu, drv, g)
	if err != nil {
		mu.warn("the state is in " + name + "; what is left to do, `box repair " + name + "` does")
		if !errors.Is(err, ErrUnhealthy) {
			err = fmt.Errorf("%w: %w", ErrUnhealthy, err)
		}
		return report, err
	}
	return report, mu.complete(ctx)
}

// origin is what a record says of where a loaded state comes from.
func origin(s archive.Summary, o LoadOptions) Record {
	if s.Legacy || o.FreshLogins || len(s.Manifest.Logins) == 0 {
		// No login is shared with anybody: a lineage of its own begins.
		return Record{Lineage: newID()}
	}
	return Record{Loaded: true, Lineage: s.Manifest.Lineage, Logins: s.Manifest.Logins}
}

// describe tells what is about to be loaded and what it may burn.
func (m *Manager) describe(mu *mutation, found backup.Report, loaded Record) {
	if found.Legacy {
		mu.note("a legacy archive, of the shell tool: it has no manifest")
	} else {
		mu.note(fmt.Sprintf("state of %s, %s, %d entries", found.Manifest.Box, found.Manifest.Time.Format(time.RFC3339), found.Entries))
	}
	if text := m.sharedLogins(loaded); text != "" {
		mu.warn(text + "; --fresh-logins leaves them out")
	}
}

// sharedLogins names the logins of a box that other boxes of this host hold
// copies of, and those boxes; "" when there are none.
func (m *Manager) sharedLogins(rec Record) string {
	names, err := m.registry.names()
	if err != nil {
		return "" // the caller's own work will tell
	}
	var twins, logins []string
	for _, name := range names {
		other, err := m.registry.get(name)
		if err != nil || name == rec.Name || other.Lineage != rec.Lineage {
			continue
		}
		if shared := commonLogins(rec, other); len(shared) > 0 {
			twins = append(twins, name)
			logins = append(logins, shared...)
		}
	}
	if len(twins) == 0 {
		return ""
	}
	slices.Sort(logins)
	return fmt.Sprintf("the logins of %s are the same as in %s, and a refresh token works once: whichever box uses it second must log in again",
		strings.Join(slices.Compact(logins), ", "), strings.Join(twins, ", "))
}

// commonLogins: the origin of a lineage has all that its archives hold.
func commonLogins(a, b Record) []string {
	switch {
	case !a.Loaded:
		return b.Logins
	case !b.Loaded:
		return a.Logins
	}
	return slices.DeleteFunc(slices.Clone(a.Logins), func(login string) bool { return !slices.Contains(b.Logins, login) })
}

// lineageCheck tells of boxes that hold copies of the same logins.
func (m *Manager) lineageCheck(rec Record) []wire.Check {
	text := m.sharedLogins(rec)
	if text == "" {
		return nil
	}
	return []wire.Check{{ID: "state.lineage", Status: wire.Info, Summary: text, Evidence: "lineage " + rec.Lineage}}
}

// semver is what --pinned accepts: a version out of an archive becomes part of
// an installer's command line.
var semver = regexp.MustCompile(`^[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}(-[0-9A-Za-z]+(\.[0-9A-Za-z]+)*)?$`)

// pinsOf returns the versions that an archive's manifest names.
func pinsOf(s archive.Summary) (*wire.Pins, error) {
	if s.Legacy {
		return nil, errors.New("a legacy archive does not say which versions it was made with, so --pinned has nothing to install")
	}
	pins := &wire.Pins{}
	for name, pin := range map[string]*string{"claude": &pins.Claude, "codex": &pins.Codex, "executor": &pins.Executor, "hermes": &pins.Hermes} {
		i := slices.IndexFunc(s.Manifest.Tools, func(t archive.Tool) bool { return t.Name == name })
		if i < 0 {
			continue
		}
		version := s.Manifest.Tools[i].Version
		if !semver.MatchString(version) {
			return nil, fmt.Errorf("the archive's version %q of %s is none that can be installed", version, name)
		}
		*pin = version
	}
	return pins, nil
}

// fill makes the box and has the state put in.
func (m *Manager) fill(ctx context.Context, mu *mutation, drv vm.Driver, from start, g guest, restore func() error) error {
	if err := m.boot(ctx, mu, drv, g, &from); err != nil {
		return err
	}
	if err := g.run(ctx, "await-state"); err != nil {
		return err
	}
	// A prepared system has the agent already, and the rest comes with the state
	// or after it.
	if !mu.prepared {
		if err := m.provision(ctx, mu, g, false); err != nil {
			return err
		}
		if err := m.keepTemplate(ctx, mu, drv, from); err != nil {
			return err
		}
	}
	if err := mu.enter(ctx, "restore"); err != nil {
		return err
	}
	if err := restore(); err != nil {
		return err
	}
	if err := g.run(ctx, "await-state", "--done"); err != nil {
		return err
	}
	// An engine's word that it was done would leave the box waiting for ever.
	h, err := g.hello(ctx)
	if err == nil && h.Awaits {
		err = errors.New("the state is in, and the box still waits for it")
	}
	return err
}

// restoreArchive puts the state of a verified archive in.
func (m *Manager) restoreArchive(ctx context.Context, mu *mutation, g guest, a *backup.Archive, found backup.Report, o LoadOptions) error {
	restored, err := m.restore(ctx, mu, g, a, found, o)
	if err != nil {
		return err
	}
	if err := sameState(restored, found); err != nil {
		return err
	}
	mu.leftOut(restored)
	return nil
}

// leftOut tells of what did not travel.
func (mu *mutation) leftOut(restored wire.StateResult) {
	for _, path := range restored.Dropped {
		mu.note("left out: " + wire.Printable(path))
	}
	if n := restored.SkippedXattrs; n > 0 {
		mu.warn(lostXattrs(n, "the box"))
	}
}

// restore streams a verified archive into the box's empty state. The host's
// own reading must agree with the first one, to the last byte.
func (m *Manager) restore(ctx context.Context, mu *mutation, g guest, a *backup.Archive, found backup.Report, o LoadOptions) (wire.StateResult, error) {
	return g.unpack(ctx, mu, found.Bytes, o.FreshLogins, mu.stateEvent(found.Bytes), func(ctx context.Context, w io.Writer) error {
		return a.Stream(ctx, w, m.opts.Report.Progress)
	})
}

// unpack fills a new box's empty state, of that size, with the stream that send
// writes.
func (g guest) unpack(ctx context.Context, mu *mutation, size int64, freshLogins bool, on func(wire.Event), send func(context.Context, io.Writer) error) (wire.StateResult, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	pr, pw := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		err := send(ctx, pw)
		if err != nil {
			cancel(err) // the box must not take the end of a bad stream for its end
		}
		_ = pw.CloseWithError(err)
		sent <- err
	}()
	args := []string{"unpack", "--bytes", strconv.FormatInt(size, 10)}
	if freshLogins {
		args = append(args, "--fresh-logins")
	}
	ev, err := g.perform(ctx, mu, pr, nil, on, args...)
	if err != nil {
		cancel(err) // a sender may wait for something else than the pipe
	}
	_ = pr.Close() // frees a stream that nobody reads any more
	sendErr := <-sent
	switch {
	case err != nil && sendErr != nil && errors.Is(context.Cause(ctx), sendErr): // it was the first
		return wire.StateResult{}, sendErr
	case err != nil:
		return wire.StateResult{}, err
	case sendErr != nil:
		return wire.StateResult{}, sendErr
	case ev.State == nil:
		return wire.StateResult{}, errors.New("hb unpack did not say what it unpacked")
	}
	return *ev.State, nil
}

// refresh brings our own files in a box with a restored state up to date,
// rewires it and examines it.
func (m *Manager) refresh(ctx context.Context, mu *mutation, drv vm.Driver, g guest) (wire.Report, error) {
	if err := m.provision(ctx, mu, g, false); err != nil {
		return wire.Report{}, err
	}
	return m.finish(ctx, mu, drv, g)
}
