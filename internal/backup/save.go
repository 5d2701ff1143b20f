package backup

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/partial"
	"hermes-box-lite/internal/stream"
)

// SaveOptions are what one Save needs.
type SaveOptions struct {
	Path       string // of the new archive; its directory must exist
	Box        string // whose archive it is; names the partial file
	Passphrase Passphrase
	Limits     archive.Limits
	// Source writes the gzip stream. Its error ends the save.
	Source func(ctx context.Context, w io.Writer) error
	// Accept is asked, after the file was verified and before it gets its
	// name, whether it is what the source meant to write.
	Accept   func(Report) error
	Verified Progress // of the reading back
	// Publish, when it is not nil, is given the giving of the name to do.
	Publish func(publish func() error) error

	cost int // of a guess at the passphrase, see s2kCount; 0: what it is for archives
}

// Save writes an archive: encrypted into a partial file in the destination's
// directory, synced, read again through the same descriptor and verified as
// Archive.Verify does, and only then given its name, which must be free. The
// reading follows the writing, and gets to the end only after the sync. When
// anything fails nothing is left; what a killed Save left, the next one of the
// same box removes.
func Save(ctx context.Context, o SaveOptions) (report Report, err error) {
	if err := Free(o.Path); err != nil {
		return Report{}, err
	}
	dir := filepath.Dir(o.Path)
	prefix := partialPrefix(o.Box)
	partial.RemoveStale(dir, prefix)
	unnamed, err := partial.Create(dir, prefix)
	if err != nil {
		return Report{}, fmt.Errorf("write into %s: %w", dir, err)
	}
	a := &Archive{file: unnamed, passphrase: o.Passphrase, limits: o.Limits}
	defer func() {
		// Under its final name or not at all.
		err = errors.Join(err, remove(unnamed.Name()), a.Close())
	}()
	written := newTail(unnamed)
	verified := make(chan struct{})
	var verifyErr error
	go func() {
		defer close(verified)
		report, verifyErr = a.readAll(open(ctx, written, func(done int64) {
			if total, whole := written.size(); whole && o.Verified != nil {
				o.Verified(done, total)
			}
		}), nil)
	}()
	sum, err := write(ctx, written, o)
	written.end(err)
	<-verified
	if err != nil {
		return Report{}, err
	}
	info, statErr := unnamed.Stat()
	err = errors.Join(verifyErr, statErr)
	if err == nil && (report.Stream != sum || report.Size != info.Size()) {
		err = errors.New("it holds other bytes than were written")
	}
	if err != nil {
		return Report{}, fmt.Errorf("read the archive back: %w", err)
	}
	if err := o.Accept(report); err != nil {
		return Report{}, err
	}
	if err := context.Cause(ctx); err != nil {
		return Report{}, err
	}
	give := func() error { return publish(unnamed.Name(), o.Path) }
	if o.Publish != nil {
		err = o.Publish(give)
	} else {
		err = give()
	}
	if err != nil {
		return Report{}, err
	}
	return report, nil
}

// Free returns ErrExists, with the path, when something is at path.
func Free(path string) error {
	_, err := os.Lstat(path)
	switch {
	case err == nil:
		return fmt.Errorf("%s %w", path, ErrExists)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return err
}

// write returns the SHA-256 of the stream.
func write(ctx context.Context, file *tail, o SaveOptions) (string, error) {
	buffered := bufio.NewWriterSize(file, bufferSize)
	cost := o.cost
	if cost == 0 {
		cost = s2kCount
	}
	sealed, err := encrypt(buffered, o.Passphrase, cost)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	behind := stream.Behind(sealed) // encryption is the slowest
	out := &sink{ctx: ctx, w: io.MultiWriter(sum, behind)}
	err = o.Source(ctx, out)
	behindErr := behind.Close()
	if err != nil {
		return "", err
	}
	if out.err != nil { // whether the source cared or not
		return "", out.err
	}
	if err := errors.Join(behindErr, sealed.Close(), buffered.Flush()); err != nil {
		return "", fmt.Errorf("write the archive: %w", err)
	}
	if err := file.sync(); err != nil {
		return "", fmt.Errorf("write the archive: %w", err)
	}
	return digest(sum), nil
}

// sink ends with its context. Its first error is final: there is a gap.
type sink struct {
	ctx context.Context
	w   io.Writer
	err error
}

func (s *sink) Write(p []byte) (n int, err error) {
	if s.err == nil {
		s.err = context.Cause(s.ctx)
	}
	if s.err != nil {
		return 0, s.err
	}
	if n, err = s.w.Write(p); err != nil {
		s.err = fmt.Errorf("write the archive: %w", err)
	}
	return n, s.err
}

func partialPrefix(box string) string { return ".hermes-box-" + box + "." }

// remove is os.Remove, and nothing when there is nothing to remove.
func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// RemoveUnused removes an archive unless a command has it open, and reports
// whether it did.
func RemoveUnused(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	if _, busy := lockFile(f, syscall.LOCK_EX); busy != nil {
		return false, nil
	}
	return true, os.Remove(path)
}

// publish gives a synced file its name, which must be free at that very
// moment, and makes that durable. Its name until then may stay.
func publish(unnamed, final string) error {
	err := os.Link(unnamed, final)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		// A file system without hard links.
		err = renameNoReplace(unnamed, final)
	}
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s %w", final, ErrExists)
	}
	if err != nil {
		return fmt.Errorf("give the archive its name: %w", err)
	}
	if err := atomicfile.SyncDir(filepath.Dir(final)); err != nil {
		// What is not durable was not saved.
		return fmt.Errorf("give the archive its name: %w", errors.Join(err, os.Remove(final)))
	}
	return nil
}

// FreeSpace of the file system that holds dir, bytes, for this user.
func FreeSpace(dir string) (int64, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("ask for the free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * int64(st.Bsize), nil //nolint:gosec,unconvert // far below 2^63; the types differ between systems
}
