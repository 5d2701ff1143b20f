package box

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// A box of a driver that is a vm.Cacher starts from a template where there is
// one: the system of an earlier box, after its first provisioning and before
// anything of its own was in it but the names that a copy replaces. A
// template's id covers everything that went into it, so that it is never asked
// whether it fits.

// templateLife is how long "the latest" versions may be as old as a template.
const templateLife = 7 * 24 * time.Hour

// templatesKept bounds how many templates of this home a driver keeps.
const templatesKept = 4

// start is what a new machine's system starts from.
type start struct {
	base     vm.Base
	place    string // see Placer
	template string // "" starts from the base
	keep     string // the id under which the provisioned system is to be kept; "": it is not
	latest   bool   // versions that were asked for as the latest are part of it
}

// templateNote is what this home knows of a template that it has made.
type templateNote struct {
	Driver string    `json:"driver"`
	Base   string    `json:"base"`   // digest
	Image  string    `json:"image"`  // BASE_IMAGE
	Latest bool      `json:"latest"` // some versions were the latest ones
	Made   time.Time `json:"made"`   // UTC
	// Retired: no box starts from it any more. It is removed as soon as the
	// engine has no machine that stands on it.
	Retired bool `json:"retired,omitempty"`
}

func (n templateNote) expired(now time.Time) bool {
	age := now.Sub(n.Made)
	return n.Retired || n.Latest && (age > templateLife || age < -templateLife)
}

func (h Home) templates() string             { return filepath.Join(h.Cache(), "templates") }
func (h Home) templateNote(id string) string { return filepath.Join(h.templates(), id+".json") }
func (h Home) templateLock(id string) string { return filepath.Join(h.templates(), id+".lock") }

// noteOf returns fs.ErrNotExist for a template that this home has not made.
func (m *Manager) noteOf(id string) (templateNote, error) {
	data, err := os.ReadFile(m.home.templateNote(id))
	if err != nil {
		return templateNote{}, err
	}
	var n templateNote
	if err := json.Unmarshal(data, &n); err != nil {
		return templateNote{}, fmt.Errorf("%s: %w", m.home.templateNote(id), err)
	}
	return n, nil
}

func (m *Manager) writeNote(id string, n templateNote) error {
	data, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return atomicfile.Write(m.home.templateNote(id), append(data, '\n'), 0o600)
}

// retire keeps boxes from starting from a template.
func (m *Manager) retire(id string) error {
	note, err := m.noteOf(id)
	if err != nil || note.Retired {
		return nil //nolint:nilerr // none starts from it: there is no note that could be read
	}
	note.Retired = true
	return m.writeNote(id, note)
}

// startFrom chooses what a new machine starts from.
func (m *Manager) startFrom(mu *mutation, drv vm.Driver, base vm.Base, fresh bool) (start, error) {
	if _, ok := power[vm.Cacher](drv); !ok || fresh {
		return start{base: base}, nil
	}
	id, latest, err := m.templateID(mu, drv, base)
	if err != nil {
		return start{}, err
	}
	from := start{base: base, keep: id, latest: latest}
	// Whatever is wrong with the note, a new template is made.
	if note, err := m.noteOf(id); err == nil && !note.expired(m.opts.Now()) {
		from.template = id
		mu.note("starting from the system of an earlier box, kept on " + note.Made.Format(time.DateTime))
	}
	return from, nil
}

// templateID is the digest of all that goes into a template, and whether that
// says "the latest" somewhere.
func (m *Manager) templateID(mu *mutation, drv vm.Driver, base vm.Base) (id string, latest bool, err error) {
	req, err := m.provisionRequest(Record{}, false, mu.pins)
	if err != nil {
		return "", false, err
	}
	binary, err := m.opts.HB()
	if err != nil {
		return "", false, err
	}
	hb := sha256.Sum256(binary)
	all, err := json.Marshal(struct {
		Form, Driver, Arch, Base, HB string
		SystemGiB                    int
		Request                      wire.ProvisionRequest
	}{"1", drv.Name(), runtime.GOARCH, base.Digest, hex.EncodeToString(hb[:]), m.config.OverlayGiB, req})
	if err != nil {
		return "", false, err
	}
	sum := sha256.Sum256(all)
	v := req.Versions
	latest = v.Claude == "" || v.Codex == "" || req.Executor && v.Executor == "" || req.Hermes && v.Hermes == ""
	return hex.EncodeToString(sum[:]), latest, nil
}

// keepTemplate keeps the system of a box that was just provisioned. That it
// cannot be kept is no reason to fail.
func (m *Manager) keepTemplate(ctx context.Context, mu *mutation, drv vm.Driver, from start) error {
	if from.keep == "" || from.template != "" {
		return nil
	}
	cacher, ok := power[vm.Cacher](drv)
	if !ok {
		return nil
	}
	release, err := m.lockTemplate(from.keep)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil // another new does it
	}
	if err != nil {
		return err
	}
	defer release()
	if note, err := m.noteOf(from.keep); err == nil && !note.expired(m.opts.Now()) {
		return nil // another new has done it
	}
	if err := mu.enter(ctx, "keep the system for the next box"); err != nil {
		return err
	}
	err = m.makeTemplate(ctx, mu, drv, cacher, from)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, errors.ErrUnsupported):
		return nil
	case err != nil:
		mu.warn("the system was not kept, so that the next box starts from the base again: " + wire.Printable(err.Error()))
	}
	// The machine may have been stopped and started for it.
	limited, cancel := m.supervisorLimit(ctx)
	defer cancel()
	return m.awaitSupervisor(limited, m.guest(drv, mu.rec.Name, mu.log))
}

func (m *Manager) lockTemplate(id string) (release func(), err error) {
	if err := os.MkdirAll(m.home.templates(), 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(m.home.templateLock(id), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

func (m *Manager) makeTemplate(ctx context.Context, mu *mutation, drv vm.Driver, cacher vm.Cacher, from start) error {
	if err := m.guest(drv, mu.rec.Name, mu.log).run(ctx, "sync"); err != nil {
		return err
	}
	// The note comes first: without a note nobody would remove the template.
	err := m.writeNote(from.keep, templateNote{
		Driver: drv.Name(), Base: from.base.Digest, Image: m.config.BaseImage, Latest: from.latest, Made: m.opts.Now().UTC(),
	})
	if err != nil {
		return err
	}
	limited, cancel := within(ctx, m.opts.Deadlines.Engine)
	defer cancel()
	if err := cacher.MakeTemplate(limited, mu.rec.Name, mu.rec.OwnerID, from.keep); err != nil {
		m.forgetTemplate(from.keep)
		return err
	}
	mu.kept = from.keep
	return m.boundTemplates(ctx, drv, cacher)
}

// forgetTemplate makes the next box start from the base.
func (m *Manager) forgetTemplate(id string) {
	_ = os.Remove(m.home.templateNote(id)) // a template that is missing is noticed again
}

// distrust retires the template that a failed box has made or was made from: the
// next box shall not fail for the same reason.
func (m *Manager) distrust(ctx context.Context, mu *mutation, drv vm.Driver, from start) {
	cacher, ok := power[vm.Cacher](drv)
	if !ok || ctx.Err() != nil || mu.kept == "" && from.template == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.Deadlines.Cleanup)
	defer cancel()
	if err := m.evict(ctx, cacher, CacheEntry{Cached: vm.Cached{ID: from.keep, Template: true}}); err != nil {
		mu.log.line("evict the template: %v", err)
	}
	mu.note("the next new starts from the base again")
}

// boundTemplates evicts the templates that are expired or too many.
func (m *Manager) boundTemplates(ctx context.Context, drv vm.Driver, cacher vm.Cacher) error {
	ctx, cancel := within(ctx, m.opts.Deadlines.Engine)
	defer cancel()
	kept, err := m.cachedBy(ctx, drv, cacher)
	if err != nil {
		return err
	}
	slices.SortFunc(kept, func(a, b CacheEntry) int { return b.Made.Compare(a.Made) })
	live := 0
	for _, e := range kept {
		if !e.Template || e.Foreign {
			continue
		}
		if live++; live <= templatesKept && !e.Expired {
			continue
		}
		if err := m.evict(ctx, cacher, e); err != nil && !errors.Is(err, vm.ErrInUse) {
			return err
		}
	}
	return nil
}

// power returns the optional power of a driver, without deadlines of its own.
func power[T any](drv vm.Driver) (T, bool) {
	if b, ok := drv.(bounded); ok {
		drv = b.Driver
	}
	p, ok := drv.(T)
	return p, ok
}

// CacheEntry is a system that is kept for fast starts.
type CacheEntry struct {
	vm.Cached
	Driver  string // "" for a base in the form that all drivers start from
	Image   string // the BASE_IMAGE of a template; "" where it is not known
	Expired bool   // a template that no box starts from any more
	Foreign bool   // a template of another home that uses the same engine
	Wanted  bool   // a base of which there is a box or a template
}

// BaseCache keeps prepared bases.
type BaseCache interface {
	Cached() ([]vm.Cached, error)
	Evict(id string) error
}

// Cache lists what is kept for fast starts: bases first, each kind from the
// newest on.
func (m *Manager) Cache(ctx context.Context, engines []string) ([]CacheEntry, error) {
	all, err := m.basesKept()
	if err != nil {
		return nil, err
	}
	for _, name := range engines {
		drv, err := m.opts.Driver(ctx, name)
		if err != nil {
			return nil, err
		}
		cacher, ok := power[vm.Cacher](drv)
		if !ok {
			continue
		}
		ctx, cancel := within(ctx, m.opts.Deadlines.Ask)
		defer cancel()
		kept, err := m.cachedBy(ctx, drv, cacher)
		var engine *vm.EngineError
		if errors.As(err, &engine) {
			continue // an engine that is not here keeps nothing
		}
		if err != nil {
			return nil, fmt.Errorf("ask the %s driver what it keeps: %w", name, err)
		}
		all = append(all, kept...)
	}
	wanted, err := m.wantedBases()
	if err != nil {
		return nil, err
	}
	for i, e := range all {
		all[i].Wanted = !e.Template && slices.ContainsFunc(wanted, func(digest string) bool { return isOf(e.ID, digest) })
	}
	slices.SortStableFunc(all, func(a, b CacheEntry) int {
		if a.Template != b.Template {
			if b.Template {
				return -1
			}
			return 1
		}
		return b.Made.Compare(a.Made)
	})
	return all, nil
}

// isOf reports whether a driver's id of a base is of that digest: some leave out
// the algorithm, or keep the beginning only, for tags of images are short.
func isOf(id, digest string) bool {
	_, hex, _ := strings.Cut(digest, ":")
	return id != "" && (strings.HasPrefix(hex, id) || strings.HasPrefix(digest, id))
}

// wantedBases are the digests of the bases of which there is a box
// or a template.
func (m *Manager) wantedBases() ([]string, error) {
	names, err := m.registry.names()
	if err != nil {
		return nil, err
	}
	var wanted []string
	for _, name := range names {
		rec, err := m.registry.get(name)
		if err != nil {
			return nil, err
		}
		wanted = append(wanted, rec.BaseDigest)
	}
	notes, err := filepath.Glob(filepath.Join(m.home.templates(), "*.json"))
	for _, path := range notes {
		note, err := m.noteOf(strings.TrimSuffix(filepath.Base(path), ".json"))
		if err == nil && !note.expired(m.opts.Now()) {
			wanted = append(wanted, note.Base)
		}
	}
	return wanted, err
}

// basesKept lists the prepared bases, of which every machine has a copy.
func (m *Manager) basesKept() ([]CacheEntry, error) {
	if m.opts.Bases == nil {
		return nil, nil
	}
	kept, err := m.opts.Bases.Cached()
	if err != nil {
		return nil, fmt.Errorf("list the bases: %w", err)
	}
	var all []CacheEntry
	for _, c := range kept {
		all = append(all, CacheEntry{Cached: c})
	}
	return all, nil
}

func (m *Manager) cachedBy(ctx context.Context, drv vm.Driver, cacher vm.Cacher) ([]CacheEntry, error) {
	kept, err := cacher.Cached(ctx)
	if err != nil {
		return nil, err
	}
	var all []CacheEntry
	for _, c := range kept {
		e := CacheEntry{Cached: c, Driver: drv.Name()}
		if c.Template {
			note, err := m.noteOf(c.ID)
			switch {
			case errors.Is(err, fs.ErrNotExist):
				e.Foreign = true
			case err != nil:
				e.Expired = true // a damaged note: it is never started from
			default:
				e.Image, e.Expired, e.Made = note.Image, note.expired(m.opts.Now()), note.Made
			}
		}
		all = append(all, e)
	}
	return all, nil
}

// evict removes one entry. Before the engine is asked no box starts from it any
// more, and its note goes last: one that a machine still needs stays known.
func (m *Manager) evict(ctx context.Context, cacher vm.Cacher, e CacheEntry) error {
	if e.Template {
		if err := m.retire(e.ID); err != nil {
			return err
		}
	}
	err := cacher.Evict(ctx, e.ID)
	if errors.Is(err, vm.ErrNoTemplate) {
		err = nil
	}
	if err == nil && e.Template {
		m.forgetTemplate(e.ID)
		// Whoever holds it makes a template again: twice is no harm.
		_ = os.Remove(m.home.templateLock(e.ID))
	}
	return err
}

// PruneCache removes what is expired and the bases that nothing needs; with
// all, everything of this home that no machine needs. It returns what it
// removed.
func (m *Manager) PruneCache(ctx context.Context, engines []string, all bool) ([]CacheEntry, error) {
	var removed []CacheEntry
	// Templates first, then what only they needed.
	for _, templates := range []bool{true, false} {
		entries, err := m.Cache(ctx, engines)
		if err != nil {
			return removed, err
		}
		for _, e := range entries {
			if e.Template != templates || e.InUse || e.Foreign || !all && (e.Wanted || e.Template && !e.Expired) {
				continue
			}
			if err := m.pruneOne(ctx, e); errors.Is(err, vm.ErrInUse) {
				continue
			} else if err != nil {
				return removed, fmt.Errorf("remove %s: %w", e.ID, err)
			}
			removed = append(removed, e)
		}
	}
	return removed, nil
}

func (m *Manager) pruneOne(ctx context.Context, e CacheEntry) error {
	if e.Driver == "" {
		return m.opts.Bases.Evict(e.ID)
	}
	drv, err := m.opts.Driver(ctx, e.Driver)
	if err != nil {
		return err
	}
	cacher, ok := power[vm.Cacher](drv)
	if !ok {
		return errors.ErrUnsupported
	}
	ctx, cancel := within(ctx, m.opts.Deadlines.Engine)
	defer cancel()
	return m.evict(ctx, cacher, e)
}
