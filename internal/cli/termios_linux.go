package cli

import "golang.org/x/sys/unix"

// The calls that read and set how a terminal treats what is typed.
const (
	getTermios = unix.TCGETS
	setTermios = unix.TCSETS
)
