// Command hb looks after a box from the inside. In a virtual machine it is the
// init as well.
package main

import (
	"fmt"
	"os"

	"hermes-box-lite/internal/guest"
	"hermes-box-lite/internal/guest/boot"
)

// version is set by the linker.
var version = "dev"

func main() {
	switch {
	case boot.IsInit(os.Args):
		boot.Init()
	case boot.IsChannel(os.Args):
		_, _ = fmt.Fprintln(os.Stderr, boot.Channel(os.Stdin)) // init starts it again
		os.Exit(1)
	}
	os.Exit(guest.Main(os.Args[1:], version, os.Stdin, os.Stdout, os.Stderr))
}
