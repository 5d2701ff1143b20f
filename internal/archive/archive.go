package archive

import (
	"errors"
	"io"
	"io/fs"
	"time"
)

// Version is the format that this package writes; it reads no other.
const Version = 1

// ErrUnsafe is what every refusal of an archive's content is.
var ErrUnsafe = errors.New("unsafe archive")

// EntryError refuses an entry, or with an empty Name the archive as a whole.
type EntryError struct{ Name, Rule string }

// Error shows the entry's name escaped.
func (e *EntryError) Error() string { return ErrUnsafe.Error() + ": " + e.Plain() }

// Plain is the error where there is no archive yet that could be unsafe.
func (e *EntryError) Plain() string {
	if e.Name == "" {
		return e.Rule
	}
	return cut(printable(e.Name), 300) + ": " + e.Rule
}

// Unwrap says that it is an [ErrUnsafe].
func (e *EntryError) Unwrap() error { return ErrUnsafe }

// Owner is who owns an entry: numbers do not travel.
type Owner byte

// The two owners.
const (
	Root Owner = iota
	Agent
)

// Type is what an entry is; there are no others.
type Type byte

// The types. A Link is another name of an earlier File.
const (
	Dir Type = iota + 1
	File
	Symlink
	Link
)

// String names the type.
func (t Type) String() string {
	switch t {
	case Dir:
		return "directory"
	case File:
		return "file"
	case Symlink:
		return "symbolic link"
	case Link:
		return "hard link"
	}
	return "unknown type"
}

// Entry is one directory, file or link of the state.
type Entry struct {
	// Name is "data" or below it, without a trailing slash, any bytes but
	// NUL. Legacy names come in the same form.
	Name    string
	Type    Type
	Mode    fs.FileMode // within 0777
	Owner   Owner
	ModTime time.Time // the zero time is written as 1970
	Size    int64     // of a File
	// Target is a Symlink's text, verbatim, or the Name of the earlier File
	// of a Link.
	Target string
	Xattrs map[string]string // user.* of a Dir or File
}

// Manifest is an archive's first entry.
type Manifest struct {
	Format  int       `json:"format"`
	Box     string    `json:"box"`
	Time    time.Time `json:"time"`    // UTC
	Lineage string    `json:"lineage"` // 32 lower-case hex digits
	HB      string    `json:"hb"`      // version of the hb that packed
	Tools   []Tool    `json:"tools"`
	Logins  []string  `json:"logins"` // tools whose login travels
}

// Tool is a tool's version when the state was packed.
type Tool struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// Finding is something that pack had to say about a path: what it left out,
// changed, or saw changing.
type Finding struct {
	Path   string `json:"path"` // escaped
	Kind   string `json:"kind"` // special, mode, owner, xattr, changed, database, json, vanished
	Detail string `json:"detail,omitempty"`
}

// End is an archive's last entry.
type End struct {
	Entries  int64     `json:"entries"` // without manifest and end
	Bytes    int64     `json:"bytes"`   // of all files' content
	Digest   string    `json:"digest"`  // of the state, 64 hex digits
	Findings []Finding `json:"findings"`
	More     int       `json:"more"` // findings beyond those listed
}

// Limits bound an archive.
type Limits struct {
	Entries int64
	File    int64 // bytes of one file
	Total   int64 // bytes of all files
	// Names bounds the bytes of the names and targets of directories and
	// symbolic links: an extractor remembers those until the end.
	Names int64
}

// DefaultLimits are far above any box's state.
func DefaultLimits() Limits {
	return Limits{Entries: 2_000_000, File: 64 << 30, Total: 1 << 40, Names: 256 << 20}
}

// Summary is what [Read] found.
type Summary struct {
	Legacy   bool
	Manifest Manifest // zero for a legacy archive
	End      End      // zero for a legacy archive
	Entries  int64
	Bytes    int64
	Digest   string
	// FoldCollision is the first name (escaped) that a file system which
	// ignores case or normalises Unicode would take for an earlier one.
	FoldCollision string
}

// Handler is given the entries of an archive one by one, checked, parents
// first, but before the archive's end has been seen: nothing of it may be
// trusted before [Read] returns without error.
type Handler interface {
	Dir(Entry) error
	File(Entry, io.Reader) error
	Symlink(Entry) error
	Link(Entry) error
}
