package backup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/partial"
)

// spaceReserve is left free by Extract, bytes.
const spaceReserve = 64 << 20

// Extract writes the content of a verified archive into the new directory dir,
// mode 0700, and onto the disk. When anything fails nothing is left; what a
// killed Extract left, the next one into the same place removes.
func (a *Archive) Extract(ctx context.Context, dir string, progress Progress) (err error) {
	if a.report == nil {
		return errNotVerified
	}
	if err := Free(dir); err != nil {
		return err
	}
	parent := filepath.Dir(dir)
	free, err := FreeSpace(parent)
	if err != nil {
		return err
	}
	if need := a.report.Bytes + spaceReserve; need > free {
		return fmt.Errorf("%s has %d MiB free and the archive needs %d MiB: %w", parent, free>>20, need>>20, syscall.ENOSPC)
	}
	partial.RemoveStale(parent, partialDirPrefix) // plaintext
	lock, err := partial.CreateDir(parent, partialDirPrefix)
	if err != nil {
		return fmt.Errorf("write into %s: %w", parent, err)
	}
	defer func() { _ = lock.Close() }() // a descriptor to read with
	temporary := lock.Name()
	defer func() {
		if err != nil {
			err = errors.Join(err, partial.RemoveAll(temporary))
		}
	}()
	if a.report.FoldCollision != "" {
		probe := foldsNames
		if a.folds != nil {
			probe = a.folds
		}
		folds, err := probe(temporary)
		if err != nil {
			return err
		}
		if folds {
			return fmt.Errorf("%s cannot hold both of %s, whose names its file system takes for one", parent, a.report.FoldCollision)
		}
	}
	extractor := archive.NewExtractor(lock, archive.ExtractOptions{})
	defer func() { err = errors.Join(err, extractor.Close()) }()
	second, err := a.read(ctx, extractor, progress)
	if err != nil {
		if errors.Is(err, ErrAuth) || errors.Is(err, archive.ErrUnsafe) {
			return changed(err)
		}
		return err
	}
	if second.SHA256 != a.report.SHA256 || second.Digest != a.report.Digest {
		return ErrChanged
	}
	if err := extractor.Finish(); err != nil {
		return err
	}
	a.skippedXattrs = extractor.SkippedXattrs()
	if err := syncTree(lock); err != nil {
		return fmt.Errorf("write into %s: %w", parent, err)
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := renameNoReplace(temporary, dir); err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = ErrExists
		}
		return fmt.Errorf("%s: %w", dir, err)
	}
	if err := atomicfile.SyncDir(parent); err != nil {
		return errors.Join(err, partial.RemoveAll(dir))
	}
	return nil
}

// SkippedXattrs is the number of extended attributes for which the last Extract
// found no place.
func (a *Archive) SkippedXattrs() int { return a.skippedXattrs }

const partialDirPrefix = ".hermes-box-extract."

// foldsNames reports whether the file system takes names for one that differ
// in case or in Unicode form only.
func foldsNames(dir string) (bool, error) {
	for _, pair := range [][2]string{{".hermes-box-fold", ".HERMES-BOX-FOLD"}, {".hermes-box-\u00e9", ".hermes-box-e\u0301"}} {
		first := filepath.Join(dir, pair[0])
		if err := os.WriteFile(first, nil, 0o600); err != nil {
			return false, err
		}
		_, statErr := os.Lstat(filepath.Join(dir, pair[1]))
		if err := os.Remove(first); err != nil {
			return false, err
		}
		if statErr == nil {
			return true, nil
		}
	}
	return false, nil
}
