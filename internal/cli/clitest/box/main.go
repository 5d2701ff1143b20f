//go:build linux

// Command box is the command line of the tests: the real one, with the fake
// driver for everything. All that it says is kept, so that the end of every
// test can look for secrets and for hints that do not work.
//
// It is a program of its own, and not the test binary under another name,
// because it is started by the thousand: that one takes twice as long to start.
package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/cli"
	"hermes-box-lite/internal/cli/clitest"
	"hermes-box-lite/internal/config"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/fake"
)

func main() {
	built := os.Getenv(clitest.BuiltVar)
	// One for all, because it counts how often a point is reached.
	engine := fake.New(os.Getenv(clitest.EngineVar), filepath.Join(built, "tools"))
	build := func(config.Config) vm.Driver { return engine }
	p := cli.Program{
		Version: clitest.Version, Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Drivers: map[string]func(config.Config) vm.Driver{"auto": build, "fake": build},
		HB:      func() ([]byte, error) { return mapped(filepath.Join(built, "hb")) },
		Deadlines: box.Deadlines{
			List: duration(clitest.ListLimitVar), Cleanup: duration(clitest.CleanupLimitVar),
			Ask: duration(clitest.EngineLimitVar), Engine: duration(clitest.EngineLimitVar), Guest: duration(clitest.GuestLimitVar),
		},
		Step: engine.Step,
	}
	if info, err := os.Stderr.Stat(); err == nil && info.Mode()&os.ModeCharDevice == 0 {
		said, err := os.OpenFile(os.Getenv(clitest.SaidVar), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			panic(err)
		}
		p.Stderr = io.MultiWriter(os.Stderr, said)
		if !slices.Contains(p.Args, "--") { // the output of CMD is CMD's
			p.Stdout = io.MultiWriter(os.Stdout, said)
		}
	}
	os.Exit(cli.Main(p))
}

// mapped is a file's content, for which nothing is read before it is looked at.
func mapped(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_POPULATE)
}

func duration(name string) time.Duration {
	d, _ := time.ParseDuration(os.Getenv(name)) // absent: the built-in one
	return d
}
