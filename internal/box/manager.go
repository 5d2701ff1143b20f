package box

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"hermes-box-lite/internal/config"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// Reporter is told what a long command does. Texts may come from a guest and
// are already escaped.
type Reporter interface {
	Step(name string) // a step of the command began
	Note(text string) // what the step did or found
	Warn(text string) // worth the user's attention
	// Progress of the step: done of total bytes; total is 0 where it is not
	// known.
	Progress(done, total int64)
}

// Options is what a Manager is made of.
type Options struct {
	Home    Home
	Config  config.Config
	Version string // of this program; hb inside a box is brought to the same
	// Driver returns a driver by its name in the registry; "auto" picks one.
	Driver func(ctx context.Context, name string) (vm.Driver, error)
	// HB returns the hb binary for this host's architecture.
	HB func() ([]byte, error)
	// Base prepares BASE_IMAGE.
	Base func(ctx context.Context, image string, note func(string)) (vm.Base, error)
	// Bases is the cache of what Base prepares; nil: there is none.
	Bases  BaseCache
	Report Reporter
	Output io.Writer // sees the raw output of what runs in the guest; may be nil
	Now    func() time.Time
	// Deadlines are the built-in ones where they are zero.
	Deadlines Deadlines
	// Step, when it is not nil, is given each durable step of a mutation to do;
	// for tests, which interrupt between two of them.
	Step func(ctx context.Context, point string, work func() error) error
}

// Manager runs the life of boxes.
type Manager struct {
	home     Home
	registry registry
	config   config.Config
	opts     Options
}

// NewManager returns a Manager; it touches nothing yet.
func NewManager(o Options) *Manager {
	o.Deadlines = o.Deadlines.withDefaults()
	o.Driver = boundedDrivers(o.Driver, o.Deadlines)
	return &Manager{home: o.Home, registry: registry{o.Home}, config: o.Config, opts: o}
}

// StepError says at which step a command failed and where its evidence is.
type StepError struct {
	Verb, Name, Step string
	Transcript       string // path, or ""
	Err              error
}

func (e *StepError) Error() string {
	return fmt.Sprintf("%s %s: %s: %v", e.Verb, e.Name, e.Step, e.Err)
}

func (e *StepError) Unwrap() error { return e.Err }

// CleanupError says that something of ours is, or may be, still there, and
// that its record was kept. A person must act.
type CleanupError struct {
	Name, Driver string
	Gone         bool // the machine is certainly gone, its record is what is left
	Err          error
}

func (e *CleanupError) Error() string {
	if e.Gone {
		return fmt.Sprintf("the machine of %s is gone, but not its record: %v", e.Name, e.Err)
	}
	return fmt.Sprintf("the machine of %s could not be removed and verified absent; its record was kept: %v", e.Name, e.Err)
}

func (e *CleanupError) Unwrap() error { return e.Err }

// mutation is one running command that changes a box: its lock, its line in
// the journal and its transcript.
type mutation struct {
	m    *Manager
	verb string
	rec  Record
	lock *lock
	log  *transcript
	step string
	stop bool       // the box was stopped before this mutation
	pins *wire.Pins // versions to install in place of the configured ones; nil: none
	// prepared: the machine's system was provisioned as it is to be, here or
	// where it was copied from.
	prepared bool
	kept     string // the template that this mutation has made; ""
	// began is when this mutation was first journalled; earlier is what the
	// journal held before, the trace of an interrupted mutation.
	began   time.Time
	earlier *Operation
	// given reports whether the user has given the command up.
	given func() bool
}

// begin locks the box and opens the transcript.
func (m *Manager) begin(name, verb string) (*mutation, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	if err := m.home.ensure(); err != nil {
		return nil, err
	}
	l, err := m.home.acquire(name, verb)
	if err != nil {
		return nil, err
	}
	log, err := m.home.newTranscript(name, verb, m.opts.Now(), m.opts.Output)
	if err != nil {
		l.release()
		return nil, err
	}
	return &mutation{m: m, verb: verb, lock: l, log: log}, nil
}

// beginExisting is begin for a box that must have a record.
func (m *Manager) beginExisting(name, verb string) (*mutation, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	if _, err := m.registry.get(name); err != nil {
		return nil, err // no lock file for a name that does not exist
	}
	mu, err := m.begin(name, verb)
	if err != nil {
		return nil, err
	}
	if mu.rec, err = m.registry.get(name); err != nil {
		return nil, mu.end(err)
	}
	mu.earlier = mu.rec.Operation
	return mu, nil
}

// durable does one durable step of a mutation.
func (m *Manager) durable(ctx context.Context, point string, work func() error) error {
	if m.opts.Step == nil {
		return work()
	}
	return m.opts.Step(ctx, point, work)
}

// enter records the next step, durably, before it is announced and taken: who
// has read of a step may rely on its trace. No step begins after a signal.
func (mu *mutation) enter(ctx context.Context, step string) error {
	mu.step = step
	mu.given = func() bool { return ctx.Err() != nil }
	mu.log.line("step %s", step)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	err := mu.durable(ctx, step, func() error {
		if mu.rec.OwnerID == "" {
			return nil // nothing to attribute yet
		}
		if mu.began.IsZero() {
			mu.began = mu.m.opts.Now().UTC()
		}
		mu.rec.Operation = &Operation{Verb: mu.verb, Step: step, Started: mu.began, Stop: mu.stop}
		return mu.m.registry.put(mu.rec)
	})
	if err != nil {
		return err
	}
	mu.m.opts.Report.Step(step)
	return nil
}

// durable does a step of this mutation's own.
func (mu *mutation) durable(ctx context.Context, step string, work func() error) error {
	return mu.m.durable(ctx, "step."+mu.verb+"."+strings.ReplaceAll(step, " ", "-"), work)
}

func (mu *mutation) note(text string) {
	mu.m.opts.Report.Note(text)
	mu.log.line("note %s", text)
}

func (mu *mutation) warn(text string) {
	mu.m.opts.Report.Warn(text)
	mu.log.line("warning %s", text)
}

// complete clears the journal: the mutation reached its end. Starting and
// stopping do not heal what another verb left half done, so its trace stays.
func (mu *mutation) complete(ctx context.Context) error {
	mu.rec.Operation = nil
	if was := mu.earlier; was != nil && trivial(mu.verb) && !trivial(was.Verb) {
		mu.rec.Operation = was
	}
	return mu.durable(ctx, "complete", func() error { return mu.m.registry.put(mu.rec) })
}

// trivial verbs leave a box as it is, but for running or stopped.
func trivial(verb string) bool {
	return verb == "start" || verb == "stop" || verb == "save" || verb == "fork"
}

// end releases the lock. A failure at a step keeps the transcript and names
// the step.
func (mu *mutation) end(err error) error {
	if err != nil {
		mu.log.line("error %v", err)
	}
	path := mu.log.close(err != nil && mu.step != "")
	rec, getErr := mu.m.registry.get(mu.name())
	if err != nil && getErr == nil {
		mu.journalFailure(rec)
	}
	if errors.Is(getErr, ErrNotFound) {
		mu.lock.discard()
	} else {
		mu.lock.release()
	}
	if err == nil || mu.step == "" {
		return err
	}
	return &StepError{Verb: mu.verb, Name: mu.name(), Step: mu.step, Transcript: path, Err: err}
}

// journalFailure tells a failure, which was reported, from an interruption, of
// which `box ls` is the first to tell.
func (mu *mutation) journalFailure(rec Record) {
	op := rec.Operation
	if op == nil || op.Verb != mu.verb || !op.Started.Equal(mu.began) || mu.given == nil || mu.given() {
		return
	}
	failed := *op
	failed.Failed = true
	rec.Operation = &failed
	err := mu.m.durable(context.Background(), "step.failed", func() error { return mu.m.registry.put(rec) })
	if err != nil {
		mu.m.opts.Report.Warn("note that it failed: " + err.Error()) // ls calls it an interruption then
	}
}

func (mu *mutation) name() string { return mu.rec.Name }

// driver returns the record's driver.
func (m *Manager) driver(ctx context.Context, rec Record) (vm.Driver, error) {
	return m.opts.Driver(ctx, rec.Driver)
}

// dispose removes the machine of a record and then the record, in this order
// and only when absence is certain. It does not stop when ctx ends.
func (m *Manager) dispose(ctx context.Context, drv vm.Driver, rec Record) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), m.opts.Deadlines.Cleanup,
		fmt.Errorf("the engine did not finish within %s", m.opts.Deadlines.Cleanup))
	defer cancel()
	err := drv.Delete(ctx, rec.Name, rec.OwnerID)
	if err == nil || errors.Is(err, vm.ErrNotFound) {
		// An engine's word that it deleted something is not yet its word that
		// nothing is there.
		err = verifiedAbsent(ctx, drv, rec)
	}
	if err != nil {
		return &CleanupError{Name: rec.Name, Driver: rec.Driver, Err: err}
	}
	if err := m.durable(ctx, "step.forget", func() error { return m.registry.remove(rec.Name) }); err != nil {
		return &CleanupError{Name: rec.Name, Driver: rec.Driver, Gone: true, Err: err}
	}
	return nil
}

func verifiedAbsent(ctx context.Context, drv vm.Driver, rec Record) error {
	_, err := drv.Inspect(ctx, rec.Name)
	switch {
	case errors.Is(err, vm.ErrNotFound):
		return lookedInPlace(ctx, drv, rec)
	case err != nil:
		return fmt.Errorf("make sure that it is gone: %w", err)
	}
	return fmt.Errorf("the %s driver reports it deleted, and still shows it", drv.Name())
}

// newID makes an owner id or a lineage id: 32 hexadecimal digits.
func newID() string {
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	return hex.EncodeToString(id)
}
