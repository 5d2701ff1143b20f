package provision

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"hermes-box-lite/internal/atomicfile"
)

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// writeIfDiffers writes a file only when its content or mode is not the wanted
// one, and reports whether it did.
func writeIfDiffers(path string, data []byte, mode fs.FileMode) (bool, error) {
	fi, err := os.Lstat(path)
	if err == nil && fi.Mode().IsRegular() && fi.Mode().Perm() == mode {
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, data) {
			return false, nil
		}
	}
	if err == nil && !fi.Mode().IsRegular() {
		// A link or something else in our place: ours is a file.
		if fi.IsDir() {
			return false, fmt.Errorf("%s is a directory", path)
		}
		if err := os.Remove(path); err != nil {
			return false, err
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, err
	}
	return true, atomicfile.Write(path, data, mode)
}

// writeOwned is writeIfDiffers with an owner.
func writeOwned(path string, data []byte, mode fs.FileMode, uid, gid int) (bool, error) {
	changed, err := writeIfDiffers(path, data, mode)
	if err != nil {
		return changed, err
	}
	fixed, err := own(path, uid, gid)
	return changed || fixed, err
}

// own gives path to uid and gid when it is not theirs already.
func own(path string, uid, gid int) (bool, error) {
	if os.Geteuid() != 0 {
		return false, nil // a developer's machine
	}
	fi, err := os.Lstat(path)
	if err != nil {
		return false, err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && int(st.Uid) == uid && int(st.Gid) == gid {
		return false, nil
	}
	return true, os.Lchown(path, uid, gid)
}

// directory makes sure that path is a real directory with this owner and mode,
// and touches nothing below it.
func directory(path string, mode fs.FileMode, uid, gid int) (changed bool, err error) {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.Mkdir(path, mode); err != nil {
			return false, err
		}
		changed = true
		fi, err = os.Lstat(path)
	}
	if err != nil {
		return changed, err
	}
	if !fi.IsDir() {
		return changed, fmt.Errorf("%s is not a directory", path)
	}
	if fi.Mode().Perm() != mode {
		if err := os.Chmod(path, mode); err != nil {
			return changed, err
		}
		changed = true
	}
	fixed, err := own(path, uid, gid)
	return changed || fixed, err
}

// reclaim gives a directory in the agent's home back to an agent who does not
// own it, or may not use it: not what is in it, and not where a link leads.
func reclaim(path string, uid, gid int) (changed bool, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ELOOP) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat()
	if err != nil {
		return false, err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && int(st.Uid) != uid && os.Geteuid() == 0 {
		if err := f.Chown(uid, gid); err != nil {
			return false, err
		}
		changed = true
	}
	const owners = 0o700
	if fi.Mode()&owners != owners {
		if err := f.Chmod(fi.Mode() | owners); err != nil {
			return changed, err
		}
		changed = true
	}
	return changed, nil
}

// link makes path a symlink to target and reports whether it had to.
func link(path, target string) (bool, error) {
	if have, err := os.Readlink(path); err == nil && have == target {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, err
	}
	tmp := path + ".hermes-box-new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if err := os.Symlink(target, tmp); err != nil {
		return false, err
	}
	if err := os.Rename(tmp, path); err != nil {
		return false, errors.Join(err, os.Remove(tmp))
	}
	return true, nil
}
