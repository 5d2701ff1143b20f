// Package box is the life of a box: its name and registry record, locks,
// ports, ownership, and the lifecycle with its rollback. It knows no terminal
// and no driver's insides.
//
// Three promises shape it. A machine is deleted only when it carries the
// owner id that this host wrote down, durably, before the machine existed.
// A record is forgotten only when the absence of its machine was verified.
// Whatever ends a mutation early, the next command can tell what happened.
package box

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"hermes-box-lite/internal/vm"
)

// Home is where everything of this user's boxes is kept.
type Home struct{ dir, configFile string }

// HomeAt returns the Home in dir, with its box.env beside the rest.
func HomeAt(dir string) Home { return Home{dir, filepath.Join(dir, "box.env")} }

// HomeSplit returns a Home whose box.env is elsewhere.
func HomeSplit(dir, configFile string) Home { return Home{dir, configFile} }

// ConfigFile is box.env. Relative paths in it start at its directory.
func (h Home) ConfigFile() string { return h.configFile }

// Backups is where archives go.
func (h Home) Backups() string { return filepath.Join(h.dir, "backups") }

// Cache holds what can be made again.
func (h Home) Cache() string { return filepath.Join(h.private(), "cache") }

// Machines is where drivers keep what their engine keeps nowhere else.
func (h Home) Machines() string { return filepath.Join(h.private(), "machines") }

func (h Home) private() string     { return filepath.Join(h.dir, ".box") }
func (h Home) records() string     { return filepath.Join(h.private(), "boxes") }
func (h Home) locks() string       { return filepath.Join(h.private(), "locks") }
func (h Home) transcripts() string { return filepath.Join(h.private(), "transcripts") }

// verifications holds what is known of archive files, one file each.
func (h Home) verifications() string { return filepath.Join(h.private(), "verified") }

// ensure makes the private directories.
func (h Home) ensure() error {
	for _, dir := range []string{h.private(), h.records(), h.locks(), h.transcripts()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("prepare %s: %w", h.private(), err)
		}
	}
	// An older umask or a careless copy must not leave it open.
	return os.Chmod(h.private(), 0o700)
}

var namePattern = regexp.MustCompile(`^[a-z][a-z0-9-]{0,38}$`)

// NameError is a name that no box can have.
type NameError struct{ Name string }

func (e *NameError) Error() string {
	return fmt.Sprintf("%q is not a box name: use a lower-case letter, then letters, digits and single dashes, at most 39, no dash at the end", e.Name)
}

// CheckName returns a *NameError for a name outside the grammar.
func CheckName(name string) error {
	if !namePattern.MatchString(name) || strings.Contains(name, "--") || strings.HasSuffix(name, "-") {
		return &NameError{name}
	}
	return nil
}

// GoneError says that the machine of a recorded box is certainly not there.
type GoneError struct{ Name, Driver string }

func (e *GoneError) Error() string {
	return fmt.Sprintf("the machine of %s is gone: the %s driver has none of that name", e.Name, e.Driver)
}

func (e *GoneError) Unwrap() error { return vm.ErrNotFound }

// Hint forgets the record.
func (e *GoneError) Hint() string { return "box rm " + e.Name }

// ElsewhereError says that an engine knows nothing of a machine because it
// looks for machines in another place than the one where that one was made:
// another user, another HOME, another daemon. It does not mean that the
// machine is gone.
type ElsewhereError struct{ Name, Driver, Made, Here string }

func (e *ElsewhereError) Error() string {
	return fmt.Sprintf("the machine of %s was made in %s, and the %s driver looks in %s now: run box as the user and with the environment that made it",
		e.Name, e.Made, e.Driver, e.Here)
}

// Sentinels on which callers branch.
var (
	// ErrNotFound: this host has no box of that name.
	ErrNotFound = errors.New("no such box")
	// ErrExists: a box, or a machine that is not ours, has the name.
	ErrExists = errors.New("already exists")
	// ErrNotRunning: the box is stopped and the verb does not start boxes.
	ErrNotRunning = errors.New("the box is not running")
	// ErrUnhealthy: the doctor found a fault.
	ErrUnhealthy = errors.New("the box is unhealthy")
)
