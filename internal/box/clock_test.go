package box

import (
	"testing"
	"time"

	"hermes-box-lite/internal/wire"
)

func TestSkew(t *testing.T) {
	now := time.Date(2026, 11, 29, 12, 0, 0, 400e6, time.UTC)
	for _, c := range []struct {
		guest time.Duration // from now
		took  time.Duration // of the question
		want  wire.Status
	}{
		{0, 0, wire.Pass},
		{3 * time.Second, 4 * time.Second, wire.Pass},
		{-45 * time.Minute, time.Second, wire.Fail},
		{24 * time.Hour, 2 * time.Second, wire.Fail},
		{-4 * time.Second, 0, wire.Pass},
		{7 * time.Second, time.Second, wire.Fail},
	} {
		// hb tells whole seconds.
		skew := skewOf(now.Add(c.guest).Truncate(time.Second), now, now.Add(c.took))
		if got := clockCheck("alpha", skew); got.Status != c.want {
			t.Errorf("guest at %v: %+v", c.guest, got)
		}
	}
}
