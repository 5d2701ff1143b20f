//go:build !linux

package archive

import (
	"os"
	"time"
)

// setTime sets the modification time. There is no call for the open file in
// package os; nobody else is in the directory yet.
func setTime(_ *os.File, parent *os.Root, base string, t time.Time) error {
	return parent.Chtimes(base, time.Time{}, t)
}

// setSymlinkTime leaves a link's time as it is: no portable call sets it.
func setSymlinkTime(*os.Root, string, time.Time) (bool, error) { return false, nil }

// setXattrs leaves all out.
func setXattrs(_ *os.File, xattrs map[string]string) (skipped int, err error) {
	return len(xattrs), nil
}
