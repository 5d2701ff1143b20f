package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/wire"
)

func (a *app) doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor NAME",
		Short: "Check a box from inside and outside",
		Long: `doctor checks the tools, the state, Executor's MCP endpoint inside the box and,
when it is forwarded, on this host. It reads only: it starts nothing and repairs
nothing. A stopped box is exit code 3.`,
		Example: "  box doctor alpha\n  box doctor alpha --json",
		Args:    exactArgs("NAME"), ValidArgsFunction: a.completeName,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			name := args[0]
			report, err := m.Doctor(cmd.Context(), name)
			if errors.Is(err, box.ErrNotRunning) {
				return hinted{err, "box start " + name}
			}
			if err != nil && !errors.Is(err, box.ErrUnhealthy) {
				return err
			}
			if a.json {
				enc := json.NewEncoder(a.Stdout)
				enc.SetIndent("", "  ")
				if encErr := enc.Encode(report); encErr != nil {
					return encErr
				}
			} else {
				printReport(a.Stdout, report.Checks)
			}
			if err != nil {
				return hinted{fmt.Errorf("doctor %s: %w", name, err), "box repair " + name}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&a.json, "json", false, "print JSON of a fixed schema")
	return cmd
}

func printReport(w io.Writer, checks []wire.Check) {
	for _, c := range checks {
		_, _ = fmt.Fprintf(w, "%-4s  %-18s  %s\n", c.Status, c.ID, c.Summary)
		if c.Status == wire.Fail || c.Status == wire.Info || c.Status == wire.Skip {
			if c.Evidence != "" {
				_, _ = fmt.Fprintf(w, "      %-18s  seen: %s\n", "", c.Evidence)
			}
			if c.Fix != "" {
				_, _ = fmt.Fprintf(w, "      %-18s  fix: %s\n", "", c.Fix)
			}
		}
	}
}

// printFaults shows what a failed new or repair found, on stderr.
func (a *app) printFaults(m *box.Manager, name string, report wire.Report) {
	_, err := m.Lookup(name)
	var faults []wire.Check
	for _, c := range report.Checks {
		if c.Status == wire.Fail {
			if errors.Is(err, box.ErrNotFound) {
				c.Fix = "" // it would be a command for a box that is no more
			}
			faults = append(faults, c)
		}
	}
	printReport(a.Stderr, faults)
}
