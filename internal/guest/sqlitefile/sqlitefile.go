// Package sqlitefile is what hb knows of SQLite's database files: to recognise
// one and the files beside it, to check it, and to copy it while its program
// goes on. None of it changes a database.
package sqlitefile

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"hermes-box-lite/internal/wire"
)

// Header begins every SQLite 3 database (file format, section 1.3).
const Header = "SQLite format 3\x00"

// busyLimit is how long a locked database is waited for.
const busyLimit = 5 * time.Second

// Bounds of looking for databases and of checking one.
const (
	findMost   = 200
	findWalk   = 50_000 // directory entries
	checkLimit = 20 * time.Second
)

// Sidecars are the files beside a database that belong to it.
func Sidecars() []string { return []string{"-wal", "-shm", "-journal"} }

// IsSidecar tells a database's own file from another that only has its name.
func IsSidecar(f *os.File, base string, size int64) bool {
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

// Find finds regular files with SQLite's header; links are not
// followed. It gives up where there is no end to them.
func Find(roots []string) (paths []string, complete bool) {
	seen := 0
	complete = true
	for _, root := range roots {
		_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if seen++; seen > findWalk || len(paths) >= findMost {
				complete = false
				return fs.SkipAll
			}
			if err != nil {
				return nil // unreadable places hold no database of the agent
			}
			if e.IsDir() && (e.Name() == "node_modules" || e.Name() == ".git" || e.Name() == "venv" || e.Name() == ".venv") {
				return fs.SkipDir
			}
			if e.Type().IsRegular() && isAt(path) {
				paths = append(paths, path)
			}
			return nil
		})
	}
	return paths, complete
}

// open waits for no pipe and follows no link: whose files these are puts there
// what it likes.
func open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

func isAt(path string) bool {
	f, err := open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	is, err := Is(f)
	return err == nil && is
}

// Check opens the database read-only. A write-ahead log makes SQLite need
// its shared memory file; where only the log is left, opening would create
// one, which a doctor does not do.
func Check(ctx context.Context, path string) (wire.Status, string) {
	if exists(path + "-wal") {
		if !exists(path + "-shm") {
			return wire.Info, "has a write-ahead log that its program has yet to recover"
		}
		return quickCheck(ctx, path, "mode=ro")
	}
	if isHot(path + "-journal") {
		return wire.Info, "has a journal that its program has yet to finish or to roll back"
	}
	before, err := os.Lstat(path)
	if err != nil {
		return wire.Info, err.Error()
	}
	// Nobody has a WAL database open without a log, and immutable keeps
	// SQLite from making one. It also makes it see neither locks nor journals,
	// so that what was written meanwhile looks damaged.
	status, detail := quickCheck(ctx, path, "mode=ro&immutable=1")
	if status == wire.Fail && writtenSince(path, before) {
		return wire.Info, "was written meanwhile"
	}
	return status, detail
}

// isHot tells whether a rollback journal is one that counts: there is something
// in it, and its header was not zeroed (file format, section 3).
func isHot(journal string) bool {
	f, err := open(journal)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return false
	}
	var first [1]byte
	n, _ := f.ReadAt(first[:], 0)
	return n == 1 && first[0] != 0
}

// writtenSince tells whether the database is another than it was before, or is
// about to be.
func writtenSince(path string, before fs.FileInfo) bool {
	now, err := os.Lstat(path)
	return err != nil || !os.SameFile(before, now) || now.Size() != before.Size() || !now.ModTime().Equal(before.ModTime()) ||
		isHot(path+"-journal") || exists(path+"-wal")
}

func quickCheck(ctx context.Context, path, options string) (wire.Status, string) {
	ctx, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	db, err := sql.Open("sqlite", URI(path)+"?"+options+"&_pragma=busy_timeout(2000)")
	if err != nil {
		return wire.Fail, err.Error()
	}
	defer func() { _ = db.Close() }()
	var problems []string
	err = func() error {
		rows, err := db.QueryContext(ctx, "PRAGMA quick_check(5)")
		if err != nil {
			return err
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			var line string
			if err := rows.Scan(&line); err != nil {
				return err
			}
			if line != "ok" {
				problems = append(problems, line)
			}
		}
		return rows.Err()
	}()
	switch {
	case ctx.Err() != nil:
		return wire.Info, "not finished in time"
	case isBusy(err):
		return wire.Info, "in use at the moment"
	case err != nil:
		return wire.Fail, err.Error()
	case len(problems) > 0:
		return wire.Fail, strings.Join(problems, "; ")
	}
	return wire.Pass, ""
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// Copy copies the database at from into the empty file to and removes the
// latter's name before it holds anything. It runs as the database's owner.
//
// A save changes nothing. A connection that can write would: as the last one it
// empties the write-ahead log when it closes, it rolls back what a crash has
// left, and it removes the log of what is no database at all. One that can only
// read leaves an empty log and its shared memory behind where there is no log.
// So what lies beside the database decides.
func Copy(ctx context.Context, from, to string) error {
	mode := "rw"
	for _, suffix := range Sidecars() {
		if _, err := os.Lstat(from + suffix); !errors.Is(err, os.ErrNotExist) {
			mode = "ro"
		}
	}
	return copyDatabase(ctx, from, to, mode)
}

func copyDatabase(ctx context.Context, from, to, mode string) error {
	db, err := sql.Open("sqlite", URI(from)+"?mode="+mode+fmt.Sprintf("&_pragma=busy_timeout(%d)", busyLimit.Milliseconds()))
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
		backup, err := source.NewBackup(URI(to) + "?mode=rw&_pragma=journal_mode(OFF)&_pragma=synchronous(OFF)&_pragma=temp_store(2)")
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
	var e *sqlite.Error
	return errors.As(err, &e) && (e.Code()&0xff == sqlite3.SQLITE_BUSY || e.Code()&0xff == sqlite3.SQLITE_LOCKED)
}

// URI names a file to the driver, whatever is in its path.
func URI(path string) string { return "file:" + (&url.URL{Path: path}).EscapedPath() }

// Is tells whether an open file is a database, and leaves its offset alone.
func Is(f io.ReaderAt) (bool, error) {
	head := make([]byte, len(Header))
	n, err := f.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return false, err
	}
	return string(head[:n]) == Header, nil
}
