// Package cli is the command line of box: one file per verb, all terminal
// rules in term.go, the construction of drivers in drivers.go. It decides
// exit codes and hints, and leaves everything else to package box.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/backup"
	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/config"
	"hermes-box-lite/internal/hbbin"
	"hermes-box-lite/internal/rootfs"
	"hermes-box-lite/internal/vm"
)

// Exit codes, documented in `box help exit-codes`.
const (
	exitOK        = 0
	exitFailed    = 1
	exitUsage     = 2
	exitUnhealthy = 3
	exitNotFound  = 4
	exitLocked    = 5
	exitAuth      = 6
	exitUnsafe    = 7
	exitCleanup   = 8
	exitTransport = 255 // of `enter NAME -- CMD` when box itself failed
	exitSignal    = 128 // plus the signal's number
)

// Program is what main hands over.
type Program struct {
	Version string
	Args    []string // without the program's name
	Stdin   *os.File
	Stdout  io.Writer
	Stderr  io.Writer
	// Drivers replaces the drivers of this program, by name; for tests.
	Drivers map[string]func(config.Config) vm.Driver
	// HB replaces the embedded hb binary; for tests.
	HB func() ([]byte, error)
	// Deadlines replaces those of package box where it is not zero; for tests.
	Deadlines box.Deadlines
	// Step interrupts the work of package box; for tests.
	Step func(ctx context.Context, point string, work func() error) error
}

// signalError is the cause of a context that a signal ended.
type signalError struct{ sig syscall.Signal }

func (e signalError) Error() string { return "ended by " + e.sig.String() }

// Main runs one command and returns its exit code. The first HUP, INT or TERM
// cancels the command, which cleans up; the second ends the process at once.
func Main(p Program) int {
	secret := takePassphrase()
	if p.HB == nil {
		p.HB = sync.OnceValues(func() ([]byte, error) { return hbbin.Binary(runtime.GOARCH) })
	}
	a := &app{Program: p, secret: secret, term: newTerminal(p.Stdin, p.Stdout, p.Stderr)}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	// With it a write that nobody reads (`| head`, a tee that Ctrl-C ended
	// first) fails; without, it would end us in the midst of the work.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	go func() {
		first, ok := (<-signals).(syscall.Signal)
		if !ok {
			return
		}
		cancel(signalError{first})
		second := (<-signals).(syscall.Signal)
		a.term.restore()
		os.Exit(exitSignal + int(second))
	}()

	root := a.rootCommand()
	root.SetArgs(p.Args)
	root.SetIn(p.Stdin)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	err := root.ExecuteContext(ctx)
	a.term.done()
	return a.conclude(ctx, err)
}

// app is one run of the program.
type app struct {
	Program
	term    *terminal
	secret  passphraseSource
	verbose bool
	json    bool
}

// usageError is a fault of the command line itself.
type usageError struct {
	err     error
	command string
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }
func (e *usageError) Hint() string  { return e.command + " --help" }

// exitError ends with a code and no message: it was said already.
type exitError struct{ code int }

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

// hinted attaches a command that helps.
type hinted struct {
	error
	hint string
}

func (e hinted) Unwrap() error { return e.error }
func (e hinted) Hint() string  { return e.hint }

// conclude prints the error with its hints and chooses the exit code.
func (a *app) conclude(ctx context.Context, err error) int {
	var exit exitError
	if err == nil {
		return exitOK
	}
	if errors.As(err, &exit) {
		return exit.code
	}
	if hungUp(err) {
		return exitSignal + int(syscall.SIGPIPE) // as a filter ends, without a word
	}
	a.term.fail(err, hintsOf(err))
	var sig signalError
	var cleanup *box.CleanupError
	var usage *usageError
	var name *box.NameError
	var locked *box.LockedError
	var setting *config.Error
	var elsewhere *box.ElsewhereError
	switch {
	case errors.As(err, &cleanup):
		return exitCleanup
	case errors.As(context.Cause(ctx), &sig):
		return exitSignal + int(sig.sig)
	case errors.As(err, &usage), errors.As(err, &name), errors.As(err, &setting):
		return exitUsage
	case errors.Is(err, backup.ErrAuth):
		return exitAuth
	case errors.Is(err, archive.ErrUnsafe):
		return exitUnsafe
	case errors.Is(err, box.ErrUnhealthy), errors.Is(err, box.ErrNotRunning):
		return exitUnhealthy
	case errors.As(err, &elsewhere):
		return exitCleanup
	case errors.Is(err, box.ErrNotFound), errors.Is(err, vm.ErrNotFound) && !making(err):
		return exitNotFound
	case errors.As(err, &locked):
		return exitLocked
	case errors.Is(err, vm.ErrNotOwner):
		return exitCleanup
	}
	return exitFailed
}

// hungUp tells an output of ours that nobody reads any more.
func hungUp(err error) bool {
	var path *fs.PathError
	return errors.As(err, &path) && errors.Is(path.Err, syscall.EPIPE) &&
		(path.Path == os.Stdout.Name() || path.Path == os.Stderr.Name())
}

// making reports whether the command that failed was to make a box: a machine
// that it then misses is no wrong name.
func making(err error) bool {
	var step *box.StepError
	return errors.As(err, &step) && (step.Verb == "new" || step.Verb == "load" || step.Verb == "fork")
}

// hintsOf collects the commands that help with an error.
func hintsOf(err error) []string {
	var hints []string
	var cleanup *box.CleanupError
	var elsewhere *box.ElsewhereError // no command of ours helps
	if errors.As(err, &cleanup) && !errors.As(err, &elsewhere) {
		hints = append(hints, "box ls --all", "box rm "+cleanup.Name)
	}
	var step *box.StepError
	if errors.As(err, &step) {
		if errors.Is(err, box.ErrUnhealthy) {
			switch step.Verb {
			case "repair":
				hints = append(hints, "box doctor "+step.Name)
			case "load":
				hints = append(hints, "box repair "+step.Name)
			}
		}
		if step.Transcript != "" {
			hints = append(hints, "less "+box.ShellWord(step.Transcript))
		}
	}
	if errors.Is(err, box.ErrNotFound) {
		hints = append(hints, "box ls")
	}
	if errors.Is(err, box.ErrExists) {
		hints = append(hints, "box ls --all")
	}
	for _, e := range leaves(err) {
		h, ok := e.(interface{ Hint() string })
		if !ok || h.Hint() == "" {
			continue
		}
		if making(err) && !errors.Is(err, box.ErrUnhealthy) && h.Hint() == "box repair "+step.Name {
			continue // the box that was not to be worked with is gone again
		}
		hints = append(hints, h.Hint())
	}
	return hints
}

// leaves returns err and everything that it wraps.
func leaves(err error) []error {
	all := []error{err}
	switch e := err.(type) { //nolint:errorlint // it walks the whole tree itself
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			all = append(all, leaves(inner)...)
		}
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			all = append(all, leaves(inner)...)
		}
	}
	return all
}

// home finds the home of everything: $BOX_HOME, else the program's directory
// when it holds box.env (a checkout), else the XDG directories.
func home() (box.Home, error) {
	if dir := os.Getenv("BOX_HOME"); dir != "" {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return box.Home{}, fmt.Errorf("BOX_HOME: %w", err)
		}
		return box.HomeAt(abs), nil
	}
	if exe, err := os.Executable(); err == nil {
		if exe, err = filepath.EvalSymlinks(exe); err == nil {
			if _, err := os.Stat(filepath.Join(filepath.Dir(exe), "box.env")); err == nil {
				return box.HomeAt(filepath.Dir(exe)), nil
			}
		}
	}
	user, err := os.UserHomeDir()
	if err != nil {
		return box.Home{}, fmt.Errorf("find a home for boxes (set BOX_HOME): %w", err)
	}
	xdg := func(name, fallback string) string {
		if dir := os.Getenv(name); filepath.IsAbs(dir) {
			return dir
		}
		return filepath.Join(user, fallback)
	}
	return box.HomeSplit(
		filepath.Join(xdg("XDG_DATA_HOME", ".local/share"), "hermes-box"),
		filepath.Join(xdg("XDG_CONFIG_HOME", ".config"), "hermes-box", "box.env")), nil
}

// manager reads box.env and builds what the verbs work with.
func (a *app) manager() (*box.Manager, box.Home, error) {
	h, err := home()
	if err != nil {
		return nil, box.Home{}, err
	}
	cfg, err := config.Load(h.ConfigFile(), config.ThisMachine())
	if err != nil {
		return nil, box.Home{}, err
	}
	if a.Drivers == nil {
		a.Drivers = builtinDrivers(h, a.HB, a.term.Note)
	}
	store := rootfs.NewStore(filepath.Join(h.Cache(), "bases"))
	var output io.Writer
	if a.verbose {
		output = a.term
	}
	return box.NewManager(box.Options{
		Home: h, Config: cfg, Version: a.Version, HB: a.HB, Report: a.term, Output: output, Now: time.Now, Deadlines: a.Deadlines, Step: a.Step, Bases: store,
		Driver: func(ctx context.Context, name string) (vm.Driver, error) { return a.driver(ctx, cfg, name) },
		Base: func(ctx context.Context, image string, note func(string)) (vm.Base, error) {
			return store.Prepare(ctx, image, filepath.Dir(h.ConfigFile()), note)
		},
	}), h, nil
}

// exactArgs refuses missing and surplus arguments by name.
func exactArgs(names ...string) cobra.PositionalArgs { return rangeArgs(len(names), names...) }

// rangeArgs is exactArgs where only the first needed ones must be there. An
// argument called NAME must be one that a box can have.
func rangeArgs(needed int, names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < needed {
			return fmt.Errorf("%s: %s is missing", cmd.CommandPath(), strings.Join(names[len(args):needed], " and "))
		}
		if len(args) > len(names) {
			return fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), args[len(names)])
		}
		for i, arg := range args {
			if names[i] == "NAME" {
				if err := box.CheckName(arg); err != nil {
					return err
				}
			} else if arg == "" {
				return fmt.Errorf("%s: %s is empty", cmd.CommandPath(), names[i])
			}
		}
		return nil
	}
}

// completeName offers the names of boxes.
func (a *app) completeName(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	m, _, err := a.manager()
	if err != nil || len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names, _ := m.Names()
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeNameThenFile is completeName, and files after the name.
func (a *app) completeNameThenFile(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 1 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return a.completeName(cmd, args, toComplete)
}
