package archive

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"
)

// From linux/fcntl.h and linux/stat.h; package syscall does not export them.
const (
	atSymlinkNofollow = 0x100
	utimeOmit         = 0x3ffffffe
)

// setTime sets the modification time of an open file. The access time stays.
func setTime(f *os.File, _ *os.Root, _ string, t time.Time) error {
	// With no path the call is about the descriptor itself, see utimensat(2).
	return utimensat(f, nil, t, 0)
}

// setSymlinkTime sets the modification time of a symbolic link itself, for
// which package os has no call.
func setSymlinkTime(parent *os.Root, base string, t time.Time) (bool, error) {
	dir, err := parent.Open(".")
	if err != nil {
		return false, err
	}
	defer func() { _ = dir.Close() }()
	path, err := syscall.BytePtrFromString(base)
	if err != nil {
		return false, err
	}
	return true, utimensat(dir, path, t, atSymlinkNofollow)
}

func utimensat(f *os.File, path *byte, t time.Time, flags uintptr) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	times := [2]syscall.Timespec{{Nsec: utimeOmit}, {Sec: t.Unix(), Nsec: int64(t.Nanosecond())}}
	var errno syscall.Errno
	err = conn.Control(func(fd uintptr) {
		_, _, errno = syscall.Syscall6(syscall.SYS_UTIMENSAT, fd,
			uintptr(unsafe.Pointer(path)), uintptr(unsafe.Pointer(&times)), flags, 0, 0)
	})
	if err == nil && errno != 0 {
		err = &os.SyscallError{Syscall: "utimensat", Err: errno}
	}
	return err
}

// setXattrs sets extended attributes of an open file or directory, through the
// descriptor's name in /proc. Those that the file system has no place for are
// counted: content is worth more than they are.
func setXattrs(f *os.File, xattrs map[string]string) (skipped int, err error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	ctrl := conn.Control(func(fd uintptr) {
		path := fmt.Sprintf("/proc/self/fd/%d", fd)
		for name, value := range xattrs {
			switch e := syscall.Setxattr(path, name, []byte(value), 0); {
			case errors.Is(e, syscall.ENOTSUP), errors.Is(e, syscall.ENOSPC), errors.Is(e, syscall.E2BIG), errors.Is(e, syscall.ERANGE):
				skipped++
			case e != nil:
				err = errors.Join(err, &os.SyscallError{Syscall: "setxattr", Err: e})
			}
		}
	})
	return skipped, errors.Join(err, ctrl)
}
