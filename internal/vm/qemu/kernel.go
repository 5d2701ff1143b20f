package qemu

import (
	"bytes"
	"compress/gzip"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// kernelPackages are the meta packages of Debian and Ubuntu whose kernels are
// made for virtual machines.
var kernelPackages = []string{"linux-image-cloud-" + runtime.GOARCH, "linux-image-virtual"}

var realKernel = regexp.MustCompile(`^linux-(image|modules)-[0-9][0-9A-Za-z.+-]*$`)

// fetchKernel brings a kernel through the host's package client, once, and
// returns the directory that it was unpacked to. Nothing is installed.
func (d *Driver) fetchKernel(ctx context.Context) (string, error) {
	dir := filepath.Join(d.opts.Dir, "kernel")
	unlock, err := flock(ctx, dir+".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := newest(filepath.Join(dir, "boot/vmlinuz*")); err == nil {
		return dir, nil
	}
	for _, client := range []string{"apt-get", "dpkg-deb"} {
		if _, err := lookPath(client); err != nil {
			return "", &vm.EngineError{
				Engine: "qemu",
				Reason: "the base brings no kernel, and this host's package client is not apt; set BOX_KERNEL in box.env to a directory with boot/vmlinuz and lib/modules",
				Fix:    "box help config",
			}
		}
	}
	// What killed downloads left.
	for _, pattern := range []string{".kernel-*", ".lists-*"} {
		stale, _ := filepath.Glob(filepath.Join(d.opts.Dir, pattern)) // the pattern is fine
		for _, path := range stale {
			_ = os.RemoveAll(path) // the next one tries again
		}
	}
	err = d.downloadAny(ctx, dir, nil)
	if err == nil {
		return dir, nil
	}
	// The host's lists of packages may be missing or too old. Lists of our own
	// need no root and leave the host's alone.
	if ownErr := d.downloadWithOwnLists(ctx, dir); ownErr == nil {
		return dir, nil
	} else if ctx.Err() != nil {
		return "", context.Cause(ctx)
	} else {
		err = errors.Join(err, ownErr)
	}
	return "", &vm.EngineError{
		Engine: "qemu", Fix: "sudo apt-get update",
		Reason: fmt.Sprintf("the base brings no kernel, and the package client brought none: %v", err),
	}
}

func (d *Driver) downloadWithOwnLists(ctx context.Context, dir string) error {
	lists, err := os.MkdirTemp(d.opts.Dir, ".lists-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(lists) }()
	if err := os.Mkdir(filepath.Join(lists, "partial"), 0o700); err != nil {
		return err
	}
	options := []string{"-o", "Dir::State::Lists=" + lists, "-o", "APT::Sandbox::User=root"}
	if err := run(ctx, "", "apt-get", append(options, "-q", "update")...); err != nil {
		return err
	}
	return d.downloadAny(ctx, dir, options)
}

func (d *Driver) downloadAny(ctx context.Context, dir string, options []string) error {
	var errs []error
	for _, meta := range kernelPackages {
		err := d.download(ctx, meta, dir, options)
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (d *Driver) download(ctx context.Context, meta, dir string, options []string) error {
	names, err := kernelsOf(ctx, meta, options, 2)
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("package %s is not known here", meta)
	}
	tmp, err := os.MkdirTemp(d.opts.Dir, ".kernel-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	if err := run(ctx, tmp, "apt-get", slices.Concat(options, []string{"-q", "-o", "APT::Sandbox::User=root", "download"}, names)...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(debs) == 0 {
		return errors.Join(err, fmt.Errorf("apt-get download %s brought nothing", strings.Join(names, " ")))
	}
	tree := filepath.Join(tmp, "tree")
	for _, deb := range debs {
		if err := run(ctx, "", "dpkg-deb", "-x", deb, tree); err != nil {
			return err
		}
	}
	if err := run(ctx, "", "chmod", "-R", "go=", tree); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.Rename(tree, dir)
}

// kernelsOf follows a meta package's dependencies to the packages with files.
func kernelsOf(ctx context.Context, pkg string, options []string, depth int) ([]string, error) {
	out, err := exec.CommandContext(ctx, "apt-cache", slices.Concat(options, []string{"depends", "--no-recommends", "--no-suggests", pkg})...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && len(exit.Stderr) > 0 {
			return nil, fmt.Errorf("apt-cache depends %s: %s", pkg, wire.Printable(strings.TrimSpace(string(exit.Stderr))))
		}
		return nil, fmt.Errorf("apt-cache depends %s: %w", pkg, err)
	}
	var names []string
	for line := range strings.Lines(string(out)) {
		name, ok := strings.CutPrefix(strings.TrimSpace(line), "Depends: ")
		if !ok || !realKernel.MatchString(name) || slices.Contains(names, name) {
			continue
		}
		names = append(names, name)
		if depth > 1 {
			more, err := kernelsOf(ctx, name, options, depth-1)
			if err != nil {
				return nil, err
			}
			names = append(names, more...)
		}
	}
	return names, nil
}

// wantedModules are what a machine of this driver needs to find its disks and
// network; a kernel that has one built in has no file for it.
var wantedModules = []string{"virtio_pci", "virtio_blk", "virtio_net", "virtio_rng", "ext4"}

// packModules writes the wanted modules, and all that they depend on, as a
// cpio with the list in loading order.
func packModules(ctx context.Context, dir, to string) error {
	files := map[string]string{} // module name -> path
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name, _, ok := strings.Cut(e.Name(), ".ko"); ok && e.Type().IsRegular() {
			files[strings.ReplaceAll(name, "-", "_")] = path
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the kernel's modules: %w", err)
	}
	var order []string
	var archive cpio
	archive.dir("modules")
	var add func(name string) error
	add = func(name string) error {
		path, ok := files[name]
		place := "/modules/" + name + ".ko"
		if !ok || slices.Contains(order, place) {
			return nil
		}
		data, err := readModule(ctx, path)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		needs, err := dependencies(data)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		for _, n := range needs {
			if err := add(n); err != nil {
				return err
			}
		}
		order = append(order, place)
		archive.file(place[1:], 0o644, data)
		return nil
	}
	for _, name := range wantedModules {
		if err := add(name); err != nil {
			return err
		}
	}
	archive.file(strings.TrimPrefix(wire.ModulesPath, "/"), 0o644, []byte(strings.Join(order, "\n")+"\n"))
	return os.WriteFile(to, archive.bytes(), 0o600)
}

// readModule reads a module, compressed or not.
func readModule(ctx context.Context, path string) ([]byte, error) {
	switch filepath.Ext(path) {
	case ".xz":
		return exec.CommandContext(ctx, "xz", "-dc", path).Output()
	case ".zst":
		return exec.CommandContext(ctx, "zstd", "-dcq", path).Output()
	}
	data, err := os.ReadFile(path)
	if err != nil || filepath.Ext(path) != ".gz" {
		return data, err
	}
	zr, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(zr)
}

// dependencies reads the "depends" line of an ELF module's .modinfo, a list
// separated by commas.
func dependencies(module []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("no .modinfo")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	var names []string
	for line := range strings.SplitSeq(string(info), "\x00") {
		if list, ok := strings.CutPrefix(line, "depends="); ok && list != "" {
			for name := range strings.SplitSeq(list, ",") {
				names = append(names, strings.ReplaceAll(name, "-", "_"))
			}
		}
	}
	return names, nil
}
