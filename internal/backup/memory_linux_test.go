package backup

import (
	"context"
	"io"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"

	"hermes-box-lite/internal/archive"
)

// TestMemory: that of a save does not depend on what is saved.
func TestMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const size = 128 << 20
	o := options(t, filepath.Join(inMemory(t), "a"))
	o.Source = func(_ context.Context, w io.Writer) error {
		z, err := gzip.NewWriterLevel(w, gzip.HuffmanOnly)
		if err != nil {
			return err
		}
		tar, err := archive.NewWriter(z, manifest(), archive.DefaultLimits())
		if err != nil {
			return err
		}
		if err := tar.Dir(archive.Entry{Name: "data", Mode: 0o755, ModTime: time.Unix(1, 0)}); err != nil {
			return err
		}
		e := archive.Entry{Name: "data/a", Mode: 0o644, ModTime: time.Unix(1, 0), Size: size}
		if err := tar.File(e, io.LimitReader(rand.NewChaCha8([32]byte{2}), size)); err != nil {
			return err
		}
		if _, err := tar.Close(); err != nil {
			return err
		}
		return z.Close()
	}
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	var peak atomic.Uint64
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			var now runtime.MemStats
			runtime.ReadMemStats(&now)
			peak.Store(max(peak.Load(), now.HeapInuse+now.StackInuse))
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	}()
	report, err := Save(context.Background(), o)
	close(stop)
	<-ended
	if err != nil || report.Bytes != size {
		t.Fatalf("%+v, %v", report, err)
	}
	if grown := int64(peak.Load()) - int64(before.HeapInuse+before.StackInuse); grown > 64<<20 {
		t.Errorf("%d MiB for %d MiB", grown>>20, int64(size)>>20)
	} else {
		t.Logf("%d MiB for %d MiB", grown>>20, int64(size)>>20)
	}
}
