package box

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// clockTolerance is what a guest's clock may differ from the host's. A machine
// that slept with its host wakes up in the past; TLS and builds mind minutes.
const clockTolerance = 5 * time.Second

// hasOwnClock reports whether a machine's clock is not the host's own.
func hasOwnClock(i vm.Isolation) bool {
	return i == vm.IsolationKVM || i == vm.IsolationEmulated || i == vm.IsolationHypervisor
}

// clockSkew asks for the guest's clock and returns by how much it is ahead of
// the host's, at least: the question itself takes a while.
func (m *Manager) clockSkew(ctx context.Context, g guest) (time.Duration, wire.Hello, error) {
	before := m.opts.Now()
	hello, err := g.hello(ctx)
	return skewOf(time.Unix(hello.UnixTime, 0), before, m.opts.Now()), hello, err
}

func skewOf(guest, before, after time.Time) time.Duration {
	switch {
	case guest.Before(before.Truncate(time.Second)):
		return guest.Sub(before)
	case guest.After(after):
		return guest.Sub(after)
	}
	return 0
}

// syncClock sets the clock of a machine that has lost it.
func (m *Manager) syncClock(ctx context.Context, g guest, isolation vm.Isolation) error {
	if !hasOwnClock(isolation) {
		return nil
	}
	skew, _, err := m.clockSkew(ctx, g)
	if err != nil || skew.Abs() <= clockTolerance {
		return err
	}
	if err := g.run(ctx, "clock", strconv.FormatInt(m.opts.Now().Unix(), 10)); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	return nil
}

func clockCheck(name string, skew time.Duration) wire.Check {
	c := wire.Check{ID: "clock", Status: wire.Pass, Summary: "the box tells the host's time", Evidence: "differs by " + skew.Round(time.Second).String()}
	if skew.Abs() > clockTolerance {
		c.Status, c.Fix = wire.Fail, "box start "+name // a running box only gets its clock set
		c.Summary = "the clock of the box is " + skew.Abs().Round(time.Second).String() + " behind"
		if skew > 0 {
			c.Summary = "the clock of the box is " + skew.Round(time.Second).String() + " ahead"
		}
	}
	return c
}
