//go:build linux

package cli_test

import (
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// smallDisk mounts a file system of so many MiB.
func smallDisk(t *testing.T, dir string, mib string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a small disk")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+mib+"m"); err != nil {
		t.Skipf("mount a small disk: %v", err) // a container without the right to
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

func (h *host) agentHome(name string) string {
	return filepath.Join(h.engine, "machines", name, "root/data/home/agent")
}

// incompressible puts a file of random bytes into a box.
func (h *host) incompressible(name string, size int) {
	h.t.Helper()
	data := make([]byte, size)
	_, _ = rand.Read(data) // never fails
	if err := os.WriteFile(filepath.Join(h.agentHome(name), "workspace/random"), data, 0o644); err != nil {
		h.t.Fatal(err)
	}
}

func TestSaveOntoAFullDisk(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.env = append(h.env, "BOX_PASSPHRASE=secret")
	h.must("new", "alpha")
	h.incompressible("alpha", 6<<20)
	disk := filepath.Join(t.TempDir(), "disk")
	smallDisk(t, disk, "3")
	code, stdout, stderr := h.run("save", "alpha", filepath.Join(disk, "a.gpg"))
	if code != 1 || stdout != "" || !strings.Contains(stderr, "no space left on device") {
		t.Errorf("exit code %d, stdout %q, stderr:\n%s", code, stdout, stderr)
	}
	if left, err := os.ReadDir(disk); err != nil || len(left) > 0 {
		t.Errorf("left on the disk: %v (%v)", left, err)
	}
	h.must("doctor", "alpha") // Executor runs again
	// What cannot fit is refused before it is tried.
	full := filepath.Join(disk, "full")
	if err := os.WriteFile(full, make([]byte, 3<<20-64<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, stderr = h.run("save", "alpha", filepath.Join(disk, "a.gpg"))
	if code != 1 || !strings.Contains(stderr, "look at the state: "+disk+" has 0 MiB free and the state is ") {
		t.Errorf("exit code %d, stderr:\n%s", code, stderr)
	}
	h.must("save", "alpha")
}

// Whose disk is full makes room by removing a box.
func TestRemoveOnAFullDisk(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	settings, err := os.ReadFile(filepath.Join(h.home, "box.env"))
	if err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(t.TempDir(), "disk")
	smallDisk(t, disk, "16")
	if err := os.WriteFile(filepath.Join(disk, "box.env"), settings, 0o600); err != nil {
		t.Fatal(err)
	}
	h.env = append(h.env, "BOX_HOME="+disk)
	h.must("new", "alpha")
	full, err := os.Create(filepath.Join(disk, "full"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(full, zeros{}); !errors.Is(err, syscall.ENOSPC) || full.Close() != nil {
		t.Fatal(err)
	}
	code, _, stderr := h.run("rm", "alpha", "--force")
	if code != 0 || !strings.Contains(stderr, "no space left on device") {
		t.Errorf("exit code %d, stderr:\n%s", code, stderr)
	}
	if left := h.must("ls", "--all"); strings.Contains(left, "alpha") {
		t.Errorf("it is still there:\n%s", left)
	}
}

// zeros has no end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestLoadIntoASmallBox(t *testing.T) {
	t.Parallel()
	from := newHost(t)
	from.env = append(from.env, "BOX_PASSPHRASE=secret")
	from.must("new", "alpha")
	from.incompressible("alpha", 40<<20)
	file := strings.TrimSpace(from.must("save", "alpha"))

	to := newHost(t)
	to.env = append(to.env, "BOX_PASSPHRASE=secret")
	smallDisk(t, filepath.Join(to.engine, "machines"), "90")
	code, _, stderr := to.run("load", file, "beta")
	if code != 1 || !strings.Contains(stderr, "box: load beta: restore: ") || !strings.Contains(stderr, "no space left on device") {
		t.Errorf("exit code %d, stderr:\n%s", code, stderr)
	}
	if _, err := os.Stat(to.agentHome("beta")); err == nil {
		t.Error("the machine of the failed load is still there")
	}
	if code, stdout, _ := to.run("ls"); code != 0 || strings.Contains(stdout, "beta") {
		t.Errorf("ls: %d\n%s", code, stdout)
	}

	disk := filepath.Join(t.TempDir(), "disk")
	smallDisk(t, disk, "20")
	code, _, stderr = to.run("extract", file, filepath.Join(disk, "out"))
	if code != 1 || !strings.Contains(stderr, "no space left on device") {
		t.Errorf("exit code %d, stderr:\n%s", code, stderr)
	}
	if left, err := os.ReadDir(disk); err != nil || len(left) > 0 {
		t.Errorf("left on the disk: %v (%v)", left, err)
	}
}

// The passphrase is asked for twice, not shown, and a slip is found.
func TestPassphraseAtATerminal(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	file := filepath.Join(h.home, "a.gpg")
	c := h.console("save", "alpha", file)
	c.await("Passphrase of the archive: ")
	c.write("correct horse\r")
	c.await("once more: ")
	c.write("correct house\r")
	if code := c.end(); code != 1 || !strings.Contains(c.text(), "the two passphrases differ, nothing was saved") {
		t.Errorf("exit code %d: %s", code, c.text())
	}
	c = h.console("save", "alpha", file)
	c.await("Passphrase of the archive: ")
	c.write("correct horse\r")
	c.await("once more: ")
	c.write("correct horse\r")
	if code := c.end(); code != 0 || strings.Contains(c.text(), "horse") {
		t.Errorf("exit code %d: %s", code, c.text())
	}
	c = h.console("verify", file)
	c.await("Passphrase of the archive: ")
	c.write("correct horse\r")
	c.await("digest")
	if code := c.end(); code != 0 {
		t.Errorf("exit code %d: %s", code, c.text())
	}
	c = h.console("verify", file)
	c.await("Passphrase of the archive: ")
	c.write("\x03")
	if code := c.end(); code != 130 {
		t.Errorf("interrupted: exit code %d: %s", code, c.text())
	}
}
