package fake

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"hermes-box-lite/internal/vm"
)

func (d *Driver) templateDir(id string) string { return filepath.Join(d.dir, "templates", id) }

// copyInto copies what is in one directory into another, but for some names.
func copyInto(from, to string, but ...string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	args := []string{"-a", "--"}
	for _, e := range entries {
		if !strings.Contains("|"+strings.Join(but, "|")+"|", "|"+e.Name()+"|") {
			args = append(args, filepath.Join(from, e.Name()))
		}
	}
	if len(args) == 2 {
		return nil
	}
	if out, err := exec.Command("cp", append(args, to)...).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %s (%w)", from, out, err)
	}
	return nil
}

// owned locks a machine of the caller's.
func (d *Driver) owned(name, ownerID string) (unlock func(), err error) {
	if unlock, err = d.lock(name); err != nil {
		return nil, err
	}
	r, err := d.load(name)
	if err == nil && (ownerID == "" || r.OwnerID != ownerID) {
		err = fmt.Errorf("fake machine %s: %w", name, vm.ErrNotOwner)
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// MakeTemplate implements vm.Cacher.
func (d *Driver) MakeTemplate(ctx context.Context, name, ownerID, id string) error {
	return d.faulty(ctx, "template", func() error {
		unlock, err := d.owned(name, ownerID)
		if err != nil {
			return err
		}
		defer unlock()
		if err := os.MkdirAll(filepath.Dir(d.templateDir(id)), 0o700); err != nil {
			return err
		}
		making, err := os.MkdirTemp(filepath.Dir(d.templateDir(id)), ".making-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(making) }()
		if err := copyInto(d.Root(name), making, "data", "run", "tmp"); err != nil {
			return err
		}
		if err := os.RemoveAll(d.templateDir(id)); err != nil {
			return err
		}
		return os.Rename(making, d.templateDir(id))
	})
}

func (d *Driver) fromTemplate(id, root string) error {
	if _, err := os.Stat(d.templateDir(id)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("template %s: %w", id, vm.ErrNoTemplate)
	}
	return copyInto(d.templateDir(id), root)
}

// Cached implements vm.Cacher; there are no bases.
func (d *Driver) Cached(ctx context.Context) (all []vm.Cached, err error) {
	err = d.faulty(ctx, "cached", func() error {
		entries, err := os.ReadDir(filepath.Join(d.dir, "templates"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if info, err := e.Info(); err == nil && !strings.HasPrefix(e.Name(), ".") {
				all = append(all, vm.Cached{ID: e.Name(), Template: true, Made: info.ModTime().UTC()})
			}
		}
		return nil
	})
	return all, err
}

// Evict implements vm.Cacher.
func (d *Driver) Evict(ctx context.Context, id string) error {
	return d.faulty(ctx, "evict", func() error {
		if _, err := os.Stat(d.templateDir(id)); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("template %s: %w", id, vm.ErrNoTemplate)
		}
		return os.RemoveAll(d.templateDir(id))
	})
}

// Clone implements vm.Cloner.
func (d *Driver) Clone(ctx context.Context, source, sourceOwnerID string, spec vm.Spec) (m vm.Machine, err error) {
	err = d.faulty(ctx, "clone", func() error {
		unlock, err := d.owned(source, sourceOwnerID)
		if err != nil {
			return err
		}
		defer unlock()
		if source == spec.Name {
			return fmt.Errorf("fake machine %s: %w", source, vm.ErrExists)
		}
		m, err = d.make(spec, func(root string) error { return copyInto(d.Root(source), root, "run", "tmp") })
		return err
	})
	return m, err
}
