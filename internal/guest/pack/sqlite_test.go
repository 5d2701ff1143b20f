package pack

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/sqlitefile"
)

func database(t testing.TB, path, pragma string) *sql.DB {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", sqlitefile.URI(path)+"?_pragma="+pragma)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(1)
	return db
}

func do(t testing.TB, db *sql.DB, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := db.Exec(s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// rows of the copy in an archive, which must be sound.
func rows(t testing.TB, content string) int {
	t.Helper()
	path := put(t, filepath.Join(t.TempDir(), "copy.db"), content)
	db := database(t, path, "busy_timeout(0)")
	var said string
	if err := db.QueryRow("PRAGMA integrity_check").Scan(&said); err != nil || said != "ok" {
		t.Fatalf("integrity: %q, %v", said, err)
	}
	var n int
	if err := db.QueryRow("SELECT count(*) FROM rows").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func bytesOf(t testing.TB, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		found[e.Name()] = string(data)
	}
	return found
}

// crashed leaves a database as a killed program does: copied under its feet.
func crashed(t testing.TB, from, to string) {
	t.Helper()
	for _, suffix := range []string{"", "-wal", "-journal"} {
		data, err := os.ReadFile(from + suffix)
		if err == nil && len(data) > 0 {
			put(t, to+suffix, string(data))
		}
	}
}

const manyRows = `WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c WHERE n<500) INSERT INTO rows SELECT n, hex(randomblob(100)) FROM c`

// TestDatabases of programs that do not run, or run and do nothing: the copy is
// whole, without sidecars, and a save changes nothing of the state.
func TestDatabases(t *testing.T) {
	for name, make := range map[string]func(t *testing.T, path string){
		"rollback journal": func(t *testing.T, path string) {
			db := database(t, path, "journal_mode(DELETE)")
			do(t, db, "CREATE TABLE rows (n, text)", manyRows)
			_ = db.Close()
		},
		"persistent journal": func(t *testing.T, path string) {
			db := database(t, path, "journal_mode(PERSIST)")
			do(t, db, "CREATE TABLE rows (n, text)", manyRows)
			_ = db.Close()
		},
		"WAL, closed": func(t *testing.T, path string) {
			db := database(t, path, "journal_mode(WAL)")
			do(t, db, "CREATE TABLE rows (n, text)", manyRows)
			_ = db.Close()
		},
		"WAL, open, all in the log": func(t *testing.T, path string) {
			held(t, path, "PRAGMA journal_mode=WAL", "PRAGMA wal_autocheckpoint=0", "CREATE TABLE rows (n, text)", manyRows)
			if info, err := os.Stat(path); err != nil || info.Size() > 4096 {
				t.Fatalf("not all is in the log: %v, %v", info, err)
			}
		},
		"WAL, crashed, all in the log": func(t *testing.T, path string) {
			live := filepath.Join(t.TempDir(), "live.db")
			held(t, live, "PRAGMA journal_mode=WAL", "PRAGMA wal_autocheckpoint=0", "CREATE TABLE rows (n, text)", manyRows)
			crashed(t, live, path)
		},
		"other page size": func(t *testing.T, path string) {
			db := database(t, path, "page_size(512)")
			do(t, db, "CREATE TABLE rows (n, text)", manyRows)
			_ = db.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newBox(t)
			dir := filepath.Join(l.Home(), ".hermes")
			path := filepath.Join(dir, "state % ?#.db")
			make(t, path)
			before := bytesOf(t, dir)
			p := pack(t, l)
			// Locks and marks of readers are not state, and come with each of them.
			shm := "state % ?#.db-shm"
			if after := bytesOf(t, dir); !cmp.Equal(without(before, shm), without(after, shm)) {
				t.Errorf("the state changed: %s", cmp.Diff(keysAndSizes(before), keysAndSizes(after)))
			}
			entry := homeEntry + "/.hermes/state % ?#.db"
			if n := rows(t, p.content[entry]); n != 500 {
				t.Errorf("%d rows", n)
			}
			for name := range p.entries {
				if strings.HasPrefix(name, entry+"-") {
					t.Errorf("%s travels", name)
				}
			}
			if len(p.summary.End.Findings) != 0 {
				t.Errorf("found %+v", p.summary.End.Findings)
			}
			if left, err := os.ReadDir(snapshotDir(l)); err != nil || len(left) != 0 {
				t.Errorf("%v is left, %v", left, err)
			}
			other := newBox(t)
			unpack(t, other, p.stream)
			if again := pack(t, other); again.content[entry] != p.content[entry] {
				t.Error("the copy of the copy differs")
			}
		})
	}
}

func keysAndSizes(m map[string]string) map[string]int {
	sizes := map[string]int{}
	for name, content := range m {
		sizes[name] = len(content)
	}
	return sizes
}

func without(m map[string]string, name string) map[string]string {
	rest := map[string]string{}
	for n, content := range m {
		if n != name {
			rest[n] = content
		}
	}
	return rest
}

// TestNoCopy: what SQLite cannot read travels as it is, with what lies beside
// it, is found, and never blocks for long.
func TestNoCopy(t *testing.T) {
	for name, make := range map[string]func(t *testing.T, path string){
		"corrupt": func(t *testing.T, path string) {
			put(t, path, sqlitefile.Header+strings.Repeat("nonsense", 1000))
			put(t, path+"-wal", "log")
		},
		"corrupt inside": func(t *testing.T, path string) {
			db := database(t, path, "journal_mode(DELETE)")
			do(t, db, "CREATE TABLE rows (n, text)", manyRows)
			_ = db.Close()
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			copy(data[100:], bytes.Repeat([]byte{0xee}, 2000)) // the schema
			put(t, path, string(data))
			put(t, path+"-wal", "")
		},
		"header only": func(t *testing.T, path string) { put(t, path, sqlitefile.Header); put(t, path+"-wal", "x") },
		"hot journal": func(t *testing.T, path string) {
			live := filepath.Join(t.TempDir(), "live.db")
			held(t, live, "CREATE TABLE rows (n, text)", manyRows, "PRAGMA cache_size=1", "BEGIN", "UPDATE rows SET text = hex(randomblob(200))")
			crashed(t, live, path)
			if _, err := os.Stat(path + "-journal"); err != nil {
				t.Fatal(err)
			}
		},
		"locked": func(t *testing.T, path string) {
			held(t, path, "CREATE TABLE rows (n, text)", manyRows, "BEGIN EXCLUSIVE", "UPDATE rows SET text = 'changed'")
			if _, err := os.Stat(path + "-journal"); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // some wait
			l := newBox(t)
			dir := filepath.Join(l.Home(), ".hermes")
			path := filepath.Join(dir, "state.db")
			make(t, path)
			before := bytesOf(t, dir)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			p, err := packUntil(ctx, l)
			if err != nil {
				t.Fatal(err)
			}
			if after := bytesOf(t, dir); !cmp.Equal(before, without(after, "state.db-shm")) {
				t.Errorf("the state changed: %s", cmp.Diff(keysAndSizes(before), keysAndSizes(after)))
			}
			entry := homeEntry + "/.hermes/"
			for name, content := range before {
				if p.content[entry+name] != content {
					t.Errorf("%s does not travel as it is", name)
				}
			}
			if len(before) < 2 {
				t.Errorf("nothing lies beside it: %v", keysAndSizes(before))
			}
			if found := p.findings("database"); len(found) != 1 || found[entry+"state.db"] == "" {
				t.Errorf("found %v", found)
			}
			if left, err := os.ReadDir(snapshotDir(l)); err != nil || len(left) != 0 {
				t.Errorf("%v is left, %v", left, err)
			}
		})
	}
}

// TestGrowsWithoutCopy: a database that could not be copied is whole, as large
// as it has become meanwhile.
func TestGrowsWithoutCopy(t *testing.T) {
	l := newBox(t)
	put(t, filepath.Join(l.Workspace(), growing), sqlitefile.Header+"a page")
	p := pack(t, l)
	name := homeEntry + "/workspace/" + growing
	if got, want := p.content[name], sqlitefile.Header+"a pagethe last page"; got != want {
		t.Errorf("%q travels, not %q", got, want)
	}
	if found := p.summary.End.Findings; len(found) != 1 || found[0].Kind != "database" {
		t.Errorf("found %+v", found)
	}
}

func packUntil(ctx context.Context, l layout.Layout) (*packed, error) {
	type outcome struct {
		p   *packed
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		p, err := packWith(l, noHold)
		done <- outcome{p, err}
	}()
	select {
	case o := <-done:
		return o.p, o.err
	case <-ctx.Done():
		return nil, errors.New("pack blocks")
	}
}

// TestNotADatabase: what only looks a little like one is a file like others.
func TestNotADatabase(t *testing.T) {
	l := newBox(t)
	for name, content := range map[string]string{"empty.db": "", "encrypted.db": strings.Repeat("\x8f\x13", 4096), "short.db": sqlitefile.Header[:15], "old.db": "** This file contains an SQLite 2.1 database **"} {
		put(t, filepath.Join(l.Workspace(), name), content)
		put(t, filepath.Join(l.Workspace(), name+"-wal"), "beside")
		defer func() {
			if t.Failed() {
				t.Log(name)
			}
		}()
	}
	p := pack(t, l)
	if len(p.summary.End.Findings) != 0 || len(p.content) != 8 {
		t.Errorf("%d files, found %+v", len(p.content), p.summary.End.Findings)
	}
}

// TestLiveWriter: each archive has every row that was acknowledged before.
func TestLiveWriter(t *testing.T) {
	l := newBox(t)
	path := filepath.Join(l.Home(), ".hermes/state.db")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cmd := exec.CommandContext(ctx, self, writerVerb, path)
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var acknowledged atomic.Int64
	first, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		lines := bufio.NewScanner(pipe)
		for lines.Scan() {
			n, err := strconv.ParseInt(lines.Text(), 10, 64)
			if err != nil {
				t.Error(err)
				return
			}
			if acknowledged.Store(n); n == 1 {
				close(first)
			}
		}
	}()
	select {
	case <-first:
	case <-ended:
		t.Fatal("the writer ended")
	case <-time.After(time.Minute):
		t.Fatal("the writer does not write")
	}
	// Nothing in the snapshots' directory holds anything while it has a name.
	watch, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for {
			select {
			case <-watch:
				return
			default:
			}
			entries, _ := os.ReadDir(snapshotDir(l)) // not there yet
			for _, e := range entries {
				if info, err := e.Info(); err == nil && (info.Size() != 0 || info.Mode() != 0o600) {
					t.Errorf("%s, %v, holds %d bytes", e.Name(), info.Mode(), info.Size())
					return
				}
			}
			time.Sleep(100 * time.Microsecond) // leave the rest some time
		}
	}()
	const packs = 20
	for n := range packs {
		before := acknowledged.Load()
		p := pack(t, l)
		if got := rows(t, p.content[homeEntry+"/.hermes/state.db"]); int64(got) < before {
			t.Errorf("pack %d: %d rows, %d acknowledged before", n, got, before)
		}
		for name := range p.entries {
			if strings.Contains(name, "state.db-") {
				t.Errorf("pack %d: %s travels", n, name)
			}
		}
		if f := p.findings("database"); len(f) != 0 {
			t.Errorf("pack %d: found %v", n, f)
		}
	}
	close(watch)
	<-watched
	before := acknowledged.Load()
	cancel()
	<-ended
	_ = cmd.Wait() // it was ended by us
	if before < packs {
		t.Errorf("only %d rows were written", before)
	}
	// The writer is dead now, its log is still there.
	if got := rows(t, pack(t, l).content[homeEntry+"/.hermes/state.db"]); int64(got) < before {
		t.Errorf("after its end: %d rows, %d acknowledged", got, before)
	}
}

// TestStaleSnapshots of killed packs go with the next one.
func TestStaleSnapshots(t *testing.T) {
	l := newBox(t)
	stale := put(t, filepath.Join(snapshotDir(l), snapshotPrefix+"123"), "")
	other := put(t, filepath.Join(snapshotDir(l), "other"), "")
	pack(t, l)
	if _, err := os.Stat(stale); err == nil {
		t.Error("the stale one is there")
	}
	if _, err := os.Stat(other); err != nil {
		t.Error(err)
	}
}

// TestSnapshotSpeaks: why there is no copy reaches the finding.
func TestSnapshotSpeaks(t *testing.T) {
	l := newBox(t)
	put(t, filepath.Join(l.Workspace(), "x.db"), sqlitefile.Header+strings.Repeat("x", 5000))
	found := pack(t, l).findings("database")[homeEntry+"/workspace/x.db"]
	if !strings.HasPrefix(found, "copied as it is: ") || !strings.Contains(found, "not a database") {
		t.Errorf("found %q", fmt.Sprint(found))
	}
}

func TestSnapshotUser(t *testing.T) {
	for _, c := range []struct {
		name     string
		uid, gid uint32
		want     [2]uint32
	}{
		{homeEntry + "/x.db", 1001, 1001, [2]uint32{1001, 1001}},
		{homeEntry + "/x.db", 0, 0, [2]uint32{1001, 1001}},
		{homeEntry + "/x.db", 33, 34, [2]uint32{33, 34}},
		{"data/x.db", 0, 0, [2]uint32{0, 0}},
	} {
		uid, gid := snapshotUser(c.name, &unix.Stat_t{Uid: c.uid, Gid: c.gid})
		if got := [2]uint32{uid, gid}; got != c.want {
			t.Errorf("%s of %d: %v", c.name, c.uid, got)
		}
	}
}

func TestNeighboursOfADatabaseTravel(t *testing.T) {
	l := newBox(t)
	path := filepath.Join(l.Workspace(), "shop")
	put(t, path, "")
	db := database(t, path, "journal_mode(DELETE)")
	do(t, db, "CREATE TABLE rows (n, text)", manyRows)
	_ = db.Close()
	put(t, path+"-shm/diary.txt", "a diary")
	put(t, path+"-wal", "notes on a wall, which are long")
	p := pack(t, l)
	entry := homeEntry + "/workspace/"
	if !strings.HasPrefix(p.content[entry+"shop"], sqlitefile.Header) {
		t.Error("the database does not travel")
	}
	for name, want := range map[string]string{"shop-shm/diary.txt": "a diary", "shop-wal": "notes on a wall, which are long"} {
		if got := p.content[entry+name]; got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
}
