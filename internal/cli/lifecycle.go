package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
)

func (a *app) startCommand() *cobra.Command {
	return a.simple("start", "Start a stopped box", `start starts a stopped box and returns when its supervisor answers. A running
box stays as it is.`, (*box.Manager).Start)
}

func (a *app) stopCommand() *cobra.Command {
	return a.simple("stop", "Stop a box without deleting its state", `stop ends the services of a box in order and stops its machine. Its state stays.
A stopped box stays as it is.`, (*box.Manager).Stop)
}

// simple is a verb with a box's name and no answer.
func (a *app) simple(verb, short, long string, run func(*box.Manager, context.Context, string) error) *cobra.Command {
	return &cobra.Command{
		Use: verb + " NAME", Short: short, Long: long, Example: "  box " + verb + " alpha",
		Args: exactArgs("NAME"), ValidArgsFunction: a.completeName,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			return run(m, cmd.Context(), args[0])
		},
	}
}

func (a *app) repairCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "repair NAME",
		Short: "Refresh the tools and settings of a box, rewire it and check it",
		Long: `repair pauses Executor, refreshes packages, tools and our own files in the box,
resumes Executor as it was before, registers its MCP endpoint again and runs the
doctor. It may install newer releases. A deliberate pause (hb down) stays.`,
		Example: "  box repair alpha",
		Args:    exactArgs("NAME"), ValidArgsFunction: a.completeName,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			report, err := m.Repair(cmd.Context(), args[0])
			a.term.done()
			if err != nil {
				a.printFaults(m, args[0], report)
			}
			return err
		},
	}
}

func (a *app) rmCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "rm NAME",
		Short: "Remove a box and its state",
		Long: `rm removes a box with all its state. It tells the newest backup and its age and
asks for the exact name. --force is for intentional removal by scripts.

The record of the box goes only after its machine was verified absent; a machine
of the same name that is not ours is left alone.`,
		Example: "  box rm alpha\n  box rm alpha --force",
		Args:    exactArgs("NAME"), ValidArgsFunction: a.completeName,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, h, err := a.manager()
			if err != nil {
				return err
			}
			name := args[0]
			rec, err := m.Lookup(name)
			if err != nil {
				return err
			}
			if !force {
				if err := a.confirm(cmd.Context(), m, h, name); err != nil {
					return err
				}
			}
			return m.Remove(cmd.Context(), rec)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "do not ask")
	return cmd
}

func (a *app) confirm(ctx context.Context, m *box.Manager, h box.Home, name string) error {
	backup, err := describeBackup(m, h, name)
	if err != nil {
		return err
	}
	a.term.say(backup)
	answer, err := a.term.ask(ctx, "Removing "+name+" deletes all its state. Type its name to confirm: ")
	if errors.Is(err, errNotAsked) {
		return hinted{errors.Join(errors.New("rm "+name+": nothing was removed"), err), "box rm " + name + " --force"}
	}
	if err != nil {
		return fmt.Errorf("rm %s: nothing was removed: %w", name, err)
	}
	if answer != name {
		return errors.New("rm " + name + ": the name typed is another, nothing was removed")
	}
	return nil
}
