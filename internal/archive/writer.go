package archive

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"time"
)

// The numeric owners that travel beside the names, for those who unpack an
// archive with tar. Agent's is the one every box has.
const (
	agentID = 1001
	rootID  = 0
)

// Writer writes an archive. An entry against the grammar is refused with an
// [EntryError] before anything of it is written, and the Writer stays usable;
// after any other error it is not.
type Writer struct {
	tar      *tar.Writer
	ledger   *ledger
	time     time.Time
	findings []Finding
	weight   int // bytes of the findings
	more     int
	buf      []byte
	err      error
}

// NewWriter starts an archive with its manifest.
func NewWriter(w io.Writer, m Manifest, l Limits) (*Writer, error) {
	if rule := m.validate(); rule != "" {
		return nil, &EntryError{Name: manifestName, Rule: rule}
	}
	if m.Tools == nil {
		m.Tools = []Tool{}
	}
	if m.Logins == nil {
		m.Logins = []string{}
	}
	raw, err := encode(m)
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	a := &Writer{tar: tar.NewWriter(w), ledger: newLedger(l), time: m.Time, buf: make([]byte, 64<<10)}
	if err := a.special(manifestName, raw); err != nil {
		return nil, err
	}
	return a, nil
}

// special writes an entry of our own.
func (w *Writer) special(name string, raw []byte) error {
	e := Entry{Name: name, Type: File, Mode: 0o600, Owner: Root, ModTime: w.time.Truncate(time.Second), Size: int64(len(raw))}
	if err := w.header(&e); err != nil {
		return err
	}
	return w.write(name, bytes.NewReader(raw))
}

// Dir writes a directory.
func (w *Writer) Dir(e Entry) error { return w.bodiless(e, Dir) }

// Symlink writes a symbolic link.
func (w *Writer) Symlink(e Entry) error { return w.bodiless(e, Symlink) }

// Link writes another name of an earlier file.
func (w *Writer) Link(e Entry) error { return w.bodiless(e, Link) }

func (w *Writer) bodiless(e Entry, t Type) error {
	if err := w.admit(&e, t); err != nil {
		return err
	}
	if err := w.header(&e); err != nil {
		return err
	}
	w.ledger.add(&e, nil)
	return nil
}

// File writes a file of exactly e.Size bytes. If r has fewer, zeros follow; if
// it has more, they are left; both are found as "changed".
func (w *Writer) File(e Entry, r io.Reader) error {
	if err := w.admit(&e, File); err != nil {
		return err
	}
	if err := w.header(&e); err != nil {
		return err
	}
	sum := sha256.New()
	x := &exact{r: r, left: e.Size}
	if err := w.write(e.Name, io.TeeReader(x, sum)); err != nil {
		return err
	}
	switch more, err := x.more(); {
	case err != nil:
		w.err = fmt.Errorf("read %s: %w", printable(e.Name), err)
		return w.err
	case x.padded > 0:
		w.Find(Finding{Path: e.Name, Kind: "changed", Detail: fmt.Sprintf("%d bytes shorter when read", x.padded)})
	case more:
		w.Find(Finding{Path: e.Name, Kind: "changed", Detail: "longer when read"})
	}
	w.ledger.add(&e, sum.Sum(nil))
	return nil
}

// exact makes a reader yield exactly its number of bytes.
type exact struct {
	r      io.Reader
	left   int64
	ended  bool
	padded int64
}

func (x *exact) Read(p []byte) (int, error) {
	if x.left == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), x.left)]
	if x.ended {
		clear(p)
		x.padded += int64(len(p))
		x.left -= int64(len(p))
		return len(p), nil
	}
	n, err := x.r.Read(p)
	x.left -= int64(n)
	if err == io.EOF { //nolint:errorlint // a wrapped one is not the file's end
		x.ended, err = true, nil
	}
	return n, err
}

// more tells whether the reader has more than was wanted of it.
func (x *exact) more() (bool, error) {
	if x.ended {
		return false, nil
	}
	_, err := io.ReadFull(x.r, make([]byte, 1))
	if err == io.EOF { //nolint:errorlint // as above
		return false, nil
	}
	return err == nil, err
}

// admit holds e against the rules.
func (w *Writer) admit(e *Entry, t Type) error {
	if w.err != nil {
		return w.err
	}
	if e.Type != 0 && e.Type != t {
		return &EntryError{Name: e.Name, Rule: ruleType}
	}
	e.Type = t
	return w.ledger.admit(e)
}

func (w *Writer) header(e *Entry) error {
	flags := map[Type]byte{Dir: tar.TypeDir, File: tar.TypeReg, Symlink: tar.TypeSymlink, Link: tar.TypeLink}
	h := &tar.Header{
		Typeflag: flags[e.Type], Name: e.Name, Linkname: e.Target, Size: e.Size, Mode: int64(e.Mode),
		Uid: rootID, Gid: rootID, Uname: "root", Gname: "root",
		ModTime: e.ModTime, Format: tar.FormatPAX,
	}
	if e.Type == Dir {
		h.Name += "/"
	}
	if e.Owner == Agent {
		h.Uid, h.Gid, h.Uname, h.Gname = agentID, agentID, "agent", "agent"
	}
	if len(e.Xattrs) > 0 {
		h.PAXRecords = make(map[string]string, len(e.Xattrs))
		for name, value := range e.Xattrs {
			h.PAXRecords[xattrPrefix+name] = value
		}
	}
	if err := w.tar.WriteHeader(h); err != nil {
		w.err = fmt.Errorf("write %s: %w", printable(e.Name), err)
		return w.err
	}
	return nil
}

func (w *Writer) write(name string, r io.Reader) error {
	// The wrapper hides ReadFrom, which would bring a buffer of its own.
	if _, err := io.CopyBuffer(struct{ io.Writer }{w.tar}, struct{ io.Reader }{r}, w.buf); err != nil {
		w.err = fmt.Errorf("write %s: %w", printable(name), err)
		return w.err
	}
	return nil
}

// Find adds a finding to the end entry; its texts are escaped here.
func (w *Writer) Find(f Finding) {
	f.Path = cut(printable(f.Path), maxFindingPath)
	f.Detail = cut(printable(f.Detail), maxFindingText)
	weight := len(f.Path) + len(f.Kind) + len(f.Detail) + 64
	if len(w.findings) == maxFindings || w.weight+weight > maxFindingBytes {
		w.more++
		return
	}
	w.weight += weight
	w.findings = append(w.findings, f)
}

// Has tells whether an entry of this name was written.
func (w *Writer) Has(name string) bool {
	_, ok := w.ledger.seen[idOf(name)]
	return ok
}

// Close writes the end entry and tar's end marker. It does not close the
// underlying writer.
func (w *Writer) Close() (End, error) {
	if w.err != nil {
		return End{}, w.err
	}
	end := End{Entries: w.ledger.entries, Bytes: w.ledger.bytes, Digest: w.ledger.state(), Findings: w.findings, More: w.more}
	if end.Findings == nil {
		end.Findings = []Finding{}
	}
	if rule := end.validate(); rule != "" {
		return End{}, &EntryError{Name: endName, Rule: rule}
	}
	raw, err := encode(end)
	if err != nil {
		return End{}, fmt.Errorf("encode end: %w", err)
	}
	if err := w.special(endName, raw); err != nil {
		return End{}, err
	}
	if err := w.tar.Close(); err != nil {
		w.err = fmt.Errorf("write end marker: %w", err)
		return End{}, w.err
	}
	w.err = errors.New("archive is closed")
	return end, nil
}
