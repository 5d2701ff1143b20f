// Package guesttest helps tests that run the real hb against a directory: it
// builds hb and the stub of Executor (command guesttest/executor, whose
// documentation says what it stands for) and lays out a box.
package guesttest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"hermes-box-lite/internal/guest/layout"
)

// Build compiles the packages into dir, each under the last part of its path.
func Build(dir string, pkgs ...string) error {
	cmd := exec.Command("go", append([]string{"build", "-ldflags", "-s -w", "-o", dir + "/"}, pkgs...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %v: %w\n%s", pkgs, err, text)
	}
	return nil
}

// Packages to Build.
const (
	HB       = "hermes-box-lite/cmd/hb"
	Executor = "hermes-box-lite/internal/guest/guesttest/executor"
)

// InstallExecutor puts the stub on the agent's PATH of a box.
func InstallExecutor(t testing.TB, l layout.Layout, stub string) {
	t.Helper()
	bin := l.Path("/usr/local/bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(filepath.Join(bin, "executor"))
	if err := os.Symlink(stub, filepath.Join(bin, "executor")); err != nil {
		t.Fatal(err)
	}
}
