package provision

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// manifest records the versions and, last of all, that the box is provisioned.
func manifest(ctx context.Context, r *run) error {
	r.versions.HB = hbVersion(ctx, r.l)
	if err := PublishManifest(ctx, r.l, r.versions); err != nil {
		return err
	}
	want := r.settings()
	if have, err := r.l.ReadSettings(); err == nil && have == want {
		r.note("already there: settings")
		return nil
	}
	if err := r.l.WriteSettings(want); err != nil {
		return err
	}
	r.note("wrote %s", r.l.Provisioned())
	return nil
}

// publishScript replaces a file atomically; it runs as the agent, so that
// links in the agent's home lead nowhere that the agent cannot go.
const publishScript = `set -eu
umask 077
mkdir -p "$(dirname "$1")"
tmp=$(mktemp "$1.XXXXXX")
trap 'rm -f "$tmp"' EXIT
cat >"$tmp"
sync "$tmp"
mv -f -T "$tmp" "$1"
`

// PublishManifest writes m to the runtime manifest, 0600, owned by the agent.
// A manifest that says the same but for its time is left alone.
func PublishManifest(ctx context.Context, l layout.Layout, m wire.RuntimeManifest) error {
	path := l.RuntimeManifest()
	if data, err := readBounded(path, wire.MaxDocument); err == nil {
		var have wire.RuntimeManifest
		fi, statErr := os.Lstat(path)
		if wire.DecodeStrict(data, &have) == nil && statErr == nil && fi.Mode() == 0o600 && sameVersions(have, m) {
			return nil
		}
	}
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	cmd := l.AgentCommand(ctx, "/bin/sh", "-c", publishScript, "sh", path)
	cmd.Stdin = bytes.NewReader(append(data, '\n'))
	tail := &lastBytes{max: tailBytes}
	cmd.Stderr = tail
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), errors.Join(err, errorText(tail.lines())))
	}
	return nil
}

func errorText(s string) error {
	if s == "" {
		return nil
	}
	return errors.New(s)
}

func sameVersions(a, b wire.RuntimeManifest) bool {
	b.Time = a.Time
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}
