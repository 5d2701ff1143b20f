package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
)

func (a *app) loadCommand() *cobra.Command {
	var o box.LoadOptions
	cmd := &cobra.Command{
		Use:   "load FILE NAME",
		Short: "Make a new box with the state of an archive",
		Long: `load reads and verifies the whole archive, then makes a new box, installs
today's tools, restores the state, registers Executor's MCP endpoint with a
token of its own and runs the doctor.

A wrong passphrase or a damaged or unsafe archive ends it before anything is
made. Until the state is in, a failure removes the machine that this very
command made; from then on the box stays, and box repair NAME does what is left.
An existing box is never touched.

--pinned installs the versions that the archive was made with. --fresh-logins
leaves out the files that log Claude Code, Codex and Hermes in: their refresh
tokens work once, so two live copies of a state burn each other.`,
		Example: "  box load backups/alpha-20260625-120000.tar.gz.gpg beta",
		Args:    exactArgs("FILE", "NAME"), ValidArgsFunction: completeFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			if err := readable(args[0]); err != nil {
				return err
			}
			if rec, err := m.Lookup(args[1]); err == nil && rec.Phase == box.Ready {
				return fmt.Errorf("load %s: box %s %w", args[1], args[1], box.ErrExists)
			}
			if o.Passphrase, err = a.passphrase(cmd.Context(), false); err != nil {
				return fmt.Errorf("load %s: %w", args[0], err)
			}
			report, err := m.Load(cmd.Context(), args[0], args[1], o)
			a.term.done()
			if err != nil {
				a.printFaults(m, args[1], report)
				return err
			}
			_, err = fmt.Fprintf(a.Stdout, `%[1]s has the state of the archive.

  box enter %[1]s    enter it
  box open %[1]s     open Executor's web page
`, args[1])
			return err
		},
	}
	cmd.Flags().BoolVar(&o.Pinned, "pinned", false, "install the versions that the archive names, not the latest")
	cmd.Flags().BoolVar(&o.FreshLogins, "fresh-logins", false, "leave out the files that log the tools in")
	cmd.Flags().BoolVar(&o.KeepOnFailure, "keep-on-failure", false, "keep the machine of a failed load, to look at it")
	return cmd
}
