//go:build linux

package box

import (
	"context"
	"errors"
	"slices"
	"testing"

	"hermes-box-lite/internal/vm"
)

// grabber is an engine on whose host other programs take ports between the
// reservation of a port and its use.
type grabber struct {
	vm.Driver
	t     *testing.T
	left  int // ports still to be taken
	taken []int
}

func (g *grabber) Create(ctx context.Context, spec vm.Spec) (vm.Machine, error) {
	if g.left > 0 {
		g.left--
		g.taken = append(g.taken, spec.HostPort)
		listen(g.t, "tcp4", "127.0.0.1", spec.HostPort)
	}
	return g.Driver.Create(ctx, spec)
}

func TestPortsLostBetweenCheckAndUse(t *testing.T) {
	lo, hi := freeRange(t, 20)
	m, _ := testManager(t, lo, hi)
	drv, err := m.opts.Driver(t.Context(), "fake")
	if err != nil {
		t.Fatal(err)
	}
	begin := func(name string) *mutation {
		mu, err := m.begin(name, "new")
		if err != nil {
			t.Fatal(err)
		}
		mu.rec = Record{Name: name, OwnerID: newID(), Driver: "fake", Phase: Creating}
		return mu
	}

	mu := begin("alpha")
	g := &grabber{Driver: drv, t: t, left: 3}
	if err := m.create(t.Context(), mu, g, &start{}); err != nil {
		t.Fatal(err)
	}
	alpha := mu.rec
	t.Cleanup(func() {
		if err := m.dispose(context.Background(), drv, alpha); err != nil {
			t.Error(err)
		}
	})
	rec, err := m.registry.get("alpha")
	if err != nil || len(g.taken) != 3 || slices.Contains(g.taken, rec.HostPort) {
		t.Errorf("port %d with %v taken, %v", rec.HostPort, g.taken, err)
	}
	if machine, err := drv.Inspect(t.Context(), "alpha"); err != nil || machine.HostPort != rec.HostPort || machine.State != vm.Running {
		t.Errorf("the machine is %+v, %v", machine, err)
	}

	// One that loses every time gives up and leaves nothing.
	mu = begin("beta")
	g = &grabber{Driver: drv, t: t, left: 100}
	err = m.create(t.Context(), mu, g, &start{})
	if !errors.Is(err, vm.ErrPortTaken) || len(g.taken) != portAttempts {
		t.Errorf("%d ports tried, %v", len(g.taken), err)
	}
	if err := m.rollback(t.Context(), mu, drv, false, err); !errors.Is(err, vm.ErrPortTaken) {
		t.Error(err)
	}
	if _, err := m.registry.get("beta"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a record was left: %v", err)
	}
	if _, err := drv.Inspect(t.Context(), "beta"); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("a machine was left: %v", err)
	}
}
