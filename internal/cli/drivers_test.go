package cli

import (
	"context"
	"errors"
	"testing"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/container"
)

// choosy is a driver that says whether it is usable.
type choosy struct {
	vm.Driver
	err error
}

func (c choosy) Usable(context.Context) error { return c.err }

func TestAutomaticPicksAVirtualMachine(t *testing.T) {
	fine, broken := choosy{}, choosy{err: errors.New("/dev/kvm is not there")}
	for _, tc := range []struct {
		system    string
		preferred vm.Driver
		want      string
	}{
		{"linux", fine, "smolvm"},
		{"linux", broken, "qemu"},
		{"linux", container.New(""), "qemu"},
		{"darwin", fine, "smolvm"},
		{"darwin", broken, "smolvm"}, // which says what it misses
	} {
		if got := automatic(t.Context(), tc.system, tc.preferred); got != tc.want {
			t.Errorf("on %s, with smolvm's word %v: %s, want %s", tc.system, tc.preferred, got, tc.want)
		}
	}
}
