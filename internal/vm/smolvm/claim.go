package smolvm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"hermes-box-lite/internal/atomicfile"
)

// claim is this host's note of a machine that it made. It is written, synced,
// before smolvm is asked for the machine and after it was certain that nothing
// of that name existed, so that what a failed or killed creation leaves can be
// told from the things of others.
type claim struct {
	Name     string `json:"name"`
	Owner    string `json:"owner"`
	DataDir  string `json:"data_dir"`
	Database string `json:"database"`
	// Created is smolvm's time of creation; 0 until it is known.
	Created int64 `json:"created"`
	// Marked: the machine has run, and its disk has the marker.
	Marked   bool   `json:"marked"`
	Template string `json:"template,omitempty"`
}

// covers reports whether what lies in a directory was left by this claim's
// creation.
func (c claim) covers(dataDir string) bool { return c.Owner != "" && c.DataDir == dataDir }

func (d *Driver) claimPath(name string) string {
	return filepath.Join(d.opts.Dir, "claims", name+".json")
}

// readClaim returns an empty claim where there is none.
func (d *Driver) readClaim(name string) (claim, error) {
	data, err := os.ReadFile(d.claimPath(name))
	if errors.Is(err, fs.ErrNotExist) {
		return claim{}, nil
	}
	if err != nil {
		return claim{}, err
	}
	var c claim
	if err := json.Unmarshal(data, &c); err != nil || c.Name != name {
		return claim{}, errors.Join(fmt.Errorf("%s is damaged", d.claimPath(name)), err)
	}
	return c, nil
}

func (d *Driver) writeClaim(c claim) error {
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(d.claimPath(c.Name)), 0o700); err != nil {
		return err
	}
	return atomicfile.Write(d.claimPath(c.Name), data, 0o600)
}

func (d *Driver) dropClaim(name string) error {
	if err := os.Remove(d.claimPath(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// claimed are the claims of machines that were seen to be made.
func (d *Driver) claimed() ([]claim, error) {
	entries, err := os.ReadDir(filepath.Join(d.opts.Dir, "claims"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var all []claim
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || checkName(name) != nil {
			continue
		}
		c, err := d.readClaim(name)
		if err != nil {
			return nil, err
		}
		if c.Created != 0 {
			all = append(all, c)
		}
	}
	return all, nil
}
