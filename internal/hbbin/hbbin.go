// Package hbbin holds the static Linux binaries of hb that box puts into its
// machines. `make build` makes them first; a program built without them says
// so when it needs one.
package hbbin

import (
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
)

//go:embed bin
var files embed.FS

// Binary returns hb for a Go architecture name.
func Binary(arch string) ([]byte, error) {
	f, err := files.Open("bin/hb-linux-" + arch + ".gz")
	if err != nil {
		return nil, fmt.Errorf("this box program was built without hb for %s; build it with make build", arch)
	}
	defer func() { _ = f.Close() }()
	zr, err := gzip.NewReader(f)
	if err != nil {
		return nil, fmt.Errorf("unpack hb: %w", err)
	}
	var hb bytes.Buffer
	hb.Grow(20 << 20) // a little more than it is: a buffer that grows takes three times as much
	if _, err := hb.ReadFrom(zr); err != nil {
		return nil, fmt.Errorf("unpack hb: %w", err)
	}
	return hb.Bytes(), nil
}
