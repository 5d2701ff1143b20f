package archive

import (
	"errors"
	"io"
	"os"
)

// ExtractOptions say how entries become files.
type ExtractOptions struct {
	// Strip leaves the leading "data/" out of names; "data" itself is then
	// the root, whose metadata is set at the end.
	Strip bool
	// Existing are directories (paths below the root) that may be there
	// already, such as "lost+found".
	Existing map[string]bool
	// Chown gives entries to these owners; otherwise they stay the process's.
	Chown              bool
	AgentUID, AgentGID int
	RootUID, RootGID   int
	// NoXattrs leaves extended attributes out.
	NoXattrs bool
	// Drop tells by entry name what to leave out although it is valid. What is
	// below a dropped directory and hard links to a dropped file are left out
	// with it.
	Drop func(name string) bool
}

// Extractor is a [Handler] that writes entries below a directory.
type Extractor struct{}

// NewExtractor extracts below root, which should be empty and belong to nobody
// else while it works.
func NewExtractor(root *os.Root, o ExtractOptions) *Extractor { return &Extractor{} }

// Dir makes a directory.
func (x *Extractor) Dir(e Entry) error { return errors.ErrUnsupported }

// File writes a file.
func (x *Extractor) File(e Entry, r io.Reader) error { return errors.ErrUnsupported }

// Symlink remembers a symbolic link: they are made at the end.
func (x *Extractor) Symlink(e Entry) error { return errors.ErrUnsupported }

// Link makes another name of an earlier file.
func (x *Extractor) Link(e Entry) error { return errors.ErrUnsupported }

// Finish makes the symbolic links, then sets the directories' metadata,
// deepest first. It is called once, after [Read] returned without error.
func (x *Extractor) Finish() error { return errors.ErrUnsupported }

// SkippedXattrs is the number of extended attributes that this host or file
// system could not take.
func (x *Extractor) SkippedXattrs() int { return 0 }
