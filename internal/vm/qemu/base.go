package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/vm"
)

// convertedBase is a base as the machines use it: one read-only disk, shared
// by all their overlays, and what boots it.
type convertedBase struct {
	Disk string `json:"disk"`
	Boot boot   `json:"boot"`
}

// boot is a kernel and the initramfs part with its modules.
type boot struct {
	Kernel  string `json:"kernel"`
	Modules string `json:"modules"` // cpio
}

// convert makes a disk of a base, once per digest.
func (d *Driver) convert(ctx context.Context, base vm.Base) (convertedBase, error) {
	_, hex, ok := strings.Cut(base.Digest, ":")
	if !ok || len(hex) < 32 || strings.ContainsAny(hex, "/.") {
		return convertedBase{}, fmt.Errorf("base digest %q is not algorithm:hex", base.Digest)
	}
	bases := filepath.Join(d.opts.Dir, "bases")
	if err := os.MkdirAll(bases, 0o700); err != nil {
		return convertedBase{}, err
	}
	dir := filepath.Join(bases, hex)
	unlock, err := flock(ctx, dir+".lock")
	if err != nil {
		return convertedBase{}, err
	}
	defer unlock()
	var c convertedBase
	if data, err := os.ReadFile(filepath.Join(dir, "base.json")); err == nil && json.Unmarshal(data, &c) == nil {
		return c, nil
	}
	// What a killed conversion left is made anew.
	if err := os.RemoveAll(dir); err != nil {
		return convertedBase{}, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return convertedBase{}, err
	}
	c.Disk = filepath.Join(dir, "disk.raw")
	tree := filepath.Join(dir, "tree")
	if err := makeDisk(ctx, base.Tar, tree, c.Disk); err != nil {
		return convertedBase{}, errors.Join(err, os.RemoveAll(dir))
	}
	if c.Boot, err = d.findBoot(ctx, tree, dir); err != nil {
		return convertedBase{}, errors.Join(err, os.RemoveAll(dir))
	}
	if err := os.RemoveAll(tree); err != nil {
		return convertedBase{}, err
	}
	data, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return convertedBase{}, err
	}
	return c, atomicfile.Write(filepath.Join(dir, "base.json"), data, 0o600)
}

// makeDisk unpacks a root filesystem and builds an ext4 disk of it. Without
// root the owners of files are kept by fakeroot, which both programs share.
func makeDisk(ctx context.Context, tarball, tree, disk string) error {
	if err := os.Mkdir(tree, 0o755); err != nil {
		return err
	}
	shell := []string{"/bin/sh"}
	if os.Geteuid() != 0 {
		fakeroot, err := lookPath("fakeroot")
		if err != nil {
			return &vm.EngineError{Engine: "qemu", Reason: "fakeroot is not installed, which makes disks without root", Fix: "sudo apt-get install fakeroot"}
		}
		shell = []string{fakeroot, "/bin/sh"}
	}
	mke2fs, err := lookPath("mke2fs")
	if err != nil {
		return err
	}
	// Half of the content is spare, for the first packages; the machine grows
	// the filesystem to its own disk when it boots.
	const script = `set -e
tar -x -p --numeric-owner -f "$1" -C "$2"
kib=$(du -s -k "$2" | cut -f1)
truncate -s $((kib * 3 / 2 + 262144))K "$3"
"$4" -q -F -t ext4 -m 0 -i 8192 -L system -d "$2" "$3"`
	args := append(shell[1:len(shell):len(shell)], "-c", script, "sh", tarball, tree, disk, mke2fs)
	return run(ctx, "", shell[0], args...)
}

// findBoot looks for a kernel: the configured one, the base's own, the one
// that the host's package client brings.
func (d *Driver) findBoot(ctx context.Context, tree, dir string) (boot, error) {
	source := tree
	switch _, err := newest(filepath.Join(tree, "boot/vmlinuz*")); {
	case d.opts.Kernel != "":
		source = d.opts.Kernel
		if strings.HasSuffix(source, ".deb") {
			source = filepath.Join(dir, "kernel")
			if err := run(ctx, "", "dpkg-deb", "-x", d.opts.Kernel, source); err != nil {
				return boot{}, err
			}
		}
	case errors.Is(err, fs.ErrNotExist):
		var err error
		if source, err = d.fetchKernel(ctx); err != nil {
			return boot{}, err
		}
	case err != nil:
		return boot{}, err
	}
	kernel, err := newest(filepath.Join(source, "boot/vmlinuz*"))
	if err != nil {
		return boot{}, fmt.Errorf("find a kernel in %s: %w", source, err)
	}
	data, err := os.ReadFile(kernel)
	if err != nil {
		return boot{}, err
	}
	b := boot{Kernel: filepath.Join(dir, "vmlinuz"), Modules: filepath.Join(dir, "modules.cpio")}
	if err := os.WriteFile(b.Kernel, data, 0o600); err != nil {
		return boot{}, err
	}
	version := strings.TrimPrefix(filepath.Base(kernel), "vmlinuz-")
	modules := filepath.Join(source, "lib/modules", version)
	if _, err := os.Stat(modules); err != nil {
		modules = filepath.Join(source, "usr/lib/modules", version)
	}
	return b, packModules(ctx, modules, b.Modules)
}

// newest returns the last match of a pattern in the order of versions, near
// enough: one kernel is the usual case.
func newest(pattern string) (string, error) {
	found, err := filepath.Glob(pattern)
	if err != nil {
		return "", err
	}
	if len(found) == 0 {
		return "", fmt.Errorf("%s: %w", pattern, fs.ErrNotExist)
	}
	return found[len(found)-1], nil
}
