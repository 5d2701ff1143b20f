package archive

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"
)

// What an archive may not exceed whatever the caller's Limits.
const (
	maxName      = 4096
	maxComponent = 255
	maxDepth     = 128
	maxTarget    = 4095 // PATH_MAX without its NUL
	maxHeader    = 1 << 20
	maxXattrName = 255     // XATTR_NAME_MAX, xattr(7)
	maxXattr     = 1 << 16 // XATTR_SIZE_MAX, xattr(7)
	maxJSON      = 1 << 20
)

const (
	manifestName = "manifest"
	endName      = "end"
	dataName     = "data"
	reservedName = "data/.hermes-box" // the box's own secrets
	legacyHome   = "data/home/agent"
	xattrPrefix  = "SCHILY.xattr."
)

// The rules, as refusals name them.
const (
	ruleAfterEnd    = "an entry after the end entry"
	ruleComponent   = "a part of the name is longer than 255 bytes"
	ruleDepth       = "deeper than 128 directories"
	ruleDuplicate   = "the name occurs twice"
	ruleEntries     = "too many entries"
	ruleFile        = "the file is too large"
	ruleFirst       = "the archive does not begin with its manifest"
	ruleFormat      = "not a header that hb writes"
	ruleHeader      = "the header is larger than 1 MiB"
	ruleLinkTarget  = "a hard link to what is not an earlier file"
	ruleMode        = "mode bits beyond 0777"
	ruleName        = "the name is not clean and local"
	ruleNames       = "names of directories and links are too long in all"
	ruleNUL         = "a NUL byte in a name"
	ruleOwner       = "the owner is neither agent nor root"
	ruleParent      = "the parent is not an earlier directory"
	ruleRecord      = "a pax record that hb does not write"
	ruleReserved    = "the name is reserved"
	ruleRoot        = "data is not a directory"
	ruleSize        = "a size on what is not a file"
	ruleSparse      = "a sparse file"
	ruleSymlink     = "the link's target is empty or too long"
	ruleTarget      = "a link target on what is not a link"
	ruleTime        = "the modification time is out of range"
	ruleTooLong     = "the name is longer than 4096 bytes"
	ruleTop         = "the name is outside data"
	ruleTotal       = "the archive holds too much"
	ruleType        = "neither directory, file, symbolic nor hard link"
	ruleXattr       = "an extended attribute that does not travel"
	ruleJSONSize    = "larger than 1 MiB"
	ruleEmpty       = "the archive is empty"
	ruleTruncated   = "the archive is cut off"
	ruleNoEnd       = "the archive has no end entry"
	ruleNoMarker    = "the archive has no end marker"
	ruleJunk        = "something follows the end marker"
	ruleTar         = "not a tar header"
	ruleCounts      = "the end entry's counts differ from what was read"
	ruleDigest      = "the end entry's digest differs from what was read"
	ruleLegacyName  = "the name does not begin with ./"
	ruleLegacyHome  = "no directory ./home/agent"
	ruleDecode      = "not strict JSON of a known form"
	ruleVersion     = "a format that this version does not read"
	ruleBox         = "not a box name"
	ruleLineage     = "not a lineage id"
	ruleUTC         = "the time is not UTC"
	ruleTools       = "not a list of tools and versions"
	ruleLogins      = "not a list of tools with a login"
	ruleFinding     = "not a finding"
	ruleDigestShape = "not a digest"
)

// The range of times that RFC 3339 can show, as Unix seconds, but for Go's zero
// time, which package tar writes as 1970.
const (
	minTime = -62135596800 + 1 // 0001-01-01
	maxTime = 253402300799     // 9999-12-31
)

type id [16]byte // the first half of a SHA-256: 2M names need no more

func idOf(name string) id {
	h := sha256.Sum256([]byte(name))
	return id(h[:16])
}

type record struct {
	kind Type
	meta id
}

// ledger holds the rules and what was seen. It keeps hashes, not names: 50 to 80
// bytes an entry, and for the reader half as much again where names are not
// their own folding keys.
type ledger struct {
	limits  Limits
	seen    map[id]record
	entries int64
	bytes   int64
	names   int64
	digest  string

	folding   bool // whether to look for collisions
	fold      folder
	folded    map[uint64]struct{} // keys that are not names of their own
	collision string

	// The parent of the entry before: most have the same.
	parent string
}

func newLedger(l Limits) *ledger {
	return &ledger{limits: l, seen: make(map[id]record), folded: make(map[uint64]struct{})}
}

// Checker holds entries against the rules that nobody writes yet.
type Checker struct{ ledger *ledger }

// NewChecker begins with none.
func NewChecker(l Limits) *Checker { return &Checker{newLedger(l)} }

// Add refuses, with an [EntryError], what a [Writer] would refuse that has
// written the entries added before.
func (c *Checker) Add(e Entry) error {
	if err := c.ledger.admit(&e); err != nil {
		return err
	}
	c.ledger.add(&e, nil)
	return nil
}

// admit is check of an entry that comes from a file system.
func (l *ledger) admit(e *Entry) error {
	if e.ModTime.IsZero() {
		e.ModTime = time.Unix(0, 0)
	}
	e.ModTime = normal(e.ModTime)
	return l.check(e)
}

// check holds an entry of the data against the rules, and changes nothing.
func (l *ledger) check(e *Entry) error {
	refuse := func(rule string) error { return &EntryError{Name: e.Name, Rule: rule} }
	if rule := checkName(e.Name); rule != "" {
		return refuse(rule)
	}
	if e.Name == reservedName || strings.HasPrefix(e.Name, reservedName+"/") {
		return refuse(ruleReserved)
	}
	if e.Name == dataName && e.Type != Dir {
		return refuse(ruleRoot)
	}
	if e.Mode&^fs.ModePerm != 0 {
		return refuse(ruleMode)
	}
	if e.Owner != Agent && e.Owner != Root {
		return refuse(ruleOwner)
	}
	if s := e.ModTime.Unix(); s < minTime || s > maxTime {
		return refuse(ruleTime)
	}
	if e.Type != File && e.Size != 0 {
		return refuse(ruleSize)
	}
	switch e.Type {
	case Dir, File:
		if e.Target != "" {
			return refuse(ruleTarget)
		}
	case Symlink:
		if e.Target == "" || len(e.Target) > maxTarget {
			return refuse(ruleSymlink)
		}
		if strings.IndexByte(e.Target, 0) >= 0 {
			return refuse(ruleNUL)
		}
	case Link:
		if rule := checkName(e.Target); rule != "" || l.seen[idOf(e.Target)].kind != File {
			return refuse(ruleLinkTarget)
		}
	default:
		return refuse(ruleType)
	}
	// With a record's length, key and separators, generously.
	header := len(e.Name) + len(e.Target) + 512
	for name, value := range e.Xattrs {
		if e.Type != Dir && e.Type != File || !ValidXattr(name) || len(value) > maxXattr {
			return refuse(ruleXattr)
		}
		header += len(name) + len(value) + 64
	}
	if header > maxHeader {
		return refuse(ruleHeader)
	}
	if e.Size < 0 || e.Size > l.limits.File {
		return refuse(ruleFile)
	}
	if e.Size > l.limits.Total-l.bytes {
		return refuse(ruleTotal)
	}
	if l.entries >= l.limits.Entries {
		return refuse(ruleEntries)
	}
	if l.names+remembered(e) > l.limits.Names {
		return refuse(ruleNames)
	}
	if _, dup := l.seen[idOf(e.Name)]; dup {
		return refuse(ruleDuplicate)
	}
	if parent, _, below := cutLast(e.Name); below && parent != l.parent {
		if l.seen[idOf(parent)].kind != Dir {
			return refuse(ruleParent)
		}
		l.parent = parent
	}
	return nil
}

// ValidXattr tells whether an extended attribute of this name can travel: a
// pax record's key holds no "=", and only user.* is the owner's to give.
func ValidXattr(name string) bool {
	return strings.HasPrefix(name, "user.") && len(name) > len("user.") && len(name) <= maxXattrName && !strings.ContainsAny(name, "=\x00")
}

// remembered is what an extractor has to keep of e.
func remembered(e *Entry) int64 {
	if e.Type == Dir || e.Type == Symlink {
		return int64(len(e.Name) + len(e.Target))
	}
	return 0
}

func checkName(name string) (rule string) {
	switch {
	case strings.IndexByte(name, 0) >= 0:
		return ruleNUL
	case len(name) > maxName:
		return ruleTooLong
	}
	depth := 0
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." || part == ".." {
			return ruleName
		}
		if len(part) > maxComponent {
			return ruleComponent
		}
		depth++
	}
	if depth > maxDepth {
		return ruleDepth
	}
	if name != dataName && !strings.HasPrefix(name, dataName+"/") {
		return ruleTop
	}
	return ""
}

// cutLast splits off a name's last part.
func cutLast(name string) (parent, base string, ok bool) {
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		return name[:i], name[i+1:], true
	}
	return "", name, false
}

// add enters a checked entry; sum is the SHA-256 of a file's content.
func (l *ledger) add(e *Entry, sum []byte) {
	r := record{kind: e.Type}
	if e.Type == Link {
		r.meta = l.seen[idOf(e.Target)].meta
	} else {
		r.meta = metaOf(e, sum)
	}
	name := idOf(e.Name)
	l.entries++
	l.bytes += e.Size
	l.names += remembered(e)
	if l.folding && l.collision == "" {
		l.foldName(e.Name)
	}
	l.seen[name] = r
}

// foldName looks for an earlier name with the same key. Only keys that are not
// their own names are remembered apart, so most names cost nothing.
func (l *ledger) foldName(name string) {
	key := l.fold.key(name)
	h := idOf(key)
	short := binary.BigEndian.Uint64(h[:])
	_, other := l.seen[h]
	if !other {
		_, other = l.folded[short]
	}
	if other {
		l.collision = printable(name)
		l.folded = nil
		return
	}
	if key != name {
		l.folded[short] = struct{}{}
	}
}

type digester struct{ hash.Hash }

func (d digester) int(n int64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	d.Write(b[:])
}

func (d digester) str(s []byte) {
	d.int(int64(len(s)))
	d.Write(s)
}

// metaOf hashes all of an entry but its name; see the package's comment.
func metaOf(e *Entry, sum []byte) id {
	d := digester{sha256.New()}
	mode, body := e.Mode, []byte(nil)
	switch e.Type {
	case Dir:
		d.Write([]byte{'d'})
	case Symlink:
		d.Write([]byte{'l'})
		mode, body = fs.ModePerm, []byte(e.Target)
	default:
		d.Write([]byte{'f'})
		body = sum
	}
	d.int(int64(mode))
	d.int(e.ModTime.Unix())
	d.int(int64(e.ModTime.Nanosecond()))
	d.str(body)
	d.int(int64(len(e.Xattrs)))
	for _, name := range slices.Sorted(maps.Keys(e.Xattrs)) {
		d.str([]byte(name))
		d.str([]byte(e.Xattrs[name]))
	}
	return id(d.Sum(nil)[:16])
}

// state returns the state digest.
func (l *ledger) state() string {
	names := make([]id, 0, len(l.seen))
	for name := range l.seen {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b id) int { return bytes.Compare(a[:], b[:]) })
	d := digester{sha256.New()}
	d.Write([]byte("hermes-box state 1\n"))
	d.int(int64(len(names)))
	for _, name := range names {
		r := l.seen[name]
		d.Write(name[:])
		d.Write(r.meta[:])
	}
	return hex.EncodeToString(d.Sum(nil))
}

// normal is t as it travels.
func normal(t time.Time) time.Time { return time.Unix(t.Unix(), int64(t.Nanosecond())).UTC() }
