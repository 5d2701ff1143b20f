package sqlitefile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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
