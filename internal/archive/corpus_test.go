package archive

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// build makes an archive, good and bad parts as they come.
type build struct {
	bytes.Buffer
	t testing.TB
	w *Writer
}

// begin starts with a good manifest and the directory "data".
func begin(t testing.TB) *build {
	b := &build{t: t}
	w, err := NewWriter(&b.Buffer, testManifest(), DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	b.w = w
	b.good(node{Entry: Entry{Name: "data", Type: Dir, Mode: 0o755}})
	return b
}

func (b *build) good(nodes ...node) {
	b.t.Helper()
	for _, n := range nodes {
		if n.ModTime.IsZero() {
			n.ModTime = time.Unix(1700000000, 0)
		}
		n.Size = int64(len(n.content))
		if err := put(b.w, n); err != nil {
			b.t.Fatal(err)
		}
	}
}

// tar writes an entry past the rules.
func (b *build) tar(h tar.Header, content string) {
	b.t.Helper()
	if h.Typeflag == 0 {
		h.Typeflag = tar.TypeReg
	}
	if h.Uname == "" {
		h.Uname = "root"
	}
	if h.ModTime.IsZero() {
		h.ModTime = time.Unix(1700000000, 0)
	}
	if h.Format == 0 {
		h.Format = tar.FormatPAX
	}
	h.Size = int64(len(content))
	if err := b.w.tar.WriteHeader(&h); err != nil {
		b.t.Fatal(err)
	}
	if _, err := io.WriteString(b.w.tar, content); err != nil {
		b.t.Fatal(err)
	}
}

// raw writes blocks past the tar writer.
func (b *build) raw(blocks ...[]byte) {
	if err := b.w.tar.Flush(); err != nil {
		b.t.Fatal(err)
	}
	for _, block := range blocks {
		b.Write(block)
		b.Write(make([]byte, -len(block)&(blockSize-1)))
	}
}

// end finishes the archive well.
func (b *build) end() {
	if _, err := b.w.Close(); err != nil {
		b.t.Fatal(err)
	}
}

// header is a ustar header block; edit may change it before its check sum is
// made.
func header(name string, typeflag byte, size int64, edit func([]byte)) []byte {
	b := make([]byte, blockSize)
	copy(b, name)
	copy(b[100:], "0000644\x000000000\x000000000\x00")
	copy(b[124:], fmt.Sprintf("%011o\x00%011o\x00", size, 1700000000))
	b[156] = typeflag
	copy(b[257:], "ustar\x0000root")
	copy(b[297:], "root")
	copy(b[329:], "0000000\x000000000\x00")
	if edit != nil {
		edit(b)
	}
	return checksummed(b)
}

func checksummed(b []byte) []byte {
	copy(b[148:], "        ")
	sum := 0
	for _, c := range b[:blockSize] {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// extended is an extended header of these records, key then value.
func extended(typeflag byte, records ...string) []byte {
	var body string
	for i := 0; i < len(records); i += 2 {
		line := " " + records[i] + "=" + records[i+1] + "\n"
		n := len(line) + 1
		for len(fmt.Sprint(n))+len(line) != n {
			n++
		}
		body += fmt.Sprint(n) + line
	}
	b := header("PaxHeaders.0/x", typeflag, int64(len(body)), nil)
	b = append(b, body...)
	return append(b, make([]byte, -len(b)&(blockSize-1))...)
}

// patch changes the header of the entry called name in a finished archive.
func patch(t testing.TB, archive []byte, name string, edit func([]byte)) {
	t.Helper()
	for at := 0; at+blockSize <= len(archive); at += blockSize {
		b := archive[at : at+blockSize]
		if bytes.HasPrefix(b, []byte(name+"\x00")) && string(b[257:262]) == "ustar" {
			edit(b)
			checksummed(b)
			return
		}
	}
	t.Fatalf("no entry %q", name)
}

type verdict struct {
	name string
	rule string // "" is accepted
	make func(b *build)
}

// hostile is a case of one entry past the rules, in an otherwise good archive.
func hostile(name, rule string, h tar.Header) verdict {
	return verdict{name, rule, func(b *build) { b.tar(h, ""); b.end() }}
}

// blocks is a case of blocks past the tar writer.
func blocks(name, rule string, raw ...[]byte) verdict {
	return verdict{name, rule, func(b *build) { b.raw(raw...); b.end() }}
}

// accepted is a case of good nodes.
func accepted(name string, nodes ...node) verdict {
	return verdict{name, "", func(b *build) { b.good(nodes...); b.end() }}
}

// edited is a good archive with a file "data/f", changed afterwards.
func edited(name, rule string, edit func(b *build)) verdict {
	return verdict{name, rule, func(b *build) {
		b.good(file("data/f", "content"))
		b.end()
		edit(b)
	}}
}

func dir(name string) node { return node{Entry: Entry{Name: name, Type: Dir, Mode: 0o755}} }

func file(name, content string) node {
	return node{Entry{Name: name, Type: File, Mode: 0o644}, content}
}

func symlink(name, target string) node {
	return node{Entry: Entry{Name: name, Type: Symlink, Mode: 0o777, Target: target}}
}

func link(name, target string) node {
	return node{Entry: Entry{Name: name, Type: Link, Target: target}}
}

// special is an archive without a good beginning, of these entries only.
func special(name, rule string, write func(w *tar.Writer)) verdict {
	return verdict{name, rule, func(b *build) {
		b.Reset()
		w := tar.NewWriter(&b.Buffer)
		write(w)
		_ = w.Close()
	}}
}

func entry(w *tar.Writer, h tar.Header, content string) {
	h.Uname, h.Size, h.Format, h.ModTime = "root", int64(len(content)), tar.FormatPAX, time.Unix(1700000000, 0)
	if h.Typeflag == 0 {
		h.Typeflag = tar.TypeReg
	}
	_ = w.WriteHeader(&h)
	_, _ = io.WriteString(w, content)
}

func manifestJSON(edit func(*Manifest)) string {
	m := testManifest()
	edit(&m)
	b, err := encode(m)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func unedited(*Manifest) {}

func manifestCase(name, rule, content string) verdict {
	return special(name, rule, func(w *tar.Writer) {
		entry(w, tar.Header{Name: "manifest", Mode: 0o600}, content)
		entry(w, tar.Header{Name: "data", Typeflag: tar.TypeDir, Mode: 0o755}, "")
	})
}

func endCase(name, rule string, edit func(*End)) verdict {
	return verdict{name, rule, func(b *build) {
		end := End{Entries: 1, Digest: b.w.ledger.state(), Findings: []Finding{}}
		edit(&end)
		raw, _ := json.Marshal(end)
		b.tar(tar.Header{Name: "end", Mode: 0o600}, string(raw))
		_ = b.w.tar.Close()
	}}
}

// deep is a name of n parts.
func deep(n int) string { return "data" + strings.Repeat("/d", n-1) }

func corpus() []verdict {
	reg := func(name string) tar.Header { return tar.Header{Name: name, Mode: 0o644} }
	typed := func(name string, flag byte) tar.Header { return tar.Header{Name: name, Mode: 0o644, Typeflag: flag} }
	record := func(key, value string) tar.Header {
		return tar.Header{Name: "data/f", Mode: 0o644, PAXRecords: map[string]string{key: value}}
	}
	cases := []verdict{
		accepted("nothing but data"),
		accepted("a file", file("data/f", "content")),

		// Names.
		hostile("../x", ruleName, reg("../x")),
		hostile("a/../../x", ruleName, reg("data/../../x")),
		hostile("data/..", ruleName, typed("data/..", tar.TypeDir)),
		hostile("absolute", ruleName, reg("/etc/passwd")),
		hostile("./x", ruleName, reg("./x")),
		hostile("a//b", ruleName, reg("data//b")),
		hostile("a/./b", ruleName, reg("data/./b")),
		hostile("two slashes on a directory", ruleName, typed("data/d//", tar.TypeDir)),
		blocks("slash on a file", ruleName, header("data/f/", '0', 0, nil)),
		hostile("C:\\x outside", ruleTop, reg(`C:\x`)),
		accepted("C:\\x and a\\..\\b inside", file(`data/C:\x`, ""), file(`data/a\..\b`, "")),
		blocks("empty name", ruleName, header("", '0', 0, nil)),
		hostile("dot as a symlink", ruleName, tar.Header{Name: ".", Typeflag: tar.TypeSymlink, Linkname: "/", Mode: 0o777}),
		hostile("dot dot as a directory", ruleName, typed("../", tar.TypeDir)),
		hostile("component of 256", ruleComponent, reg("data/"+strings.Repeat("c", 256))),
		accepted("component of 255", file("data/"+strings.Repeat("c", 255), "")),
		hostile("path of 4097", ruleTooLong, reg("data"+strings.Repeat("/"+strings.Repeat("p", 30), 132)+"x")),
		hostile("depth 129", ruleDepth, reg(deep(129))),
		{"depth 128", "", func(b *build) {
			for n := 2; n <= 128; n++ {
				b.good(dir(deep(n)))
			}
			b.end()
		}},
		blocks("NUL in a pax path", ruleTar, extended('x', "path", "data/f\x00/../../x"), header("data/f", '0', 0, nil)),
		accepted("newline, ESC, bidi override in names", file("data/a\nb", ""), file("data/\x1b[2J", ""), file("data/\u202egpj.exe", "")),
		accepted("invalid UTF-8", file("data/\xff\xfe", "x")),
		accepted("NFC and NFD", file("data/\u00e9", "1"), file("data/e\u0301", "2")),
		accepted("A and a", file("data/A", "1"), file("data/a", "2")),
		hostile("outside data", ruleTop, reg("etc/passwd")),
		hostile("database is not data", ruleTop, reg("database")),
		hostile("below manifest", ruleTop, reg("manifest/x")),
		hostile("our secrets", ruleReserved, typed("data/.hermes-box", tar.TypeDir)),
		hostile("below our secrets", ruleReserved, reg("data/.hermes-box/token")),
		hostile("a symlink for our secrets", ruleReserved, tar.Header{Name: "data/.hermes-box", Typeflag: tar.TypeSymlink, Linkname: "/etc", Mode: 0o777}),
		accepted("a name like our secrets'", dir("data/.hermes-box-x")),

		// Order and parents.
		{"duplicate file", ruleDuplicate, func(b *build) {
			b.good(file("data/f", "1"))
			b.tar(reg("data/f"), "2")
			b.end()
		}},
		{"file, then directory", ruleDuplicate, func(b *build) {
			b.good(file("data/f", "1"))
			b.tar(typed("data/f/", tar.TypeDir), "")
			b.end()
		}},
		{"directory, then symlink, then child", ruleDuplicate, func(b *build) {
			b.good(dir("data/d"))
			b.tar(tar.Header{Name: "data/d", Typeflag: tar.TypeSymlink, Linkname: "/tmp", Mode: 0o777}, "")
			b.tar(reg("data/d/x"), "x")
			b.end()
		}},
		{"file under a symlink", ruleParent, func(b *build) {
			b.good(symlink("data/l", "/"))
			b.tar(reg("data/l/x"), "x")
			b.end()
		}},
		{"symlink under a symlink", ruleParent, func(b *build) {
			b.good(symlink("data/a", ".."))
			b.tar(tar.Header{Name: "data/a/b", Typeflag: tar.TypeSymlink, Linkname: "..", Mode: 0o777}, "")
			b.end()
		}},
		{"file under a file", ruleParent, func(b *build) {
			b.good(file("data/f", "1"))
			b.tar(reg("data/f/x"), "")
			b.end()
		}},
		{"file under a hard link", ruleParent, func(b *build) {
			b.good(file("data/f", "1"), link("data/l", "data/f"))
			b.tar(reg("data/l/x"), "")
			b.end()
		}},
		{"dangling link, then a file through it", ruleDuplicate, func(b *build) {
			b.good(symlink("data/l", "new"))
			b.tar(reg("data/l"), "through")
			b.end()
		}},
		hostile("no parent", ruleParent, reg("data/d/x")),
		{"parent comes later", ruleParent, func(b *build) {
			b.tar(reg("data/d/x"), "")
			b.good(dir("data/d"))
			b.end()
		}},
		special("data is a symlink", ruleRoot, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "manifest", Mode: 0o600}, manifestJSON(unedited))
			entry(w, tar.Header{Name: "data", Typeflag: tar.TypeSymlink, Linkname: "/", Mode: 0o777}, "")
		}),
		special("data is a file", ruleRoot, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "manifest", Mode: 0o600}, manifestJSON(unedited))
			entry(w, tar.Header{Name: "data", Mode: 0o644}, "x")
		}),

		// Links.
		accepted("symlinks wherever", symlink("data/abs", "/etc/passwd"), symlink("data/up", "../../.."), symlink("data/dangling", "none"),
			symlink("data/loop", "loop"), symlink("data/odd", "\xff\n\x1b"), symlink("data/self", "."), symlink("data/long", strings.Repeat("t", 4095))),
		hostile("symlink of 4096", ruleSymlink, tar.Header{Name: "data/l", Typeflag: tar.TypeSymlink, Linkname: strings.Repeat("t", 4096), Mode: 0o777}),
		blocks("symlink to nothing", ruleSymlink, header("data/l", '2', 0, nil)),
		accepted("hard link", dir("data/d"), file("data/d/f", "x"), link("data/l", "data/d/f")),
		hostile("hard link to ../", ruleLinkTarget, tar.Header{Name: "data/l", Typeflag: tar.TypeLink, Linkname: "../x"}),
		hostile("hard link to data/../..", ruleLinkTarget, tar.Header{Name: "data/l", Typeflag: tar.TypeLink, Linkname: "data/../../x"}),
		hostile("hard link to absolute", ruleLinkTarget, tar.Header{Name: "data/l", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}),
		{"hard link to symlink", ruleLinkTarget, func(b *build) {
			b.good(symlink("data/s", "/etc/passwd"))
			b.tar(tar.Header{Name: "data/l", Typeflag: tar.TypeLink, Linkname: "data/s"}, "")
			b.end()
		}},
		{"hard link to hard link", ruleLinkTarget, func(b *build) {
			b.good(file("data/f", "x"), link("data/l", "data/f"))
			b.tar(tar.Header{Name: "data/m", Typeflag: tar.TypeLink, Linkname: "data/l"}, "")
			b.end()
		}},
		{"hard link to later entry", ruleLinkTarget, func(b *build) {
			b.tar(tar.Header{Name: "data/l", Typeflag: tar.TypeLink, Linkname: "data/f"}, "")
			b.good(file("data/f", "x"))
			b.end()
		}},
		hostile("hard link to itself", ruleLinkTarget, tar.Header{Name: "data/l", Typeflag: tar.TypeLink, Linkname: "data/l"}),
		hostile("hard link to a directory", ruleLinkTarget, tar.Header{Name: "data/l", Typeflag: tar.TypeLink, Linkname: "data"}),
		hostile("hard link to the manifest", ruleLinkTarget, tar.Header{Name: "data/l", Typeflag: tar.TypeLink, Linkname: "manifest"}),
		blocks("a file with a link target", ruleTarget, header("data/f", '0', 0, func(b []byte) { copy(b[157:], "/etc/passwd") })),
		blocks("hard link with a size", ruleSize, header("data/l", '1', 512, func(b []byte) { copy(b[157:], "data") })),
		blocks("directory with a size", ruleSize, header("data/d/", '5', 512, nil)),

		// Types and modes.
		hostile("setuid", ruleMode, tar.Header{Name: "data/f", Mode: 0o4755}),
		hostile("setgid", ruleMode, tar.Header{Name: "data/f", Mode: 0o2755}),
		hostile("sticky", ruleMode, tar.Header{Name: "data/d/", Typeflag: tar.TypeDir, Mode: 0o1777}),
		hostile("type bits in the mode", ruleMode, tar.Header{Name: "data/f", Mode: 0o100644}),
		accepted("modes 0000", dir("data/z"), node{Entry{Name: "data/z/f", Type: File}, "x"}, node{Entry: Entry{Name: "data/d", Type: Dir}}, file("data/d/f", "x")),
		hostile("character device", ruleType, typed("data/dev", tar.TypeChar)),
		hostile("block device", ruleType, typed("data/dev", tar.TypeBlock)),
		hostile("fifo", ruleType, typed("data/fifo", tar.TypeFifo)),
		blocks("contiguous", ruleType, header("data/c", '7', 0, nil)),
		blocks("unknown type Z", ruleType, header("data/z", 'Z', 0, nil)),
		blocks("volume label", ruleType, header("data/v", 'V', 0, nil)),
		blocks("multi-volume", ruleType, header("data/m", 'M', 0, nil)),
		blocks("pax global with path", ruleType, extended('g', "path", "data/g"), header("data/f", '0', 0, nil)),
		blocks("pax global, empty", ruleType, extended('g')),

		// Extended headers.
		blocks("pax path overriding a safe name", ruleName, extended('x', "path", "../x"), header("data/f", '0', 0, nil)),
		blocks("pax linkpath overriding a safe one", ruleLinkTarget, extended('x', "linkpath", "/etc/passwd"), header("data/l", '1', 0, func(b []byte) { copy(b[157:], "data/f") })),
		blocks("GNU long name", ruleFormat, header("././@LongLink", 'L', 7, func(b []byte) { copy(b[257:], "ustar  \x00") }), []byte("data/f\x00"),
			header("data/g", '0', 0, func(b []byte) { copy(b[257:], "ustar  \x00") })),
		blocks("GNU long name and pax both", ruleFormat, extended('x', "path", "data/p"),
			header("././@LongLink", 'L', 5, nil), []byte("../x\x00"), header("data/g", '0', 0, nil)),
		blocks("V7 header", ruleFormat, header("data/f", '0', 0, func(b []byte) { clear(b[257:]) })),
		blocks("raw non-ASCII name", ruleFormat, header("data/\xff", '0', 0, nil)),
		blocks("GNU sparse, old", ruleSparse, header("data/s", 'S', 0, func(b []byte) {
			copy(b[257:], "ustar  \x00")
			clear(b[345:])
			copy(b[386:], "00000000000\x0000000000000\x00")
			copy(b[483:], "00000000000\x00")
		})),
		blocks("GNU sparse 0.0", ruleSparse, extended('x', "GNU.sparse.size", "1099511627776", "GNU.sparse.numblocks", "1",
			"GNU.sparse.offset", "0", "GNU.sparse.numbytes", "0"), header("data/s", '0', 0, nil)),
		blocks("GNU sparse 0.1", ruleSparse, extended('x', "GNU.sparse.size", "1099511627776", "GNU.sparse.numblocks", "1",
			"GNU.sparse.map", "0,0"), header("data/s", '0', 0, nil)),
		blocks("GNU sparse 1.0", ruleSparse, extended('x', "GNU.sparse.major", "1", "GNU.sparse.minor", "0", "GNU.sparse.realsize", "1099511627776",
			"GNU.sparse.name", "data/s"), header("data/GNUSparseFile.0/s", '0', 512, nil), []byte("1\n1099511627776\n0\n")),
		blocks("GNU sparse 1.0 bomb", ruleTruncated, extended('x', "GNU.sparse.major", "1", "GNU.sparse.minor", "0", "GNU.sparse.realsize", "1099511627776",
			"GNU.sparse.name", "data/s"), header("data/GNUSparseFile.0/s", '0', 512, nil), []byte("99999999999\n")),
		blocks("size 2^50", ruleFormat, header("data/f", '0', 0, func(b []byte) { copy(b[124:], "\x80\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00") })),
		blocks("pax size 2^50", ruleFile, extended('x', "size", fmt.Sprint(1<<50)), header("data/f", '0', 0, nil)),
		blocks("size -1", ruleTar, header("data/f", '0', 0, func(b []byte) { copy(b[124:], strings.Repeat("\xff", 12)) })),
		blocks("pax size -1", ruleTar, extended('x', "size", "-1"), header("data/f", '0', 0, nil)),
		blocks("two sizes", ruleRecord, extended('x', "size", "3"), header("data/f", '0', 512, nil), make([]byte, 512)),
		blocks("pax uid NaN", ruleTar, extended('x', "uid", "NaN"), header("data/f", '0', 0, nil)),
		hostile("a comment record", ruleRecord, record("comment", "x")),
		hostile("an unknown record", ruleRecord, record("HERMES.x", "x")),
		hostile("another vendor's xattr", ruleRecord, record("LIBARCHIVE.xattr.user.x", "x")),
		blocks("an endless header", ruleHeader, slices.Repeat([][]byte{extended('x', "comment", strings.Repeat("c", 500<<10))}, 6)...),
		blocks("a header of 2 MiB", ruleHeader, extended('x', "comment", strings.Repeat("c", 2<<20)), header("data/f", '0', 0, nil)),

		// Attributes.
		hostile("xattr security.capability", ruleXattr, record("SCHILY.xattr.security.capability", "x")),
		hostile("xattr trusted", ruleXattr, record("SCHILY.xattr.trusted.overlay.opaque", "y")),
		hostile("xattr system.posix_acl", ruleXattr, record("SCHILY.xattr.system.posix_acl_access", "y")),
		hostile("xattr without a name", ruleXattr, record("SCHILY.xattr.user.", "y")),
		hostile("xattr of 64 KiB and one", ruleXattr, record("SCHILY.xattr.user.big", strings.Repeat("v", 64<<10+1))),
		hostile("xattr on a symlink", ruleXattr, tar.Header{Name: "data/l", Typeflag: tar.TypeSymlink, Linkname: "x", Mode: 0o777, PAXRecords: map[string]string{"SCHILY.xattr.user.x": "y"}}),
		accepted("mtime -1 and before", node{Entry{Name: "data/a", Type: File, ModTime: time.Unix(-1, 0)}, ""}, node{Entry{Name: "data/b", Type: File, ModTime: time.Unix(-2, 5e8)}, ""}),
		blocks("mtime 2^60", ruleTime, extended('x', "mtime", fmt.Sprint(1<<60)), header("data/f", '0', 0, nil)),
		blocks("mtime of the year 1, Go's zero", ruleTime, extended('x', "mtime", "-62135596800"), header("data/f", '0', 0, nil)),
		blocks("mtime -2^63", ruleTime, extended('x', "mtime", "-9223372036854775808"), header("data/f", '0', 0, nil)),
		blocks("mtime NaN", ruleTar, extended('x', "mtime", "NaN"), header("data/f", '0', 0, nil)),
		hostile("another owner", ruleOwner, tar.Header{Name: "data/f", Uname: "nobody", Mode: 0o644}),
		blocks("no owner", ruleOwner, header("data/f", '0', 0, func(b []byte) { clear(b[265:297]) })),
		edited("uid 2^31 is ignored", "", func(b *build) {
			patch(b.t, b.Bytes(), "data/f", func(h []byte) { copy(h[108:], "\x80\x00\x00\x00\x80\x00\x00\x00") })
			patch(b.t, b.Bytes(), "data/f", func(h []byte) { copy(h[108:], "7777777\x007777777\x00") })
		}),

		// The whole.
		edited("bad check sum", ruleTar, func(b *build) {
			i := bytes.Index(b.Bytes(), []byte("data/f\x00"))
			b.Bytes()[i+1] ^= 1
		}),
		edited("truncated header", ruleTruncated, func(b *build) { b.Truncate(bytes.Index(b.Bytes(), []byte("data/f\x00")) + 100) }),
		edited("truncated body", ruleTruncated, func(b *build) { b.Truncate(bytes.Index(b.Bytes(), []byte("content")) + 3) }),
		edited("truncated padding", ruleNoMarker, func(b *build) { b.Truncate(bytes.Index(b.Bytes(), []byte("content")) + 100) }),
		edited("truncated after an entry", ruleNoMarker, func(b *build) { b.Truncate(bytes.Index(b.Bytes(), []byte("content")) + 512) }),
		edited("one zero block only", ruleNoMarker, func(b *build) { b.Truncate(b.Len() - 512) }),
		edited("no end marker", ruleNoMarker, func(b *build) { b.Truncate(b.Len() - 1024) }),
		edited("half a zero block", ruleTruncated, func(b *build) { b.Truncate(b.Len() - 700) }),
		edited("an extended header for nothing", ruleNoMarker, func(b *build) { b.Truncate(b.Len() - 1024); b.Write(extended('x', "mtime", "1")) }),
		edited("an extended header before the marker", ruleNoMarker, func(b *build) {
			b.Truncate(b.Len() - 1024)
			b.Write(extended('x', "mtime", "1"))
			b.Write(make([]byte, 1024))
		}),
		edited("zero block, then an entry", ruleTar, func(b *build) {
			b.Truncate(b.Len() - 512)
			b.Write(header("data/g", '0', 0, nil))
			b.Write(make([]byte, 1024))
		}),
		edited("entries after the end marker", ruleJunk, func(b *build) { b.Write(header("data/g", '0', 0, nil)); b.Write(make([]byte, 1024)) }),
		edited("junk after the end marker", ruleJunk, func(b *build) { b.WriteString("junk") }),
		edited("one byte after 20 blocks", ruleJunk, func(b *build) { b.Write(make([]byte, 20*512)); b.WriteByte(1) }),
		edited("zeros after the end marker", "", func(b *build) { b.Write(make([]byte, 10240)) }),
		edited("2 MiB of zeros after the end marker", ruleJunk, func(b *build) { b.Write(make([]byte, 2<<20)) }),
		edited("an entry after end", ruleAfterEnd, func(b *build) {
			b.Truncate(b.Len() - 1024)
			b.Write(header("data/g", '0', 0, nil))
			b.Write(make([]byte, 1024))
		}),
		edited("end twice", ruleAfterEnd, func(b *build) {
			i := bytes.Index(b.Bytes(), []byte("end\x00"))
			end := bytes.Clone(b.Bytes()[i : b.Len()-1024])
			b.Truncate(b.Len() - 1024)
			b.Write(end)
			b.Write(make([]byte, 1024))
		}),
		edited("no end entry", ruleNoEnd, func(b *build) {
			b.Truncate(bytes.Index(b.Bytes(), []byte("end\x00")))
			b.Write(make([]byte, 1024))
		}),
		edited("content changed", ruleDigest, func(b *build) { b.Bytes()[bytes.Index(b.Bytes(), []byte("content"))] ^= 1 }),
		edited("mode changed", ruleDigest, func(b *build) {
			patch(b.t, b.Bytes(), "data/f", func(h []byte) { copy(h[100:], "0000600\x00") })
		}),
		edited("name changed", ruleDigest, func(b *build) {
			patch(b.t, b.Bytes(), "data/f", func(h []byte) { copy(h, "data/g") })
		}),
		{"empty", ruleEmpty, func(b *build) { b.Reset() }},
		{"512 zeros", ruleNoMarker, func(b *build) { b.Reset(); b.Write(make([]byte, 512)) }},
		{"end marker only", ruleEmpty, func(b *build) { b.Reset(); b.Write(make([]byte, 1024)) }},
		{"text", ruleTruncated, func(b *build) { b.Reset(); b.WriteString("#!/bin/sh\nrm -rf /\n") }},
		{"a long text", ruleTar, func(b *build) { b.Reset(); b.WriteString(strings.Repeat("#!/bin/sh\nrm -rf /\n", 100)) }},

		// Manifest and end.
		special("manifest missing", ruleFirst, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "data", Typeflag: tar.TypeDir, Mode: 0o755}, "")
		}),
		special("manifest second", ruleFirst, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "data", Typeflag: tar.TypeDir, Mode: 0o755}, "")
			entry(w, tar.Header{Name: "manifest", Mode: 0o600}, manifestJSON(unedited))
		}),
		{"manifest twice", ruleDuplicate, func(b *build) {
			b.tar(tar.Header{Name: "manifest", Mode: 0o600}, manifestJSON(unedited))
			b.end()
		}},
		special("manifest is a symlink", ruleType, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "manifest", Typeflag: tar.TypeSymlink, Linkname: "/etc/shadow", Mode: 0o777}, "")
		}),
		special("manifest is a directory", ruleType, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "manifest", Typeflag: tar.TypeDir, Mode: 0o777}, "")
		}),
		{"end is a symlink", ruleType, func(b *build) {
			b.tar(tar.Header{Name: "end", Typeflag: tar.TypeSymlink, Linkname: "/etc/shadow", Mode: 0o777}, "")
			_ = b.w.tar.Close()
		}},
		manifestCase("manifest empty", ruleDecode, ""),
		manifestCase("manifest null", ruleVersion, "null"),
		manifestCase("manifest of a later format", ruleVersion, `{"format":2,"novel":true}`),
		manifestCase("manifest with an unknown field", ruleDecode, strings.Replace(manifestJSON(unedited), "{", `{"novel":1,`, 1)),
		manifestCase("manifest with trailing data", ruleDecode, manifestJSON(unedited)+"{}"),
		manifestCase("manifest of 2 MiB", ruleJSONSize, strings.Repeat(" ", 2<<20)),
		manifestCase("manifest nested deep", ruleDecode, strings.Repeat("[", 200000)),
		manifestCase("manifest: box", ruleBox, manifestJSON(func(m *Manifest) { m.Box = "../x" })),
		manifestCase("manifest: box with a newline", ruleBox, manifestJSON(func(m *Manifest) { m.Box = "alpha\n" })),
		manifestCase("manifest: lineage", ruleLineage, manifestJSON(func(m *Manifest) { m.Lineage = strings.Repeat("A", 32) })),
		manifestCase("manifest: time", ruleUTC, manifestJSON(func(m *Manifest) { m.Time = m.Time.In(time.FixedZone("", 3600)) })),
		manifestCase("manifest: tool", ruleTools, manifestJSON(func(m *Manifest) { m.Tools = []Tool{{"-x", "1"}} })),
		manifestCase("manifest: version", ruleTools, manifestJSON(func(m *Manifest) { m.Tools = []Tool{{"x", "\x1b[2J"}} })),
		manifestCase("manifest: long version", ruleTools, manifestJSON(func(m *Manifest) { m.HB = strings.Repeat("1", 129) })),
		manifestCase("manifest: login", ruleLogins, manifestJSON(func(m *Manifest) { m.Logins = []string{"--help"} })),
		manifestCase("manifest good, no end", ruleNoEnd, manifestJSON(unedited)),
		endCase("a good end", "", func(*End) {}),
		endCase("end: entries", ruleCounts, func(e *End) { e.Entries++ }),
		endCase("end: bytes", ruleCounts, func(e *End) { e.Bytes-- }),
		endCase("end: digest", ruleDigest, func(e *End) { e.Digest = strings.Repeat("0", 64) }),
		endCase("end: digest's form", ruleDigestShape, func(e *End) { e.Digest = strings.ToUpper(e.Digest) + "\n" }),
		endCase("end: more", ruleFinding, func(e *End) { e.More = -1 }),
		endCase("end: an unescaped path", ruleFinding, func(e *End) { e.Findings = []Finding{{Path: "\x1b[2J", Kind: "mode"}} }),
		endCase("end: a finding's kind", ruleFinding, func(e *End) { e.Findings = []Finding{{Path: "x", Kind: "no such"}} }),
		endCase("end: findings", "", func(e *End) {
			e.Findings, e.More = []Finding{{Path: `data/\x1b`, Kind: "mode", Detail: "setuid"}}, 7
		}),
		endCase("end: 501 findings", ruleFinding, func(e *End) { e.Findings = slices.Repeat([]Finding{{Path: "x", Kind: "mode"}}, 501) }),

		// Legacy.
		legacy("legacy", "", nil),
		legacy("legacy: setuid is masked", "", func(w *tar.Writer) {
			entry(w, tar.Header{Name: "./home/agent/su", Mode: 0o4755}, "x")
		}),
		legacy("legacy: links", "", func(w *tar.Writer) {
			entry(w, tar.Header{Name: "./home/agent/f", Mode: 0o644}, "x")
			entry(w, tar.Header{Name: "./home/agent/l", Typeflag: tar.TypeLink, Linkname: "./home/agent/f"}, "")
			entry(w, tar.Header{Name: "./home/agent/s", Typeflag: tar.TypeSymlink, Linkname: "/usr/bin/x", Mode: 0o777}, "")
		}),
		legacy("legacy: link with a new name", ruleLinkTarget, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "./home/agent/f", Mode: 0o644}, "x")
			entry(w, tar.Header{Name: "./home/agent/l", Typeflag: tar.TypeLink, Linkname: "data/home/agent/f"}, "")
		}),
		legacy("legacy: another prefix", ruleLegacyName, func(w *tar.Writer) { entry(w, tar.Header{Name: "data/x", Mode: 0o644}, "") }),
		legacy("legacy: a manifest", ruleLegacyName, func(w *tar.Writer) { entry(w, tar.Header{Name: "manifest", Mode: 0o644}, "") }),
		legacy("legacy: ./../x", ruleName, func(w *tar.Writer) { entry(w, tar.Header{Name: "./../x", Mode: 0o644}, "") }),
		legacy("legacy: ././x", ruleName, func(w *tar.Writer) { entry(w, tar.Header{Name: "././x", Mode: 0o644}, "") }),
		legacy("legacy: .//x", ruleName, func(w *tar.Writer) { entry(w, tar.Header{Name: ".//x", Mode: 0o644}, "") }),
		legacy("legacy: root twice", ruleDuplicate, func(w *tar.Writer) { entry(w, tar.Header{Name: "./", Typeflag: tar.TypeDir}, "") }),
		legacy("legacy: our secrets", ruleReserved, func(w *tar.Writer) { entry(w, tar.Header{Name: "./.hermes-box/", Typeflag: tar.TypeDir}, "") }),
		legacy("legacy: fifo", ruleType, func(w *tar.Writer) { entry(w, tar.Header{Name: "./fifo", Typeflag: tar.TypeFifo}, "") }),
		legacy("legacy: file under a symlink", ruleParent, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "./l", Typeflag: tar.TypeSymlink, Linkname: "/"}, "")
			entry(w, tar.Header{Name: "./l/x", Mode: 0o644}, "")
		}),
		special("legacy: no home", ruleLegacyHome, func(w *tar.Writer) { entry(w, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}, "") }),
		special("legacy: home is a symlink", ruleLegacyHome, func(w *tar.Writer) {
			entry(w, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}, "")
			entry(w, tar.Header{Name: "./home/", Typeflag: tar.TypeDir, Mode: 0o755}, "")
			entry(w, tar.Header{Name: "./home/agent", Typeflag: tar.TypeSymlink, Linkname: "/root", Mode: 0o777}, "")
		}),
		special("legacy: root is a symlink", ruleFirst, func(w *tar.Writer) {
			entry(w, tar.Header{Name: ".", Typeflag: tar.TypeSymlink, Linkname: "/", Mode: 0o777}, "")
		}),
	}
	return cases
}

func legacy(name, rule string, more func(w *tar.Writer)) verdict {
	return special(name, rule, func(w *tar.Writer) {
		for _, d := range []string{"./", "./home/", "./home/agent/"} {
			entry(w, tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}, "")
		}
		if more != nil {
			more(w)
		}
	})
}

// canaried is a directory to extract into, with things around that must not
// change.
type canaried struct {
	t           testing.TB
	top, inside string
	before      []string
}

func newCanary(t testing.TB) *canaried {
	// In memory where there is a place for it: there are thousands of these.
	top, err := os.MkdirTemp("/dev/shm", "hermes-box-") //nolint:usetesting // see above
	if err != nil {
		top = t.TempDir()
	} else {
		t.Cleanup(func() {
			makeRemovable(top)
			_ = os.RemoveAll(top)
		})
	}
	c := &canaried{t: t, top: top}
	c.inside = filepath.Join(c.top, "beside", "in")
	for _, d := range []string{c.inside, filepath.Join(c.top, "etc"), filepath.Join(c.top, "beside", "data")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"x", "etc/passwd", "beside/x", "beside/data/x"} {
		if err := os.WriteFile(filepath.Join(c.top, f), []byte("canary"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c.before = c.list()
	return c
}

// list describes all outside of the directory.
func (c *canaried) list() []string {
	var found []string
	err := filepath.WalkDir(c.top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == c.inside {
			return fs.SkipDir
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		content := ""
		if info.Mode().IsRegular() {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content = string(b)
		}
		found = append(found, fmt.Sprint(path, info.Mode(), info.ModTime().UnixNano(), content))
		return nil
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return found
}

// extract extracts an archive and says how it went; nothing around may change.
func (c *canaried) extract(r io.Reader, l Limits, o ExtractOptions) error {
	c.t.Helper()
	root, err := os.Open(c.inside)
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	x := NewExtractor(root, o)
	_, err = Read(r, l, x)
	// Nobody finishes what was refused; even so, nothing may get out.
	if finish := x.Finish(); err == nil {
		err = finish
	}
	err = errors.Join(err, x.Close())
	if diff := cmp.Diff(c.before, c.list()); diff != "" {
		c.t.Errorf("outside of the directory: %s", diff)
	}
	makeRemovable(c.inside)
	return err
}

func ruleOf(err error) string {
	var e *EntryError
	if errors.As(err, &e) {
		return e.Rule
	}
	if err != nil {
		return "other: " + err.Error()
	}
	return ""
}

func TestCorpus(t *testing.T) {
	for _, c := range corpus() {
		t.Run(c.name, func(t *testing.T) {
			b := begin(t)
			c.make(b)
			_, err := Read(bytes.NewReader(b.Bytes()), DefaultLimits(), nil)
			if got := ruleOf(err); got != c.rule {
				t.Errorf("validator: %q, want %q", got, c.rule)
			}
			if errors.Is(err, ErrUnsafe) != (c.rule != "") {
				t.Errorf("%v: not an ErrUnsafe, or one", err)
			}
			if err != nil && err.Error() != printable(err.Error()) {
				t.Errorf("not escaped: %q", err)
			}
			for _, strip := range []bool{false, true} {
				got := newCanary(t).extract(bytes.NewReader(b.Bytes()), DefaultLimits(), ExtractOptions{Strip: strip})
				if ruleOf(got) != c.rule {
					t.Errorf("extractor (strip %t): %v, want %q", strip, got, c.rule)
				}
			}
		})
	}
}

func TestAbsoluteCanary(t *testing.T) {
	outside := t.TempDir()
	name := filepath.Join(outside, "x")
	for _, h := range []tar.Header{
		{Name: name, Mode: 0o644},
		{Name: "data" + strings.Repeat("/..", 30) + name, Mode: 0o644},
		{Name: "data/l/x", Mode: 0o644},
		{Name: "data/l/", Mode: 0o755, Typeflag: tar.TypeDir},
	} {
		b := begin(t)
		b.good(symlink("data/l", outside))
		b.tar(h, "")
		b.end()
		if err := newCanary(t).extract(&b.Buffer, DefaultLimits(), ExtractOptions{}); !errors.Is(err, ErrUnsafe) {
			t.Errorf("%q: %v", h.Name, err)
		}
		if left, _ := os.ReadDir(outside); len(left) != 0 {
			t.Errorf("%q: made %v", h.Name, left)
		}
	}
}

// TestExtractorAlone gives the extractor what the parser would refuse: it must
// hold by itself.
func TestExtractorAlone(t *testing.T) {
	c := newCanary(t)
	root, err := os.Open(c.inside)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	if err := errors.Join(
		os.Symlink("../..", filepath.Join(c.inside, "up")), os.Mkdir(filepath.Join(c.inside, "d"), 0o700),
		os.WriteFile(filepath.Join(c.inside, "f"), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}
	inside, err := os.ReadDir(c.inside)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"../x", "../../x", "up/y", "up/beside/x", filepath.Join(c.top, "y"), "up", "..", ".", "", "./x", "up/.", "d//x"} {
		for what, do := range map[string]func(*Extractor) error{
			"file": func(x *Extractor) error {
				return x.File(Entry{Name: name, Type: File, Size: 1}, strings.NewReader("x"))
			},
			"large file": func(x *Extractor) error {
				return x.File(Entry{Name: name, Type: File, Size: hole}, strings.NewReader(strings.Repeat("x", hole)))
			},
			"directory": func(x *Extractor) error { return x.Dir(Entry{Name: name, Type: Dir}) },
			"link to":   func(x *Extractor) error { return x.Link(Entry{Name: "l", Type: Link, Target: name + "/../x"}) },
			"link at":   func(x *Extractor) error { return x.Link(Entry{Name: name, Type: Link, Target: "f"}) },
			"symlink":   func(x *Extractor) error { return x.Symlink(Entry{Name: name, Type: Symlink, Target: "f"}) },
		} {
			if name == "." && what == "directory" {
				continue // the root itself
			}
			x := NewExtractor(root, ExtractOptions{})
			if err := errors.Join(do(x), x.Finish(), x.Close()); err == nil {
				t.Errorf("%s %q was made", what, name)
			}
		}
	}
	if after, err := os.ReadDir(c.inside); err != nil || len(after) != len(inside) {
		t.Errorf("%v became %v, %v", inside, after, err)
	}
	if diff := cmp.Diff(c.before, c.list()); diff != "" {
		t.Error(diff)
	}
}

func TestLimits(t *testing.T) {
	b := begin(t)
	b.good(dir("data/d"), file("data/d/f", "0123456789"), file("data/g", "0123456789"), symlink("data/l", "target"))
	b.end()
	names := int64(len("data") + len("data/d") + len("data/l") + len("target"))
	exact := Limits{Entries: 5, File: 10, Total: 20, Names: names}
	for _, c := range []struct {
		rule string
		edit func(*Limits)
	}{
		{"", func(*Limits) {}},
		{ruleEntries, func(l *Limits) { l.Entries-- }},
		{ruleFile, func(l *Limits) { l.File-- }},
		{ruleTotal, func(l *Limits) { l.Total-- }},
		{ruleNames, func(l *Limits) { l.Names-- }},
	} {
		l := exact
		c.edit(&l)
		_, err := Read(bytes.NewReader(b.Bytes()), l, nil)
		if ruleOf(err) != c.rule {
			t.Errorf("%+v: %v, want %q", l, err, c.rule)
		}
		if err := newCanary(t).extract(bytes.NewReader(b.Bytes()), l, ExtractOptions{}); ruleOf(err) != c.rule {
			t.Errorf("%+v: extractor: %v, want %q", l, err, c.rule)
		}
	}
}

// TestStreamErrors: what the layers below say is theirs, not the archive's.
func TestStreamErrors(t *testing.T) {
	b := begin(t)
	b.good(file("data/f", strings.Repeat("content", 1000)))
	b.end()
	pack := func(parts ...[]byte) []byte {
		var out bytes.Buffer
		for _, p := range parts {
			w := gzip.NewWriter(&out)
			_, _ = w.Write(p)
			_ = w.Close()
		}
		return out.Bytes()
	}
	whole := pack(b.Bytes())
	flip := func(at int) []byte {
		c := bytes.Clone(whole)
		c[len(c)+at] ^= 1
		return c
	}
	for _, c := range []struct {
		name string
		in   []byte
		want error
		rule string
	}{
		{"good", whole, nil, ""},
		{"bad CRC", flip(-8), gzip.ErrChecksum, ""},
		{"bad ISIZE", flip(-4), gzip.ErrChecksum, ""},
		{"cut off", whole[:len(whole)-20], io.ErrUnexpectedEOF, ""},
		{"junk behind", append(bytes.Clone(whole), "junk behind the end"...), gzip.ErrHeader, ""},
		{"zeros behind", append(bytes.Clone(whole), make([]byte, 512)...), gzip.ErrHeader, ""},
		{"two members are one stream", pack(b.Bytes()[:700], b.Bytes()[700:]), nil, ""},
		{"an archive behind", pack(b.Bytes(), b.Bytes()), ErrUnsafe, ruleJunk},
	} {
		for _, how := range []string{"validator", "extractor"} {
			z, err := gzip.NewReader(bytes.NewReader(c.in))
			if err != nil {
				t.Fatal(err)
			}
			if how == "validator" {
				_, err = Read(z, DefaultLimits(), nil)
			} else {
				err = newCanary(t).extract(z, DefaultLimits(), ExtractOptions{})
			}
			if !errors.Is(err, c.want) || errors.Is(err, ErrUnsafe) != (c.rule != "") || c.rule != "" && ruleOf(err) != c.rule {
				t.Errorf("%s, %s: %v, want %v %s", c.name, how, err, c.want, c.rule)
			}
		}
	}
}
