// Package identity makes a machine its own: one whose disks began as copies of
// another's, or of a template, must not go by the other's machine id, host
// keys and tokens. The supervisor calls it before anything else runs.
package identity

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/secrets"
)

var ownerID = regexp.MustCompile(`^[0-9a-f]{32}$`)

// Valid reports whether s is an owner id: 32 lower hex digits.
func Valid(s string) bool { return ownerID.MatchString(s) }

// Assume makes the system and the state those of the box with this owner id,
// and returns what it renewed. It changes nothing where they are already. A
// renewed system counts as not provisioned, so that nothing runs under the
// settings of another box.
func Assume(ctx context.Context, l layout.Layout, owner string) (renewed []string, err error) {
	if !Valid(owner) {
		return nil, fmt.Errorf("identity: %q is not an owner id", owner)
	}
	for _, part := range []struct {
		name, marker string
		mode         fs.FileMode
		renew        func() error
	}{
		{"system", filepath.Join(l.Opt(), "owner"), 0o644, func() error { return renewSystem(ctx, l) }},
		{"tokens", filepath.Join(l.Secrets(), "owner"), 0o600, func() error { return secrets.Forget(l) }},
	} {
		have, err := os.ReadFile(part.marker)
		if err == nil && strings.TrimSpace(string(have)) == owner {
			continue
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return renewed, fmt.Errorf("identity: %w", err)
		}
		if err := part.renew(); err != nil {
			return renewed, fmt.Errorf("identity: renew the %s: %w", part.name, err)
		}
		// Last, so that what was interrupted is done again.
		if err := atomicfile.Write(part.marker, []byte(owner+"\n"), part.mode); err != nil {
			return renewed, fmt.Errorf("identity: %w", err)
		}
		renewed = append(renewed, part.name)
	}
	return renewed, nil
}

func renewSystem(ctx context.Context, l layout.Layout) error {
	if err := os.Remove(l.Provisioned()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// machine-id(5): 32 lower hex digits and a newline.
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	if err := os.MkdirAll(l.Path("/etc"), 0o755); err != nil {
		return err
	}
	if err := atomicfile.Write(l.Path("/etc/machine-id"), []byte(hex.EncodeToString(id[:])+"\n"), 0o444); err != nil {
		return err
	}
	if err := os.MkdirAll(l.Opt(), 0o755); err != nil {
		return err
	}
	return renewHostKeys(ctx, l)
}

// renewHostKeys replaces the keys of an SSH server that somebody has installed.
func renewHostKeys(ctx context.Context, l layout.Layout) error {
	keys, err := filepath.Glob(l.Path("/etc/ssh/ssh_host_*_key*"))
	if err != nil || len(keys) == 0 {
		return err
	}
	for _, key := range keys {
		if err := os.Remove(key); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if !l.Real() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "ssh-keygen", "-A").CombinedOutput(); err != nil {
		return fmt.Errorf("ssh-keygen -A: %w: %.200s", err, out)
	}
	return nil
}
