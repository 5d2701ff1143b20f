package archive

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode"
)

func TestWriterRefuses(t *testing.T) {
	b := begin(t)
	b.good(file("data/f", "x"), symlink("data/s", "f"), link("data/l", "data/f"))
	before := b.Len()
	now := time.Unix(1700000000, 0)
	checker := NewChecker(DefaultLimits())
	for _, n := range []node{{Entry: Entry{Name: "data", Type: Dir}}, file("data/f", ""), symlink("data/s", "f"), link("data/l", "data/f")} {
		if err := checker.Add(n.Entry); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		e    Entry
		rule string
	}{
		{Entry{Name: "data/../x", Type: File}, ruleName},
		{Entry{Name: "data/d/", Type: Dir}, ruleName},
		{Entry{Name: "/x", Type: File}, ruleName},
		{Entry{Name: "x", Type: File}, ruleTop},
		{Entry{Name: "manifest", Type: File}, ruleTop},
		{Entry{Name: "data/.hermes-box", Type: Dir}, ruleReserved},
		{Entry{Name: "data/a\x00b", Type: File}, ruleNUL},
		{Entry{Name: "data/f", Type: File}, ruleDuplicate},
		{Entry{Name: "data/s/x", Type: File}, ruleParent},
		{Entry{Name: "data/u", Type: File, Mode: 0o755 | fs.ModeSetuid}, ruleMode},
		{Entry{Name: "data/u", Type: File, Mode: 0o4755}, ruleMode},
		{Entry{Name: "data/u", Type: Dir, Mode: fs.ModeDir | 0o755}, ruleMode},
		{Entry{Name: "data/u", Type: File, Owner: 7}, ruleOwner},
		{Entry{Name: "data/u", Type: File, Size: -1}, ruleFile},
		{Entry{Name: "data/u", Type: File, Size: 1 << 50}, ruleFile},
		{Entry{Name: "data/u", Type: Dir, Size: 1}, ruleSize},
		{Entry{Name: "data/u", Type: Link, Target: "data/s"}, ruleLinkTarget},
		{Entry{Name: "data/u", Type: Link, Target: "data/l"}, ruleLinkTarget},
		{Entry{Name: "data/u", Type: Symlink}, ruleSymlink},
		{Entry{Name: "data/u", Type: Symlink, Target: "a\x00"}, ruleNUL},
		{Entry{Name: "data/u", Type: File, Target: "x"}, ruleTarget},
		{Entry{Name: "data/u", Type: File, Xattrs: map[string]string{"security.x": ""}}, ruleXattr},
		{Entry{Name: "data/u", Type: File, Xattrs: map[string]string{"user.a=b": ""}}, ruleXattr},
		{Entry{Name: "data/u", Type: Symlink, Target: "x", Xattrs: map[string]string{"user.a": ""}}, ruleXattr},
		{Entry{Name: "data/u", Type: File, Xattrs: manyXattrs(20, 60<<10)}, ruleHeader},
		{Entry{Name: "data/u", Type: File, ModTime: time.Unix(1<<60, 0)}, ruleTime},
	} {
		if c.e.ModTime.IsZero() {
			c.e.ModTime = now
		}
		err := put(b.w, node{Entry: c.e})
		var e *EntryError
		if !errors.As(err, &e) || e.Rule != c.rule || e.Name != c.e.Name || !errors.Is(err, ErrUnsafe) {
			t.Errorf("%.100q %s: %v, want %q", c.e.Name, c.e.Type, err, c.rule)
		}
		if err := checker.Add(c.e); ruleOf(err) != c.rule {
			t.Errorf("%.100q %s, unwritten: %v, want %q", c.e.Name, c.e.Type, err, c.rule)
		}
	}
	if err := b.w.Dir(Entry{Name: "data/u", Type: File}); ruleOf(err) != ruleType {
		t.Errorf("a file as a directory: %v", err)
	}
	if err := b.w.tar.Flush(); err != nil {
		t.Fatal(err)
	}
	// Of the last entry's padding alone.
	if b.Len()-before >= blockSize {
		t.Errorf("refusals wrote %d bytes", b.Len()-before)
	}
	// All at their limits, and the archive is still good.
	b.good(node{Entry: Entry{Name: "data/x", Type: File, Xattrs: manyXattrs(16, 60<<10)}})
	b.end()
	if _, err := Read(&b.Buffer, DefaultLimits(), nil); err != nil {
		t.Error(err)
	}
}

func manyXattrs(n, size int) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprintf("user.%d", i)] = strings.Repeat("v", size)
	}
	return m
}

func TestWriterManifest(t *testing.T) {
	m := testManifest()
	m.Lineage = "no"
	if _, err := NewWriter(io.Discard, m, DefaultLimits()); ruleOf(err) != ruleLineage {
		t.Errorf("%v", err)
	}
	m = testManifest()
	m.Time = time.Now()
	if _, err := NewWriter(io.Discard, m, DefaultLimits()); ruleOf(err) != ruleUTC {
		t.Errorf("%v", err)
	}
}

// TestChanging: files that are not as long as their entry says.
func TestChanging(t *testing.T) {
	b := begin(t)
	for _, c := range []struct{ name, content string }{{"data/short", "abc"}, {"data/long", "abcdefgh"}, {"data/same", "abcde"}, {"data/gone", ""}} {
		if err := b.w.File(Entry{Name: c.name, Size: 5, ModTime: time.Unix(1, 0)}, strings.NewReader(c.content)); err != nil {
			t.Fatal(err)
		}
	}
	b.end()
	var r recorder
	sum, err := Read(&b.Buffer, DefaultLimits(), &r)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, n := range r.nodes[1:] {
		got[n.Name] = n.content
	}
	for name, want := range map[string]string{"data/short": "abc\x00\x00", "data/long": "abcde", "data/same": "abcde", "data/gone": "\x00\x00\x00\x00\x00"} {
		if got[name] != want {
			t.Errorf("%s = %q, want %q", name, got[name], want)
		}
	}
	want := []Finding{
		{"data/short", "changed", "2 bytes shorter when read"},
		{"data/long", "changed", "longer when read"},
		{"data/gone", "changed", "5 bytes shorter when read"},
	}
	if fmt.Sprint(sum.End.Findings) != fmt.Sprint(want) {
		t.Errorf("findings %v, want %v", sum.End.Findings, want)
	}
}

func TestFindings(t *testing.T) {
	b := begin(t)
	b.w.Find(Finding{Path: "data/\x1b[2J\xff\u202e", Kind: "special", Detail: "a\nb"})
	for i := range 600 {
		b.w.Find(Finding{Path: fmt.Sprintf("data/%d%s", i, strings.Repeat("\x1b\xff", 600)), Kind: "mode", Detail: strings.Repeat("\\", 1000)})
	}
	b.end()
	sum, err := Read(&b.Buffer, DefaultLimits(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := sum.End.Findings[0]; got != (Finding{`data/\x1b[2J\xff\u202e`, "special", `a\nb`}) {
		t.Errorf("first finding %q", got)
	}
	if n := len(sum.End.Findings); n+sum.End.More != 601 || n > maxFindings || n < 100 {
		t.Errorf("%d findings and %d more", n, sum.End.More)
	}
}

// brokenAfter fails after n bytes.
type brokenAfter struct{ n int }

var errBroken = errors.New("broken")

func (b *brokenAfter) Write(p []byte) (int, error) {
	if b.n -= len(p); b.n < 0 {
		return 0, errBroken
	}
	return len(p), nil
}

func TestWriterErrors(t *testing.T) {
	a, err := NewWriter(&brokenAfter{5000}, testManifest(), DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Dir(Entry{Name: "data"}); err != nil {
		t.Fatal(err)
	}
	err = a.File(Entry{Name: "data/f", Size: 1 << 20}, strings.NewReader(strings.Repeat("x", 1<<20)))
	if !errors.Is(err, errBroken) || errors.Is(err, ErrUnsafe) {
		t.Errorf("%v", err)
	}
	if err := a.Dir(Entry{Name: "data/d"}); !errors.Is(err, errBroken) {
		t.Errorf("after it: %v", err)
	}
	if _, err := a.Close(); !errors.Is(err, errBroken) {
		t.Errorf("close: %v", err)
	}

	// A file that cannot be read is the end of the archive too.
	b := begin(t)
	err = b.w.File(Entry{Name: "data/f", Size: 10}, io.MultiReader(strings.NewReader("abc"), &ends{errBroken}))
	if !errors.Is(err, errBroken) {
		t.Errorf("%v", err)
	}
	if _, err := b.w.Close(); !errors.Is(err, errBroken) {
		t.Errorf("close: %v", err)
	}
}

// lazy reads nothing of what it is given, or fails.
type lazy struct {
	recorder
	err error
}

func (l *lazy) File(Entry, io.Reader) error { return l.err }

func TestHandler(t *testing.T) {
	b := begin(t)
	b.good(file("data/f", strings.Repeat("x", 100000)), file("data/g", "x"))
	b.end()
	if _, err := Read(bytes.NewReader(b.Bytes()), DefaultLimits(), &lazy{}); err != nil {
		t.Errorf("content that was not read: %v", err)
	}
	if _, err := Read(bytes.NewReader(b.Bytes()), DefaultLimits(), &lazy{err: errBroken}); !errors.Is(err, errBroken) || errors.Is(err, ErrUnsafe) {
		t.Errorf("the handler's error: %v", err)
	}
	// The stream's error comes through a handler that hides causes.
	r := io.MultiReader(bytes.NewReader(b.Bytes()[:50000]), &ends{errBroken})
	if _, err := Read(r, DefaultLimits(), &hiding{}); !errors.Is(err, errBroken) {
		t.Errorf("the stream's error: %v", err)
	}
	if _, err := Read(bytes.NewReader(b.Bytes()[:50000]), DefaultLimits(), &hiding{}); ruleOf(err) != ruleTruncated {
		t.Errorf("cut off: %v", err)
	}
}

// TestWrappedEOF: only io.EOF itself is a good end; authentication of what was
// read may fail there.
func TestWrappedEOF(t *testing.T) {
	b := begin(t)
	b.good(file("data/f", "x"))
	b.end()
	for _, ending := range []error{fmt.Errorf("too early: %w", io.EOF), errBroken} {
		for n := 0; n <= b.Len(); n += blockSize / 4 {
			r := io.MultiReader(bytes.NewReader(b.Bytes()[:n]), &ends{ending})
			if _, err := Read(r, DefaultLimits(), nil); !errors.Is(err, ending) || errors.Is(err, ErrUnsafe) {
				t.Fatalf("%v after %d bytes: %v", ending, n, err)
			}
		}
	}
}

type ends struct{ err error }

func (e *ends) Read([]byte) (int, error) { return 0, e.err }

type hiding struct{ recorder }

func (hiding) Dir(Entry) error { return nil }

func (hiding) File(_ Entry, r io.Reader) error {
	if _, err := io.Copy(io.Discard, r); err != nil {
		return errors.New("something")
	}
	return nil
}

func TestZeroTime(t *testing.T) {
	var b bytes.Buffer
	w, err := NewWriter(&b, testManifest(), DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []node{
		{Entry: Entry{Name: "data", Type: Dir}},
		{Entry: Entry{Name: "data/f", Type: File}},
		{Entry: Entry{Name: "data/l", Type: Link, Target: "data/f"}},
		{Entry: Entry{Name: "data/e", Type: File, ModTime: time.Time{}.Add(time.Second)}},
	} {
		if err := put(w, n); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Close(); err != nil {
		t.Fatal(err)
	}
	var seen recorder
	if _, err := Read(&b, DefaultLimits(), &seen); err != nil {
		t.Fatal(err)
	}
	if got := seen.nodes[0].ModTime.Unix(); got != 0 {
		t.Errorf("time %d, want 0", got)
	}
}

func TestHas(t *testing.T) {
	b := begin(t)
	if !b.w.Has("data") || b.w.Has("data/f") {
		t.Error("before")
	}
	b.good(file("data/f", ""))
	if !b.w.Has("data/f") {
		t.Error("after")
	}
}

// TestDigest holds the digest that the package's comment defines: it must never
// change for format 1. The golden one was computed by another program from the
// comment.
func TestDigest(t *testing.T) {
	at := time.Unix(1700000000, 5)
	nodes := []node{
		{Entry: Entry{Name: "data", Type: Dir, Mode: 0o755, ModTime: at}},
		{Entry{Name: "data/f", Type: File, Mode: 0o644, Size: 1, ModTime: time.Unix(-1, 7), Xattrs: map[string]string{"user.b": "2", "user.a": "\x00"}}, "x"},
		{Entry: Entry{Name: "data/l", Type: Link, Target: "data/f", ModTime: at}},
		{Entry: Entry{Name: "data/s", Type: Symlink, Mode: 0o777, Target: "/x", ModTime: at}},
	}
	digest := func(edit func(n []node)) string {
		n := append([]node(nil), nodes...)
		edit(n)
		a, err := NewWriter(io.Discard, testManifest(), DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range n {
			if err := put(a, n); err != nil {
				t.Fatal(err)
			}
		}
		end, err := a.Close()
		if err != nil {
			t.Fatal(err)
		}
		return end.Digest
	}
	want := digest(func([]node) {})
	const golden = "b9fe9b7ca1ad57ded4c8593292b4ba7fc4cf60bd95d27fc0b587bb30d13adf44"
	if want != golden {
		t.Errorf("digest %s, want %s", want, golden)
	}
	for name, edit := range map[string]func(n []node){
		"order":             func(n []node) { n[1], n[3] = n[3], n[1]; n[2], n[3] = n[3], n[2] },
		"owner":             func(n []node) { n[1].Owner = Agent },
		"link":              func(n []node) { n[2] = n[1]; n[2].Name = "data/l" },
		"mode of a symlink": func(n []node) { n[3].Mode = 0 },
		"time of a link":    func(n []node) { n[2].ModTime = time.Unix(1, 1) },
	} {
		if got := digest(edit); got != want {
			t.Errorf("%s: another digest", name)
		}
	}
	for name, edit := range map[string]func(n []node){
		"name":        func(n []node) { n[3].Name = "data/t" },
		"mode":        func(n []node) { n[0].Mode = 0o700 },
		"seconds":     func(n []node) { n[0].ModTime = at.Add(time.Second) },
		"nanoseconds": func(n []node) { n[0].ModTime = at.Add(1) },
		"content":     func(n []node) { n[1].content = "y" },
		"target":      func(n []node) { n[3].Target = "/y" },
		"xattr":       func(n []node) { n[1].Xattrs = map[string]string{"user.a": "\x00"} },
		"type":        func(n []node) { n[3] = node{Entry: Entry{Name: "data/s", Type: Dir, Mode: 0o777, ModTime: at}} },
		"fewer":       func(n []node) { n[2] = node{Entry: Entry{Name: "data/m", Type: Dir, ModTime: at}} },
	} {
		if digest(edit) == want {
			t.Errorf("%s: the same digest", name)
		}
	}
}

func TestFoldCollision(t *testing.T) {
	for _, c := range []struct{ a, b, want string }{
		{"A", "a", "data/a"},
		{"a", "A", "data/A"},
		{"a", "b", ""},
		{"\u00e9", "e\u0301", "data/e\u0301"},
		{"e\u0301", "\u00c9", "data/\u00c9"},
		{"stra\u00dfe", "STRASSE", "data/STRASSE"},
		{"\u212a", "k", "data/k"},
		{"\u03c3", "\u03c2", "data/\u03c2"},
		{"\uac00", "\u1100\u1161", "data/\u1100\u1161"},
		{"\ufb01", "FI", "data/FI"},
		{"q\u0307\u0323", "q\u0323\u0307", "data/q\u0323\u0307"},
		{"Config", "con\u200cfig", `data/con\u200cfig`},
		{"\u0130", "i\u0307", "data/i\u0307"},
		{"\xff", "\xfe", ""},
		{"日", "本", ""},
		{"\u00e9", "e", ""},
		{"A\n", "a\n", `data/a\n`},
	} {
		b := begin(t)
		b.good(file("data/"+c.a, ""), file("data/"+c.b, ""))
		b.end()
		sum, err := Read(&b.Buffer, DefaultLimits(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if sum.FoldCollision != c.want {
			t.Errorf("%q, %q: collision %q, want %q", c.a, c.b, sum.FoldCollision, c.want)
		}
	}
	// In a parent.
	b := begin(t)
	b.good(dir("data/Dir"), file("data/Dir/f", ""), dir("data/dir"))
	b.end()
	if sum, err := Read(&b.Buffer, DefaultLimits(), nil); err != nil || sum.FoldCollision != "data/dir" {
		t.Errorf("%q, %v", sum.FoldCollision, err)
	}
}

// TestFoldEverything: a key is its own key, and all case variants have one.
func TestFoldEverything(t *testing.T) {
	var f folder
	// Beyond the compatibility ideographs nothing folds or decomposes.
	for r := rune(1); r < 0x30000; r++ {
		if r >= 0xd800 && r < 0xe000 {
			continue
		}
		key := f.key(string(r))
		if again := f.key(key); again != key {
			t.Errorf("%U: key %+q, its key %+q", r, key, again)
		}
		for c := unicode.SimpleFold(r); c != r; c = unicode.SimpleFold(c) {
			if other := f.key(string(c)); other != key {
				t.Errorf("%U: key %+q, but %U: %+q", r, key, c, other)
			}
		}
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"data/x":          "data/x",
		"a\x1b[31m\n\x7f": `a\x1b[31m\n\x7f`,
		"\xff\u202e":      `\xff\u202e`,
		"\u200b\u2066":    `\u200b\u2066`,
		"日本 é":            "日本 é",
		"\u3164\u2800":    `\u3164\u2800`,
		"\u0085\u00a0":    `\u0085\u00a0`,
		"\U000e0041":      `\U000e0041`,
		"a\\b\"":          `a\b"`,
		"\ufffd":          "\ufffd",
	} {
		got := printable(in)
		if got != want {
			t.Errorf("printable(%+q) = %+q, want %+q", in, got, want)
		}
		if again := printable(got); again != got {
			t.Errorf("printable(%+q) = %+q", got, again)
		}
	}
	e := &EntryError{Name: "data/\x1b]0;x\a", Rule: "r"}
	if e.Error() != `unsafe archive: data/\x1b]0;x\a: r` {
		t.Errorf("%s", e)
	}
	if len((&EntryError{Name: strings.Repeat("\x1b", 1<<20)}).Error()) > 400 {
		t.Error("a name of 1 MiB is shown whole")
	}
}

// many is an endless number of small entries without the memory for them.
func many(t testing.TB, w io.Writer, n int) {
	a, err := NewWriter(w, testManifest(), DefaultLimits())
	if err != nil {
		t.Error(err)
		return
	}
	for i := range n {
		e := Entry{Name: "data", ModTime: time.Unix(1, 0)}
		if i > 0 {
			e.Name = fmt.Sprintf("data/Some name of the usual length %d", i)
			err = a.File(e, strings.NewReader(""))
		} else {
			err = a.Dir(e)
		}
		if err != nil {
			t.Error(err)
			return
		}
	}
	if _, err := a.Close(); err != nil {
		t.Error(err)
	}
}

// TestMemory: what the ledger keeps for each entry, in the worst case of names
// that a folding file system would change.
func TestMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("300000 entries")
	}
	const n = 300_000
	l := newLedger(DefaultLimits())
	l.folding = true
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range n {
		l.add(&Entry{Name: fmt.Sprintf("data/Name%d", i), Type: File}, nil)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	// Measured 52 (100k) to 83 (2M) for lower-case names, half again for these.
	per := (float64(after.HeapAlloc) - float64(before.HeapAlloc)) / n
	t.Logf("%.0f bytes an entry", per)
	if per > 140 {
		t.Errorf("%.0f bytes an entry", per)
	}
	runtime.KeepAlive(l)

	// The whole way, through a pipe.
	r, w := io.Pipe()
	go func() {
		buffered := bufio.NewWriterSize(w, 1<<20)
		many(t, buffered, n/10)
		_ = w.CloseWithError(buffered.Flush())
	}()
	sum, err := Read(bufio.NewReaderSize(r, 1<<20), DefaultLimits(), nil)
	if err != nil || sum.Entries != n/10 {
		t.Errorf("%+v, %v", sum, err)
	}
}
