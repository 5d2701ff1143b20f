// Package hbbin holds the static Linux binaries of hb that box puts into its
// machines. `make build` makes them first; a program built without them says
// so when it needs one.
package hbbin

import (
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
	"io"
)

//go:embed bin
var files embed.FS

// Binary returns hb for a Go architecture name.
func Binary(arch string) ([]byte, error) {
	data, err := files.ReadFile("bin/hb-linux-" + arch + ".gz")
	if err != nil {
		return nil, fmt.Errorf("this box program was built without hb for %s; build it with make build", arch)
	}
	zr, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("unpack hb: %w", err)
	}
	return io.ReadAll(zr)
}
