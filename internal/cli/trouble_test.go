//go:build linux

package cli_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// data is the state of a box.
func (h *host) data(name string) string {
	return filepath.Join(h.engine, "machines", name, "root/data")
}

// stateDisk moves the state of a stopped box to a disk of its own.
func (h *host) stateDisk(name, mib string) {
	h.t.Helper()
	aside := filepath.Join(h.t.TempDir(), "data")
	if out, err := exec.Command("cp", "-a", h.data(name), aside).CombinedOutput(); err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
	smallDisk(h.t, h.data(name), mib)
	if out, err := exec.Command("cp", "-a", aside+"/.", h.data(name)).CombinedOutput(); err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
}

// fill writes a file until nothing more fits.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for block := make([]byte, 1<<20); len(block) > 0; {
		n, err := f.Write(block)
		if err != nil && n == 0 {
			block = block[:len(block)/2]
		}
	}
}

// files are those of a state that the user would miss, by their content.
// Executor's own change while it runs.
func (h *host) files(name string) map[string]string {
	h.t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(h.data(name), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || strings.Contains(path, "/.executor/") || strings.HasSuffix(path, "/filler") {
			return err
		}
		data, err := os.ReadFile(path)
		found[strings.TrimPrefix(path, h.data(name))] = string(data)
		return err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return found
}

// unhealthy runs the doctor, which must name a fault with its evidence or fix.
func (h *host) unhealthy(name, check, words string) {
	h.t.Helper()
	code, out, _ := h.run("doctor", name)
	block := regexp.MustCompile(`(?m)^fail  ` + regexp.QuoteMeta(check) + ` .*\n(^ .*\n)*`).FindString(out)
	if code != 3 || block == "" || !strings.Contains(block, words) {
		h.t.Errorf("exit code %d, no fault of %s with %q:\n%s", code, check, words, out)
	}
}

func TestFullState(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.env = append(h.env, "BOX_PASSPHRASE=secret")
	h.must("new", "alpha")
	h.must("stop", "alpha")
	h.stateDisk("alpha", "300")
	h.must("start", "alpha")
	h.must("doctor", "alpha")
	filler := filepath.Join(h.agentHome("alpha"), "workspace/filler")
	fill(t, filler)
	before := h.files("alpha")
	h.unhealthy("alpha", "state.space", "du -xh")

	// It can be saved, stopped and started.
	h.must("save", "alpha", filepath.Join(h.home, "full.gpg"))
	h.must("verify", filepath.Join(h.home, "full.gpg"))
	h.must("stop", "alpha")
	h.must("start", "alpha")
	// A repair does what it can and damages nothing, however often.
	for range 3 {
		if code, _, stderr := h.run("repair", "alpha"); code != 1 && code != 3 {
			t.Errorf("repair of a full box: exit code %d\n%s", code, stderr)
		}
	}
	if diff := cmp.Diff(before, h.files("alpha")); diff != "" {
		t.Errorf("the state of the full box changed (-before +after):\n%s", diff)
	}
	// The doctor's advice was to remove what is not needed.
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	h.must("repair", "alpha")
	h.must("doctor", "alpha")
}

func TestReadOnlyState(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.env = append(h.env, "BOX_PASSPHRASE=secret")
	h.must("new", "alpha")
	h.must("stop", "alpha")
	h.stateDisk("alpha", "300")
	remount := func(flags uintptr) {
		t.Helper()
		if err := syscall.Mount("", h.data("alpha"), "", syscall.MS_REMOUNT|flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	remount(syscall.MS_RDONLY)
	h.must("start", "alpha")
	h.unhealthy("alpha", "state.writable", "mount -o remount,rw")
	h.must("save", "alpha", filepath.Join(h.home, "ro.gpg"))
	h.must("verify", filepath.Join(h.home, "ro.gpg"))
	if code, _, stderr := h.run("repair", "alpha"); code != 1 && code != 3 || !strings.Contains(stderr, "is a read-only file system (sudo mount -o remount,rw ") {
		t.Errorf("repair: exit code %d\n%s", code, stderr)
	}
	h.must("stop", "alpha")
	h.must("start", "alpha")
	// A machine's boot has found damage: no remounting, then.
	note := filepath.Join(h.engine, "machines/alpha/root/run/hermes-box-damage")
	if err := os.WriteFile(note, []byte("inode 12 is lost\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	h.unhealthy("alpha", "state.writable", "sudo touch /forcefsck")
	h.unhealthy("alpha", "state.writable", "inode 12 is lost")
	if code, _, stderr := h.run("repair", "alpha"); code != 1 || !strings.Contains(stderr, "is damaged; the doctor tells how to mend it") {
		t.Errorf("repair: exit code %d\n%s", code, stderr)
	}
	if err := os.Remove(note); err != nil {
		t.Fatal(err)
	}
	remount(0)
	h.must("repair", "alpha")
	h.must("doctor", "alpha")
}

// status is what hb says of Executor.
func (h *host) status(name string) string {
	h.t.Helper()
	return h.must("enter", name, "--", "hb", "status")
}

// A program that answers on Executor's port as Executor would: it is named, no
// health is claimed, and it is given no credential.
func TestTakenExecutorPort(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	var machine struct {
		Port string `json:"executor_port"`
	}
	data, err := os.ReadFile(filepath.Join(h.engine, "machines/alpha/machine.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &machine); err != nil {
		t.Fatal(err)
	}
	h.must("enter", "alpha", "--", "hb", "down")
	l := listenOn(t, "tcp4", net.JoinHostPort("127.0.0.1", machine.Port))
	r := &recorder{}
	go r.serve(l)
	up := h.command("enter", "alpha", "--", "hb", "up")
	if err := up.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(patience); !strings.Contains(h.status("alpha"), "is held by another program"); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the problem was never told:", h.status("alpha"))
		}
	}
	if s := h.status("alpha"); !regexp.MustCompile(`(?m)^executor +waiting$`).MatchString(s) {
		t.Error(s)
	}
	h.unhealthy("alpha", "executor.process", "port "+machine.Port+" inside the box is held by another program")
	h.unhealthy("alpha", "executor.process", "sudo ss -ltnp")
	h.unhealthy("alpha", "mcp.guest", "")
	r.mu.Lock()
	if text := r.seen.String(); strings.Contains(text, "Bearer") {
		t.Errorf("a credential went to the other program: %q", text)
	}
	r.mu.Unlock()
	if err := l.Close(); err != nil { // the advice: end the program
		t.Fatal(err)
	}
	// The next try may be half a minute away. Another hb up makes one at once, and
	// the first one waits for whichever succeeds.
	h.must("enter", "alpha", "--", "hb", "up")
	if err := up.Wait(); err != nil {
		t.Errorf("hb up after the port was free: %v", err)
	}
	h.must("doctor", "alpha")
}

// What an Executor of another boot left says that a live process, which is
// somebody else's, serves the data.
func TestStaleDataLock(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	h.must("stop", "alpha")
	control := filepath.Join(h.agentHome("alpha"), ".executor/server-control")
	for name, text := range map[string]string{
		"server.json":  fmt.Sprintf(`{"pid":%d,"port":1,"token":"stale"}`, os.Getpid()),
		"startup.lock": fmt.Sprintf("%d\n", os.Getpid()),
	} {
		if err := os.WriteFile(filepath.Join(control, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(control, "../daemon-4788.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.must("start", "alpha")
	h.must("enter", "alpha", "--", "hb", "ready")
	h.must("doctor", "alpha")
	data, err := os.ReadFile(filepath.Join(control, "server.json"))
	if err != nil || bytes.Contains(data, []byte("stale")) {
		t.Errorf("Executor did not start anew: %s, %v", data, err)
	}
	if _, err := os.Stat(filepath.Join(control, "startup.lock")); err == nil {
		t.Error("the stale lock is still there")
	}
}

// hb replaced under a running supervisor: the new one takes over, with one
// Executor, whatever replaced it.
func TestReplacedSupervisor(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.must("new", "alpha")
	root := filepath.Join(h.engine, "machines/alpha/root")
	worker := func() string {
		pids, _ := exec.Command("pgrep", "-f", "hb supervise --worker").Output() //nolint:errcheck // none is an answer
		for pid := range strings.FieldsSeq(string(pids)) {
			environ, err := os.ReadFile("/proc/" + pid + "/environ")
			if err == nil && bytes.Contains(environ, []byte("HB_ROOT="+root+"\x00")) {
				return pid
			}
		}
		return ""
	}
	before := worker()
	if before == "" {
		t.Fatal("there is no worker")
	}
	hb := filepath.Join(root, "opt/hermes-box/bin/hb")
	for _, step := range []struct{ name, script string }{
		{"the same program, another file", `cp "$1" "$1.new" && mv -f "$1.new" "$1"`},
		{"not there", `rm "$1"`},
	} {
		if out, err := exec.Command("sh", "-c", step.script, "sh", hb).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v %s", step.name, err, out)
		}
		h.must("repair", "alpha")
		now := worker()
		if now == "" || now == before {
			t.Errorf("%s: the worker was %s and is %s", step.name, before, now)
		}
		before = now
		h.must("doctor", "alpha")
	}
	if _, err := os.Stat(filepath.Join(h.agentHome("alpha"), ".executor/stub-double")); err == nil {
		t.Error("two Executors ran at once")
	}
}

// A login file of another user is the agent's business no more, and no repair
// changes owners in its home.
func TestForeignLoginFile(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	h := newHost(t)
	h.must("new", "alpha")
	file := filepath.Join(h.agentHome("alpha"), ".codex/auth.json")
	if err := os.WriteFile(file, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(file, 12345, 12345); err != nil {
		t.Fatal(err)
	}
	h.unhealthy("alpha", "state.secrets", "sudo chown agent: "+file)
	if code, _, _ := h.run("repair", "alpha"); code != 3 {
		t.Errorf("repair: exit code %d", code)
	}
	if err := os.Chown(file, os.Geteuid(), os.Getegid()); err != nil { // the advice
		t.Fatal(err)
	}
	h.must("repair", "alpha") // which closes it
	h.must("doctor", "alpha")
}
