package smolvm

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/smolvm/smolvmtest"
)

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// pid is what the stand-in tells as a machine's process.
func (r *rig) pid(t *testing.T, name string) int {
	t.Helper()
	var m struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(r.world.Must(t, "machine", "status", "--name", name, "--json")), &m); err != nil || m.PID <= 1 {
		t.Fatalf("the process of %s is %d (%v)", name, m.PID, err)
	}
	return m.PID
}

// sh runs a script in a machine and returns its output.
func (r *rig) sh(t *testing.T, name, script string) string {
	t.Helper()
	var out, words bytes.Buffer
	code, err := r.Exec(ctx(t), name, vm.Command{Argv: []string{"/bin/sh", "-c", script}, Stdout: &out, Stderr: &words})
	if err != nil || code != 0 {
		t.Fatalf("%q: exit code %d, %v: %s", script, code, err, words.String())
	}
	return strings.TrimSpace(out.String())
}

// called reports whether a verb of machines is among the calls.
func called(calls []smolvmtest.Call, verb string) bool {
	return slices.ContainsFunc(calls, func(c smolvmtest.Call) bool { return len(c.Args) > 1 && c.Args[1] == verb })
}

// processes are those of a machine of the stand-in.
func processes(t *testing.T, dir string) []int {
	t.Helper()
	return having(t, "environ", "SMOLVM_STANDIN_MACHINE="+dir+"\x00")
}

// starts are the calls that start a machine.
func starts(t *testing.T, name string) []int {
	t.Helper()
	return having(t, "cmdline", "\x00machine\x00start\x00--name\x00"+name+"\x00")
}

// having are the processes with a text in one of the files of proc(5).
func having(t *testing.T, file, text string) []int {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(data, []byte(text)) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil && !zombie(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
