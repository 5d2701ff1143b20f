package smolvm

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"hermes-box-lite/internal/process"
)

// roots are the directories below which smolvm keeps its things.
type roots struct{ data, cache string }

// smolvmRoots follows src/process.rs and the dirs crate: SMOLVM_DATA_DIR
// replaces the home and all XDG directories (on Linux), relative XDG
// directories do not count, macOS knows none.
func smolvmRoots() (roots, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return roots{}, fmt.Errorf("find smolvm's directories: %w", err)
	}
	if runtime.GOOS == "darwin" {
		return roots{filepath.Join(home, "Library/Application Support"), filepath.Join(home, "Library/Caches")}, nil
	}
	xdg := func(name, fallback string) string {
		if dir := os.Getenv(name); filepath.IsAbs(dir) {
			return dir
		}
		return filepath.Join(home, fallback)
	}
	if dir := os.Getenv("SMOLVM_DATA_DIR"); dir != "" {
		return roots{filepath.Join(dir, ".local/share"), filepath.Join(dir, ".cache")}, nil
	}
	return roots{xdg("XDG_DATA_HOME", ".local/share"), xdg("XDG_CACHE_HOME", ".cache")}, nil
}

// database is smolvm's list of machines (src/db.rs).
func database() (string, error) {
	r, err := smolvmRoots()
	return filepath.Join(r.data, "smolvm/server/smolvm.db"), err
}

// dataDir is where smolvm keeps a machine's disks (src/agent/manager.rs); ""
// without a home.
func (d *Driver) dataDir(name string) string {
	r, err := smolvmRoots()
	if err != nil {
		return ""
	}
	sum := sha256.Sum256([]byte(name))
	return filepath.Join(r.cache, "smolvm/vms", hex.EncodeToString(sum[:8]))
}

// leftOver says what of a machine is there that smolvm does not list, or "".
// A failed creation and every question about an unknown name leave a
// directory, whose disks the next machine of that name would get.
func (d *Driver) leftOver(name string) (string, error) {
	dir := d.dataDir(name)
	if _, err := os.Lstat(dir); err == nil {
		return "smolvm lists no such machine, but " + dir + " is there", nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if pid := vmm(dir); pid != 0 {
		return fmt.Sprintf("smolvm lists no such machine, but its process %d runs", pid), nil
	}
	return "", nil
}

// vmm is the process of a machine, which has its boot file as an argument; 0 if
// there is none, or no /proc to look at.
func vmm(dataDir string) int {
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is fine
	for _, path := range paths {
		cmdline, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(cmdline, []byte("\x00"+filepath.Join(dataDir, "boot-config.json")+"\x00")) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil && process.Identify(pid).Alive() {
			return pid
		}
	}
	return 0
}

// owned reports whether a machine's directory says that it is of this name; one
// without a word is. Two names may share a directory by their hash.
func owned(dataDir, name string) bool {
	data, err := os.ReadFile(filepath.Join(dataDir, "name"))
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	return err == nil && string(bytes.TrimSpace(data)) == name
}
