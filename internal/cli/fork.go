package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
)

func (a *app) forkCommand() *cobra.Command {
	var o box.ForkOptions
	cmd := &cobra.Command{
		Use:   "fork SRC DST",
		Short: "Make a new box with the state of another one",
		Long: `fork makes the box DST with the state of SRC and an identity of its own: another
name, another port, other tokens, another machine id. SRC may be running or
stopped and stays as it is.

Virtual machines of QEMU share what both have in common and copy nothing; with
other drivers, and with --fresh-logins, the state is streamed from box to box.
No archive is made and no passphrase is needed.

Logins travel with the state. Refresh tokens work once: whichever box uses one
second must log in again. --fresh-logins leaves the logins out.

When it fails, the machine that this very command made is removed.`,
		Example:           "  box fork alpha beta",
		Args:              exactArgs("SRC", "DST"),
		ValidArgsFunction: a.completeName,
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, name := range args {
				if err := box.CheckName(name); err != nil {
					return &usageError{err, cmd.CommandPath()}
				}
			}
			if args[0] == args[1] {
				return &usageError{fmt.Errorf("fork: %s cannot become itself", args[0]), cmd.CommandPath()}
			}
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			report, err := m.Fork(cmd.Context(), args[0], args[1], o)
			a.term.done()
			if err != nil {
				a.printFaults(m, args[1], report)
				return err
			}
			_, err = fmt.Fprintf(a.Stdout, `%[2]s has the state of %[1]s.

  box enter %[2]s    enter it
  box open %[2]s     open Executor's web page
`, args[0], args[1])
			return err
		},
	}
	cmd.Flags().BoolVar(&o.FreshLogins, "fresh-logins", false, "leave out the files that log the tools in")
	cmd.Flags().BoolVar(&o.KeepOnFailure, "keep-on-failure", false, "keep the machine of a failed fork, to look at it")
	return cmd
}
