//go:build e2e && linux

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// bystander is a box that nothing may happen to.
type bystander struct{ name, record, machine string }

func (h *home) bystander(short string) bystander {
	h.t.Helper()
	b := bystander{name: h.create(short)}
	h.in(b.name, "echo precious >kept")
	b.record, b.machine = h.recorded(b.name), h.containerID(b.name)
	return b
}

// recorded is the whole record of a box, "" without one.
func (h *home) recorded(name string) string {
	data, _ := os.ReadFile(filepath.Join(h.dir, ".box/boxes", name+".json")) // no record is an answer
	return string(data)
}

func (h *home) containerID(name string) string {
	h.t.Helper()
	out, err := podman("container", "inspect", "--format", "{{.Id}} {{.State.StartedAt}}", "hermes-box-"+name)
	if err != nil {
		h.t.Error(err)
	}
	return out
}

func (b bystander) unharmed(h *home) {
	h.t.Helper()
	if h.recorded(b.name) != b.record || h.containerID(b.name) != b.machine || h.in(b.name, "cat kept") != "precious" {
		h.t.Errorf("the other box is not as it was: %s", h.recorded(b.name))
	}
}

// ownObjects are the containers, volumes and networks of one box.
func (h *home) ownObjects(name string) []string {
	h.t.Helper()
	found, err := objects("hermes-box-" + name)
	if err != nil {
		h.t.Fatal(err)
	}
	var own []string
	for _, object := range found {
		if strings.HasSuffix(object, " hermes-box-"+name) {
			own = append(own, object)
		}
	}
	return own
}

// afterKill holds right after a kill: nothing without a record, no lock, and of
// what the journal has an explanation. It reports whether there was one.
func (h *home) afterKill(name string) (explained bool) {
	h.t.Helper()
	record := h.recorded(name)
	if own := h.ownObjects(name); record == "" && len(own) > 0 {
		h.t.Errorf("without a record: %q", own)
	}
	locks, err := filepath.Glob(filepath.Join(h.dir, ".box/locks/*.lock"))
	if err != nil || len(locks) == 0 {
		h.t.Errorf("no lock files: %v", err)
	}
	for _, path := range locks {
		f, err := os.Open(path)
		if err != nil {
			h.t.Error(err)
			continue
		}
		// Programs that the killed command had started may hold nothing.
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			h.t.Errorf("%s is still held: %v", path, err)
		}
		_ = f.Close()
	}
	r := h.box("ls")
	explained = strings.Contains(r.stderr, name+": interrupted while ") ||
		strings.Contains(r.stderr, name+": its machine is gone") // a rm that was nearly through
	if r.code != 0 || strings.Contains(record, `"operation"`) && !explained {
		h.t.Errorf("ls explains nothing: %s", r)
	}
	return explained
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// TestKilled ends box by SIGKILL 30 times, in new, save, load and rm, each time
// looks at what is left, and has the next command get over it. A few commands
// may be quicker than that, and a load may be past its last point before.
func TestKilled(t *testing.T) {
	h := newHome(t, nil)
	other := h.bystander("other")
	name := h.name("killed")
	file := filepath.Join(h.dir, "a.tar.gz.gpg")
	kills, early, explained := 0, 0, 0
	kill := func(verb, at string, delay time.Duration, args ...string) (inTime bool) {
		t.Helper()
		h.within(t, fmt.Sprintf("%s at %s after %s", verb, at, delay), func(*testing.T) {
			if _, inTime = h.signalled(at, delay, syscall.SIGKILL, args...); inTime {
				kills++
			} else {
				early++
			}
			known := h.afterKill(name)
			if known {
				explained++
			}
			// What says its step has journalled it, but for those before there is a
			// record. A rm, or a save that has given its file, may have been through.
			unrecorded := at == "check" || at == "verify the archive"
			through := verb == "rm" && h.recorded(name) == "" || verb == "save" && exists(file)
			if inTime && !known && !unrecorded && !through {
				h.t.Errorf("ls does not tell of it")
			}
			other.unharmed(h)
		})
		return inTime
	}

	// Each new removes what the one before has left.
	for _, at := range []string{"check", "record", "create", "start", "install hb", "provision", "start Executor", "wire MCP", "doctor"} {
		kill("new", at, 0, "new", name)
	}
	// And so does rm, also over what a killed rm has left.
	for _, ms := range []time.Duration{0, 20, 50, 100, 150, 300, 600} {
		if h.recorded(name) == "" {
			kill("new", "start", 0, "new", name)
		}
		kill("rm", "remove", ms*time.Millisecond, "rm", name, "--force")
	}
	if h.recorded(name) != "" {
		h.must("rm", name, "--force")
	}
	h.noTraces(name)
	h.must("new", name)
	h.doctor(name, 0)

	// So much that the steps take a while.
	h.in(name, "head -c 80000000 /dev/urandom >random; echo mine >kept")
	for _, c := range []struct {
		at    string
		delay time.Duration
	}{
		{"look at the state", 0},
		{"look at the state", 50 * time.Millisecond},
		{"save", 0},
		{"save: pack Executor's data", 0},
		{"save: pack Executor's data", 100 * time.Millisecond},
		{"save: pack the state", 0},
		{"save: pack the state", 300 * time.Millisecond},
		{"save: verify", 0},
	} {
		if !kill("save", c.at, c.delay, "save", name, file) || exists(file) {
			h.quicker(c.at, file) // whole or not at all
		}
	}
	h.must("save", name, file)
	if left, err := filepath.Glob(filepath.Join(h.dir, ".hermes-box-*")); err != nil || len(left) > 0 {
		t.Errorf("partial files are left: %q (%v)", left, err)
	}
	eventually(t, time.Minute, "Executor as before", func() error {
		if executor(h, name) == 0 {
			return errors.New("it is down")
		}
		return nil
	})
	h.must("rm", name, "--force")
	h.noTraces(name)

	// Each load removes what the one before has left.
	for _, at := range []string{"verify the archive", "create", "start", "install hb", "restore", "start Executor"} {
		kill("load", at, 0, "load", file, name)
		if strings.Contains(h.recorded(name), `"phase": "ready"`) {
			break // the state is in: what is left is for repair
		}
	}
	h.must("repair", name)
	h.doctor(name, 0)
	if got := h.in(name, "cat kept; stat -c %s random"); got != "mine\n80000000" {
		t.Errorf("the loaded state: %q", got)
	}
	h.must("rm", name, "--force")
	h.noTraces(name)
	other.unharmed(h)
	h.doctor(other.name, 0)
	t.Logf("%d kills, %d of them explained; %d commands were quicker", kills, explained, early)
	if kills < 25 || explained < 15 {
		t.Errorf("only %d kills came in time, and %d were explained", kills, explained)
	}
}
