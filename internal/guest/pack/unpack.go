package pack

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/klauspost/compress/gzip"
	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/stream"
	"hermes-box-lite/internal/wire"
)

// spaceReserve is left free on /data, bytes: a box needs some to work.
const spaceReserve = 64 << 20

// keep is what of a new box's /data is not state.
func keep() map[string]bool { return map[string]bool{".hermes-box": true, "lost+found": true} }

// Unpack fills the box's /data with the state of a gzip stream. What
// provisioning has put there before goes first: the caller makes sure that the
// box is a new one. Whether the result counts, the host decides.
// size is that of the files' content, bytes.
func Unpack(ctx context.Context, l layout.Layout, size int64, freshLogins bool, r io.Reader) (_ wire.StateResult, err error) {
	if err := clearData(l); err != nil {
		return wire.StateResult{}, fmt.Errorf("clear the new box's state: %w", err)
	}
	if err := hasRoom(l.Data(), size); err != nil {
		return wire.StateResult{}, err
	}
	dir, err := os.Open(l.Data()) // now: its mode to come may keep us out
	if err != nil {
		return wire.StateResult{}, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	dropped := []string{}
	options := archive.ExtractOptions{
		Strip: true, Existing: keep(), Chown: l.Real(),
		AgentUID: layout.AgentUID, AgentGID: layout.AgentGID,
	}
	if freshLogins {
		options.Drop = func(name string) bool {
			for _, login := range logins() {
				if login.file == name {
					// Asked again for what is below it or leads to it.
					if path := wire.Printable("/" + name); !slices.Contains(dropped, path) {
						dropped = append(dropped, path)
					}
					return true
				}
			}
			return false
		}
	}
	extractor := archive.NewExtractor(dir, options)
	defer func() { err = errors.Join(err, extractor.Close()) }()
	sum := sha256.New()
	source := bufio.NewReaderSize(io.TeeReader(&contextReader{ctx, r}, sum), 256<<10)
	z, err := gzip.NewReader(source)
	if err != nil {
		return wire.StateResult{}, fmt.Errorf("read the stream: %w", err)
	}
	z.Multistream(false)
	unpacked := stream.Ahead(z) // decompressing and writing go on side by side
	defer unpacked.Stop()
	stop := syncMeanwhile(dir)
	summary, err := archive.Read(unpacked, archive.DefaultLimits(), extractor)
	if err = errors.Join(err, stop()); err != nil {
		return wire.StateResult{}, err
	}
	if err := context.Cause(ctx); err != nil {
		return wire.StateResult{}, err
	}
	if _, err := source.Peek(1); err != nil && err != io.EOF {
		return wire.StateResult{}, fmt.Errorf("read the stream: %w", err)
	} else if err == nil {
		return wire.StateResult{}, fmt.Errorf("%w: something follows the gzip stream", archive.ErrUnsafe)
	}
	if err := extractor.Finish(); err != nil {
		return wire.StateResult{}, err
	}
	// File by file costs more than the extraction.
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return wire.StateResult{}, fmt.Errorf("sync: %w", err)
	}
	return wire.StateResult{
		Stream: hex.EncodeToString(sum.Sum(nil)), Entries: summary.Entries, Bytes: summary.Bytes, Digest: summary.Digest, Dropped: dropped,
		SkippedXattrs: extractor.SkippedXattrs(),
	}, nil
}

// syncMeanwhile has the disk write while the state is unpacked, so that the
// sync in the end has less to wait for. stop returns an error of the disk: it is
// told once to a descriptor, syncfs(2), so the sync in the end may not tell it.
func syncMeanwhile(dir *os.File) (stop func() error) {
	const pause = time.Second
	quit, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-quit:
				ended <- nil
				return
			case <-time.After(pause):
				if err := unix.Syncfs(int(dir.Fd())); err != nil {
					ended <- fmt.Errorf("sync: %w", err)
					return
				}
			}
		}
	}()
	return func() error { close(quit); return <-ended }
}

func clearData(l layout.Layout) error {
	entries, err := os.ReadDir(l.Data())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !keep()[e.Name()] {
			if err := os.RemoveAll(filepath.Join(l.Data(), e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// hasRoom refuses what certainly does not fit.
func hasRoom(dir string, size int64) error {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return fmt.Errorf("ask for the free space of %s: %w", dir, err)
	}
	free := int64(st.Bavail) * st.Bsize //nolint:gosec // far below 2^63
	if free < spaceReserve || size > free-spaceReserve {
		return fmt.Errorf("%s has %d MiB free and the state needs %d MiB: %w", dir, free>>20, (size+spaceReserve)>>20, syscall.ENOSPC)
	}
	return nil
}

// contextReader ends with its context.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *contextReader) Read(p []byte) (int, error) {
	if err := context.Cause(c.ctx); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
