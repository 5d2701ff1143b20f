package provision

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/wire"
)

// memory is what a verification leaves to the doctor that comes right after it,
// as the one of `box new` does: without it every program would be run twice
// within a minute, which takes half a minute in an emulated machine.
type memory struct {
	BootID string                `json:"boot_id"`
	At     time.Duration         `json:"at"` // on the kernel's clock since boot, which nobody sets
	Tools  map[string]remembered `json:"tools"`
}

type remembered struct {
	Version string `json:"version"`
	Files   string `json:"files"` // fingerprint of all that the program consists of
}

// memoryLasts is how long a verification is believed.
const memoryLasts = 10 * time.Minute

func memoryPath(l layout.Layout) string { return filepath.Join(l.Run(), "verified.json") }

// slowTools are those whose start takes its time, with the directories that
// hold all their files but the system's libraries.
func slowTools(l layout.Layout) map[string]string {
	packages := map[string]string{"node": "", "npm": ""}
	for _, t := range (&run{l: l, req: wire.ProvisionRequest{Executor: true}}).npmTools() {
		packages[t.name] = filepath.Join(npmPrefix, "lib/node_modules", t.pkg)
	}
	return packages
}

// remember writes down the versions of the slow tools.
func remember(l layout.Layout, s survey) error {
	m := memory{BootID: process.BootID(), At: sinceBoot(), Tools: map[string]remembered{}}
	for name, dir := range slowTools(l) {
		f, ok := s.found[s.envs[0]][name]
		if !ok || f.trouble() != "" {
			continue
		}
		files, err := fingerprint(l, name, dir)
		if err != nil {
			return fmt.Errorf("fingerprint of %s: %w", name, err)
		}
		m.Tools[name] = remembered{f.version, files}
	}
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(l.Run(), 0o700); err != nil {
		return err
	}
	return atomicfile.Write(memoryPath(l), data, 0o600)
}

// recall returns the versions that need not be asked for, by tool.
func recall(l layout.Layout) map[string]string {
	data, err := readBounded(memoryPath(l), wire.MaxDocument)
	var m memory
	if err != nil || wire.DecodeStrict(data, &m) != nil || m.BootID != process.BootID() {
		return nil
	}
	if age := sinceBoot() - m.At; age < 0 || age > memoryLasts {
		return nil
	}
	told := map[string]string{}
	for name, dir := range slowTools(l) {
		r, ok := m.Tools[name]
		if !ok {
			continue
		}
		if files, err := fingerprint(l, name, dir); err == nil && files == r.Files {
			told[name] = r.Version
		}
	}
	return told
}

func sinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// fingerprint tells whether anything has changed of what a tool needs to start:
// its launcher and what that leads to, its package, the environment that
// programs get, the directories of the system's libraries. A file's time of
// change cannot be set by a program, see stat(2).
func fingerprint(l layout.Layout, name, dir string) (string, error) {
	h := sha256.New()
	launcher := l.Path("/usr/local/bin/" + name)
	real, err := filepath.EvalSymlinks(launcher)
	if err != nil {
		return "", err
	}
	if dir == "" {
		dir = real // node's own program
		if name == "npm" {
			dir = filepath.Dir(filepath.Dir(real))
		}
	} else {
		dir = l.Path(dir)
	}
	node, err := filepath.EvalSymlinks(l.Path("/usr/local/bin/node"))
	if err != nil {
		return "", err // most of them are its scripts
	}
	paths := []string{launcher, real, node, l.Environment(), l.Path("/etc/ld.so.cache")}
	libraries, err := filepath.Glob(l.Path("/usr/lib/*-linux-gnu"))
	if err != nil {
		return "", err
	}
	for _, path := range append(paths, libraries...) {
		if err := addFile(h, path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return addFile(h, path)
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

func addFile(w io.Writer, path string) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, path, st.Dev, st.Ino, st.Mode, st.Uid, st.Size, st.Ctim.Nano())
	return err
}
