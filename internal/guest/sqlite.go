package guest

import (
	"context"
	"database/sql"
	"encoding/json"
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

	"github.com/spf13/cobra"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"hermes-box-lite/internal/wire"
)

// Bounds of the database check.
const (
	sqliteLimit  = 45 * time.Second // in all
	sqliteOne    = 20 * time.Second
	sqliteMost   = 200
	sqliteWalk   = 50_000 // directory entries
	sqliteHeader = "SQLite format 3\x00"
)

// sqliteResult is one line of check-sqlite.
type sqliteResult struct {
	Path   string      `json:"path"`
	Status wire.Status `json:"status"`
	Detail string      `json:"detail"`
}

// checkSQLiteCommand checks every database of Executor, Codex and Hermes. It
// runs as the agent.
func (a *app) checkSQLiteCommand() *cobra.Command {
	return verb("check-sqlite", "Check the databases as the agent", "", cobra.NoArgs, func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), sqliteLimit)
		defer cancel()
		var roots []string
		for _, name := range []string{".executor", ".codex", ".hermes"} {
			roots = append(roots, filepath.Join(a.layout.Home(), name))
		}
		enc := json.NewEncoder(a.stdout)
		paths, complete := findDatabases(roots)
		for _, path := range paths {
			status, detail := quickCheck(ctx, path)
			if err := enc.Encode(sqliteResult{path, status, detail}); err != nil {
				return err
			}
		}
		if !complete {
			return enc.Encode(sqliteResult{a.layout.Home(), wire.Info, "too many files: not all databases were examined"})
		}
		return nil
	})
}

// findDatabases finds regular files with SQLite's header; links are not
// followed.
func findDatabases(roots []string) (paths []string, complete bool) {
	seen := 0
	complete = true
	for _, root := range roots {
		_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if seen++; seen > sqliteWalk || len(paths) >= sqliteMost {
				complete = false
				return fs.SkipAll
			}
			if err != nil {
				return nil // unreadable places hold no database of the agent
			}
			if e.IsDir() && (e.Name() == "node_modules" || e.Name() == ".git" || e.Name() == "venv" || e.Name() == ".venv") {
				return fs.SkipDir
			}
			if e.Type().IsRegular() && hasSQLiteHeader(path) {
				paths = append(paths, path)
			}
			return nil
		})
	}
	return paths, complete
}

func hasSQLiteHeader(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	head := make([]byte, len(sqliteHeader))
	_, err = io.ReadFull(f, head)
	return err == nil && string(head) == sqliteHeader
}

// quickCheck opens the database read-only. A write-ahead log makes SQLite need
// its shared memory file; where only the log is left, opening would create
// one, which a doctor does not do.
func quickCheck(ctx context.Context, path string) (wire.Status, string) {
	options := "mode=ro"
	if exists(path + "-wal") {
		if !exists(path + "-shm") {
			return wire.Info, "has a write-ahead log that its program has yet to recover"
		}
	} else {
		// Nobody has a WAL database open without a log, and immutable keeps
		// SQLite from making one.
		options += "&immutable=1"
	}
	ctx, cancel := context.WithTimeout(ctx, sqliteOne)
	defer cancel()
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?"+options+"&_pragma=busy_timeout(2000)")
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
	var sqliteErr *sqlite.Error
	switch {
	case ctx.Err() != nil:
		return wire.Info, "not finished in time"
	case errors.As(err, &sqliteErr) && (sqliteErr.Code()&0xff == sqlite3.SQLITE_BUSY || sqliteErr.Code()&0xff == sqlite3.SQLITE_LOCKED):
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

func summarizeSQLite(results []sqliteResult) wire.Check {
	c := wire.Check{ID: "state.sqlite", Status: wire.Pass}
	counts := map[wire.Status]int{}
	var failed, noted []string
	for _, r := range results {
		counts[r.Status]++
		switch r.Status {
		case wire.Pass:
		case wire.Fail:
			failed = append(failed, r.Path+": "+r.Detail)
		default:
			noted = append(noted, r.Path+": "+r.Detail)
		}
	}
	c.Summary = fmt.Sprintf("%d databases are sound", counts[wire.Pass])
	switch {
	case len(failed) > 0:
		c.Status, c.Summary = wire.Fail, fmt.Sprintf("%d of %d databases are damaged", len(failed), len(results))
		c.Evidence = strings.Join(failed[:min(3, len(failed))], "; ")
		c.Fix = "box load BACKUP NEWNAME # restores a backup into a new box"
	case len(noted) > 0:
		c.Status = wire.Info
		c.Summary += fmt.Sprintf(", %d could not be checked now", len(noted))
		c.Evidence = strings.Join(noted[:min(3, len(noted))], "; ")
	case len(results) == 0:
		c.Summary = "there are no databases yet"
	}
	return c
}
