package pack

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"modernc.org/sqlite"

	"hermes-box-lite/internal/guest/layout"
)

// SnapshotVerb is the hidden verb of hb that copies one database as its owner.
const SnapshotVerb = "snapshot-sqlite"

// sqliteHeader begins every SQLite 3 database (file format, section 1.3).
const sqliteHeader = "SQLite format 3\x00"

// snapshotLimit bounds one database. The copy of a gigabyte takes seconds, in
// an emulated machine minutes.
const snapshotLimit = 15 * time.Minute

// busyLimit is how long a locked database is waited for.
const busyLimit = 5 * time.Second

// sidecars are the files beside a database that belong to it.
func sidecars() []string { return []string{"-wal", "-shm", "-journal"} }

// isSidecar tells a database's own file from another that only has its name.
func isSidecar(f *os.File, base string, size int64) bool {
	head := make([]byte, 8)
	if n, _ := f.ReadAt(head, 0); int64(n) < min(size, 8) {
		return false
	}
	switch filepath.Ext(strings.ReplaceAll(base, "-", ".")) {
	case ".wal": // file format, section 4.1
		return size == 0 || bytes.Equal(head[:3], []byte{0x37, 0x7f, 0x06}) && head[3]&^1 == 0x82
	case ".shm": // WAL-index header, in the byte order of its machine
		const version = 3007000
		return size == 0 || binary.NativeEndian.Uint32(head) == version || bytes.Equal(head, make([]byte, 8))
	case ".journal": // section 3; a persistent one is zeroed when it is done
		return size == 0 || bytes.Equal(head, make([]byte, 8)) || bytes.Equal(head, []byte{0xd9, 0xd5, 0x05, 0xf9, 0x20, 0xa1, 0x63, 0xd7})
	}
	return false
}

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

// Snapshot copies the database at from into the empty file to and removes the
// latter's name before it holds anything. It runs as the database's owner.
//
// A save changes nothing. A connection that can write would: as the last one it
// empties the write-ahead log when it closes, it rolls back what a crash has
// left, and it removes the log of what is no database at all. One that can only
// read leaves an empty log and its shared memory behind where there is no log.
// So what lies beside the database decides.
func Snapshot(ctx context.Context, from, to string) error {
	mode := "rw"
	for _, suffix := range sidecars() {
		if _, err := os.Lstat(from + suffix); !errors.Is(err, os.ErrNotExist) {
			mode = "ro"
		}
	}
	return copyDatabase(ctx, from, to, mode)
}

func copyDatabase(ctx context.Context, from, to, mode string) error {
	db, err := sql.Open("sqlite", databaseURI(from)+"?mode="+mode+fmt.Sprintf("&_pragma=busy_timeout(%d)", busyLimit.Milliseconds()))
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	// Asks for a lock and reads the schema: what is damaged or locked shows
	// before anything is copied.
	var n int
	if err := conn.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_master").Scan(&n); err != nil {
		return err
	}
	return conn.Raw(func(driver any) error {
		source, ok := driver.(interface {
			NewBackup(string) (*sqlite.Backup, error)
		})
		if !ok {
			return errors.New("the SQLite driver has no backup")
		}
		// A journal would be a second file, with a name.
		backup, err := source.NewBackup(databaseURI(to) + "?mode=rw&_pragma=journal_mode(OFF)&_pragma=synchronous(OFF)&_pragma=temp_store(2)")
		if err != nil {
			return err
		}
		if err := os.Remove(to); err != nil {
			return errors.Join(err, backup.Finish())
		}
		deadline := time.Now().Add(busyLimit)
		for {
			more, err := backup.Step(-1)
			if err == nil && !more {
				break
			}
			if err != nil && !isBusy(err) || err != nil && time.Now().After(deadline) {
				return errors.Join(err, backup.Finish())
			}
			select {
			case <-ctx.Done():
				return errors.Join(context.Cause(ctx), backup.Finish())
			case <-time.After(50 * time.Millisecond):
			}
		}
		return backup.Finish()
	})
}

func isBusy(err error) bool {
	const busy, locked = 5, 6 // SQLITE_BUSY, SQLITE_LOCKED
	var e *sqlite.Error
	return errors.As(err, &e) && (e.Code()&0xff == busy || e.Code()&0xff == locked)
}

func databaseURI(path string) string { return "file:" + (&url.URL{Path: path}).EscapedPath() }

// hasSQLiteHeader reads from the beginning of f and returns there.
func hasSQLiteHeader(f *os.File) (bool, error) {
	head := make([]byte, len(sqliteHeader))
	n, err := f.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return false, err
	}
	return string(head[:n]) == sqliteHeader, nil
}
