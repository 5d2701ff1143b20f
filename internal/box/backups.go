package box

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/backup"
)

// Backup is an archive of a box.
type Backup struct {
	Path     string
	Time     time.Time // UTC, from its name, else the file's own
	Verified bool      // this host read all of this very file
}

// backupLayout is the time in an archive's name.
const backupLayout = "20060102-150405"

const backupSuffix = ".tar.gz.gpg"

// backupName is the name of an archive that is saved without another.
func backupName(box string, when time.Time) string {
	return box + "-" + when.UTC().Format(backupLayout) + backupSuffix
}

// backupTime is the inverse of backupName.
func backupTime(box, base string) (time.Time, bool) {
	stamp, ok := strings.CutPrefix(base, box+"-")
	if !ok {
		return time.Time{}, false
	}
	stamp, ok = strings.CutSuffix(stamp, backupSuffix)
	when, err := time.ParseInLocation(backupLayout, stamp, time.UTC)
	return when, ok && err == nil
}

// NewestBackup finds the newest archive of a box: among those in the backups
// directory, by the name that archives are given, and the one that save wrote
// last, wherever that is. found is false when there is none.
func (m *Manager) NewestBackup(name string) (newest Backup, found bool, err error) {
	byBox, err := m.backupsByBox()
	if err != nil {
		return Backup{}, false, err
	}
	rec, err := m.registry.get(name)
	if err != nil {
		rec = Record{} // its reader has reported it
	}
	newest, found = m.newestOf(name, rec, byBox[name])
	return newest, found, nil
}

// NewestBackups is NewestBackup for several boxes, in one look at the
// directory; boxes without an archive are missing.
func (m *Manager) NewestBackups(boxes []Status) (map[string]Backup, error) {
	byBox, err := m.backupsByBox()
	if err != nil {
		return nil, err
	}
	newest := map[string]Backup{}
	var mu sync.Mutex
	var readers errgroup.Group // none of them fails
	readers.SetLimit(runtime.GOMAXPROCS(0))
	for _, s := range boxes {
		if s.State == StateForeign {
			continue // of the name it may have, archives are another's
		}
		readers.Go(func() error {
			if b, ok := m.newestOf(s.Name, s.rec, byBox[s.Name]); ok {
				mu.Lock()
				defer mu.Unlock()
				newest[s.Name] = b
			}
			return nil
		})
	}
	return newest, readers.Wait()
}

// newestOf chooses among the archives that carry a box's name; rec is its
// record, or none.
func (m *Manager) newestOf(name string, rec Record, list []Backup) (newest Backup, found bool) {
	if rec.LastArchive != "" {
		if info, err := os.Stat(rec.LastArchive); err == nil {
			last := Backup{Path: rec.LastArchive, Time: info.ModTime().UTC()}
			if when, ok := backupTime(name, filepath.Base(last.Path)); ok {
				last.Time = when
			}
			list = append(list, last)
		}
	}
	slices.SortStableFunc(list, func(a, b Backup) int { return b.Time.Compare(a.Time) })
	for _, b := range list {
		if found && b.Time.Before(newest.Time) {
			break // the older ones need no look
		}
		v, ok := m.home.verified(b.Path)
		if ok && rec.OwnerID != "" && v.Lineage != rec.Lineage {
			continue // of an earlier box of that name
		}
		b.Verified = ok
		if !found || b.Verified {
			newest, found = b, true
		}
	}
	return newest, found
}

// backupsByBox returns the archives in the backups directory by the boxes that
// they are called after.
func (m *Manager) backupsByBox() (map[string][]Backup, error) {
	entries, err := os.ReadDir(m.home.Backups())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	const tail = len("-"+backupLayout) + len(backupSuffix)
	byBox := map[string][]Backup{}
	for _, e := range entries {
		if len(e.Name()) <= tail || !e.Type().IsRegular() {
			continue
		}
		name := e.Name()[:len(e.Name())-tail]
		if when, ok := backupTime(name, e.Name()); ok {
			byBox[name] = append(byBox[name], Backup{Path: filepath.Join(m.home.Backups(), e.Name()), Time: when})
		}
	}
	return byBox, nil
}

// backupsIn returns the archives of a box in a directory, oldest first.
func (m *Manager) backupsIn(dir, name string) ([]Backup, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []Backup
	for _, e := range entries {
		if when, ok := backupTime(name, e.Name()); ok && e.Type().IsRegular() {
			list = append(list, Backup{Path: filepath.Join(dir, e.Name()), Time: when})
		}
	}
	slices.SortStableFunc(list, func(a, b Backup) int { return a.Time.Compare(b.Time) })
	return list, nil
}

// verification is what this host knows of an archive file that it has read to
// its end. Size and time tell, without reading it again, that the file is
// still the one with that hash.
type verification struct {
	Path    string    `json:"path"`
	SHA256  string    `json:"sha256"`
	Size    int64     `json:"size"`
	ModTime time.Time `json:"mod_time"`
	Time    time.Time `json:"time"` // UTC, of the verification
	// Lineage of the state inside: a name may be given to another box.
	Lineage string `json:"lineage"`
}

func (h Home) verification(path string) string {
	sum := sha256.Sum256([]byte(path))
	return filepath.Join(h.verifications(), hex.EncodeToString(sum[:])+".json")
}

// noteVerified remembers that the file at path was verified.
func (h Home) noteVerified(path string, report backup.Report, now time.Time) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	data, err := json.Marshal(verification{
		Path: path, SHA256: report.SHA256, Size: report.Size, ModTime: info.ModTime(), Time: now.UTC(),
		Lineage: report.Manifest.Lineage,
	})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(h.verifications(), 0o700); err != nil {
		return err
	}
	return atomicfile.Write(h.verification(path), append(data, '\n'), 0o600)
}

// verified returns what this host knows of a file that it has verified, if it
// is still that file.
func (h Home) verified(path string) (v verification, ok bool) {
	path, err := filepath.Abs(path)
	if err != nil {
		return verification{}, false
	}
	data, err := os.ReadFile(h.verification(path))
	if err != nil {
		return verification{}, false
	}
	info, err := os.Stat(path)
	return v, err == nil && json.Unmarshal(data, &v) == nil && v.Path == path && v.Size == info.Size() && v.ModTime.Equal(info.ModTime())
}

// prune removes the oldest verified archives of a box's state beside its
// newest, and returns what it removed, so that keep of them are left. The
// newest itself stays whatever the clock says. An archive that this host has
// not verified, that is of another state under the same name, or that a command
// is reading, stays and counts for nothing.
func (m *Manager) prune(newest, name, lineage string, keep int) (removed []string, err error) {
	list, err := m.backupsIn(filepath.Dir(newest), name)
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(b Backup) bool {
		v, ok := m.home.verified(b.Path)
		return !ok || v.Lineage != lineage || b.Path == newest
	})
	for _, b := range list[:max(0, len(list)+1-keep)] {
		gone, err := backup.RemoveUnused(b.Path)
		if err != nil {
			return removed, err
		}
		if gone {
			removed = append(removed, b.Path)
			_ = os.Remove(m.home.verification(b.Path)) // of a file that is no more
		}
	}
	return removed, nil
}

// VerifyArchive reads an archive to its end.
func (m *Manager) VerifyArchive(ctx context.Context, path string, p backup.Passphrase) (backup.Report, error) {
	a, report, err := m.openArchive(ctx, path, p)
	if err != nil {
		return backup.Report{}, err
	}
	return report, a.Close()
}

// openArchive opens and verifies an archive; the caller closes it.
func (m *Manager) openArchive(ctx context.Context, path string, p backup.Passphrase) (*backup.Archive, backup.Report, error) {
	a, err := backup.Open(path, p, archive.DefaultLimits())
	if err != nil {
		return nil, backup.Report{}, err
	}
	report, err := a.Verify(ctx, m.opts.Report.Progress)
	if err == nil {
		if noteErr := m.home.noteVerified(path, report, m.opts.Now()); noteErr != nil {
			m.opts.Report.Warn("remember that it was verified: " + noteErr.Error())
		}
		return a, report, nil
	}
	return nil, backup.Report{}, errors.Join(fmt.Errorf("%s: %w", path, err), a.Close())
}

// lostXattrs says that extended attributes of files are not in a place.
func lostXattrs(n int, place string) string {
	return fmt.Sprintf("extended attributes of files were left out, for the file system of %s has no place for them: %d", place, n)
}

// ExtractArchive verifies an archive and writes its content into a new
// directory; dir "" is one below the backups directory. It returns the
// directory.
func (m *Manager) ExtractArchive(ctx context.Context, path, dir string, p backup.Passphrase) (string, error) {
	if dir == "" {
		if err := os.MkdirAll(m.home.Backups(), 0o700); err != nil {
			return "", err
		}
		stem := strings.TrimSuffix(filepath.Base(path), backupSuffix)
		dir = filepath.Join(m.home.Backups(), stem+"-extracted-"+m.opts.Now().UTC().Format(backupLayout))
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if err := backup.Free(dir); err != nil {
		return "", err
	}
	m.opts.Report.Step("verify")
	a, _, err := m.openArchive(ctx, path, p)
	if err != nil {
		return "", err
	}
	m.opts.Report.Step("extract")
	if err := errors.Join(a.Extract(ctx, dir, m.opts.Report.Progress), a.Close()); err != nil {
		return "", fmt.Errorf("extract %s: %w", path, err)
	}
	if n := a.SkippedXattrs(); n > 0 {
		m.opts.Report.Warn(lostXattrs(n, dir))
	}
	return dir, nil
}
