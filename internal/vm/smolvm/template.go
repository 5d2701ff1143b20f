package smolvm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/partial"
	"hermes-box-lite/internal/vm"
)

// Templates are packs of stopped machines (`pack create --from-vm`), from which
// machines are created (`create --from`). A pack of an image machine is one layer
// of what the machine's system was, without /workspace, on which /data lies. Its
// file is called ID-TIME.smolmachine; the newest of an id counts.

var packName = regexp.MustCompile(`^([0-9a-f]{64})-(\d{19})\.smolmachine$`)

func (d *Driver) templateDir() string { return filepath.Join(d.opts.Dir, "templates") }

// pack is a template's file.
type pack struct {
	id, path string
	made     time.Time
	bytes    int64
}

// packs are all templates' files, the newest first.
func (d *Driver) packs() ([]pack, error) {
	entries, err := os.ReadDir(d.templateDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var all []pack
	for _, e := range entries {
		m := packName.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		var nano int64
		if _, err := fmt.Sscanf(m[2], "%d", &nano); err != nil {
			return nil, fmt.Errorf("%s: %w", e.Name(), err)
		}
		all = append(all, pack{m[1], filepath.Join(d.templateDir(), e.Name()), time.Unix(0, nano).UTC(), allocated(info)})
	}
	slices.SortFunc(all, func(a, b pack) int { return cmp.Or(b.made.Compare(a.made), strings.Compare(a.path, b.path)) })
	return all, nil
}

func (d *Driver) newestPack(id string) (string, error) {
	all, err := d.packs()
	if err != nil {
		return "", err
	}
	for _, p := range all {
		if p.id == id {
			return p.path, nil
		}
	}
	return "", fmt.Errorf("template %.12s: %w", id, vm.ErrNoTemplate)
}

// MakeTemplate implements vm.Cacher. A running machine is stopped and started
// again: smolvm packs only stopped ones.
func (d *Driver) MakeTemplate(ctx context.Context, name, ownerID, id string) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := vm.CheckTemplateID(id); err != nil {
		return err
	}
	held, err := d.lock(ctx, name)
	if err != nil {
		return err
	}
	defer held.release()
	m, c, err := d.existing(ctx, name)
	if err != nil {
		return err
	}
	if ownerID == "" || owner(m, c) != ownerID {
		return fmt.Errorf("smolvm machine %s: %w", name, vm.ErrNotOwner)
	}
	runs, err := d.reallyRuns(ctx, m)
	if err != nil {
		return err
	}
	if !runs {
		// What kind its /data is tells only a machine that runs.
		if err := d.start(ctx, name); err != nil {
			return err
		}
	}
	kind, err := d.ask(ctx, d.opts.Patience.Ask, name, dataKindScript)
	if err == nil && kind != "bound" {
		err = errors.New("/data could not be mounted in this machine, so its system cannot be packed without it")
	}
	if err != nil {
		if !runs {
			err = errors.Join(err, d.stop(ctx, name))
		}
		return err
	}
	if err := d.stop(ctx, name); err != nil {
		return err
	}
	err = d.makePack(ctx, name, id)
	if runs {
		// Also after a failure or a cancellation: it ran before.
		again, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.opts.Patience.Start)
		defer cancel()
		err = errors.Join(err, d.start(again, name))
	}
	return err
}

// makePack packs a stopped machine into a directory of its own and moves the
// result to its place.
func (d *Driver) makePack(ctx context.Context, name, id string) error {
	if err := os.MkdirAll(d.templateDir(), 0o700); err != nil {
		return err
	}
	const prefix = ".pack."
	partial.RemoveStale(d.templateDir(), prefix)
	making, err := partial.CreateDir(d.templateDir(), prefix)
	if err != nil {
		return err
	}
	defer func() { _ = making.Close() }() // lets go of its lock
	tmp := making.Name()
	defer func() { _ = os.RemoveAll(tmp) }() // half of a pack is of no use
	// smolvm writes a program to run the pack, of which we have no need, and the
	// pack itself beside it. The pack's own sizes stay smolvm's defaults: any
	// others would win over arguments of create that equal those
	// (src/cli/machine.rs).
	if _, err := d.run(ctx, d.opts.Patience.Work, "pack", "create", "--from-vm", name, "-o", filepath.Join(tmp, "pack"), "--staging-dir", tmp); err != nil {
		return err
	}
	made := time.Now().UTC()
	path := filepath.Join(d.templateDir(), fmt.Sprintf("%s-%019d.smolmachine", id, made.UnixNano()))
	if err := os.Rename(filepath.Join(tmp, "pack.smolmachine"), path); err != nil {
		return fmt.Errorf("find what smolvm packed: %w", err)
	}
	if err := atomicfile.SyncDir(d.templateDir()); err != nil {
		return err
	}
	// Machines of an older pack of this id keep it: their records name it.
	_, err = d.removePacks(ctx, id, func(p pack) bool { return p.path != path })
	if errors.Is(err, vm.ErrInUse) {
		return nil
	}
	return err
}

// removePacks removes those packs of an id that are chosen, unless a machine was
// made from one of that id, and returns how many they were.
func (d *Driver) removePacks(ctx context.Context, id string, chosen func(pack) bool) (int, error) {
	all, err := d.packs()
	if err != nil {
		return 0, err
	}
	all = slices.DeleteFunc(all, func(p pack) bool { return p.id != id || !chosen(p) })
	if len(all) == 0 {
		return 0, nil
	}
	used, err := d.usedTemplates(ctx)
	if err != nil {
		return 0, err
	}
	if used[id] {
		return 0, fmt.Errorf("template %.12s: %w", id, vm.ErrInUse)
	}
	// The oldest first: what is interrupted leaves the newest.
	slices.Reverse(all)
	for i, p := range all {
		if err := os.Remove(p.path); err != nil {
			return i, err
		}
	}
	return len(all), nil
}

// usedTemplates are the templates that machines were made from, by their labels
// and, for those that are being made, by their claims.
func (d *Driver) usedTemplates(ctx context.Context) (map[string]bool, error) {
	machines, err := d.list(ctx)
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, m := range machines {
		used[m.Labels[labelTemplate]] = true
	}
	paths, err := filepath.Glob(filepath.Join(d.opts.Dir, "claims", "*.json"))
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		c, err := d.readClaim(strings.TrimSuffix(filepath.Base(path), ".json"))
		if err != nil {
			return nil, err
		}
		if c.Created == 0 {
			used[c.Template] = true
		}
	}
	return used, nil
}

// Cached implements vm.Cacher.
func (d *Driver) Cached(ctx context.Context) ([]vm.Cached, error) {
	packs, err := d.packs()
	if err != nil {
		return nil, err
	}
	var all []vm.Cached
	if len(packs) > 0 {
		used, err := d.usedTemplates(ctx)
		if err != nil {
			return nil, err
		}
		seen := map[string]int{}
		for _, p := range packs {
			if i, ok := seen[p.id]; ok {
				all[i].Bytes += p.bytes
				continue
			}
			seen[p.id] = len(all)
			all = append(all, vm.Cached{ID: p.id, Template: true, Made: p.made, Bytes: p.bytes, InUse: used[p.id]})
		}
	}
	entries, err := os.ReadDir(d.imageDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		digest, ok := strings.CutSuffix(e.Name(), ".tar")
		if !ok || !baseDigest.MatchString("sha256:"+digest) {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		// No machine needs it: smolvm has a link or a copy of its own.
		all = append(all, vm.Cached{ID: "sha256:" + digest, Made: info.ModTime().UTC(), Bytes: allocated(info)})
	}
	return all, nil
}

// Evict implements vm.Cacher.
func (d *Driver) Evict(ctx context.Context, id string) error {
	if baseDigest.MatchString(id) {
		err := os.Remove(filepath.Join(d.imageDir(), id[len("sha256:"):]+".tar"))
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("base %s: %w", id, vm.ErrNoTemplate)
		}
		return err
	}
	n, err := d.removePacks(ctx, id, func(pack) bool { return true })
	if err == nil && n == 0 {
		err = fmt.Errorf("template %.12s: %w", id, vm.ErrNoTemplate)
	}
	return err
}
