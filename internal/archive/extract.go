package archive

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// hole is the granularity in which zeros become holes: below it a hole saves
// little and costs an extent.
const hole = 64 << 10

// atOnce is how many small files are written side by side. They are most of a
// state's entries, and making one costs the file system more than reading it
// costs us.
const atOnce = 4

// ExtractOptions say how entries become files.
type ExtractOptions struct {
	// Strip leaves the leading "data/" out of names; "data" itself is then
	// the root, whose metadata is set at the end.
	Strip bool
	// Existing are directories (paths below the root) that may be there
	// already, such as "lost+found".
	Existing map[string]bool
	// Chown gives entries to these owners; otherwise they stay the process's.
	Chown              bool
	AgentUID, AgentGID int
	RootUID, RootGID   int
	// Drop tells by entry name what to leave out although it is valid. What is
	// below a dropped directory and hard links to a dropped file are left out
	// with it.
	Drop func(name string) bool
}

// Extractor is a [Handler] that writes entries below a directory and nowhere
// else: it goes down part by part, from open directory to open directory, and
// follows no link. Symbolic links are made last, so that there is none to
// follow; directories keep mode 0700 until then. What it wrote is complete only
// after [Extractor.Finish]; an error may be told some entries later than that
// which it names.
type Extractor struct {
	top  *openDir
	open []*openDir // from below top down to the directory of the entry before
	o    ExtractOptions
	dirs []Entry
	syms []Entry
	buf  []byte

	small   chan []byte // buffers of small files that are not being written
	writing sync.WaitGroup
	mu      sync.Mutex
	err     error // the first of a small file

	skippedXattrs atomic.Int64
}

// openDir is an open directory, closed by the last who uses it.
type openDir struct {
	name  string // below the root
	fd    int
	users atomic.Int32
}

func (f *openDir) release() error {
	if f.users.Add(-1) > 0 {
		return nil
	}
	return os.NewSyscallError("close", unix.Close(f.fd))
}

// NewExtractor extracts below dir, which should be empty and belong to nobody
// else while it works. It stays the caller's to close.
func NewExtractor(dir *os.File, o ExtractOptions) *Extractor {
	x := &Extractor{top: &openDir{fd: int(dir.Fd())}, o: o, buf: make([]byte, hole), small: make(chan []byte, atOnce)}
	x.top.users.Store(1) // never released
	for range atOnce {
		x.small <- make([]byte, hole)
	}
	return x
}

// Dir makes a directory.
func (x *Extractor) Dir(e Entry) error {
	if x.dropped(e.Name) {
		return nil
	}
	if name := x.path(e.Name); name != "." {
		if err := x.in(name, func(dir *openDir, base string) error { return x.mkdir(dir, base, x.o.Existing[name]) }); err != nil {
			return x.fail(e, err)
		}
	}
	x.dirs = append(x.dirs, e)
	return x.failed()
}

func (x *Extractor) mkdir(dir *openDir, base string, mayExist bool) error {
	err := uninterrupted(func() error { return unix.Mkdirat(dir.fd, base, 0o700) })
	if mayExist && errors.Is(err, fs.ErrExist) {
		var st unix.Stat_t
		if unix.Fstatat(dir.fd, base, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return nil
		}
	}
	return os.NewSyscallError("mkdirat", err)
}

// File writes a file.
func (x *Extractor) File(e Entry, r io.Reader) error {
	if x.dropped(e.Name) {
		return nil
	}
	if e.Size >= hole {
		err := x.in(x.path(e.Name), func(dir *openDir, base string) error {
			return x.write(dir, base, &e, func(f *os.File) error { return x.copy(f, r, e.Size) })
		})
		return errors.Join(x.fail(e, err), x.failed())
	}
	buf := <-x.small
	n, err := io.ReadFull(r, buf)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF { //nolint:errorlint // as in copy
		x.small <- buf
		return x.fail(e, err)
	}
	if int64(n) != e.Size {
		x.small <- buf
		return x.fail(e, io.ErrUnexpectedEOF)
	}
	dir, base, err := x.enter(x.path(e.Name))
	if err != nil {
		x.small <- buf
		return x.fail(e, err)
	}
	x.writing.Go(func() {
		err := x.write(dir, base, &e, func(f *os.File) error {
			_, err := f.Write(buf[:n])
			return err
		})
		x.small <- buf
		if err = errors.Join(err, dir.release()); err != nil {
			x.mu.Lock()
			defer x.mu.Unlock()
			if x.err == nil {
				x.err = x.fail(e, err)
			}
		}
	})
	return x.failed()
}

// failed is the first error of a small file until now.
func (x *Extractor) failed() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.err
}

// settled waits for the small files.
func (x *Extractor) settled() error {
	x.writing.Wait()
	return x.failed()
}

// write makes a file, has it filled and gives it its metadata.
func (x *Extractor) write(dir *openDir, base string, e *Entry, fill func(*os.File) error) error {
	fd, err := openat(dir.fd, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), base)
	if err = fill(f); err == nil {
		err = x.metadata(f, dir, base, e)
	}
	return errors.Join(err, f.Close())
}

// openat opens base of a directory, a link never. The caller closes it.
func openat(dir int, base string, flags int) (fd int, err error) {
	err = uninterrupted(func() (err error) {
		fd, err = unix.Openat(dir, base, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	return fd, os.NewSyscallError("openat", err)
}

// uninterrupted tries again what a signal interrupted, as package os does.
func uninterrupted(call func() error) error {
	for {
		if err := call(); err != unix.EINTR { //nolint:errorlint // calls return it bare
			return err
		}
	}
}

// copy writes r to f, and leaves holes where it has nothing but zeros.
func (x *Extractor) copy(f *os.File, r io.Reader, size int64) error {
	var at int64
	holed := false
	for {
		n, err := io.ReadFull(r, x.buf)
		switch {
		case n == len(x.buf) && zero(x.buf):
			holed = true
		case n > 0:
			if _, err := f.WriteAt(x.buf[:n], at); err != nil {
				return err
			}
		}
		at += int64(n)
		if err == io.EOF || err == io.ErrUnexpectedEOF { //nolint:errorlint // ReadFull's own, not a cause in r's error
			break
		}
		if err != nil {
			return err
		}
	}
	if at != size {
		return io.ErrUnexpectedEOF
	}
	if holed {
		return f.Truncate(at)
	}
	return nil
}

// Link makes another name of an earlier file.
func (x *Extractor) Link(e Entry) error {
	if x.dropped(e.Name) || x.dropped(e.Target) {
		return nil
	}
	if err := x.settled(); err != nil { // it may be one of the small ones
		return err
	}
	return x.fail(e, x.in(x.path(e.Target), func(from *openDir, target string) error {
		return x.in(x.path(e.Name), func(to *openDir, base string) error {
			return os.NewSyscallError("linkat", uninterrupted(func() error { return unix.Linkat(from.fd, target, to.fd, base, 0) }))
		})
	}))
}

// Symlink remembers a symbolic link for [Extractor.Finish].
func (x *Extractor) Symlink(e Entry) error {
	if !x.dropped(e.Name) {
		x.syms = append(x.syms, e)
	}
	return nil
}

// Finish makes the symbolic links and sets the directories' metadata. It is
// called once, after [Read] has returned without error. That all is on the disk
// too is for the caller to see to, by syncing the file system: file by file
// costs more than the extraction.
func (x *Extractor) Finish() error {
	if err := x.settled(); err != nil {
		return err
	}
	for i := range x.syms {
		e := &x.syms[i]
		if err := x.in(x.path(e.Name), func(dir *openDir, base string) error { return x.symlink(dir, base, e) }); err != nil {
			return x.fail(*e, err)
		}
	}
	// A directory comes before what is in it, so this way none is touched after
	// its children.
	for i := range slices.Backward(x.dirs) {
		e := &x.dirs[i]
		if err := x.in(x.path(e.Name), func(dir *openDir, base string) error { return x.finishDir(dir, base, e) }); err != nil {
			return x.fail(*e, err)
		}
	}
	return x.leave(0)
}

func (x *Extractor) symlink(dir *openDir, base string, e *Entry) error {
	if err := uninterrupted(func() error { return unix.Symlinkat(e.Target, dir.fd, base) }); err != nil {
		return os.NewSyscallError("symlinkat", err)
	}
	if x.o.Chown {
		uid, gid := x.owner(e)
		if err := unix.Fchownat(dir.fd, base, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return os.NewSyscallError("fchownat", err)
		}
	}
	return setTime(dir, base, e.ModTime)
}

func (x *Extractor) finishDir(dir *openDir, base string, e *Entry) error {
	fd, err := openat(dir.fd, base, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), base)
	return errors.Join(x.metadata(f, dir, base, e), f.Close())
}

// metadata gives an open file or directory its attributes, owner, mode and
// time, in this order: each may undo or forbid the one before.
func (x *Extractor) metadata(f *os.File, dir *openDir, base string, e *Entry) error {
	for name, value := range e.Xattrs {
		switch err := unix.Fsetxattr(int(f.Fd()), name, []byte(value), 0); {
		case errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.E2BIG), errors.Is(err, unix.ERANGE):
			x.skippedXattrs.Add(1) // no place for it here: content is worth more
		case err != nil:
			return os.NewSyscallError("fsetxattr", err)
		}
	}
	if x.o.Chown {
		if err := f.Chown(x.owner(e)); err != nil {
			return err
		}
	}
	if err := f.Chmod(e.Mode & fs.ModePerm); err != nil {
		return err
	}
	return setTime(dir, base, e.ModTime)
}

// setTime sets the modification time of what is at base, be it a link; it was
// last read now.
func setTime(dir *openDir, base string, modified time.Time) error {
	times := make([]unix.Timespec, 2)
	for i, t := range []time.Time{time.Now(), modified} {
		var err error
		if times[i], err = unix.TimeToTimespec(t); err != nil {
			return fmt.Errorf("its time: %w", err)
		}
	}
	return os.NewSyscallError("utimensat", unix.UtimesNanoAt(dir.fd, base, times, unix.AT_SYMLINK_NOFOLLOW))
}

// SkippedXattrs is the number of extended attributes for which the file system
// has no place. Finish gives the last ones.
func (x *Extractor) SkippedXattrs() int { return int(x.skippedXattrs.Load()) }

// owner is who an entry is given to.
func (x *Extractor) owner(e *Entry) (uid, gid int) {
	if e.Owner == Agent {
		return x.o.AgentUID, x.o.AgentGID
	}
	return x.o.RootUID, x.o.RootGID
}

// path is where an entry goes, relative to the root.
func (x *Extractor) path(name string) string {
	if !x.o.Strip {
		return name
	}
	if name == dataName {
		return "."
	}
	return strings.TrimPrefix(name, dataName+"/")
}

// dropped tells whether an entry or a directory above it is to be left out.
func (x *Extractor) dropped(name string) bool {
	if x.o.Drop == nil {
		return false
	}
	for i, c := range []byte(name) {
		if c == '/' && x.o.Drop(name[:i]) {
			return true
		}
	}
	return x.o.Drop(name)
}

// in calls do with the directory that holds path, and path's last part.
func (x *Extractor) in(path string, do func(dir *openDir, base string) error) error {
	dir, base, err := x.enter(path)
	if err != nil {
		return err
	}
	return errors.Join(do(dir, base), dir.release())
}

// enter opens the directory that holds path, for its caller to release. Most
// entries are in the directory of the one before or just below it.
func (x *Extractor) enter(path string) (*openDir, string, error) {
	parent, base, _ := cutLast(path)
	if path != "." && !isPart(base) {
		return nil, "", os.NewSyscallError("openat", unix.EINVAL)
	}
	shared := 0
	for shared < len(x.open) && isWithin(parent, x.open[shared].name) {
		shared++
	}
	if err := x.leave(shared); err != nil {
		return nil, "", err
	}
	dir := x.top
	if shared > 0 {
		dir = x.open[shared-1]
	}
	for dir.name != parent {
		rest := strings.TrimPrefix(parent[len(dir.name):], "/")
		part, _, _ := strings.Cut(rest, "/")
		if !isPart(part) {
			return nil, "", os.NewSyscallError("openat", unix.EINVAL)
		}
		fd, err := openat(dir.fd, part, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return nil, "", err
		}
		dir = &openDir{name: parent[:len(parent)-len(rest)+len(part)], fd: fd}
		dir.users.Store(1)
		x.open = append(x.open, dir)
	}
	dir.users.Add(1)
	return dir, base, nil
}

// isPart tells whether part is one step down. [Read] lets nothing else through.
func isPart(part string) bool { return part != "" && part != "." && part != ".." }

func isWithin(path, dir string) bool {
	return strings.HasPrefix(path, dir) && (len(path) == len(dir) || path[len(dir)] == '/')
}

// leave closes all open directories but the first n.
func (x *Extractor) leave(n int) error {
	var err error
	for _, dir := range x.open[n:] {
		err = errors.Join(err, dir.release())
	}
	x.open = x.open[:n]
	return err
}

// Close waits for what is being written and releases what an extraction that is
// given up holds. After [Extractor.Finish] there is nothing left to do.
func (x *Extractor) Close() error {
	x.writing.Wait()
	return x.leave(0)
}

// fail says which entry an error is about. The error's own path is dropped: it
// is not escaped.
func (x *Extractor) fail(e Entry, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("extract %s: %w", cut(printable(e.Name), 300), bare(err))
}

// bare takes the operation and the names out of a file system's error.
func bare(err error) error {
	var path *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &path):
		return fmt.Errorf("%s: %w", path.Op, path.Err)
	case errors.As(err, &link):
		return fmt.Errorf("%s: %w", link.Op, link.Err)
	}
	return err
}
