package archive

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
)

// hole is the granularity in which zeros become holes: below it a hole saves
// little and costs an extent.
const hole = 64 << 10

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
	// NoXattrs leaves extended attributes out.
	NoXattrs bool
	// Drop tells by entry name what to leave out although it is valid. What is
	// below a dropped directory and hard links to a dropped file are left out
	// with it.
	Drop func(name string) bool
}

// Extractor is a [Handler] that writes entries below a directory, and by way
// of [os.Root] nowhere else. Symbolic links are made last, so that nothing is
// ever written through one; directories keep mode 0700 until then. What it
// wrote is complete only after [Extractor.Finish].
type Extractor struct {
	root *os.Root
	o    ExtractOptions
	dirs []Entry
	syms []Entry
	buf  []byte
	// The directory of the entry before: most have the same.
	parent     *os.Root
	parentName string

	skippedXattrs int
	skippedTimes  int
}

// NewExtractor extracts below root, which should be empty and belong to nobody
// else while it works. The root stays the caller's to close.
func NewExtractor(root *os.Root, o ExtractOptions) *Extractor {
	return &Extractor{root: root, o: o, buf: make([]byte, hole)}
}

// Dir makes a directory.
func (x *Extractor) Dir(e Entry) error {
	if x.dropped(e.Name) {
		return nil
	}
	name := x.path(e.Name)
	if name != "." {
		parent, base, err := x.open(name)
		if err != nil {
			return x.fail(e, err)
		}
		err = parent.Mkdir(base, 0o700)
		if errors.Is(err, fs.ErrExist) && x.o.Existing[name] {
			info, statErr := parent.Lstat(base)
			if statErr == nil && info.IsDir() {
				err = nil
			}
		}
		if err != nil {
			return x.fail(e, err)
		}
	}
	x.dirs = append(x.dirs, e)
	return nil
}

// File writes a file.
func (x *Extractor) File(e Entry, r io.Reader) error {
	if x.dropped(e.Name) {
		return nil
	}
	parent, base, err := x.open(x.path(e.Name))
	if err != nil {
		return x.fail(e, err)
	}
	f, err := parent.OpenFile(base, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return x.fail(e, err)
	}
	err = x.copy(f, r, e.Size)
	if err == nil {
		err = x.metadata(f, parent, base, &e)
	}
	return errors.Join(x.fail(e, err), x.fail(e, f.Close()))
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
	if err := x.root.Link(x.path(e.Target), x.path(e.Name)); err != nil {
		return x.fail(e, err)
	}
	return nil
}

// Symlink remembers a symbolic link for [Extractor.Finish].
func (x *Extractor) Symlink(e Entry) error {
	if !x.dropped(e.Name) {
		x.syms = append(x.syms, e)
	}
	return nil
}

// Finish makes the symbolic links and sets the directories' metadata, deepest
// first. It is called once, after [Read] has returned without error. That all
// is on the disk too is for the caller to see to, by syncing the file system:
// file by file costs more than the extraction.
func (x *Extractor) Finish() (err error) {
	defer func() { err = errors.Join(err, x.closeParent()) }()
	for i := range x.syms {
		if err := x.symlink(&x.syms[i]); err != nil {
			return x.fail(x.syms[i], err)
		}
	}
	// Stable for determinism; no directory is touched after its children.
	slices.SortStableFunc(x.dirs, func(a, b Entry) int {
		return strings.Count(b.Name, "/") - strings.Count(a.Name, "/")
	})
	for i := range x.dirs {
		if err := x.finishDir(&x.dirs[i]); err != nil {
			return err
		}
	}
	return nil
}

func (x *Extractor) symlink(e *Entry) error {
	parent, base, err := x.open(x.path(e.Name))
	if err != nil {
		return err
	}
	if err := parent.Symlink(e.Target, base); err != nil {
		return err
	}
	if x.o.Chown {
		if err := parent.Lchown(base, x.uid(e), x.gid(e)); err != nil {
			return err
		}
	}
	done, err := setSymlinkTime(parent, base, e.ModTime)
	if !done {
		x.skippedTimes++
	}
	return err
}

func (x *Extractor) finishDir(e *Entry) error {
	name := x.path(e.Name)
	parent, base, err := x.open(name)
	if err != nil {
		return x.fail(*e, err)
	}
	f, err := parent.OpenFile(base, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_DIRECTORY, 0)
	if err != nil {
		return x.fail(*e, err)
	}
	return errors.Join(x.fail(*e, x.metadata(f, parent, base, e)), x.fail(*e, f.Close()))
}

// metadata gives an open file or directory its attributes, owner, mode and
// time, in this order: each may undo or forbid the one before.
func (x *Extractor) metadata(f *os.File, parent *os.Root, base string, e *Entry) error {
	if !x.o.NoXattrs && len(e.Xattrs) > 0 {
		skipped, err := setXattrs(f, e.Xattrs)
		x.skippedXattrs += skipped
		if err != nil {
			return err
		}
	}
	if x.o.Chown {
		if err := f.Chown(x.uid(e), x.gid(e)); err != nil {
			return err
		}
	}
	if err := f.Chmod(e.Mode & fs.ModePerm); err != nil {
		return err
	}
	return setTime(f, parent, base, e.ModTime)
}

// SkippedXattrs is the number of extended attributes that this host or file
// system could not take.
func (x *Extractor) SkippedXattrs() int { return x.skippedXattrs }

// SkippedTimes is the number of symbolic links whose time this host could not
// set.
func (x *Extractor) SkippedTimes() int { return x.skippedTimes }

func (x *Extractor) uid(e *Entry) int {
	if e.Owner == Agent {
		return x.o.AgentUID
	}
	return x.o.RootUID
}

func (x *Extractor) gid(e *Entry) int {
	if e.Owner == Agent {
		return x.o.AgentGID
	}
	return x.o.RootGID
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

// open returns the directory that holds path, and path's last part in it.
func (x *Extractor) open(path string) (*os.Root, string, error) {
	dir, base, below := cutLast(path)
	if !below {
		return x.root, base, nil
	}
	if x.parent != nil && x.parentName == dir {
		return x.parent, base, nil
	}
	if err := x.closeParent(); err != nil {
		return nil, "", err
	}
	parent, err := x.root.OpenRoot(dir)
	if err != nil {
		return nil, "", err
	}
	x.parent, x.parentName = parent, dir
	return parent, base, nil
}

func (x *Extractor) closeParent() error {
	if x.parent == nil {
		return nil
	}
	err := x.parent.Close()
	x.parent = nil
	return err
}

// Close releases what an extraction that is given up holds. After
// [Extractor.Finish] there is nothing left to release.
func (x *Extractor) Close() error { return x.closeParent() }

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
