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
)

// spaceReserve is left free by Extract, bytes.
const spaceReserve = 64 << 20

// Extract writes the content of a verified archive into the new directory dir,
// mode 0700. When anything fails nothing is left.
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
	temporary, err := os.MkdirTemp(parent, ".hermes-box-extract.*.partial") // 0700
	if err != nil {
		return fmt.Errorf("write into %s: %w", parent, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeAll(temporary))
		}
	}()
	if a.report.FoldCollision != "" {
		folds, err := foldsNames(temporary)
		if err != nil {
			return err
		}
		if folds {
			return fmt.Errorf("%s cannot hold both of %s, whose names its file system takes for one", parent, a.report.FoldCollision)
		}
	}
	root, err := os.OpenRoot(temporary)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	extractor := archive.NewExtractor(root, archive.ExtractOptions{})
	defer func() { err = errors.Join(err, extractor.Close()) }()
	second, err := a.read(ctx, extractor, progress)
	if err != nil {
		if errors.Is(err, ErrAuth) {
			err = errors.Join(ErrChanged, err)
		}
		return err
	}
	if second.SHA256 != a.report.SHA256 || second.Digest != a.report.Digest {
		return ErrChanged
	}
	if err := extractor.Finish(); err != nil {
		return err
	}
	if err := renameNoReplace(temporary, dir); err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = ErrExists
		}
		return fmt.Errorf("%s: %w", dir, err)
	}
	return atomicfile.SyncDir(parent)
}

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

// removeAll also removes directories that their mode closes.
func removeAll(dir string) error {
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if e != nil && e.IsDir() {
			_ = os.Chmod(path, 0o700) // it is ours; removal tells when that fails
			if err != nil {
				return fs.SkipDir
			}
		}
		return nil
	})
	return os.RemoveAll(dir)
}
