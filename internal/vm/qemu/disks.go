package qemu

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/vm"
)

// A disk of a machine is one file that is written, on top of layers that are
// not. A template or a clone begins when the written file is closed, becoming
// a layer, and a new, empty one is put on it. Layers lie in the directory of
// each machine and template that stands on them, as hard links of one file, and
// name each other by name only. So whoever is deleted takes its links along,
// and the last one the layer.

// Names of the disks: of QEMU's drives, and of the first files.
const (
	systemDrive = "system"
	dataDrive   = "data"
	firstSystem = "system.qcow2"
	firstData   = "data.raw"
)

// maxLayers bounds the depth of a disk. Each layer costs a lookup of what is
// nowhere above it; QEMU opens hundreds.
const maxLayers = 60

func formatOf(file string) string { return strings.TrimPrefix(filepath.Ext(file), ".") }

// disk is the file that is written, and the layers below it, the deepest first.
type disk struct {
	Top    string   `json:"top"`
	Layers []string `json:"layers"`
}

// onTop makes an empty file on a disk's top, in dir, and returns the new disk.
// A size of 0 is the size of what is below.
func (k disk) onTop(ctx context.Context, dir, drive string, gib int) (disk, error) {
	var unique [4]byte
	_, _ = rand.Read(unique[:]) // never fails
	top := drive + "-" + hex.EncodeToString(unique[:]) + ".qcow2"
	if err := overlay(ctx, dir, k.Top, top, gib); err != nil {
		return disk{}, err
	}
	return disk{Top: top, Layers: append(k.Layers[:len(k.Layers):len(k.Layers)], k.Top)}, nil
}

// overlay makes an empty file over another one, durably.
func overlay(ctx context.Context, dir, below, name string, gib int) error {
	args := []string{"create", "-q", "-f", "qcow2", "-F", formatOf(below), "-b", below, name}
	if gib > 0 {
		args = append(args, fmt.Sprintf("%dG", gib))
	}
	if err := run(ctx, dir, "qemu-img", args...); err != nil {
		return err
	}
	path := filepath.Join(dir, name)
	return errors.Join(os.Chmod(path, 0o600), syncFile(path))
}

// linkAll gives dir the files of a disk, as they are in another directory.
func (k disk) linkAll(from, dir string) error {
	for _, name := range append(k.Layers[:len(k.Layers):len(k.Layers)], k.Top) {
		if err := os.Link(filepath.Join(from, name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// branch closes the written files of a machine's drives and puts new ones on
// them, whether it runs or not, and returns the closed disks. The record knows
// of the new files first: as long as QEMU has not turned to them they are empty
// and show what is below them, so that nothing is lost wherever this ends.
func (d *Driver) branch(ctx context.Context, r *record, drives ...string) (map[string]disk, error) {
	closed := map[string]disk{}
	var turn []map[string]any
	next := *r
	for _, drive := range drives {
		k := next.drive(drive)
		if len(k.Layers) >= maxLayers {
			return nil, fmt.Errorf("the disk %s has %d layers already: %w", drive, len(k.Layers), vm.ErrCannotClone)
		}
		top, err := k.onTop(ctx, d.dir(r.Name), drive, 0)
		if err != nil {
			return nil, err
		}
		closed[drive] = *k
		*k = top
		turn = append(turn, map[string]any{"type": "blockdev-snapshot-sync", "data": map[string]string{
			"device": drive, "snapshot-file": top.Top, "format": "qcow2", "mode": "existing",
		}})
	}
	if err := d.save(next); err != nil {
		return nil, err
	}
	*r = next
	if !r.QEMU.Alive() {
		return closed, nil
	}
	return closed, d.monitor(ctx, r.Name, command{"transaction", map[string]any{"actions": turn}})
}

// drive is a disk of a machine, by its drive's name.
func (r *record) drive(name string) *disk {
	if name == systemDrive {
		return &r.System
	}
	return &r.Data
}

// template is template.json.
type template struct {
	Base   string    `json:"base"` // hexadecimal digest
	System disk      `json:"system"`
	Made   time.Time `json:"made"`
}

func (d *Driver) templates() string            { return filepath.Join(d.opts.Dir, "templates") }
func (d *Driver) templateDir(id string) string { return filepath.Join(d.templates(), id) }

// owned locks a machine of ours and returns its record.
func (d *Driver) owned(ctx context.Context, name, ownerID string) (r record, unlock func(), err error) {
	if unlock, err = d.lock(ctx, name); err != nil {
		return record{}, nil, err
	}
	if r, err = d.load(name); err == nil && (ownerID == "" || r.OwnerID != ownerID) {
		err = fmt.Errorf("qemu machine %s: %w", name, vm.ErrNotOwner)
	}
	if err != nil {
		unlock()
		return record{}, nil, err
	}
	return r, unlock, nil
}

// MakeTemplate implements vm.Cacher. The machine runs on meanwhile.
func (d *Driver) MakeTemplate(ctx context.Context, name, ownerID, id string) error {
	if err := vm.CheckTemplateID(id); err != nil {
		return err
	}
	r, unlock, err := d.owned(ctx, name, ownerID)
	if err != nil {
		return err
	}
	defer unlock()
	release, err := d.lockTemplates(ctx)
	if err != nil {
		return err
	}
	defer release()
	making, err := os.MkdirTemp(d.templates(), ".making-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(making) }()
	closed, err := d.branch(ctx, &r, systemDrive)
	if err != nil {
		return err
	}
	t := template{Base: r.Base, System: closed[systemDrive], Made: time.Now().UTC()}
	if err := t.System.linkAll(d.dir(name), making); err != nil {
		return err
	}
	data, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return err
	}
	if err := atomicfile.Write(filepath.Join(making, "template.json"), append(data, '\n'), 0o600); err != nil {
		return err
	}
	if err := d.dropTemplate(id); err != nil && !errors.Is(err, vm.ErrNoTemplate) {
		return err
	}
	return errors.Join(os.Rename(making, d.templateDir(id)), atomicfile.SyncDir(d.templates()))
}

// lockTemplates keeps others from changing the templates, and removes what
// killed calls left.
func (d *Driver) lockTemplates(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(d.templates(), 0o700); err != nil {
		return nil, err
	}
	if unlock, err = flock(ctx, filepath.Join(d.templates(), ".lock")); err != nil {
		return nil, err
	}
	stale, err := filepath.Glob(filepath.Join(d.templates(), ".[mr]*ing-*"))
	for _, path := range stale {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// dropTemplate removes a template, at once for those who look.
func (d *Driver) dropTemplate(id string) error {
	removing := filepath.Join(d.templates(), ".removing-"+id)
	if err := os.Rename(d.templateDir(id), removing); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("template %s: %w", id, vm.ErrNoTemplate)
	} else if err != nil {
		return err
	}
	return os.RemoveAll(removing)
}

func (d *Driver) template(id string) (template, error) {
	if err := vm.CheckTemplateID(id); err != nil {
		return template{}, err
	}
	data, err := os.ReadFile(filepath.Join(d.templateDir(id), "template.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return template{}, fmt.Errorf("template %s: %w", id, vm.ErrNoTemplate)
	}
	if err != nil {
		return template{}, err
	}
	var t template
	if err := json.Unmarshal(data, &t); err != nil {
		return template{}, fmt.Errorf("template %s: %w", id, err)
	}
	return t, nil
}

// fromTemplate makes a machine whose system begins as a template's.
func (d *Driver) fromTemplate(ctx context.Context, spec vm.Spec) (vm.Machine, error) {
	t, err := d.template(spec.Template)
	if err != nil {
		return vm.Machine{}, err
	}
	release, err := flock(ctx, d.baseDir(t.Base)+".lock") // nobody evicts it meanwhile
	if err != nil {
		return vm.Machine{}, err
	}
	defer release()
	return d.make(ctx, spec, func(dir string, r *record) error {
		_, err := os.Stat(d.baseDir(t.Base))
		if err == nil {
			err = t.System.linkAll(d.templateDir(spec.Template), dir)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("template %s was removed just now: %w", spec.Template, vm.ErrNoTemplate)
		}
		if err != nil {
			return err
		}
		r.Base = t.Base
		if r.System, err = t.System.onTop(ctx, dir, systemDrive, systemGiB(spec)); err != nil {
			return err
		}
		return d.emptyData(ctx, spec, dir, r)
	})
}

// Cached implements vm.Cacher.
func (d *Driver) Cached(ctx context.Context) ([]vm.Cached, error) {
	needed, err := d.neededBases()
	if err != nil {
		return nil, err
	}
	var all []vm.Cached
	entries, err := os.ReadDir(d.templates())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if vm.CheckTemplateID(e.Name()) != nil {
			continue
		}
		t, err := d.template(e.Name())
		if errors.Is(err, vm.ErrNoTemplate) {
			continue
		}
		c := vm.Cached{ID: e.Name(), Template: true}
		if err == nil {
			c.Made = t.Made
			needed[t.Base] = true
		}
		if c.Bytes, err = allocated(d.templateDir(e.Name())); err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	entries, err = os.ReadDir(filepath.Join(d.opts.Dir, "bases"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() || !hexDigest.MatchString(e.Name()) {
			continue
		}
		c := vm.Cached{ID: e.Name(), InUse: needed[e.Name()]}
		if info, err := e.Info(); err == nil {
			c.Made = info.ModTime().UTC()
		}
		if c.Bytes, err = allocated(d.baseDir(e.Name())); err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, ctx.Err()
}

// neededBases are the bases that machines stand on. A record that cannot be
// read may stand on any of them.
func (d *Driver) neededBases() (map[string]bool, error) {
	entries, err := os.ReadDir(d.machines())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	needed := map[string]bool{}
	running := sync.OnceValue(runningMachines)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		r, err := d.read(e.Name(), running)
		if errors.Is(err, vm.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		needed[r.Base] = true
	}
	return needed, nil
}

// allocated is what the files of a directory take of the host's disk, bytes.
func allocated(dir string) (int64, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil // removed meanwhile
	}
	var sum int64
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			sum += st.Blocks * 512 // stat(2)
		}
	}
	return sum, err
}

// Evict implements vm.Cacher. Templates need nobody's leave: who stands on one
// has links of its own.
func (d *Driver) Evict(ctx context.Context, id string) error {
	release, err := d.lockTemplates(ctx)
	if err != nil {
		return err
	}
	defer release()
	if vm.CheckTemplateID(id) == nil {
		if err := d.dropTemplate(id); !errors.Is(err, vm.ErrNoTemplate) {
			return err
		}
	}
	if !hexDigest.MatchString(id) {
		return fmt.Errorf("%q is neither a template nor a base", id)
	}
	unlock, err := flock(ctx, d.baseDir(id)+".lock")
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(d.baseDir(id)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", id, vm.ErrNoTemplate)
	}
	all, err := d.Cached(ctx)
	if err != nil {
		return err
	}
	for _, c := range all {
		if c.ID == id && c.InUse {
			return fmt.Errorf("base %s: %w", id, vm.ErrInUse)
		}
	}
	removing := d.baseDir(id) + ".making.evicted" // what convert sweeps
	if err := os.Rename(d.baseDir(id), removing); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(removing), os.Remove(d.baseDir(id)+".lock"))
}

// Clone implements vm.Cloner.
func (d *Driver) Clone(ctx context.Context, source, sourceOwnerID string, spec vm.Spec) (vm.Machine, error) {
	r, unlock, err := d.owned(ctx, source, sourceOwnerID)
	if err != nil {
		return vm.Machine{}, err
	}
	defer unlock()
	return d.make(ctx, spec, func(dir string, made *record) error {
		closed, err := d.branch(ctx, &r, systemDrive, dataDrive)
		if err != nil {
			return err
		}
		made.Base = r.Base
		for drive, k := range closed {
			if err := k.linkAll(d.dir(source), dir); err != nil {
				return err
			}
			top, err := k.onTop(ctx, dir, drive, 0)
			if err != nil {
				return err
			}
			*made.drive(drive) = top
		}
		return nil
	})
}
