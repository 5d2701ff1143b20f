package archive

import (
	"errors"
	"io"
)

// Read reads an archive to the end of r, checks it whole, and gives each entry
// to h, which may be nil. An error of r itself is returned wrapped (a damaged
// gzip stream is not an unsafe archive); whatever is against the grammar,
// truncation included, is an [EntryError].
func Read(r io.Reader, l Limits, h Handler) (Summary, error) {
	return Summary{}, errors.ErrUnsupported
}
