package backup

import (
	"os"

	"golang.org/x/sys/unix"
)

// renameNoReplace fails with fs.ErrExist when to is there.
func renameNoReplace(from, to string) error {
	return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
}

// syncTree makes what is below a directory durable, by syncing its file system:
// file by file costs more than the extraction.
func syncTree(dir *os.File) error { return unix.Syncfs(int(dir.Fd())) }

// startWriteback lets the disk begin with a part of a file, so that a later
// sync has less to wait for. Where that is not possible the sync does it all.
func startWriteback(f *os.File, from, size int64) {
	_ = unix.SyncFileRange(int(f.Fd()), from, size, unix.SYNC_FILE_RANGE_WRITE)
}
