package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/guest/boot"
	"hermes-box-lite/internal/guest/identity"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/provision"
	"hermes-box-lite/internal/guest/secrets"
	"hermes-box-lite/internal/guest/supervise"
	"hermes-box-lite/internal/guest/wiring"
	"hermes-box-lite/internal/mcp"
	"hermes-box-lite/internal/wire"
)

// How long the supervisor may take. A start takes 3 s warm and 9 s cold
// (measured), much more under emulation.
const (
	upWait     = 10 * time.Minute
	downWait   = 15 * time.Second
	statusWait = 3 * time.Second
)

func (a *app) statusCommand() *cobra.Command {
	return verb("status", "Show what the supervisor and Executor are doing", "", cobra.NoArgs, a.asRoot(func(ctx context.Context) error {
		resp, err := supervise.Ask(ctx, a.layout, supervise.OpStatus, statusWait)
		if err != nil {
			paused, pauseErr := secrets.Paused(a.layout)
			if pauseErr == nil && paused {
				_ = a.printf("executor    paused (hb up resumes it)\n")
			}
			return err
		}
		s := resp.Status
		text := string(s.Phase)
		switch s.Phase {
		case supervise.PhasePaused:
			text = "paused (hb up resumes it)"
		case supervise.PhaseRunning:
			text = fmt.Sprintf("running, pid %d", s.PID)
		}
		out := "supervisor  answers\nexecutor    " + text + "\n"
		if s.Problem != "" {
			out += "problem     " + wire.Printable(s.Problem) + "\n"
		}
		if s.Restarts > 0 {
			out += fmt.Sprintf("restarts    %d\n", s.Restarts)
		}
		door := supervise.PortsOf(a.layout).DoorURL()
		if s.DoorError != "" {
			door = "not listening: " + wire.Printable(s.DoorError)
		}
		out += "door        " + door + "\n"
		if s.Box != "" {
			out = "box         " + wire.Printable(s.Box) + "\n" + out
		}
		return a.printf("%s", out)
	}))
}

func (a *app) downCommand() *cobra.Command {
	return verb("down", "Pause Executor until hb up",
		"Pause Executor. The pause is durable: supervisor, repair and reboot respect it until hb up.",
		cobra.NoArgs, a.asRoot(func(ctx context.Context) error {
			_, err := supervise.Ask(ctx, a.layout, supervise.OpDown, downWait)
			if errors.Is(err, supervise.ErrNoSupervisor) {
				// The pause must still be there when a supervisor comes.
				if err := secrets.SetPaused(a.layout, true); err != nil {
					return err
				}
				return errors.New("the pause is recorded, but the supervisor does not answer, so Executor may still run")
			}
			if err != nil {
				return err
			}
			return a.printf("Executor is paused\n")
		}))
}

func (a *app) upCommand() *cobra.Command {
	return verb("up", "End the pause and wait until Executor is healthy", "", cobra.NoArgs, a.asRoot(func(ctx context.Context) error {
		resp, err := supervise.Ask(ctx, a.layout, supervise.OpUp, upWait)
		if errors.Is(err, supervise.ErrNoSupervisor) {
			if err := secrets.SetPaused(a.layout, false); err != nil {
				return err
			}
			return errors.New("the pause is ended, but the supervisor does not answer, so nothing starts Executor")
		}
		if err != nil {
			return err
		}
		if resp.Note != "" {
			return a.printf("%s\n", wire.Printable(resp.Note))
		}
		return a.printf("Executor is running\n")
	}))
}

func (a *app) wireCommand() *cobra.Command {
	return verb("wire-mcp", "Register Executor with Claude Code, Codex and Hermes",
		"Check that Executor's MCP endpoint is healthy, then write it into the configuration of Claude Code, Codex and Hermes.\nStale and legacy entries of Executor are replaced; everything else stays as it is.",
		cobra.NoArgs, a.asRoot(func(ctx context.Context) error {
			ep, err := a.endpoint()
			if err != nil {
				return err
			}
			// Readiness first, edits last: a configuration that works is not
			// given up for an endpoint that does not.
			res, err := mcp.Probe(ctx, mcp.Target{URL: ep.URL, Token: ep.Token})
			if err != nil {
				return err
			}
			if !res.Healthy() {
				return fmt.Errorf("nothing was changed, because Executor is not healthy: %s\nfirst: hb up", res.Summary)
			}
			changed, err := wiring.Apply(ctx, a.layout, ep)
			for _, tool := range changed {
				if err := a.printf("%s: now uses %s\n", wire.Printable(tool), ep.URL); err != nil {
					return err
				}
			}
			if err == nil && len(changed) == 0 {
				err = a.printf("everything is wired already\n")
			}
			return err
		}))
}

// wireApplyCommand is the part of wire-mcp that runs as the agent.
func (a *app) wireApplyCommand() *cobra.Command {
	return verb(wiring.ApplyVerb, "Edit the tools' configuration as the agent", "", cobra.NoArgs, func(*cobra.Command, []string) error {
		return wiring.ApplyAsAgent(a.stdin, a.stdout, a.layout)
	})
}

// endpoint is what the tools are wired to.
func (a *app) endpoint() (wiring.Endpoint, error) {
	tokens, err := secrets.Ensure(a.layout)
	if err != nil {
		return wiring.Endpoint{}, err
	}
	return wiring.Endpoint{URL: supervise.PortsOf(a.layout).MCPURL(), Token: tokens.Agent}, nil
}

func (a *app) operatorTokenCommand() *cobra.Command {
	return verb("executor-token", "Print the token that opens all of Executor",
		"Print the operator token. It opens everything behind the door; use it as a bearer token, for instance through ssh -L on a headless host.",
		cobra.NoArgs, a.asRoot(func(context.Context) error {
			tokens, err := secrets.Ensure(a.layout)
			if err != nil {
				return err
			}
			return a.printf("%s\n", tokens.Operator)
		}))
}

func (a *app) tokenCommand() *cobra.Command {
	return verb("token agent", "Print the token that opens /mcp", "", cobra.MatchAll(cobra.ExactArgs(1), onlyWord("agent")), a.mustBeRoot(func(context.Context) error {
		tokens, err := secrets.Ensure(a.layout)
		if err != nil {
			return err
		}
		return a.printf("%s\n", tokens.Agent)
	}))
}

func onlyWord(word string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if args[0] != word {
			return fmt.Errorf("unknown argument %q, want %s", args[0], word)
		}
		return nil
	}
}

func (a *app) ticketCommand() *cobra.Command {
	return verb("ticket", "Print a ticket that opens one browser session within 60 seconds", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		resp, err := supervise.Ask(ctx, a.layout, supervise.OpTicket, statusWait)
		if err != nil {
			return err
		}
		return a.printf("%s\n", resp.Ticket)
	}))
}

func (a *app) shutdownCommand() *cobra.Command {
	var undo bool
	cmd := verb("shutdown", "Stop Executor before the machine stops", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		if undo {
			_, err := supervise.Ask(ctx, a.layout, supervise.OpReload, statusWait)
			return err
		}
		_, err := supervise.Ask(ctx, a.layout, supervise.OpShutdown, downWait)
		syncDisks()
		if errors.Is(err, supervise.ErrNoSupervisor) {
			return nil // then it keeps nothing running
		}
		return err
	}))
	cmd.Flags().BoolVar(&undo, "undo", false, "the machine does not stop after all")
	return cmd
}

// syncCommand writes out what the kernel keeps in memory, before the host
// copies a disk.
func (a *app) syncCommand() *cobra.Command {
	return verb("sync", "Write everything to the disks", "", cobra.NoArgs, a.mustBeRoot(func(context.Context) error {
		if a.layout.Real() { // a host's disks are not this box's
			syncDisks()
		}
		return nil
	}))
}

// The supervisor of a machine that was just started is up within this time:
// whoever finds none would only ask again, which is dear.
const (
	supervisorPatience = 2 * time.Second
	supervisorPoll     = 20 * time.Millisecond
)

// supervised reports whether the supervisor answers, now or in a moment.
func (a *app) supervised(ctx context.Context) bool {
	for deadline := time.Now().Add(supervisorPatience); ; {
		_, err := supervise.Ask(ctx, a.layout, supervise.OpStatus, statusWait)
		if err == nil || !time.Now().Before(deadline) {
			return err == nil
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(supervisorPoll):
		}
	}
}

func (a *app) helloCommand() *cobra.Command {
	return verb("hello", "Answer the version handshake", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		supervised := a.supervised(ctx)
		_, settingsErr := a.layout.ReadSettings()
		paused, err := secrets.Paused(a.layout)
		if err != nil {
			return err
		}
		awaits, err := secrets.AwaitsState(a.layout)
		if err != nil {
			return err
		}
		line, err := json.Marshal(wire.Hello{
			Protocol: wire.Protocol, Version: a.version, Arch: runtime.GOARCH,
			Supervised: supervised, Provisioned: settingsErr == nil, Paused: paused, Awaits: awaits,
			UnixTime: time.Now().Unix(),
		})
		if err != nil {
			return err
		}
		return a.printf("%s\n", line)
	}))
}

// readyPoll is how often somebody who waits asks the supervisor.
const readyPoll = 500 * time.Millisecond

// readyCommand waits, as long as its caller lets it, until Executor is healthy
// or is not to run.
func (a *app) readyCommand() *cobra.Command {
	return verb("ready", "Wait until Executor is healthy, or is not to run", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		for {
			resp, err := supervise.Ask(ctx, a.layout, supervise.OpReady, upWait)
			if err == nil {
				return a.printf("%s\n", resp.Status.Phase)
			}
			select { // the supervisor may be about to be replaced
			case <-ctx.Done():
				resp, err = supervise.Ask(context.WithoutCancel(ctx), a.layout, supervise.OpStatus, statusWait)
				return errors.Join(fmt.Errorf("executor is %s: %s", resp.Status.Phase, resp.Status.Problem), err)
			case <-time.After(readyPoll):
			}
		}
	}))
}

// clockCommand sets the guest's clock from the host's, which a machine that
// was suspended with its host has lost. In a container the clock is the host's
// own and cannot be set.
func (a *app) clockCommand() *cobra.Command {
	return verb("clock SECONDS", "Set the clock, in seconds since 1970", "", cobra.ExactArgs(1), func(_ *cobra.Command, args []string) error {
		if err := a.mustBeInBox(); err != nil {
			return err
		}
		seconds, err := strconv.ParseInt(args[0], 10, 64)
		if err != nil || seconds <= 0 {
			return &exitError{exitUsage, fmt.Errorf("%q is not a time in seconds", args[0])}
		}
		if !a.layout.Real() {
			return errors.New("the clock of this box is its host's")
		}
		return boot.SetClock(seconds)
	})
}

func (a *app) superviseCommand() *cobra.Command {
	var isWorker bool
	var owner string
	cmd := verb("supervise", "Be the workload of the box", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		logger := log.New(a.stderr, "hb supervise: ", 0)
		if owner != "" && !identity.Valid(owner) {
			return &exitError{exitUsage, fmt.Errorf("%q is not an owner id", owner)}
		}
		if isWorker {
			return supervise.Worker(ctx, a.layout, owner, logger)
		}
		self, err := os.Executable()
		if err != nil {
			return err
		}
		return supervise.Guardian(ctx, a.layout, self, owner, logger)
	}))
	cmd.Flags().StringVar(&owner, "owner", "", "the box's owner id")
	cmd.Flags().BoolVar(&isWorker, "worker", false, "be the worker that the supervisor keeps")
	return cmd
}

func (a *app) provisionCommand() *cobra.Command {
	return verb("provision", "Bring the box to the request on standard input", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		emit := wire.NewEmitter(a.stdout)
		err := a.provision(ctx, emit)
		if emitErr := emit.Emit(resultEvent(err)); emitErr != nil {
			return errors.Join(err, emitErr)
		}
		if err != nil {
			return &exitError{exitFailed, nil} // said in the result
		}
		return nil
	}))
}

func (a *app) provision(ctx context.Context, emit *wire.Emitter) error {
	var req wire.ProvisionRequest
	if err := a.readRequest(&req, &req.Protocol); err != nil {
		return err
	}
	release, err := a.hold(ctx)
	if err != nil {
		return fmt.Errorf("hold Executor: %w", err)
	}
	runErr := provision.Run(ctx, a.layout, req, emit)
	if runErr == nil {
		runErr = a.closeSecrets(ctx, emit)
	}
	runErr = errors.Join(runErr, release())
	_, err = supervise.Ask(context.WithoutCancel(ctx), a.layout, supervise.OpReload, statusWait)
	if errors.Is(err, supervise.ErrNoSupervisor) {
		err = nil
	}
	return errors.Join(runErr, err)
}

func (a *app) versionsCommand() *cobra.Command {
	var asJSON bool
	cmd := verb("versions", "Show the versions of the tools", "", cobra.NoArgs, func(cmd *cobra.Command, _ []string) error {
		m, err := provision.Versions(cmd.Context(), a.layout)
		if err != nil {
			return err
		}
		m.HB = a.version
		if asJSON {
			data, err := json.MarshalIndent(m, "", "  ")
			if err != nil {
				return err
			}
			return a.printf("%s\n", data)
		}
		if err := a.printf("%-10s %s\n", "hb", wire.Printable(m.HB)); err != nil {
			return err
		}
		for _, t := range m.Tools {
			if err := a.printf("%-10s %s\n", wire.Printable(t.Name), wire.Printable(t.Version)); err != nil {
				return err
			}
		}
		return nil
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the runtime manifest as JSON")
	cmd.DisableFlagsInUseLine = false
	return cmd
}

// settingsOrZero returns the settings, or none before provisioning.
func settingsOrZero(l layout.Layout) (layout.Settings, error) {
	s, err := l.ReadSettings()
	if errors.Is(err, fs.ErrNotExist) {
		return layout.Settings{}, nil
	}
	return s, err
}
