package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

func (a *app) enterCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "enter NAME [-- CMD...]",
		Short: "Enter a box, or run one command in it",
		Long: `enter starts the box if it is stopped and attaches the tmux session "main" as
agent in ~/workspace. Detach with the tmux prefix and d; everything in it goes on.

With CMD it runs that instead, outside tmux, in the agent's environment: its
input and output pass unchanged, it has a terminal when this command has one,
and its exit code is the answer. 255 means that box itself failed.`,
		Example: "  box enter alpha\n  box enter alpha -- git status\n  tar c src | box enter alpha -- tar x",
		Args: func(cmd *cobra.Command, args []string) error {
			dash := cmd.ArgsLenAtDash()
			switch {
			case dash < 0:
				if len(args) > 1 && box.CheckName(args[0]) == nil {
					return fmt.Errorf("enter: a command to run stands after --: box enter %s -- %s", args[0], args[1])
				}
				return exactArgs("NAME")(cmd, args)
			case dash != 1:
				return exactArgs("NAME")(cmd, args[:dash])
			case len(args) == 1:
				return errors.New("enter: no command after --")
			}
			return box.CheckName(args[0])
		},
		ValidArgsFunction: a.completeName,
		RunE: func(cmd *cobra.Command, args []string) error {
			code, err := a.enter(cmd.Context(), args[0], args[1:])
			var sig signalError
			switch {
			case err == nil && code == 0:
				return nil
			case err == nil:
				return exitError{code}
			case hungUp(err):
				return err // as everywhere
			case len(args) > 1 && !errors.As(context.Cause(cmd.Context()), &sig):
				a.term.done()
				a.term.fail(err, hintsOf(err))
				return exitError{exitTransport}
			}
			return err
		},
	}
}

func (a *app) enter(ctx context.Context, name string, command []string) (int, error) {
	m, _, err := a.manager()
	if err != nil {
		return 0, err
	}
	if _, err := m.Lookup(name); err != nil {
		return 0, err
	}
	if len(command) == 0 && !a.term.interactive() {
		return 0, hinted{fmt.Errorf("enter %s: %w", name, errNotAsked), "box enter " + name + " -- true"}
	}
	rec, err := m.Running(ctx, name)
	a.term.done()
	if err != nil {
		return 0, err
	}
	c := vm.Command{Argv: []string{wire.HBPath, "attach"}, Stdin: a.Stdin, Stdout: a.Stdout, Stderr: a.Stderr}
	if len(command) > 0 {
		c.Argv = append([]string{wire.HBPath, "run", "--"}, command...)
	}
	if a.term.interactive() {
		tty, restore, err := a.term.raw()
		if err != nil {
			return 0, err
		}
		defer restore()
		c.TTY = tty
	}
	code, err := m.Exec(ctx, rec, c)
	if err != nil {
		return 0, fmt.Errorf("enter %s: %w", name, err)
	}
	return code, nil
}
