package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/guest/pack"
	"hermes-box-lite/internal/guest/secrets"
	"hermes-box-lite/internal/guest/sqlitefile"
	"hermes-box-lite/internal/guest/supervise"
	"hermes-box-lite/internal/wire"
)

// packCommand streams the state: the request on standard input, the gzip
// stream on standard output, events on standard error.
func (a *app) packCommand() *cobra.Command {
	var plan bool
	cmd := verb("pack", "Write the state as a gzip stream", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		if plan {
			p, err := pack.Plan(ctx, a.layout)
			if err != nil {
				return err
			}
			line, err := json.Marshal(p)
			if err != nil {
				return err
			}
			return a.printf("%s\n", line)
		}
		return a.emitState(a.stderr, func(emit *wire.Emitter) (wire.StateResult, error) {
			if err := a.holdsState(); err != nil {
				return wire.StateResult{}, err
			}
			var req wire.PackRequest
			if err := a.readRequest(&req, &req.Protocol); err != nil {
				return wire.StateResult{}, err
			}
			return pack.Pack(ctx, a.layout, req, a.hold, a.stdout, emit)
		})
	}))
	cmd.Flags().BoolVar(&plan, "plan", false, "only tell what would travel")
	return cmd
}

// errAwaits: what a half-restored box holds is nobody's state.
var errAwaits = errors.New("this new box still waits for its state")

func (a *app) holdsState() error {
	awaits, err := secrets.AwaitsState(a.layout)
	if err == nil && awaits {
		err = errAwaits
	}
	return err
}

// holdPatience is how long a worker may take that is there and does not answer
// yet: it may have an Executor to end first.
const holdPatience = 30 * time.Second

// errHoldLost: a new worker starts Executor.
var errHoldLost = errors.New("the supervisor ended meanwhile, so that Executor may have run; try again")

// hold keeps Executor down for a while. A supervisor whose worker has just
// died has the next one up soon; where none comes, nothing but this process
// must begin one meanwhile.
func (a *app) hold(ctx context.Context) (release func() error, _ error) {
	for start := time.Now(); ; {
		end, err := supervise.HoldExecutor(ctx, a.layout, downWait)
		if err == nil {
			return func() error {
				if !end() {
					return errHoldLost
				}
				return nil
			}, nil
		}
		if !errors.Is(err, supervise.ErrNoSupervisor) {
			return nil, err
		}
		if time.Since(start) >= supervisorPatience {
			release, standErr := supervise.StandIn(a.layout)
			if !errors.Is(standErr, supervise.ErrAnotherWorker) {
				return release, standErr
			}
			if time.Since(start) >= holdPatience {
				return nil, fmt.Errorf("%w; try again", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(supervisorPoll):
		}
	}
}

// unpackCommand fills a new box with the gzip stream on standard input; events
// are on standard output. The host decides whether it counts.
func (a *app) unpackCommand() *cobra.Command {
	var freshLogins bool
	var size int64
	cmd := verb("unpack", "Fill a new box with the state of a gzip stream", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		return a.emitState(a.stdout, func(*wire.Emitter) (wire.StateResult, error) {
			awaits, err := secrets.AwaitsState(a.layout)
			if err == nil && !awaits {
				err = errors.New("this box has its state already; nothing was changed")
			}
			if err != nil {
				return wire.StateResult{}, err
			}
			release, err := a.hold(ctx)
			if err != nil {
				return wire.StateResult{}, fmt.Errorf("hold Executor: %w", err)
			}
			// The marker keeps Executor down whatever becomes of the supervisor.
			defer func() { _ = release() }()
			return pack.Unpack(ctx, a.layout, size, freshLogins, a.stdin)
		})
	}))
	cmd.Flags().Int64Var(&size, "bytes", 0, "size of the state's content")
	cmd.Flags().BoolVar(&freshLogins, "fresh-logins", false, "leave out the files that log tools in")
	return cmd
}

// awaitStateCommand marks a new box as one that waits for its state, or, with
// done, as one that has it.
func (a *app) awaitStateCommand() *cobra.Command {
	var done bool
	cmd := verb("await-state", "Keep this new box still until its state is in", "", cobra.NoArgs, a.mustBeRoot(func(ctx context.Context) error {
		_, err := a.layout.ReadSettings()
		if !done && err == nil {
			return errors.New("this box is in use already; nothing was changed")
		}
		return secrets.SetAwaitsState(a.layout, !done)
	}))
	cmd.Flags().BoolVar(&done, "done", false, "the state is in")
	return cmd
}

// loginsCommand names the tools that files of the state log in.
func (a *app) loginsCommand() *cobra.Command {
	return verb("logins", "Name the tools that are logged in", "", cobra.NoArgs, a.mustBeRoot(func(context.Context) error {
		line, err := json.Marshal(pack.Logins(a.layout))
		if err != nil {
			return err
		}
		return a.printf("%s\n", line)
	}))
}

// snapshotCommand is the part of pack that runs as a database's owner.
func (a *app) snapshotCommand() *cobra.Command {
	return verb(pack.SnapshotVerb+" FROM TO", "Copy a database", "", cobra.ExactArgs(2), func(cmd *cobra.Command, args []string) error {
		return sqlitefile.Copy(cmd.Context(), args[0], args[1])
	})
}

// emitState runs work and reports its end as a result event on w.
func (a *app) emitState(w io.Writer, work func(*wire.Emitter) (wire.StateResult, error)) error {
	emit := wire.NewEmitter(w)
	state, err := work(emit)
	result := resultEvent(err)
	if err == nil {
		result.State = &state
	}
	if emitErr := emit.Emit(result); emitErr != nil {
		return errors.Join(err, emitErr)
	}
	if err != nil {
		return &exitError{exitFailed, nil} // said in the result
	}
	return nil
}

// resultEvent is the last event of a verb that ended with err.
func resultEvent(err error) wire.Event {
	result := wire.Event{Type: wire.EventResult}
	if err != nil {
		result.Error = err.Error()
		var hinted interface{ Hint() string }
		if errors.As(err, &hinted) {
			result.Hint = hinted.Hint()
		}
	}
	return result
}

// readRequest decodes the request on standard input; protocol points into it.
func (a *app) readRequest(req any, protocol *int) error {
	data, err := io.ReadAll(io.LimitReader(a.stdin, wire.MaxDocument+1))
	if err == nil {
		err = wire.DecodeStrict(data, req)
	}
	if err != nil {
		return fmt.Errorf("read the request: %w", err)
	}
	if *protocol != wire.Protocol {
		return fmt.Errorf("the request is of protocol %d, this hb speaks %d", *protocol, wire.Protocol)
	}
	return nil
}
