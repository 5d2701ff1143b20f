package backup

import "golang.org/x/sys/unix"

// renameNoReplace fails with fs.ErrExist when to is there.
func renameNoReplace(from, to string) error {
	return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
}
