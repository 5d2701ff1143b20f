package backup

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"os"
	"syscall"

	"github.com/klauspost/compress/gzip"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/stream"
)

// bufferSize of reads and writes of the file, bytes.
const bufferSize = 1 << 20

// Archive is an opened archive file. It stays the same file until Close,
// whatever happens to its name.
type Archive struct {
	file       *os.File
	passphrase Passphrase
	limits     archive.Limits
	report     *Report // of Verify

	skippedXattrs int // by Extract

	folds func(dir string) (bool, error) // instead of foldsNames, in tests
}

// Open opens an archive and keeps it from being pruned meanwhile.
func Open(path string, p Passphrase, l archive.Limits) (*Archive, error) {
	// Not blocking, or else a FIFO would be waited for.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a file", path)
	}
	if err == nil {
		_, err = lockFile(f, syscall.LOCK_SH)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Archive{file: f, passphrase: p, limits: l}, nil
}

// lockFile takes an advisory lock. On a file system without locks there is none
// to respect, and none is held.
func lockFile(f *os.File, how int) (held bool, err error) {
	err = syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, fmt.Errorf("%s is in use by another command", f.Name())
	}
	return err == nil, nil
}

// Close releases the file.
func (a *Archive) Close() error { return a.file.Close() }

// Verify reads the whole archive. ErrAuth and archive.ErrUnsafe tell why it is
// none.
func (a *Archive) Verify(ctx context.Context, progress Progress) (Report, error) {
	report, err := a.read(ctx, nil, progress)
	if err != nil {
		return Report{}, err
	}
	a.report = &report
	return report, nil
}

// errNotVerified is a fault of the caller.
var errNotVerified = errors.New("the archive was not verified yet")

// Stream writes the gzip stream of a verified archive to w. It fails when the
// file is no longer the one that was verified; what w got counts only after
// nil.
func (a *Archive) Stream(ctx context.Context, w io.Writer, progress Progress) error {
	if a.report == nil {
		return errNotVerified
	}
	source, err := a.rewind(ctx, progress)
	if err != nil {
		return err
	}
	sum := sha256.New()
	err = func() error {
		m, err := decrypt(source.buffered, a.passphrase)
		if err != nil {
			return err
		}
		if _, err := io.CopyBuffer(io.MultiWriter(w, sum), onlyReader{m}, make([]byte, bufferSize)); err != nil {
			return err
		}
		return m.finish()
	}()
	if err := source.stop(); err != nil {
		return err
	}
	if errors.Is(err, ErrAuth) || errors.Is(err, errExtra) {
		return changed(err)
	}
	if err != nil {
		return err
	}
	if digest(source.sum) != a.report.SHA256 || digest(sum) != a.report.Stream {
		return ErrChanged
	}
	return nil
}

// changed is err in an archive that was whole a moment ago.
func changed(err error) error { return fmt.Errorf("%w: %w", ErrChanged, err) }

// onlyReader hides other methods, so that io.CopyBuffer uses its buffer.
type onlyReader struct{ io.Reader }

// source is the file from its beginning, counted and hashed. It has a core of
// its own; what it counted is known after stop.
type source struct {
	buffered *bufio.Reader
	ahead    *stream.Reader
	sum      hash.Hash
	size     int64 // read so far
	err      error // of the file or the context, as opposed to its content; final
}

// open begins to read a file through r, which is at its beginning. The caller
// must stop it.
func open(ctx context.Context, r io.Reader, progress func(done int64)) *source {
	s := &source{sum: sha256.New()}
	s.ahead = stream.Ahead(&sourceReader{ctx: ctx, r: r, src: s, progress: progress})
	s.buffered = bufio.NewReader(s.ahead)
	return s
}

// stop returns the error of the file or the context.
func (s *source) stop() error {
	s.ahead.Stop()
	return s.err
}

type sourceReader struct {
	ctx      context.Context
	r        io.Reader
	src      *source
	progress func(done int64)
}

func (r *sourceReader) Read(p []byte) (int, error) {
	if r.src.err == nil {
		r.src.err = context.Cause(r.ctx)
	}
	if r.src.err != nil {
		return 0, r.src.err
	}
	n, err := r.r.Read(p)
	r.src.sum.Write(p[:n])
	r.src.size += int64(n)
	r.progress(r.src.size)
	if err != nil && err != io.EOF {
		r.src.err = fmt.Errorf("read the archive: %w", err)
	}
	return n, err
}

// rewind begins to read the file.
func (a *Archive) rewind(ctx context.Context, progress Progress) (*source, error) {
	info, err := a.file.Stat()
	if err != nil {
		return nil, fmt.Errorf("read the archive: %w", err)
	}
	return open(ctx, io.NewSectionReader(a.file, 0, math.MaxInt64), func(done int64) {
		if progress != nil {
			progress(done, max(info.Size(), done))
		}
	}), nil
}

// read is readAll of the file.
func (a *Archive) read(ctx context.Context, h archive.Handler, progress Progress) (Report, error) {
	source, err := a.rewind(ctx, progress)
	if err != nil {
		return Report{}, err
	}
	return a.readAll(source, h)
}

// readAll takes the archive apart, hands its entries to h, and returns nil only
// when message, gzip stream and grammar were sound to their ends. What h was
// given before counts only then. It stops the source.
func (a *Archive) readAll(source *source, h archive.Handler) (Report, error) {
	m, err := decrypt(source.buffered, a.passphrase)
	if err != nil {
		return Report{}, cmp.Or(source.stop(), err)
	}
	sum := sha256.New()
	summary, contentErr := readStream(stream.Ahead(m), sum, a.limits, h)
	// Whatever the content was like: first it must be what its maker wrote.
	err = m.finish()
	sourceErr := source.stop()
	switch {
	case sourceErr != nil:
		return Report{}, sourceErr
	case err != nil && !errors.Is(err, errExtra):
		return Report{}, err
	case contentErr != nil:
		return Report{}, contentErr
	case err != nil:
		return Report{}, fmt.Errorf("%w: %w", archive.ErrUnsafe, err)
	}
	return Report{Size: source.size, SHA256: digest(source.sum), Stream: digest(sum), Summary: summary}, nil
}

// readStream reads one gzip stream, and nothing after it, through the grammar,
// and hashes it. Decryption, which is the slowest, has a core of its own.
func readStream(r *stream.Reader, sum io.Writer, l archive.Limits, h archive.Handler) (archive.Summary, error) {
	defer r.Stop()
	br := bufio.NewReaderSize(io.TeeReader(r, sum), 64<<10)
	z, err := gzip.NewReader(br)
	if err != nil {
		return archive.Summary{}, notGzip(err)
	}
	z.Multistream(false)
	unpacked := stream.Ahead(z)
	defer unpacked.Stop()
	marked := &markedReader{r: unpacked}
	summary, err := archive.Read(marked, l, h)
	if marked.err != nil {
		return summary, notGzip(marked.err)
	}
	if err != nil {
		return summary, err
	}
	if _, err := br.Peek(1); err != io.EOF {
		return summary, fmt.Errorf("%w: something follows the gzip stream", archive.ErrUnsafe)
	}
	return summary, nil
}

// notGzip: what is authenticated and yet no gzip stream was made so.
func notGzip(err error) error {
	if errors.Is(err, ErrAuth) {
		return err
	}
	return fmt.Errorf("%w: its content is no whole gzip stream: %w", archive.ErrUnsafe, err)
}

// markedReader keeps the first error that is not the end.
type markedReader struct {
	r   io.Reader
	err error
}

func (m *markedReader) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	if err != nil && err != io.EOF && m.err == nil {
		m.err = err
	}
	return n, err
}

func digest(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }
