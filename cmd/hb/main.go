// Command hb looks after a box from the inside.
package main

import (
	"os"

	"hermes-box-lite/internal/guest"
)

// version is set by the linker.
var version = "dev"

func main() {
	os.Exit(guest.Main(os.Args[1:], version, os.Stdin, os.Stdout, os.Stderr))
}
