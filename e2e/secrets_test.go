//go:build e2e && linux

package e2e

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// watcher samples the command lines and environments of all processes of the
// host and remembers every text in them that could be a token, with those
// that were planted. Whether one of them is a secret is asked afterwards,
// because a box's tokens are not known while it is made.
//
// Processes in a box (another pid namespace) are kept apart: they are no
// business of other users of the host, but the door's tokens must not be there
// either. Executor's own secret is allowed, as it takes it no other way.
type watcher struct {
	program string // box itself, whose environment has the planted passphrase
	self    string // pid namespace of the host

	mu      sync.Mutex
	planted [][]byte
	known   map[string]string // command lines at the last sample, by pid
	onHost  map[string]string // text -> where
	inBoxes map[string]string
	done    chan struct{}
	ended   chan struct{}
}

var tokenLike = regexp.MustCompile(`[0-9a-f]{64}`)

func startWatcher(program string) *watcher {
	w := &watcher{program: program, onHost: map[string]string{}, inBoxes: map[string]string{}, done: make(chan struct{}), ended: make(chan struct{})}
	w.self, _ = os.Readlink("/proc/self/ns/pid")
	go func() {
		defer close(w.ended)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-w.done:
				return
			case <-tick.C:
				w.sample()
			}
		}
	}()
	return w
}

func (w *watcher) stop() {
	close(w.done)
	<-w.ended
}

func (w *watcher) plant(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.planted = append(w.planted, []byte(text))
	w.known = nil // look at all again
}

func (w *watcher) sample() {
	entries, _ := os.ReadDir("/proc")
	w.mu.Lock()
	defer w.mu.Unlock()
	known := make(map[string]string, len(w.known))
	for _, e := range entries {
		dir := "/proc/" + e.Name()
		if c := e.Name()[0]; c < '0' || c > '9' || e.Name() == strconv.Itoa(os.Getpid()) {
			continue
		}
		cmdline, err := os.ReadFile(dir + "/cmdline")
		if err != nil || len(cmdline) == 0 {
			continue // ended meanwhile, or the kernel's
		}
		// A process has a new environment only with a new command line, nearly
		// always, and most processes stay what they are.
		known[e.Name()] = string(cmdline)
		if w.known[e.Name()] == string(cmdline) {
			continue
		}
		environ, _ := os.ReadFile(dir + "/environ") // it may be another user's
		w.examine(dir, "cmdline", cmdline)
		w.examine(dir, "environ", environ)
	}
	w.known = known
}

func (w *watcher) examine(dir, file string, data []byte) {
	var found []string
	for _, text := range tokenLike.FindAll(data, -1) {
		found = append(found, string(text))
	}
	for _, text := range w.planted {
		if bytes.Contains(data, text) && !w.mayHave(dir, file) && stays(dir, file, text) {
			found = append(found, string(text))
		}
	}
	if found == nil {
		return
	}
	comm, err := os.ReadFile(filepath.Join(dir, "comm"))
	ns, nsErr := os.Readlink(filepath.Join(dir, "ns/pid"))
	if err != nil || nsErr != nil {
		return // it has ended: whose it was cannot be told
	}
	seen, whose := w.onHost, "the host's"
	if ns != w.self {
		seen, whose = w.inBoxes, "the box's"
	}
	for _, text := range found {
		seen[text] = whose + " process " + strings.TrimSpace(string(comm)) + " (" + file + ")"
	}
}

// mayHave allows what the test itself has put into box's environment, also in
// the moment when box's child is still a copy of box.
func (w *watcher) mayHave(dir, file string) bool {
	exe, err := os.Readlink(filepath.Join(dir, "exe"))
	return file == "environ" && (err != nil || exe == w.program || strings.HasSuffix(exe, ".test"))
}

// stays: a child of box that became another program between two looks has
// another environment now.
func stays(dir, file string, text []byte) bool {
	data, err := os.ReadFile(filepath.Join(dir, file))
	return err == nil && bytes.Contains(data, text)
}

// where tells where a text was seen, if it was.
func (w *watcher) where(text string, hostOnly bool) (string, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	where, ok := w.onHost[text]
	if !ok && !hostOnly {
		where, ok = w.inBoxes[text]
	}
	return where, ok
}

// searchForSecrets looks for every registered secret among the processes that
// were seen, in what box has printed, and in all files below the home that
// others could read or that are transcripts.
func (h *home) searchForSecrets() {
	t := h.t
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(run.watch.onHost) == 0 {
		t.Error("the watcher has seen no container's id, so it would have seen no token") // engines have them as arguments
	}
	for _, s := range h.secrets {
		if where, ok := run.watch.where(s.text, s.inBox); ok {
			t.Errorf("%s was seen in %s", s.what, where)
		}
		if bytes.Contains(h.output.Bytes(), []byte(s.text)) {
			t.Errorf("box has printed %s", s.what)
		}
	}
	root := filepath.Dir(h.dir)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		inBoxHome := strings.HasPrefix(path, filepath.Join(h.dir, ".box")+"/")
		if inBoxHome && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %s", path, info.Mode())
		}
		if filepath.Base(path) == "box.env" || strings.HasPrefix(path, filepath.Join(root, "browser")+"/") || info.Size() > 64<<20 {
			return nil // the user's own settings, the browser's cookies
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, s := range h.secrets {
			if bytes.Contains(data, []byte(s.text)) {
				t.Errorf("%s is in %s", s.what, path)
			}
		}
		return nil
	})
	if err != nil {
		t.Errorf("search %s: %v", root, err)
	}
	if info, err := os.Stat(filepath.Join(h.dir, ".box")); err == nil && info.Mode().Perm() != 0o700 {
		t.Errorf(".box has mode %s", info.Mode())
	}
}

// TestWatcher shows that the watcher would see a secret.
func TestWatcher(t *testing.T) {
	argument, variable := randomHex(t, 32), "planted-"+randomHex(t, 12)
	run.watch.plant(variable)
	cmd := exec.Command("/bin/sh", "-c", "read -r line", argument)
	cmd.Env = []string{"PLANTED=" + variable}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{argument, variable} {
		eventually(t, 30*time.Second, "a secret seen", func() error {
			if _, ok := run.watch.where(text, true); !ok {
				return errors.New("not yet")
			}
			return nil
		})
	}
	if _, ok := run.watch.where(randomHex(t, 32), false); ok {
		t.Error("it sees what is not there")
	}
	_ = stdin.Close() // which ends the shell
	_ = cmd.Wait()    // with 1
}

// TestProxyPassword has a proxy with a password, which box may tell only to
// the box; the proxy itself is not there.
func TestProxyPassword(t *testing.T) {
	password := "planted-" + randomHex(t, 12)
	proxy := "http://somebody:" + password + "@127.0.0.1:9"
	h := newHome(t, map[string]string{"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy})
	h.mu.Lock()
	h.secrets = append(h.secrets, secret{"the proxy's password", password, true})
	h.mu.Unlock()
	run.watch.plant(password)
	name := h.create("proxy")
	h.doctor(name, 0)
	if got := h.in(name, "grep -c PROXY= /etc/hermes-box.env || true; stat -c %a /etc/hermes-box.env"); got != "0\n644" {
		t.Errorf("proxies in the settings that everybody can read, and their mode: %q", got)
	}
	if !run.full {
		return // what follows waits minutes for a network
	}
	// The registry cannot be reached now. What is installed stays.
	r := h.box("repair", "--verbose", name)
	t.Logf("repair without a network: exit code %d", r.code)
	healthySoon(t, h, name)
}
