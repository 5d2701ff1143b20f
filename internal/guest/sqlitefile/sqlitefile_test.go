package sqlitefile

import (
	"database/sql"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"hermes-box-lite/internal/wire"
)

// What only has the name of a database's file is state like any other.
func TestNamedLikeSidecars(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		content string
		want    bool
	}{
		"a-wal": {"\x37\x7f\x06\x82rest of it", true}, "b-wal": {"\x37\x7f\x06\x83rest of it", true}, "c-wal": {"", true},
		"d-wal": {"my diary, which is long", false}, "e-wal": {"x", false},
		"a-shm": {"\x18\xe2\x2d\x00\x00\x00\x00\x00", true}, "b-shm": {strings.Repeat("\x00", 32768), true}, "c-shm": {"a diary of mine", false},
		"a-journal": {"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7....", true}, "b-journal": {strings.Repeat("\x00", 512), true}, "c-journal": {"Dear diary, today", false},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := IsSidecar(f, name, int64(len(c.content))); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
		_ = f.Close()
	}
}

// torn leaves a database as a writer that was cut off does: half of a change is
// in it, and the journal knows what was there before.
func torn(t *testing.T) (path string, journal []byte) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "d.db")
	db, err := sql.Open("sqlite", URI(path)+"?_pragma=journal_mode(delete)&_pragma=cache_size(1)")
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	for _, q := range []string{
		"CREATE TABLE t(a TEXT, b INTEGER)", "CREATE INDEX i ON t(b)",
		"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 500) INSERT INTO t SELECT hex(randomblob(100)), i FROM n",
	} {
		if _, err := db.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	// More than the cache holds: pages reach the file before the commit.
	if _, err := tx.Exec("UPDATE t SET a = hex(randomblob(300)), b = -b"); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if journal, err = os.ReadFile(path + "-journal"); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, journal
}

func TestJournals(t *testing.T) {
	path, journal := torn(t)
	for _, tt := range []struct {
		name    string
		journal []byte
		want    wire.Status
	}{
		{"hot", journal, wire.Info},
		{"zeroed", make([]byte, len(journal)), wire.Fail},
		{"empty", []byte{}, wire.Fail},
	} {
		if err := os.WriteFile(path+"-journal", tt.journal, 0o600); err != nil {
			t.Fatal(err)
		}
		if status, detail := Check(t.Context(), path); status != tt.want {
			t.Errorf("%s: %s, %s", tt.name, status, detail)
		}
	}
	if err := os.Remove(path + "-journal"); err != nil {
		t.Fatal(err)
	}
	if status, detail := Check(t.Context(), path); status != wire.Fail {
		t.Errorf("without a journal: %s, %s", status, detail)
	}
	// And it is sound: the next one to open it recovers it.
	if err := os.WriteFile(path+"-journal", journal, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", URI(path))
	if err != nil {
		t.Fatal(err)
	}
	var n int
	if err := db.QueryRow("SELECT count(*) FROM t WHERE b > 0").Scan(&n); err != nil || n != 500 {
		t.Errorf("%d rows, %v", n, err)
	}
	_ = db.Close()
	if status, detail := Check(t.Context(), path); status != wire.Pass {
		t.Errorf("recovered: %s, %s", status, detail)
	}
}

func TestWrittenSince(t *testing.T) {
	for name, change := range map[string]func(path string) error{
		"":         func(string) error { return nil },
		"larger":   func(path string) error { return os.WriteFile(path, []byte("xy"), 0o600) },
		"touched":  func(path string) error { return os.Chtimes(path, time.Time{}, time.Unix(2e9, 0)) },
		"gone":     os.Remove,
		"journal":  func(path string) error { return os.WriteFile(path+"-journal", []byte{0xd9}, 0o600) },
		"log":      func(path string) error { return os.WriteFile(path+"-wal", nil, 0o600) },
		"replaced": func(path string) error { return os.Rename(path+".new", path) },
	} {
		path := filepath.Join(t.TempDir(), "d.db")
		when := time.Unix(1e9, 0)
		for _, p := range []string{path + ".new", path} {
			if err := os.WriteFile(p, []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(p, when, when); err != nil {
				t.Fatal(err)
			}
		}
		before, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := change(path); err != nil {
			t.Fatal(err)
		}
		if got := writtenSince(path, before); got != (name != "") {
			t.Errorf("%q: %t", name, got)
		}
	}
}
