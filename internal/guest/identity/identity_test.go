package identity

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/secrets"
)

const (
	first  = "0123456789abcdef0123456789abcdef"
	second = "fedcba9876543210fedcba9876543210"
)

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func assume(t *testing.T, l layout.Layout, owner string, want ...string) {
	t.Helper()
	renewed, err := Assume(t.Context(), l, owner)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(renewed, want) {
		t.Errorf("renewed %v, want %v", renewed, want)
	}
}

// TestACopyBecomesItself follows one tree through the lives of two boxes.
func TestACopyBecomesItself(t *testing.T) {
	l := layout.At(t.TempDir())
	if _, err := secrets.Ensure(l); err != nil {
		t.Fatal(err)
	}
	assume(t, l, first, "system", "tokens")
	tokens, err := secrets.Ensure(l)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.WriteSettings(layout.Settings{BoxName: "first"}); err != nil {
		t.Fatal(err)
	}
	if err := secrets.SetPaused(l, true); err != nil {
		t.Fatal(err)
	}
	key := l.Path("/etc/ssh/ssh_host_ed25519_key")
	if err := os.MkdirAll(filepath.Dir(key), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{key, key + ".pub"} {
		if err := os.WriteFile(path, []byte("key"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	machine := read(t, l.Path("/etc/machine-id"))
	if !regexp.MustCompile(`^[0-9a-f]{32}\n$`).MatchString(machine) {
		t.Errorf("machine id %q", machine)
	}

	assume(t, l, first) // nothing
	if again, err := secrets.Ensure(l); err != nil || again != tokens {
		t.Errorf("the tokens changed in the same box: %v", err)
	}
	if _, err := l.ReadSettings(); err != nil || read(t, l.Path("/etc/machine-id")) != machine || read(t, key) != "key" {
		t.Errorf("the same box lost its settings, id or keys: %v", err)
	}

	assume(t, l, second, "system", "tokens")
	others, err := secrets.Ensure(l)
	if err != nil {
		t.Fatal(err)
	}
	if others.Agent == tokens.Agent || others.Operator == tokens.Operator {
		t.Error("the copy has a token of its origin")
	}
	if read(t, l.Path("/etc/machine-id")) == machine {
		t.Error("the copy has the machine id of its origin")
	}
	if _, err := l.ReadSettings(); err == nil {
		t.Error("the copy runs under the settings of its origin")
	}
	for _, path := range []string{key, key + ".pub"} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("the copy has %s of its origin", path)
		}
	}
	if paused, err := secrets.Paused(l); err != nil || paused {
		t.Errorf("the new box is paused: %v", err)
	}
	if strings.TrimSpace(read(t, filepath.Join(l.Secrets(), "owner"))) != second {
		t.Error("the marker is not the new owner's")
	}
}

func TestAssumeRefusesWhatIsNoOwner(t *testing.T) {
	l := layout.At(t.TempDir())
	for _, owner := range []string{"", "x", first + "0", strings.ToUpper(first)[:31] + "G", "../" + first[:29]} {
		if _, err := Assume(t.Context(), l, owner); err == nil {
			t.Errorf("%q was accepted", owner)
		}
	}
}
