package wire

import "time"

// PackRequest is the standard input of `hb pack`, whose standard output is the
// gzip stream of the archive and whose standard error carries events.
type PackRequest struct {
	Protocol int       `json:"protocol"`
	Box      string    `json:"box"`
	Time     time.Time `json:"time"` // UTC, of the host
	Lineage  string    `json:"lineage"`
}

// StateResult is what hb packed or unpacked, in the result event.
type StateResult struct {
	Stream  string   `json:"stream"` // SHA-256 of the gzip stream, hex
	Entries int64    `json:"entries"`
	Bytes   int64    `json:"bytes"`
	Digest  string   `json:"digest"`   // of the state
	PauseMS int64    `json:"pause_ms"` // how long Executor was held for it
	Dropped []string `json:"dropped"`  // logins left out, escaped paths
	// SkippedXattrs counts extended attributes that found no place on the disk.
	SkippedXattrs int `json:"skipped_xattrs,omitempty"`
}

// Same reports whether two sides speak of the same state and the same stream.
func (r StateResult) Same(other StateResult) bool {
	return r.Stream == other.Stream && r.Entries == other.Entries && r.Bytes == other.Bytes && r.Digest == other.Digest
}

// StatePlan is what an archive of the box would hold: `hb pack --plan`. The
// sizes are those of the files and can change until they are packed.
type StatePlan struct {
	Protocol int         `json:"protocol"`
	Entries  int64       `json:"entries"`
	Bytes    int64       `json:"bytes"`
	Parts    []StatePart `json:"parts"`
	LeftOut  []LeftOut   `json:"left_out"`
	More     int         `json:"more"` // left out beyond those listed
}

// StatePart is the share of one tool.
type StatePart struct {
	Name    string `json:"name"`
	Entries int64  `json:"entries"`
	Bytes   int64  `json:"bytes"`
}

// LeftOut is a path that does not travel.
type LeftOut struct {
	Path  string `json:"path"` // escaped
	Why   string `json:"why"`
	Bytes int64  `json:"bytes"`
}
