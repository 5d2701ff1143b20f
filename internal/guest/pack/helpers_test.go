package pack

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/sqlitefile"
	"hermes-box-lite/internal/wire"
)

// What the test's own binary can be asked for.
const (
	writerVerb = "write-rows"
	holderVerb = "hold-database"
)

// growing is the name of a database that grows while it should be copied, and
// cannot be.
const growing = "growing.db"

// growInstead is the copy of one.
func growInstead(path string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("the last page")
	return errors.Join(err, f.Close(), errors.New("it is in use"))
}

// TestMain lets the test's own binary be the helper that pack runs, and the
// program that is writing into a database.
func TestMain(m *testing.M) {
	var err error
	switch {
	case len(os.Args) == 4 && os.Args[1] == SnapshotVerb && filepath.Base(os.Args[2]) == growing:
		err = growInstead(os.Args[2])
	case len(os.Args) == 4 && os.Args[1] == SnapshotVerb:
		err = sqlitefile.Copy(context.Background(), os.Args[2], os.Args[3])
	case len(os.Args) == 3 && os.Args[1] == writerVerb:
		err = writeRows(os.Args[2])
	case len(os.Args) > 2 && os.Args[1] == holderVerb:
		err = holdDatabase(os.Args[2], os.Args[3:])
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// writeRows writes numbered rows and says which are durable, until it is ended.
func writeRows(path string) error {
	db, err := sql.Open("sqlite", sqlitefile.URI(path)+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_pragma=synchronous(NORMAL)")
	if err != nil {
		return err
	}
	if _, err := db.Exec("CREATE TABLE IF NOT EXISTS rows (n INTEGER PRIMARY KEY, text TEXT)"); err != nil {
		return err
	}
	for n := 1; ; n++ {
		if _, err := db.Exec("INSERT INTO rows VALUES (?, hex(randomblob(200)))", n); err != nil {
			return err
		}
		if _, err := fmt.Println(n); err != nil {
			return nil // nobody listens any more
		}
		time.Sleep(time.Millisecond) // or else it grows beyond what a test should copy
	}
}

// holdDatabase has a database open, with these statements done, until its
// standard input ends. A process of its own: whoever closes a file gives up the
// locks that his process has on it (fcntl(2)).
func holdDatabase(path string, statements []string) error {
	db, err := sql.Open("sqlite", sqlitefile.URI(path))
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(1)
	for _, s := range statements {
		if _, err := db.Exec(s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// held is holdDatabase until the test's end.
func held(t testing.TB, path string, statements ...string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, append([]string{holderVerb, path}, statements...)...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait() // how it ends is nobody's business
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
}

// newBox is a box's directory with an empty home, in memory where there is a
// place for it: every unpacking syncs.
func newBox(t testing.TB) layout.Layout {
	t.Helper()
	root, err := os.MkdirTemp("/dev/shm", "hermes-box-") //nolint:usetesting // see above
	if err != nil {
		return newBoxAt(t, t.TempDir())
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	return newBoxAt(t, root)
}

// newBoxAt is one in a directory that the test's end removes.
func newBoxAt(t testing.TB, root string) layout.Layout {
	t.Helper()
	t.Cleanup(func() { open(root) })
	l := layout.At(root)
	if err := os.MkdirAll(l.Home(), 0o755); err != nil {
		t.Fatal(err)
	}
	return l
}

// open lets a test that is not root's clean up.
func open(root string) {
	_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, _ error) error {
		if e != nil && e.IsDir() {
			_ = os.Chmod(path, 0o700)
		}
		return nil
	})
}

func put(t testing.TB, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func request() wire.PackRequest {
	return wire.PackRequest{Protocol: wire.Protocol, Box: "alpha", Time: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), Lineage: strings.Repeat("0f", 16)}
}

func noHold(context.Context) (func() error, error) { return func() error { return nil }, nil }

// packed is what Pack wrote, read back.
type packed struct {
	result  wire.StateResult
	stream  []byte
	summary archive.Summary
	order   []string
	entries map[string]archive.Entry
	content map[string]string
}

func (p *packed) Dir(e archive.Entry) error {
	p.order = append(p.order, e.Name)
	p.entries[e.Name] = e
	return nil
}
func (p *packed) Symlink(e archive.Entry) error { return p.Dir(e) }
func (p *packed) Link(e archive.Entry) error    { return p.Dir(e) }
func (p *packed) File(e archive.Entry, r io.Reader) error {
	data, err := io.ReadAll(r)
	p.content[e.Name] = string(data)
	_ = p.Dir(e)
	return err
}

// findings of a kind, by path.
func (p *packed) findings(kind string) map[string]string {
	found := map[string]string{}
	for _, f := range p.summary.End.Findings {
		if f.Kind == kind {
			found[f.Path] = f.Detail
		}
	}
	return found
}

func packHeld(t testing.TB, l layout.Layout, hold Hold) *packed {
	t.Helper()
	p, err := packWith(l, hold)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func packWith(l layout.Layout, hold Hold) (*packed, error) {
	var out bytes.Buffer
	result, err := Pack(context.Background(), l, request(), hold, &out, wire.NewEmitter(io.Discard))
	if err != nil {
		return nil, err
	}
	p := &packed{result: result, stream: bytes.Clone(out.Bytes()), entries: map[string]archive.Entry{}, content: map[string]string{}}
	z, err := gzip.NewReader(&out)
	if err != nil {
		return nil, err
	}
	if p.summary, err = archive.Read(z, archive.DefaultLimits(), p); err != nil {
		return nil, err
	}
	if s := p.summary; s.Digest != result.Digest || s.Entries != result.Entries || s.Bytes != result.Bytes || result.Stream != fmt.Sprintf("%x", sha256.Sum256(p.stream)) {
		return nil, fmt.Errorf("packed %+v, read %+v", result, s)
	}
	return p, nil
}

func pack(t testing.TB, l layout.Layout) *packed { t.Helper(); return packHeld(t, l, noHold) }

func unpack(t testing.TB, l layout.Layout, stream []byte) wire.StateResult {
	t.Helper()
	result, err := Unpack(context.Background(), l, 0, false, bytes.NewReader(stream))
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// look describes what is below dir, by means of its own. Special files do not
// count and special bits neither.
func look(t testing.TB, dir string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	names := map[uint64][]string{} // by inode
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		said := fmt.Sprintf("mode %04o time %d.%09d", st.Mode&0o777, st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			said = "dir " + said + attributesOf(path)
		case unix.S_IFREG:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			said = fmt.Sprintf("file %s %d %x%s", said, len(data), sha256.Sum256(data), attributesOf(path))
			names[st.Ino] = append(names[st.Ino], rel)
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			said = "link " + said + " " + target
		default:
			return nil
		}
		tree[rel] = said
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, same := range names {
		slices.Sort(same)
		for _, name := range same {
			tree[name] += fmt.Sprint(" names ", same)
		}
	}
	return tree
}

func attributesOf(path string) string {
	list := make([]byte, 4096)
	n, err := unix.Llistxattr(path, list)
	if err != nil {
		return ""
	}
	attrs := strings.Split(strings.Trim(string(list[:n]), "\x00"), "\x00")
	slices.Sort(attrs)
	said := ""
	for _, a := range attrs {
		if strings.HasPrefix(a, "user.") {
			value := make([]byte, 1<<16)
			n, _ := unix.Lgetxattr(path, a, value)
			said += fmt.Sprintf(" %s=%q", a, value[:max(n, 0)])
		}
	}
	return said
}
