package archive

import (
	"errors"
	"io"
)

// Writer writes an archive. An entry against the grammar is refused with an
// [EntryError] before anything of it is written, and the Writer stays usable;
// after any other error it is not.
type Writer struct{}

// NewWriter starts an archive with its manifest.
func NewWriter(w io.Writer, m Manifest, l Limits) (*Writer, error) {
	return nil, errors.ErrUnsupported
}

// Dir writes a directory.
func (w *Writer) Dir(e Entry) error { return errors.ErrUnsupported }

// File writes a file of exactly e.Size bytes. If r has fewer, zeros follow; if
// it has more, they are left; both are found as "changed".
func (w *Writer) File(e Entry, r io.Reader) error { return errors.ErrUnsupported }

// Symlink writes a symbolic link.
func (w *Writer) Symlink(e Entry) error { return errors.ErrUnsupported }

// Link writes another name of an earlier file.
func (w *Writer) Link(e Entry) error { return errors.ErrUnsupported }

// Find adds a finding to the end entry; its path is escaped here.
func (w *Writer) Find(f Finding) {}

// Has tells whether an entry of this name was written.
func (w *Writer) Has(name string) bool { return false }

// Close writes the end entry and tar's end marker. It does not close the
// underlying writer.
func (w *Writer) Close() (End, error) { return End{}, errors.ErrUnsupported }
