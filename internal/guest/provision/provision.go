// Package provision installs the tools of a box and refreshes our own assets.
//
// Run is an ordered list of steps. Each of them has a name and a deadline,
// looks at what is there before it acts, says what it found or did, and can be
// run again at any time; a second Run on an unchanged box changes nothing. An
// error names its step. Errors that a user can mend carry a hint:
// errors.As(err, *interface{ Hint() string }).
//
// In a layout with a root of its own (the fake driver's) nothing of the system
// is touched: there the steps that would install something only require the
// launchers to be present below the root, while our own assets and settings
// are written for real.
//
// Checks is the same verification as Run's last step, for the doctors. The
// callers are hb's provision, repair, doctor and versions verbs.
package provision

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// StepError says which step could not be done.
type StepError struct {
	Step string
	Err  error
	Fix  string // what the user can do, or ""
}

func (e *StepError) Error() string { return "provision: " + e.Step + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *StepError) Unwrap() error { return e.Err }

// Hint returns what the user can do about it, or "".
func (e *StepError) Hint() string { return e.Fix }

// step is one idempotent piece of work.
type step struct {
	name  string
	limit time.Duration // generous: an emulated VM is some twenty times slower
	do    func(context.Context, *run) error
	// system steps touch what only a real box may have touched.
	system bool
}

func steps() []step {
	return []step{
		{name: "preflight", limit: time.Minute, do: preflight},
		{name: "trust", limit: 10 * time.Minute, do: trust, system: true},
		{name: "packages", limit: 30 * time.Minute, do: packages, system: true},
		{name: "agent", limit: 5 * time.Minute, do: agent},
		{name: "environment", limit: time.Minute, do: environment},
		{name: "node", limit: 30 * time.Minute, do: node, system: true},
		{name: "tools", limit: 40 * time.Minute, do: tools, system: true},
		{name: "hermes", limit: 40 * time.Minute, do: hermes, system: true},
		{name: "assets", limit: time.Minute, do: assets},
		{name: "verify", limit: 10 * time.Minute, do: verify},
		{name: "manifest", limit: 2 * time.Minute, do: manifest},
	}
}

// run is what the steps of one Run share.
type run struct {
	l        layout.Layout
	req      wire.ProvisionRequest
	emit     *wire.Emitter
	step     string
	log      io.Writer // output of child commands: the host's transcript
	settled  bool      // provisioning had succeeded before this Run
	prepared bool      // the system is a copy of one that was verified
	versions wire.RuntimeManifest
	words    map[string]word   // what the programs said that were there at the beginning; nil: they are not to be believed
	probed   map[string]string // tool -> the version that it told, as the agent, in this Run
}

// Run brings the box to what req asks for and reports every step through emit.
// The output of the programs it runs goes to standard error.
func Run(ctx context.Context, l layout.Layout, req wire.ProvisionRequest, emit *wire.Emitter) error {
	r := &run{l: l, req: req, emit: emit, log: os.Stderr}
	if _, err := l.ReadSettings(); err == nil {
		r.settled = true
	}
	if req.Prepared {
		// A copy that does not know what is in it is looked at like any other,
		// and so is one of a box that was made by other settings.
		r.versions, r.prepared = readVerified(l)
		r.prepared = r.prepared && lists(r.versions, managedTools(r.settings()))
	}
	for _, s := range steps() {
		if err := r.perform(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) perform(ctx context.Context, s step) error {
	r.step = s.name
	r.event(wire.EventStep, "")
	if s.system && !r.l.Real() {
		r.note("skipped: this is not a real box")
		return nil
	}
	if s.system && r.prepared {
		r.note("already there: the system is a copy of one that was provisioned")
		return nil
	}
	stepCtx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	err := s.do(stepCtx, r)
	if err == nil {
		return nil
	}
	if ctx.Err() == nil && errors.Is(stepCtx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("not done within %s: %w", s.limit, err)
	}
	var hinted interface{ Hint() string }
	stepErr := &StepError{Step: s.name, Err: err}
	if errors.As(err, &hinted) {
		stepErr.Fix = hinted.Hint()
	}
	return stepErr
}

// event reports to the host. A host that no longer listens is noticed by the
// caller, whose context ends; provisioning itself need not stop half-way.
func (r *run) event(t wire.EventType, text string) {
	_ = r.emit.Emit(wire.Event{Type: t, Step: r.step, Text: text})
}

func (r *run) note(format string, args ...any) {
	r.event(wire.EventNote, fmt.Sprintf(format, args...))
}

func (r *run) warn(format string, args ...any) {
	r.event(wire.EventWarning, fmt.Sprintf(format, args...))
}

// hintedError carries what a user can do about err.
type hintedError struct {
	err error
	fix string
}

func (e *hintedError) Error() string { return e.err.Error() }
func (e *hintedError) Unwrap() error { return e.err }
func (e *hintedError) Hint() string  { return e.fix }
