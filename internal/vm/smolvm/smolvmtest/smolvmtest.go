// Package smolvmtest has a program that stands for smolvm where smolvm cannot
// run, and what tests need to use it. It is NOT smolvm, and what passes with it
// has not been shown with smolvm: no virtual machine, no image puller, no guest
// agent is in it. It was written from a description of smolvm 1.9.3's command
// line, read from its source; `make e2e-smolvm` runs the same tests on a real
// smolvm where one is installed.
//
// It keeps its state where smolvm does: the database below $XDG_DATA_HOME (or
// ~/.local/share), the machines below $XDG_CACHE_HOME (or ~/.cache), so that
// another HOME shows an empty list. A machine is a podman container with the
// machine's command as its main process, or, with SMOLVM_STANDIN_ENGINE=none, a
// directory and processes of the host, which HB_ROOT tells where their root is.
// Another value of SMOLVM_STANDIN_ENGINE is podman's path.
//
// These traps of smolvm's are always there:
//
//   - every failure of its own is exit code 1, as a guest's can be; a command
//     that cannot connect says "is not running", also of a machine that runs
//   - ls lists in random order; clones copy all labels and the time of creation
//   - questions about unknown names (exec, stop, status without --json) make a
//     directory; what a failed creation leaves there is the next machine's disk
//   - delete without -f asks, and takes the end of its input for a no, prints
//     "Cancelled" and exits with 0
//   - a command that cannot connect writes the machine's whole record back as
//     unreachable, also when it was deleted meanwhile; that state stays when the
//     machine answers again, and start then kills what runs
//   - a second start, or a stop, kills the machine that the first one boots
//   - eight connections by machine; a ninth waits three seconds and gives up
//   - exec without -i keeps its output until the end and cuts each stream at
//     11 MiB; exec -i makes its standard input non-blocking, and only a normal
//     end undoes that; when it is killed its command lives on; unless RUST_LOG
//     forbids it, a warning is among its messages
//   - delete does not look for processes of a machine that never came up, which
//     stop does; both kill, without TERM; /run and /tmp are gone after a stop
//   - the first start reads the image; the egress floor is read at start, and a
//     machine that never had a strict one shares a network with others (podman)
//   - a pack's sizes win over arguments that equal the defaults
//
// These are chosen by files below $XDG_DATA_HOME/smolvm/standin, of World.Set:
//
//	version           what --version says in place of 1.9.3
//	ls-fails          ls says this and exits with 1
//	ls-says           ls prints this and exits with 0
//	deaf-NAME         the machine does not answer; its processes run
//	ping              how long an answer is awaited (3s)
//	start-takes       how long a start takes before it boots (0s)
//	boot-fails-NAME   how many starts fail because the guest is not ready in time
//	start-dies-NAME   a start dies when it has booted, before it writes that down
//	create-fails-NAME creation fails with this, and leaves a disk
//	delete-lies-NAME  delete removes nothing, prints "Cancelled" and exits with 0
//	ghost-NAME        a deleted machine's record comes back once
//	fork-leaves-golden a fork does not freeze its source, as if all clones were gone
//
// Every call is written to the file "calls" there, a JSON line each.
//
// Not modelled: images from registries (which it refuses), -d, cp, update,
// monitor and prune, sizes of disks, a machine that outlives its main command,
// and time: it is as quick as containers are.
package smolvmtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Build makes the program as dir/smolvm and returns its path.
func Build(dir string) (string, error) {
	program := filepath.Join(dir, "smolvm")
	cmd := exec.Command("go", "build", "-o", program, "hermes-box-lite/internal/vm/smolvm/smolvmtest/standin")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the stand-in for smolvm: %w\n%s", err, out)
	}
	return program, nil
}

// World is one user's state of the stand-in.
type World struct {
	Program string
	Data    string // $XDG_DATA_HOME
	Cache   string // $XDG_CACHE_HOME
}

// New gives the test a world of its own, by its environment.
func New(t *testing.T, program, engine string) *World {
	t.Helper()
	dir := t.TempDir()
	w := &World{Program: program, Data: filepath.Join(dir, "data"), Cache: filepath.Join(dir, "cache")}
	for key, value := range map[string]string{
		"XDG_DATA_HOME": w.Data, "XDG_CACHE_HOME": w.Cache, "SMOLVM_STANDIN_ENGINE": engine,
		"SMOLVM_DATA_DIR": "", "RUST_LOG": "",
	} {
		t.Setenv(key, value)
	}
	if err := os.MkdirAll(w.settings(), 0o700); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *World) settings() string { return filepath.Join(w.Data, "smolvm/standin") }

// Set chooses a trap; "" takes it away.
func (w *World) Set(t *testing.T, name, value string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(w.settings(), name), []byte(value), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Run runs the program as its user would and returns its output and exit code.
func (w *World) Run(t *testing.T, args ...string) (string, int) {
	t.Helper()
	out, err := exec.Command(w.Program, args...).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return string(out), exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(out), 0
}

// Must is Run for what has to succeed.
func (w *World) Must(t *testing.T, args ...string) string {
	t.Helper()
	out, code := w.Run(t, args...)
	if code != 0 {
		t.Fatalf("smolvm %s: exit code %d: %s", strings.Join(args, " "), code, out)
	}
	return out
}

// Call is one call of the program.
type Call struct {
	Args    []string `json:"args"`
	Group   int      `json:"group"` // its process group
	Stdin   string   `json:"stdin"` // what its standard input was
	Floor   string   `json:"floor"` // SMOLVM_EGRESS_FLOOR
	Publish string   `json:"publish"`
}

// Calls are those that were made so far.
func (w *World) Calls(t *testing.T) []Call {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(w.settings(), "calls"))
	if err != nil {
		t.Fatal(err)
	}
	var calls []Call
	for line := range bytes.Lines(data) {
		var c Call
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		calls = append(calls, c)
	}
	return calls
}
