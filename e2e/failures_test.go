//go:build e2e && linux

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestInterruptedNew ends `box new` by signals at several of its steps.
func TestInterruptedNew(t *testing.T) {
	for _, c := range []struct {
		step   string
		signal syscall.Signal
	}{
		{"create", syscall.SIGTERM},
		{"provision: packages", syscall.SIGINT},
		{"start Executor", syscall.SIGHUP},
	} {
		t.Run(c.step, func(t *testing.T) {
			h := newHome(t, nil)
			name := h.name("cut")
			r := h.cut(c.step, c.signal, "new", name)
			h.noTraces(name)
			if len(h.transcripts()) != 1 {
				t.Errorf("transcripts: %d", len(h.transcripts()))
			}
			if hint := "hint: less " + filepath.Join(h.dir, ".box/transcripts", name); !strings.Contains(r.stderr, hint) {
				t.Errorf("no %q: %s", hint, r)
			}
		})
	}
}

// TestKilledNew kills `box new`, which then can clean up nothing: the next
// command has to explain, and `rm` and `new` have to get over it.
func TestKilledNew(t *testing.T) {
	h := newHome(t, nil)
	name := h.name("killed")
	kill := func() {
		t.Helper()
		h.cut("provision: packages", syscall.SIGKILL, "new", name)
		h.wants(0, []string{"interrupted", "box rm " + name, "box repair " + name}, "ls")
	}
	kill()
	h.must("rm", name, "--force")
	h.noTraces(name)
	kill()
	h.must("new", name)
	h.doctor(name, 0)
	h.must("rm", name, "--force")
	h.noTraces(name)
}

// TestForeignObjects has somebody else's container, volume or network under
// the name that a new box needs.
func TestForeignObjects(t *testing.T) {
	for _, kind := range []string{"container", "volume", "network"} {
		t.Run(kind, func(t *testing.T) {
			h := newHome(t, nil)
			name := h.name("foreign")
			full := "hermes-box-" + name
			args := []string{kind, "create", full}
			if kind == "container" {
				image, err := exec.Command("podman", "images", "--quiet", "--filter", "reference=localhost/hermes-box-base").Output()
				if err != nil || len(image) == 0 {
					t.Fatalf("an image for the foreign container: %v", err)
				}
				args = []string{kind, "create", "--network", "none", "--name", full, strings.Fields(string(image))[0], "/bin/true"}
			}
			if _, err := podman(args...); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := podman(kind, "rm", full); err != nil {
					t.Error(err)
				}
			})
			before, err := podman(kind, "inspect", full)
			if err != nil {
				t.Fatal(err)
			}
			h.wants(1, []string{"left alone", "hint: box ls --all"}, "new", name)
			after, err := podman(kind, "inspect", full)
			if err != nil || before != after {
				t.Errorf("the foreign %s is another now (%v):\n%s\n%s", kind, err, before, after)
			}
			found, err := objects(full)
			if err != nil || len(found) != 1 {
				t.Errorf("objects: %v (%v)", found, err)
			}
			h.wants(4, nil, "rm", name, "--force")
			h.wants(0, []string{name, "foreign"}, "ls", "--all")
			if r := h.box("ls"); strings.Contains(r.stdout, name) {
				t.Errorf("ls without --all: %s", r)
			}
		})
	}
}

// TestUnusableEngine has no engine at all, or one that fails half-way.
func TestUnusableEngine(t *testing.T) {
	t.Run("not there", func(t *testing.T) {
		h := newHome(t, map[string]string{"BOX_CONTAINER_ENGINE": "/nonexistent/podman"})
		name := h.name("none")
		h.wants(1, []string{"/nonexistent/podman", "not installed"}, "new", name)
		h.noTraces(name)
		if r := h.box("ls", "--json"); r.code != 0 {
			t.Errorf("ls without an engine: %s", r)
		}
	})
	for _, call := range []string{"volume create", "network create", "container create", "container start"} {
		t.Run("fails at "+call, func(t *testing.T) {
			real, err := exec.LookPath("podman")
			if err != nil {
				t.Fatal(err)
			}
			engine := filepath.Join(t.TempDir(), "podman")
			script := fmt.Sprintf("#!/bin/sh\nif [ \"$1 $2\" = %q ]; then echo 'Error: the disk is full, says the test' >&2; exit 125; fi\nexec %s \"$@\"\n", call, real)
			if err := os.WriteFile(engine, []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			h := newHome(t, map[string]string{"BOX_CONTAINER_ENGINE": engine})
			name := h.name("half")
			start := time.Now()
			r := h.wants(1, []string{"the disk is full, says the test", "hint: less "}, "new", name)
			t.Logf("failed after %s", time.Since(start).Round(time.Second))
			h.noTraces(name)
			logs := h.transcripts()
			if len(logs) != 1 {
				t.Errorf("transcripts: %d: %s", len(logs), r)
			}
			for file, text := range logs {
				if !strings.Contains(text, "the disk is full, says the test") {
					t.Errorf("%s does not tell why:\n%s", file, text)
				}
			}
		})
	}
	t.Run("fails at the removal", func(t *testing.T) {
		real, err := exec.LookPath("podman")
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		engine := filepath.Join(dir, "podman")
		script := fmt.Sprintf("#!/bin/sh\ncase \"$1 $2\" in 'container create'|'volume rm') if [ ! -e %s/mended ]; then echo 'Error: no, says the test' >&2; exit 125; fi;; esac\nexec %s \"$@\"\n", dir, real)
		if err := os.WriteFile(engine, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		h := newHome(t, map[string]string{"BOX_CONTAINER_ENGINE": engine})
		name := h.name("stuck")
		h.wants(8, []string{"its record was kept", "hint: box rm " + name}, "new", name)
		h.wants(0, []string{name}, "ls")
		if err := os.WriteFile(filepath.Join(dir, "mended"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		h.must("rm", name, "--force") // as the hint says
		h.noTraces(name)
	})
}

// TestKeepOnFailure keeps the machine of a failed `new`.
func TestKeepOnFailure(t *testing.T) {
	h := newHome(t, map[string]string{"INSTALL_HERMES": "true", "HERMES_INSTALLER": "/nonexistent/install.sh"})
	name := h.name("keep")
	h.wants(1, []string{"/nonexistent/install.sh", "INSTALL_HERMES=false"}, "new", name)
	h.noTraces(name)
	h.wants(1, []string{"box enter " + name, "box rm " + name}, "new", name, "--keep-on-failure")
	if got := h.in(name, "whoami"); got != "agent" {
		t.Errorf("in the kept machine: %q", got)
	}
	h.must("rm", name, "--force")
	h.noTraces(name)
}

// TestBadInstaller has Hermes' installer fail, and not be there: what went
// wrong and how to go without it is said in one place.
func TestBadInstaller(t *testing.T) {
	for source, words := range map[string][]string{
		"/etc/debian_version":       {"the installer of Hermes (/etc/debian_version)", "exit code 127", "command not found"},
		"http://127.0.0.1:9/get.sh": {"Hermes' installer", "http://127.0.0.1:9/get.sh", "connect"},
	} {
		t.Run(source, func(t *testing.T) {
			h := newHome(t, map[string]string{"INSTALL_HERMES": "true", "HERMES_INSTALLER": source})
			name := h.name("installer")
			r := h.wants(1, append(words, "new "+name+": provision: hermes", "INSTALL_HERMES=false"), "new", name)
			if strings.Count(r.stderr, "\nbox: ") > 1 {
				t.Errorf("more than one error: %s", r)
			}
			h.noTraces(name)
		})
	}
}
