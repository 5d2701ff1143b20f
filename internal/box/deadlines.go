package box

import (
	"context"
	"fmt"
	"time"

	"hermes-box-lite/internal/vm"
)

// Deadlines bound the waiting for an engine or a guest, which may hang.
type Deadlines struct {
	List    time.Duration // of `box ls`
	Ask     time.Duration // of a question to the engine about one machine
	Engine  time.Duration // of whatever else an engine does
	Cleanup time.Duration // of what is done after the user has given up waiting
	// Guest bounds calls of hb that have longer deadlines of their own; 0: none.
	// Reading and writing a box's state takes as long as it takes.
	Guest time.Duration
}

func (d Deadlines) withDefaults() Deadlines {
	for _, limit := range []struct {
		of      *time.Duration
		builtIn time.Duration
	}{
		{&d.List, 15 * time.Second},
		{&d.Ask, time.Minute},
		{&d.Engine, 30 * time.Minute}, // an emulated machine takes minutes to boot, a base to be copied
		{&d.Cleanup, 2 * time.Minute},
	} {
		if *limit.of == 0 {
			*limit.of = limit.builtIn
		}
	}
	return d
}

// guest is the deadline of a call of hb that has one of its own.
func (d Deadlines) guest(own time.Duration) time.Duration {
	if d.Guest > 0 {
		return min(d.Guest, own)
	}
	return own
}

// boundedDrivers are the drivers that build returns, without their patience.
func boundedDrivers(build func(context.Context, string) (vm.Driver, error), d Deadlines) func(context.Context, string) (vm.Driver, error) {
	return func(ctx context.Context, name string) (vm.Driver, error) {
		drv, err := build(ctx, name)
		if err != nil {
			return nil, err
		}
		return bounded{drv, d}, nil
	}
}

// bounded is a driver whose calls, but for Exec, end in time. Exec is bounded
// by who calls it, and List by `box ls`.
type bounded struct {
	vm.Driver
	limits Deadlines
}

func within(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, limit, fmt.Errorf("the engine did not answer within %s", limit))
}

func (b bounded) Create(ctx context.Context, spec vm.Spec) (vm.Machine, error) {
	ctx, cancel := within(ctx, b.limits.Engine)
	defer cancel()
	return b.Driver.Create(ctx, spec)
}

func (b bounded) Inspect(ctx context.Context, name string) (vm.Machine, error) {
	ctx, cancel := within(ctx, b.limits.Ask)
	defer cancel()
	return b.Driver.Inspect(ctx, name)
}

func (b bounded) Start(ctx context.Context, name string) error {
	ctx, cancel := within(ctx, b.limits.Engine)
	defer cancel()
	return b.Driver.Start(ctx, name)
}

func (b bounded) Stop(ctx context.Context, name string) error {
	ctx, cancel := within(ctx, b.limits.Engine)
	defer cancel()
	return b.Driver.Stop(ctx, name)
}

func (b bounded) Delete(ctx context.Context, name, ownerID string) error {
	ctx, cancel := within(ctx, b.limits.Engine)
	defer cancel()
	return b.Driver.Delete(ctx, name, ownerID)
}
