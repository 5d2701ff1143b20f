package archive

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"strings"
)

const (
	blockSize = 512
	// maxTrailer bounds the zeros after the end marker: tar fills records,
	// of 10 KiB by default.
	maxTrailer = 1 << 20
	// maxHeaders bounds what one entry's headers take of the stream: an
	// extended header of 1 MiB, or GNU's two, and the blocks around.
	maxHeaders = 2*maxHeader + 16*blockSize
)

// Read reads an archive to the end of r, checks it whole, and gives each entry
// to h, which may be nil. An error of r itself is returned wrapped (a damaged
// gzip stream is not an unsafe archive); whatever is against the grammar,
// truncation included, is an [EntryError].
func Read(r io.Reader, l Limits, h Handler) (Summary, error) {
	src := &source{r: r}
	p := &parser{src: src, tar: tar.NewReader(src), ledger: newLedger(l), handler: h}
	p.ledger.folding = true
	if err := p.run(); err != nil {
		return Summary{}, err
	}
	s := p.summary
	s.Entries, s.Bytes, s.Digest = p.ledger.entries, p.ledger.bytes, p.ledger.digest
	s.FoldCollision = p.ledger.collision
	return s, nil
}

// source is the stream as the parser sees it: it counts, remembers the
// stream's own error, and stops headers that never end.
type source struct {
	r      io.Reader
	n      int64
	err    error // other than io.EOF
	header bool  // headers are being read
	budget int64 // for them
	spent  bool
	mark   int64 // where they begin
	marked bool  // there was something but zeros
}

func (s *source) Read(p []byte) (int, error) {
	if s.err != nil {
		return 0, s.err
	}
	if s.header {
		if s.budget <= 0 {
			s.spent = true
			return 0, io.ErrUnexpectedEOF
		}
		p = p[:min(int64(len(p)), s.budget)]
	}
	n, err := s.r.Read(p)
	if s.header && s.n >= s.mark && !s.marked {
		s.marked = !zero(p[:n])
	}
	s.n += int64(n)
	s.budget -= int64(n)
	// Exactly io.EOF: a layer below may have wrapped it to say "too early".
	if err != nil && err != io.EOF { //nolint:errorlint // see above
		s.err = err
	}
	return n, err
}

type parser struct {
	src     *source
	tar     *tar.Reader
	ledger  *ledger
	handler Handler
	summary Summary
	home    bool // legacy: its agent's home was seen
	end     bool
	// contentEnd is where in the stream the last entry's content and padding
	// end, so that an end marker can be told from none.
	contentEnd int64
}

func (p *parser) run() error {
	for first := true; ; first = false {
		h, err := p.next()
		if err != nil {
			return err
		}
		if h == nil {
			if first {
				return &EntryError{Rule: ruleEmpty}
			}
			break
		}
		if first {
			p.summary.Legacy = h.Name == "./" && h.Typeflag == tar.TypeDir
		}
		if err := p.entry(h, first); err != nil {
			return err
		}
	}
	switch {
	case p.summary.Legacy && !p.home:
		return &EntryError{Rule: ruleLegacyHome}
	case !p.summary.Legacy && !p.end:
		return &EntryError{Rule: ruleNoEnd}
	}
	return p.trailer()
}

// next returns the next header, none at the end marker, or a final error. (No
// sentinel: the stream's own errors, which it returns wrapped, may hold one.)
func (p *parser) next() (*tar.Header, error) {
	p.src.header, p.src.budget, p.src.spent = true, maxHeaders, false
	p.src.mark, p.src.marked = p.contentEnd, false
	h, err := p.tar.Next()
	p.src.header = false
	if err == nil {
		p.contentEnd = p.src.n
		return h, nil
	}
	if p.src.spent || errors.Is(err, tar.ErrFieldTooLong) {
		return nil, &EntryError{Rule: ruleHeader}
	}
	if p.src.err == nil && errors.Is(err, io.EOF) {
		if p.src.n == 0 {
			return nil, &EntryError{Rule: ruleEmpty}
		}
		if p.src.n-p.contentEnd != 2*blockSize || p.src.marked {
			return nil, &EntryError{Rule: ruleNoMarker}
		}
		return nil, nil
	}
	return nil, p.fault(err)
}

// fault tells an error of the stream from what is wrong with its content.
func (p *parser) fault(err error) error {
	switch {
	case p.src.err != nil:
		return fmt.Errorf("read archive: %w", p.src.err)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return &EntryError{Rule: ruleTruncated}
	}
	return &EntryError{Rule: ruleTar}
}

// entry handles one entry and reads it to its end.
func (p *parser) entry(h *tar.Header, first bool) error {
	e, rule := p.header(h)
	if rule != "" {
		return &EntryError{Name: h.Name, Rule: rule}
	}
	if !p.summary.Legacy {
		switch {
		case p.end:
			return &EntryError{Name: e.Name, Rule: ruleAfterEnd}
		case first != (e.Name == manifestName):
			if first {
				return &EntryError{Name: e.Name, Rule: ruleFirst}
			}
			return &EntryError{Name: e.Name, Rule: ruleDuplicate}
		case first:
			return p.readManifest(&e)
		case e.Name == endName:
			return p.readEnd(&e)
		}
	}
	if err := p.ledger.check(&e); err != nil {
		return err
	}
	if e.Name == legacyHome && e.Type == Dir {
		p.home = true
	}
	c := &content{parser: p, left: e.Size, sum: sha256.New()}
	if p.handler != nil {
		if err := p.hand(e, c); err != nil {
			if c.err != nil {
				return c.err // the cause, not what the handler made of it
			}
			return err
		}
	}
	if err := p.drain(c, e.Size); err != nil {
		return err
	}
	p.ledger.add(&e, c.sum.Sum(nil))
	return nil
}

func (p *parser) hand(e Entry, c *content) error {
	switch e.Type {
	case Dir:
		return p.handler.Dir(e)
	case File:
		return p.handler.File(e, c)
	case Symlink:
		return p.handler.Symlink(e)
	default:
		return p.handler.Link(e)
	}
}

// drain reads what is left of an entry's content.
func (p *parser) drain(c *content, size int64) error {
	if _, err := io.Copy(io.Discard, c); err != nil {
		return err
	}
	p.contentEnd = p.src.n + -size&(blockSize-1)
	return nil
}

// content is a file's content, hashed. It ends after exactly the entry's size
// or with a final error.
type content struct {
	parser *parser
	left   int64
	sum    hash.Hash
	err    error
}

func (c *content) Read(b []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	if c.left == 0 {
		return 0, io.EOF
	}
	n, err := c.parser.tar.Read(b)
	c.sum.Write(b[:n])
	c.left -= int64(n)
	if err != nil && (c.left > 0 || !errors.Is(err, io.EOF)) {
		c.err = c.parser.fault(err)
		return n, c.err
	}
	return n, nil
}

// header translates a tar header, or names the rule it is against.
func (p *parser) header(h *tar.Header) (e Entry, rule string) {
	if h.Typeflag == tar.TypeGNUSparse {
		return e, ruleSparse
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return e, ruleSparse
		}
	}
	types := map[byte]Type{tar.TypeDir: Dir, tar.TypeReg: File, tar.TypeSymlink: Symlink, tar.TypeLink: Link}
	e = Entry{
		Name: h.Name, Type: types[h.Typeflag], Mode: fs.FileMode(h.Mode & 0o777),
		ModTime: normal(h.ModTime), Size: h.Size, Target: h.Linkname,
	}
	if e.Type == 0 {
		return e, ruleType
	}
	// GNU tar's own format, and its pax headers with bytes beyond ASCII, which
	// package tar cannot name.
	if h.Format != tar.FormatUSTAR && h.Format != tar.FormatPAX && !p.summary.Legacy {
		return e, ruleFormat
	}
	for key, value := range h.PAXRecords {
		name, xattr := strings.CutPrefix(key, xattrPrefix)
		if xattr {
			if e.Xattrs == nil {
				e.Xattrs = make(map[string]string)
			}
			e.Xattrs[name] = value
		} else if !p.knows(key, h) {
			return e, ruleRecord
		}
	}
	if !p.summary.Legacy && h.Mode&^0o777 != 0 {
		return e, ruleMode
	}
	if e.Type == Dir {
		e.Name = strings.TrimSuffix(e.Name, "/")
	}
	if p.summary.Legacy {
		if e.Name, rule = fromLegacy(e.Name); rule != "" {
			return e, rule
		}
		if e.Type == Link {
			if e.Target, rule = fromLegacy(e.Target); rule != "" {
				return e, ruleLinkTarget
			}
		}
	}
	switch {
	case h.Uname == "agent":
		e.Owner = Agent
	case h.Uname == "root":
		e.Owner = Root
	case !p.summary.Legacy:
		return e, ruleOwner
	case e.Name == legacyHome || strings.HasPrefix(e.Name, legacyHome+"/"):
		// The shell tool's images gave the agent other names.
		e.Owner = Agent
	}
	return e, ""
}

// knows tells whether an extended record is one that our writer, or for legacy
// archives GNU tar, writes.
func (p *parser) knows(key string, h *tar.Header) bool {
	switch key {
	case "path", "linkpath", "mtime":
		return true
	case "size":
		// Written where the header's own field is too small; two sizes would
		// leave it to the reader which one counts.
		return p.summary.Legacy || h.Size >= 1<<33
	case "atime", "ctime", "uid", "gid", "uname", "gname":
		return p.summary.Legacy
	}
	return false
}

// fromLegacy turns "." into "data" and "./a" into "data/a".
func fromLegacy(name string) (string, string) {
	if name == "." {
		return dataName, ""
	}
	below, ok := strings.CutPrefix(name, "./")
	if !ok {
		return "", ruleLegacyName
	}
	return dataName + "/" + below, ""
}

// special reads the whole of an entry that is ours: small, plain, root's.
func (p *parser) special(e *Entry) ([]byte, error) {
	switch {
	case e.Type != File:
		return nil, &EntryError{Name: e.Name, Rule: ruleType}
	case e.Owner != Root:
		return nil, &EntryError{Name: e.Name, Rule: ruleOwner}
	case e.Target != "":
		return nil, &EntryError{Name: e.Name, Rule: ruleTarget}
	case len(e.Xattrs) != 0:
		return nil, &EntryError{Name: e.Name, Rule: ruleXattr}
	case e.Size < 0 || e.Size > maxJSON:
		return nil, &EntryError{Name: e.Name, Rule: ruleJSONSize}
	}
	c := &content{parser: p, left: e.Size, sum: sha256.New()}
	raw, err := io.ReadAll(c)
	if err != nil {
		return nil, err
	}
	return raw, p.drain(c, e.Size)
}

func (p *parser) readManifest(e *Entry) error {
	raw, err := p.special(e)
	if err != nil {
		return err
	}
	m, rule := decodeManifest(raw)
	if rule != "" {
		return &EntryError{Name: manifestName, Rule: rule}
	}
	p.summary.Manifest = m
	return nil
}

func (p *parser) readEnd(e *Entry) error {
	raw, err := p.special(e)
	if err != nil {
		return err
	}
	end, rule := decodeEnd(raw)
	if rule != "" {
		return &EntryError{Name: endName, Rule: rule}
	}
	if end.Entries != p.ledger.entries || end.Bytes != p.ledger.bytes {
		return &EntryError{Name: endName, Rule: ruleCounts}
	}
	p.ledger.digest = p.ledger.state()
	if end.Digest != p.ledger.digest {
		return &EntryError{Name: endName, Rule: ruleDigest}
	}
	p.summary.End, p.end = end, true
	return nil
}

// trailer reads to the stream's end: tar's own reader stops at the marker and
// would never see what follows, nor the check sums of the layers below.
func (p *parser) trailer() error {
	buf := make([]byte, 32<<10)
	for total := 0; ; {
		n, err := p.src.Read(buf)
		total += n
		if !zero(buf[:n]) || total > maxTrailer {
			return &EntryError{Rule: ruleJunk}
		}
		if p.src.err != nil {
			return p.fault(err)
		}
		if err != nil { // the end
			break
		}
	}
	if p.summary.Legacy {
		p.ledger.digest = p.ledger.state()
	}
	return nil
}

func zero(b []byte) bool {
	for len(b) >= 8 {
		if binary.NativeEndian.Uint64(b) != 0 {
			return false
		}
		b = b[8:]
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
