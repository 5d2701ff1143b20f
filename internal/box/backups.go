package box

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Backup is an archive of a box found in the backups directory.
type Backup struct {
	Path     string
	Time     time.Time // UTC, from its name
	Verified bool      // this host wrote and verified it
}

// backupLayout is the time in an archive's name.
const backupLayout = "20060102-150405"

const backupSuffix = ".tar.gz.gpg"

// NewestBackup finds the newest archive of a box by the name that archives
// are given. found is false when there is none.
func (h Home) NewestBackup(name string) (newest Backup, found bool, err error) {
	entries, err := os.ReadDir(h.Backups())
	if errors.Is(err, fs.ErrNotExist) {
		return Backup{}, false, nil
	}
	if err != nil {
		return Backup{}, false, err
	}
	for _, e := range entries {
		stamp, ok := strings.CutPrefix(e.Name(), name+"-")
		if !ok {
			continue
		}
		stamp, ok = strings.CutSuffix(stamp, backupSuffix)
		when, timeErr := time.ParseInLocation(backupLayout, stamp, time.UTC)
		if !ok || timeErr != nil || !e.Type().IsRegular() {
			continue
		}
		if !found || when.After(newest.Time) {
			newest, found = Backup{Path: filepath.Join(h.Backups(), e.Name()), Time: when}, true
		}
	}
	return newest, found, nil
}
