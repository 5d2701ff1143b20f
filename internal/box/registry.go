package box

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"hermes-box-lite/internal/atomicfile"
)

// Phase of a record.
type Phase string

// Phases.
const (
	// Creating: written before the machine exists, until the box was ready
	// once. A creating record whose box lock is free was interrupted.
	Creating Phase = "creating"
	// Ready: the box was healthy once. Only rm removes it.
	Ready Phase = "ready"
)

// Record is what this host knows of one box. It is written, and synced,
// before what it describes is done.
type Record struct {
	Schema     int        `json:"schema"`
	Name       string     `json:"name"`
	OwnerID    string     `json:"owner_id"`
	Driver     string     `json:"driver"`
	Place      string     `json:"place,omitempty"` // see Placer; "" where there is only one
	Phase      Phase      `json:"phase"`
	Operation  *Operation `json:"operation,omitempty"` // the mutation under way, or interrupted
	HostPort   int        `json:"host_port"`           // 0 = not exposed
	BaseImage  string     `json:"base_image"`
	BaseDigest string     `json:"base_digest"`
	Isolation  string     `json:"isolation"`
	Created    time.Time  `json:"created"` // UTC
	Sizes      Sizes      `json:"sizes,omitzero"`
	// Lineage is the id that the state carries through save and load, as long
	// as logins travel with it.
	Lineage string `json:"lineage,omitempty"`
	// Loaded: the state came out of an archive or of another box, with Logins in it. A box that
	// was not loaded is the origin of its lineage, with whatever logins its
	// archives hold.
	Loaded bool     `json:"loaded,omitempty"`
	Logins []string `json:"logins,omitempty"`
	// Source is the absolute path of the archive, or the name of the box, whose
	// state is not in the box yet; "" for every other box.
	Source string `json:"source,omitempty"`
	// LastArchive is the path of the newest archive that save wrote.
	LastArchive string `json:"last_archive,omitempty"`
}

// Sizes are those that a box was made with, as the configuration had them. All
// are 0 in a record from before they were kept.
type Sizes struct {
	CPUs       int `json:"cpus"`
	MemoryMiB  int `json:"memory_mib"`
	OverlayGiB int `json:"overlay_gib"`
	StorageGiB int `json:"storage_gib"` // 0: the driver's own
}

// sameState reports whether nothing was done to the box between two readings.
func (r Record) sameState(other Record) bool {
	if (r.Operation == nil) != (other.Operation == nil) {
		return false
	}
	return r.OwnerID == other.OwnerID && r.Phase == other.Phase && (r.Operation == nil || *r.Operation == *other.Operation)
}

// Operation is one line of a record's journal.
type Operation struct {
	Verb    string    `json:"verb"`
	Step    string    `json:"step"`
	Started time.Time `json:"started"` // UTC
	// Stop: the box was stopped before, and is to be again.
	Stop bool `json:"stop,omitempty"`
	// Failed: it ended by an error that it reported, and was not interrupted.
	Failed bool `json:"failed,omitempty"`
}

// registry is a directory with one file per box.
type registry struct{ home Home }

func (r registry) path(name string) string {
	return filepath.Join(r.home.records(), name+".json")
}

// get returns ErrNotFound when there is no record. A damaged record is an
// error that names the file: the box behind it may well exist.
func (r registry) get(name string) (Record, error) {
	data, err := os.ReadFile(r.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, fmt.Errorf("%s: %w", name, ErrNotFound)
	}
	if err != nil {
		return Record{}, err
	}
	var rec Record
	if err := json.Unmarshal(data, &rec); err != nil {
		return Record{}, fmt.Errorf("the record %s is damaged: %w", r.path(name), err)
	}
	if rec.Schema != 1 || rec.Name != name || rec.OwnerID == "" {
		return Record{}, fmt.Errorf("the record %s is not one of this version (schema %d, name %q)", r.path(name), rec.Schema, rec.Name)
	}
	return rec, nil
}

func (r registry) put(rec Record) error {
	rec.Schema = 1
	data, err := json.MarshalIndent(rec, "", "  ")
	if err != nil {
		return err
	}
	if err := atomicfile.Write(r.path(rec.Name), append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the record of %s: %w", rec.Name, err)
	}
	return nil
}

func (r registry) remove(name string) error {
	if err := os.Remove(r.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the record of %s: %w", name, err)
	}
	return atomicfile.SyncDir(r.home.records())
}

// names returns the names of all records, sorted.
func (r registry) names() ([]string, error) {
	entries, err := os.ReadDir(r.home.records())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the registry: %w", err)
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".json"); ok && CheckName(name) == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}
