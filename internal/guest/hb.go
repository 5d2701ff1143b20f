package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// Exit codes of hb.
const (
	exitOK        = 0
	exitFailed    = 1
	exitUsage     = 2
	exitUnhealthy = 3
)

// exitError carries an exit code; with a nil err everything was said already.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// app is what every verb gets.
type app struct {
	version string
	layout  layout.Layout
	stdin   io.Reader
	stdout  io.Writer
	stderr  io.Writer
}

// Main runs one command line of hb in the box that the environment names and
// returns its exit code.
func Main(args []string, version string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// A second signal ends at once.
	context.AfterFunc(ctx, stop)
	a := &app{version, layout.FromEnv(), stdin, stdout, stderr}
	root := a.root()
	root.SetArgs(args)
	return a.report(root.ExecuteContext(ctx))
}

// report prints an error in hb's way and returns the exit code.
func (a *app) report(err error) int {
	if err == nil {
		return exitOK
	}
	code := exitFailed
	var exit *exitError
	if errors.As(err, &exit) {
		code, err = exit.code, exit.err
	}
	if err != nil {
		for line := range strings.Lines(err.Error()) {
			_, _ = fmt.Fprintf(a.stderr, "hb: %s\n", wire.Printable(strings.TrimRight(line, "\n")))
		}
	}
	return code
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "hb",
		Short: "Look after this box",
		Long: `hb looks after this box: it keeps Executor running, checks and repairs what is in here.

Exit codes: 0 ok, 1 failed, 2 usage, 3 unhealthy (doctor).`,
		Example:       "  hb status\n  hb doctor\n  hb logs executor -f",
		Version:       a.version,
		Args:          usageArgs(cobra.NoArgs),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetVersionTemplate("hb {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &exitError{exitUsage, err} })
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(
		a.statusCommand(), a.versionsCommand(), a.doctorCommand(), a.logsCommand(),
		a.downCommand(), a.upCommand(), a.wireCommand(), a.operatorTokenCommand(),
	)
	for _, plumbing := range []*cobra.Command{
		a.superviseCommand(), a.helloCommand(), a.readyCommand(), a.clockCommand(), a.provisionCommand(), a.attachCommand(),
		a.runCommand(), a.ticketCommand(), a.tokenCommand(), a.shutdownCommand(), a.syncCommand(), a.freezeCommand(), a.loginsCommand(),
		a.checkSQLiteCommand(), a.checkHomeCommand(), a.wireApplyCommand(),
		a.packCommand(), a.unpackCommand(), a.awaitStateCommand(), a.snapshotCommand(),
	} {
		plumbing.Hidden = true
		root.AddCommand(plumbing)
	}
	return root
}

// usageArgs makes wrong arguments exit with the code of usage errors.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return &exitError{exitUsage, fmt.Errorf("%w (see: %s --help)", err, cmd.CommandPath())}
		}
		return nil
	}
}

// verb makes a command; the long help repeats the short one where there is no
// more to say.
func verb(use, short, long string, args cobra.PositionalArgs, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
	if long == "" {
		long = short + "."
	}
	name, _, _ := strings.Cut(use, " ")
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: "  hb " + name,
		Args: usageArgs(args), RunE: run, DisableFlagsInUseLine: true,
	}
}

// asRoot runs the verb as root: a person in the box is the agent, who may use
// sudo.
func (a *app) asRoot(run func(ctx context.Context) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		if err := a.mustBeInBox(); err != nil {
			return err
		}
		if !a.layout.Real() || os.Geteuid() == 0 {
			return run(cmd.Context())
		}
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("become root: %w", err)
		}
		sudo, err := exec.LookPath("sudo")
		if err != nil {
			return errors.New("this needs root, and sudo is not installed")
		}
		argv := append([]string{"sudo", "-n", self}, os.Args[1:]...)
		return fmt.Errorf("become root: %w", syscall.Exec(sudo, argv, os.Environ()))
	}
}

// mustBeRoot refuses a plumbing verb to anybody else; the host runs them as
// root.
func (a *app) mustBeRoot(run func(ctx context.Context) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		if a.layout.Real() && os.Geteuid() != 0 {
			return errors.New("this verb is the host's and needs root")
		}
		if err := a.mustBeInBox(); err != nil {
			return err
		}
		return run(cmd.Context())
	}
}

// mustBeInBox keeps hb from changing a machine that is no box: what it does to
// packages, users and files is meant for a system that can be thrown away.
func (a *app) mustBeInBox() error {
	if !a.layout.Real() {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if self != wire.HBPath {
		return fmt.Errorf("this is %s and not %s: hb works inside a box only", self, wire.HBPath)
	}
	return nil
}

func (a *app) printf(format string, args ...any) error {
	_, err := fmt.Fprintf(a.stdout, format, args...)
	return err
}
