package box

import (
	"context"
	"fmt"

	"hermes-box-lite/internal/vm"
)

// Placer is a driver whose engine keeps machines in a place that depends on
// the user and the environment. In another place it finds nothing, and says so
// without an error.
type Placer interface {
	Place(ctx context.Context) (string, error)
}

// Place implements Placer; "" for drivers that have one place only.
func (b bounded) Place(ctx context.Context) (string, error) {
	placer, ok := b.Driver.(Placer)
	if !ok {
		return "", nil
	}
	ctx, cancel := within(ctx, b.limits.Ask)
	defer cancel()
	return placer.Place(ctx)
}

func placeOf(ctx context.Context, drv vm.Driver) (string, error) {
	placer, ok := drv.(Placer)
	if !ok {
		return "", nil
	}
	place, err := placer.Place(ctx)
	if err != nil {
		return "", fmt.Errorf("ask the %s driver where its machines are: %w", drv.Name(), err)
	}
	return place, nil
}

// lookedInPlace returns nil when a driver that knows nothing of a record's
// machine has looked for it where it was made.
func lookedInPlace(ctx context.Context, drv vm.Driver, rec Record) error {
	if rec.Place == "" {
		return nil
	}
	here, err := placeOf(ctx, drv)
	if err != nil {
		return err
	}
	if here != rec.Place {
		return &ElsewhereError{Name: rec.Name, Driver: rec.Driver, Made: rec.Place, Here: here}
	}
	return nil
}
