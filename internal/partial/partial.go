// Package partial makes the files and directories that become something under
// another name when they are whole. Each says by a lock that somebody is
// writing it, so that what a killed process left can be told and removed.
package partial

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const suffix = ".partial"

// Create makes a file that only its owner reads, in dir. It is the caller's
// until it is closed; its name is the caller's to change or to remove.
func Create(dir, prefix string) (*os.File, error) {
	return create(dir, prefix, os.O_RDWR, func(path string) error {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		return f.Close()
	})
}

// CreateDir makes a directory that only its owner reads.
func CreateDir(dir, prefix string) (*os.File, error) {
	return create(dir, prefix, os.O_RDONLY, func(path string) error { return os.Mkdir(path, 0o700) })
}

func create(dir, prefix string, flags int, make func(path string) error) (*os.File, error) {
	const tries = 100
	for range tries {
		var id [8]byte
		_, _ = rand.Read(id[:]) // never fails
		path := filepath.Join(dir, prefix+hex.EncodeToString(id[:])+suffix)
		if err := make(path); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(path, flags|syscall.O_NOFOLLOW, 0)
		if err == nil {
			if _, free := lock(f); free && same(f, path) {
				return f, nil
			}
			err = f.Close()
		}
		// Before it was locked another command took it for a stale one.
		if err = errors.Join(os.Remove(path), err); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return nil, errors.New("another command removes what was just made")
}

// lock takes the lock of what is being written. On a file system without locks
// it is free and not held.
func lock(f *os.File) (held, free bool) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	return err == nil, !errors.Is(err, syscall.EWOULDBLOCK)
}

func same(f *os.File, path string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Lstat(path)
	return err == nil && os.SameFile(opened, named)
}

// RemoveStale removes from dir what was made with that prefix and is no longer
// being written. What cannot be removed only wastes space; where there are no
// locks nobody knows, and nothing is removed.
func RemoveStale(dir, prefix string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		id, ok := strings.CutPrefix(e.Name(), prefix)
		id, ends := strings.CutSuffix(id, suffix)
		if _, err := hex.DecodeString(id); !ok || !ends || len(id) != 16 || err != nil || !e.IsDir() && !e.Type().IsRegular() {
			continue
		}
		path := filepath.Join(dir, e.Name())
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if held, _ := lock(f); held {
			_ = RemoveAll(path)
		}
		_ = f.Close()
	}
}

// RemoveAll is os.RemoveAll for a tree of ours in which directories may keep
// out even their owner.
func RemoveAll(path string) error {
	_ = filepath.WalkDir(path, func(path string, e fs.DirEntry, err error) error {
		if e != nil && e.IsDir() {
			_ = os.Chmod(path, 0o700) //nolint:gosec // a directory; removal tells when that fails
			if err != nil {
				return fs.SkipDir
			}
		}
		return nil
	})
	return os.RemoveAll(path)
}
