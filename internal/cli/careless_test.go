//go:build linux

package cli_test

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A reader that goes away, as `| head` or a tee that Ctrl-C ended, does not end
// what changes boxes.
func TestGoneReader(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	cmd := h.command("new", "alpha")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stderr).ReadString('\n')
	if err != nil || stderr.Close() != nil {
		t.Fatalf("%q, %v", line, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("new, whose progress nobody reads: %v", err)
	}
	h.must("doctor", "alpha")

	// What only tells ends without a word.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	var said strings.Builder
	ls := h.command("ls")
	ls.Stdout, ls.Stderr = w, &said
	_ = ls.Run()
	_ = w.Close()
	if code := ls.ProcessState.ExitCode(); code != 128+13 || said.Len() > 0 {
		t.Errorf("ls: exit code %d, stderr %q", code, said.String())
	}
}

// The box that was asked about is removed, and not its successor.
func TestRemoveWhileItIsReplaced(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	c := h.console("rm", "alpha")
	c.await("Type its name to confirm: ")
	h.must("rm", "alpha", "--force")
	h.must("new", "alpha")
	c.write("alpha\n")
	if code := c.end(); code != 1 || !strings.Contains(c.text(), "nothing was removed") {
		t.Errorf("exit code %d: %s", code, c.text())
	}
	h.must("doctor", "alpha")
}

// Who enters a box that a killed save has left running keeps it running.
func TestEnterAfterAKilledSave(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.env = append(h.env, "BOX_PASSPHRASE=secret")
	h.must("new", "alpha")
	path := filepath.Join(h.home, ".box/boxes/alpha.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var record map[string]any
	if err := json.Unmarshal(data, &record); err != nil {
		t.Fatal(err)
	}
	record["operation"] = map[string]any{"verb": "save", "step": "save", "started": "2026-01-02T03:04:05Z", "stop": true}
	if data, err = json.Marshal(record); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	h.must("enter", "alpha", "--", "true")
	h.must("save", "alpha")
	if ls := h.must("ls"); !strings.Contains(ls, "running") {
		t.Errorf("the save stopped the box that somebody had entered:\n%s", ls)
	}
}

// A hint is a command, also where paths have spaces.
func TestHintOfAHomeWithSpaces(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	home := filepath.Join(h.home, "my boxes")
	if err := os.MkdirAll(home, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(h.home, "box.env"), filepath.Join(home, "box.env")); err != nil {
		t.Fatal(err)
	}
	h.home = home
	h.env = append(h.env, "BOX_HOME="+home)
	if err := os.WriteFile(filepath.Join(home, "box.env"), []byte(strings.Replace(baseSettings(), "BASE_IMAGE=", "BASE_IMAGE=/none/", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, stderr := h.run("new", "alpha")
	if code == 0 || !strings.Contains(stderr, "hint: less '"+home+"/") {
		t.Errorf("exit code %d, stderr:\n%s", code, stderr)
	}
}
