package backup

import "golang.org/x/sys/unix"

// renameNoReplace fails with fs.ErrExist when to is there.
func renameNoReplace(from, to string) error {
	return unix.RenamexNp(from, to, unix.RENAME_EXCL)
}
