package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
)

func (a *app) newCommand() *cobra.Command {
	var o box.NewOptions
	cmd := &cobra.Command{
		Use:   "new NAME",
		Short: "Create a box, install its tools and check its health",
		Long: `new creates a box, boots it, installs the tools, starts Executor, registers its
MCP endpoint with the tools and runs the doctor.

A box that is like an earlier one starts from a template, see box cache: the
tools are there already. --fresh starts from the base and leaves templates alone.

When it fails, the machine that this very command made is removed, and nothing
else; a transcript is kept. --keep-on-failure keeps the machine too.`,
		Example:           "  box new alpha",
		Args:              exactArgs("NAME"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			name := args[0]
			report, err := m.New(cmd.Context(), name, o)
			a.term.done()
			if err != nil {
				a.printFaults(m, name, report)
				return err
			}
			rec, err := m.Lookup(name)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.Stdout, `%[1]s is ready: %[2]s

  box enter %[1]s    enter it; these logins work without a browser in the box:
                       claude                      then follow the address it shows
                       codex login --device-auth
                       hermes setup --portal
  box open %[1]s     open Executor's web page
  box save %[1]s     save its state, encrypted
  box doctor %[1]s   check its health
  box rm %[1]s       remove it
`, name, rec.Isolation)
			return err
		},
	}
	cmd.Flags().BoolVar(&o.Fresh, "fresh", false, "start from the base, not from a template")
	cmd.Flags().BoolVar(&o.KeepOnFailure, "keep-on-failure", false, "keep the machine of a failed new, to look at it")
	return cmd
}
