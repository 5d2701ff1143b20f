// Command box keeps isolated machines in which AI coding agents live.
package main

import (
	"os"

	"hermes-box-lite/internal/cli"
)

// version is set by the build.
var version = "dev"

func main() {
	os.Exit(cli.Main(cli.Program{
		Version: version, Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
	}))
}
