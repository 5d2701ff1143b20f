package pack

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/guest/layout"
)

// SnapshotVerb is the hidden verb of hb that copies one database as its owner.
const SnapshotVerb = "snapshot-sqlite"

// snapshotLimit bounds one database. The copy of a gigabyte takes seconds, in
// an emulated machine minutes.
const snapshotLimit = 15 * time.Minute

// snapshotPrefix names temporary files that are empty as long as they have a
// name.
const snapshotPrefix = "hb-snapshot-"

// snapshotDir is on the system disk: state is packed from /data, which may be
// full.
func snapshotDir(l layout.Layout) string { return l.Path("/var/tmp") }

// removeStaleSnapshots removes the empty files of killed snapshots.
func removeStaleSnapshots(l layout.Layout) {
	stale, _ := filepath.Glob(filepath.Join(snapshotDir(l), snapshotPrefix+"*")) // the pattern is sound
	for _, path := range stale {
		_ = os.Remove(path) // it holds nothing
	}
}

// snapshotUser is who opens a database: its owner, but never root where the
// agent can put a link in the place of the database or of what lies beside it.
func snapshotUser(name string, st *unix.Stat_t) (uid, gid uint32) {
	if st.Uid == 0 && strings.HasPrefix(name, homeEntry+"/") {
		return layout.AgentUID, layout.AgentGID
	}
	return st.Uid, st.Gid
}

// snapshot copies the database at path through SQLite's online backup, as that
// user, into a file of mode 0600 that has no name once it holds anything.
// The caller closes the file, with which it is gone.
func snapshot(ctx context.Context, l layout.Layout, path string, uid, gid uint32) (_ *os.File, err error) {
	if err := os.MkdirAll(snapshotDir(l), 0o1777); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(snapshotDir(l), snapshotPrefix)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			// The helper removes the name; if it never ran, it is still there.
			if removeErr := os.Remove(f.Name()); !errors.Is(removeErr, os.ErrNotExist) {
				err = errors.Join(err, removeErr)
			}
			err = errors.Join(err, f.Close())
		}
	}()
	if err := f.Chmod(0o600); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, snapshotLimit)
	defer cancel()
	cmd := l.AgentCommand(ctx, self, SnapshotVerb, path, f.Name())
	cmd.Dir = "/"
	if l.Real() {
		if err := f.Chown(int(uid), int(gid)); err != nil {
			return nil, err
		}
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: gid}
	}
	var said strings.Builder
	cmd.Stderr = &limitedBuilder{&said}
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, cause
		}
		words := strings.TrimSpace(said.String())
		if words == "" {
			words = err.Error()
		}
		return nil, errors.New(words)
	}
	if _, err := os.Lstat(f.Name()); err == nil {
		return nil, errors.New("the snapshot kept its name")
	}
	return f, nil
}

// limitedBuilder keeps the first KiB.
type limitedBuilder struct{ b *strings.Builder }

func (l *limitedBuilder) Write(p []byte) (int, error) {
	if room := 1024 - l.b.Len(); room > 0 {
		l.b.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
