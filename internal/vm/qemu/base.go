package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/vm"
)

// The files of a converted base, in a directory called by its digest, which
// appears by one rename: one disk that all overlays share and nobody writes,
// and what boots it. Machines refer to them by relative paths, so that the
// whole directory of the driver may be moved.
const (
	baseDisk    = "disk.raw"
	baseKernel  = "vmlinuz"
	baseModules = "modules.cpio"
)

// baseFile is the path of a base's file as seen from a machine's directory.
func baseFile(digest, name string) string { return filepath.Join("..", "..", "bases", digest, name) }

func (d *Driver) baseDir(digest string) string { return filepath.Join(d.opts.Dir, "bases", digest) }

// convert makes a disk of a base, once per digest, and returns the digest's
// hexadecimal part. The base is not evicted before it is released.
func (d *Driver) convert(ctx context.Context, base vm.Base) (digest string, release func(), err error) {
	_, digest, ok := strings.Cut(base.Digest, ":")
	if !ok || !hexDigest.MatchString(digest) {
		return "", nil, fmt.Errorf("base digest %q is not algorithm:hex", base.Digest)
	}
	dir := d.baseDir(digest)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return "", nil, err
	}
	if release, err = flock(ctx, dir+".lock"); err != nil {
		return "", nil, err
	}
	if _, err := os.Stat(dir); err == nil {
		return digest, release, nil
	}
	if err := d.makeBase(ctx, base, dir); err != nil {
		release()
		return "", nil, err
	}
	return digest, release, nil
}

// makeBase makes the directory of a base.
func (d *Driver) makeBase(ctx context.Context, base vm.Base, dir string) error {
	// Programs of a killed conversion may still write to its directory, so
	// every conversion has one of its own.
	stale, err := filepath.Glob(dir + ".making.*")
	if err != nil {
		return err
	}
	for _, path := range stale {
		_ = os.RemoveAll(path) // the next one tries again
	}
	making, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(dir)+".making.")
	if err != nil {
		return err
	}
	if err = d.fill(ctx, base.Tar, making); err == nil {
		err = os.Rename(making, dir)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(making))
	}
	return atomicfile.SyncDir(filepath.Dir(dir))
}

var hexDigest = regexp.MustCompile(`^[0-9a-f]{32,128}$`)

// fill makes the files of a base.
func (d *Driver) fill(ctx context.Context, tarball, dir string) error {
	tree := filepath.Join(dir, "tree")
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return err
	}
	if err := makeDisk(ctx, tarball, tree, filepath.Join(dir, baseDisk)); err != nil {
		return err
	}
	if err := d.findBoot(ctx, tree, dir); err != nil {
		return err
	}
	if err := os.RemoveAll(tree); err != nil {
		return err
	}
	for _, name := range []string{baseDisk, baseKernel, baseModules} {
		if err := syncFile(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// makeDisk unpacks a root filesystem and builds an ext4 disk of it. Without
// root the owners of files are kept by fakeroot, which both programs share.
func makeDisk(ctx context.Context, tarball, tree, disk string) error {
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
umask 077
truncate -s $((kib * 3 / 2 + 262144))K "$3"
"$4" -q -F -t ext4 -m 0 -i 8192 -L system -d "$2" "$3"`
	args := append(shell[1:len(shell):len(shell)], "-c", script, "sh", tarball, tree, disk, mke2fs)
	return run(ctx, "", shell[0], args...)
}

// findBoot looks for a kernel: the configured one, the base's own, the one
// that the host's package client brings.
func (d *Driver) findBoot(ctx context.Context, tree, dir string) error {
	source := tree
	switch _, err := newest(filepath.Join(tree, "boot/vmlinuz*")); {
	case d.opts.Kernel != "":
		source = d.opts.Kernel
		if strings.HasSuffix(source, ".deb") {
			source = filepath.Join(tree, ".kernel") // the disk is made already
			if err := run(ctx, "", "dpkg-deb", "-x", d.opts.Kernel, source); err != nil {
				return err
			}
		}
	case errors.Is(err, fs.ErrNotExist):
		var err error
		if source, err = d.fetchKernel(ctx); err != nil {
			return err
		}
	case err != nil:
		return err
	}
	kernel, err := newest(filepath.Join(source, "boot/vmlinuz*"))
	if err != nil {
		return fmt.Errorf("find a kernel in %s: %w", source, err)
	}
	data, err := os.ReadFile(kernel)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, baseKernel), data, 0o600); err != nil {
		return err
	}
	version := strings.TrimPrefix(filepath.Base(kernel), "vmlinuz-")
	modules := filepath.Join(source, "lib/modules", version)
	if _, err := os.Stat(modules); err != nil {
		modules = filepath.Join(source, "usr/lib/modules", version)
	}
	return packModules(ctx, modules, filepath.Join(dir, baseModules))
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
