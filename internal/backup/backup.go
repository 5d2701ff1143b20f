// Package backup turns the stream that hb packs into an encrypted archive
// file, and an archive file back into that stream: save, verify, extract and
// the host's half of load.
//
// An archive is an OpenPGP message, made with a passphrase, that holds a gzip
// stream of a tar in the closed grammar of package archive; plain
// `gpg -d FILE | tar tz` reads it (docs/format.md). It promises three things.
// Nothing is called verified whose message, gzip stream and grammar were not
// read to their very ends. A file appears under its final name only after its
// bytes were synced, read again through the same descriptor and verified, and
// it never replaces another. Nothing decrypted is written to disk, but by
// Extract.
package backup

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"hermes-box-lite/internal/archive"
)

// Sentinels on which callers branch.
var (
	// ErrAuth: the message could not be authenticated. A wrong passphrase and
	// a damaged file look the same, on purpose (no oracle).
	ErrAuth = errors.New("wrong passphrase or damaged file")
	// ErrExists: the destination is there already.
	ErrExists = errors.New("already exists")
	// ErrChanged: the file is not the one that was verified.
	ErrChanged = errors.New("the file changed while it was read")
)

// Passphrase keeps a passphrase out of logs and errors. The zero value is none.
type Passphrase struct {
	// A function, because package fmt asks no method how to print what another
	// type holds in an unexported field, and follows pointers for some verbs.
	secret func() []byte
}

// NewPassphrase refuses one that protects nothing.
func NewPassphrase(s string) (Passphrase, error) {
	if s == "" {
		return Passphrase{}, errors.New("the passphrase is empty")
	}
	secret := []byte(s)
	return Passphrase{func() []byte { return secret }}, nil
}

func (p Passphrase) bytes() ([]byte, error) {
	if p.secret == nil {
		return nil, errors.New("there is no passphrase")
	}
	return p.secret(), nil
}

// ReadPassphrase reads the first line of a file, as gpg's --passphrase-file
// does, but that a carriage return at its end is no part of it.
func ReadPassphrase(path string) (Passphrase, error) {
	f, err := os.Open(path)
	if err != nil {
		return Passphrase{}, fmt.Errorf("read the passphrase: %w", err)
	}
	defer func() { _ = f.Close() }()
	const most = 64 << 10
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return Passphrase{}, fmt.Errorf("read the passphrase: %w", err)
	}
	if len(data) > most {
		return Passphrase{}, fmt.Errorf("the passphrase file %s holds more than %d bytes", path, most)
	}
	line, _, _ := strings.Cut(string(data), "\n")
	p, err := NewPassphrase(strings.TrimSuffix(line, "\r"))
	if err != nil {
		return Passphrase{}, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

const redacted = "[redacted]"

// String implements fmt.Stringer.
func (Passphrase) String() string { return redacted }

// Format implements fmt.Formatter: not every verb asks String.
func (Passphrase) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, redacted) }

// MarshalJSON implements json.Marshaler.
func (Passphrase) MarshalJSON() ([]byte, error) { return json.Marshal(redacted) }

// Report is what reading an archive to its end has shown.
type Report struct {
	Size   int64  // of the file, bytes
	SHA256 string // of the file
	Stream string // SHA-256 of the gzip stream inside
	archive.Summary
}

// Progress is told how many of the file's bytes were read; it may be nil.
type Progress func(done, total int64)
