//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/wire"
)

// suite is what all scenarios share; TestMain makes it.
type suite struct {
	program string // a copy of ./box, so that a rebuild during the run is harmless
	prefix  string // of the names of this run's boxes
	base    string
	bare    string
	full    bool // the slow scenarios too
	outDir  string
	portLo  int
	watch   *watcher
}

// run is the suite of this process. Tests get it through newHome, TestMain has
// no other way to hand it to them.
var run *suite

func TestMain(m *testing.M) {
	s, err := newSuite()
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
	run = s
	code := m.Run()
	s.watch.stop()
	if left := s.leftovers(); len(left) > 0 {
		fmt.Fprintln(os.Stderr, "e2e: left in the engine:", strings.Join(left, ", "))
		s.sweep()
		code = 1
	}
	_ = os.RemoveAll(filepath.Dir(s.program)) // a directory of temporary files
	os.Exit(code)
}

func newSuite() (*suite, error) {
	base := os.Getenv("BOX_BASE")
	if base == "" {
		return nil, errors.New("BOX_BASE names no base; run scripts/e2e")
	}
	program := os.Getenv("BOX_PROGRAM")
	if program == "" {
		program = "../box"
	}
	dir, err := os.MkdirTemp("", "box-e2e-")
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile(program)
	if err != nil {
		return nil, fmt.Errorf("the program under test (make build): %w", err)
	}
	own := filepath.Join(dir, "box")
	if err := os.WriteFile(own, data, 0o755); err != nil {
		return nil, err
	}
	out, err := filepath.Abs("../out")
	if err != nil {
		return nil, err
	}
	random := make([]byte, 3)
	_, _ = rand.Read(random) // never fails
	s := &suite{
		program: own, prefix: "e2e-" + hex.EncodeToString(random) + "-", base: base, bare: os.Getenv("BOX_BARE_BASE"),
		full: os.Getenv("BOX_E2E_FULL") == "1", outDir: out,
		// Below the ports that Linux gives to clients, and elsewhere for
		// every run, so that two runs do not compete.
		portLo: 5200 + 40*(os.Getpid()%600),
	}
	s.watch = startWatcher(own)
	return s, nil
}

// podman runs the engine itself, to look behind box's back.
func podman(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "podman", args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("podman %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errOut.String()))
	}
	return out.String(), nil
}

// objects lists containers, volumes and networks whose names begin so.
func objects(prefix string) ([]string, error) {
	var found []string
	for _, list := range [][]string{
		{"container", "ls", "--all", "--format", "{{.Names}}"},
		{"volume", "ls", "--format", "{{.Name}}"},
		{"network", "ls", "--format", "{{.Name}}"},
	} {
		out, err := podman(list...)
		if err != nil {
			return nil, err
		}
		for name := range strings.FieldsSeq(out) {
			if strings.HasPrefix(name, prefix) {
				found = append(found, list[0]+" "+name)
			}
		}
	}
	return found, nil
}

func (s *suite) leftovers() []string {
	if _, err := exec.LookPath("podman"); err != nil {
		return nil // only boxes of smolvm were made
	}
	found, err := objects("hermes-box-" + s.prefix)
	if err != nil {
		return []string{err.Error()}
	}
	return found
}

// sweep removes what this run left, which its random prefix tells.
func (s *suite) sweep() {
	for _, object := range s.leftovers() {
		kind, name, _ := strings.Cut(object, " ")
		if _, err := podman(kind, "rm", "--force", name); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
		}
	}
}

// home is a BOX_HOME of its own, and the user who has it.
type home struct {
	t   *testing.T
	dir string
	env []string

	mu      sync.Mutex
	names   []string
	output  bytes.Buffer // everything that box has printed, for the search for secrets
	secrets []secret
	rows    int // that a database of a box certainly has
}

// secret is a text that must be seen nowhere.
type secret struct {
	what, text string
	inBox      bool // processes in a box may have it
}

// newHome makes a home whose box.env has the settings of the run and those of
// extra. At the end of the test its boxes are removed, and the searches for
// secrets are made.
func newHome(t *testing.T, extra map[string]string) *home {
	t.Helper()
	root := t.TempDir()
	h := &home{t: t, dir: filepath.Join(root, "boxes")}
	user := filepath.Join(root, "user")
	for _, dir := range []string{h.dir, user, filepath.Join(root, "tmp")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	passphrase := "planted-passphrase-" + randomHex(t, 16)
	for _, entry := range os.Environ() {
		key, _, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(key, "BOX_") && !slices.Contains([]string{"TMPDIR", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TERM", "DISPLAY", "WAYLAND_DISPLAY"}, key) {
			h.env = append(h.env, entry)
		}
	}
	h.env = append(h.env, "BOX_HOME="+h.dir, "BOX_PASSPHRASE="+passphrase, "TMPDIR="+filepath.Join(root, "tmp"), "TERM=xterm-256color")
	if os.Geteuid() == 0 {
		// A rootless podman keeps its images in the home, so only root can
		// have another.
		h.env = append(h.env, "HOME="+user)
	}
	h.secret("the passphrase", passphrase)
	settings := map[string]string{
		"BOX_DRIVER": "container", "BASE_IMAGE": run.base, "INSTALL_HERMES": "false",
		"EXECUTOR_PORT_LO": strconv.Itoa(run.portLo), "EXECUTOR_PORT_HI": strconv.Itoa(run.portLo + 39),
	}
	for key, value := range extra {
		settings[key] = value
	}
	h.configure(settings)
	t.Cleanup(h.close)
	return h
}

// within runs a part of a scenario as a test of its own.
func (h *home) within(t *testing.T, what string, part func(t *testing.T)) bool {
	outer := h.t
	defer func() { h.t = outer }()
	return t.Run(what, func(t *testing.T) {
		h.t = t
		part(t)
	})
}

// setenv sets a variable of box's environment from now on.
func (h *home) setenv(key, value string) {
	h.env = append(slices.DeleteFunc(h.env, func(entry string) bool { return strings.HasPrefix(entry, key+"=") }), key+"="+value)
}

func randomHex(t *testing.T, n int) string {
	t.Helper()
	random := make([]byte, n)
	if _, err := rand.Read(random); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(random)
}

func (h *home) configure(settings map[string]string) {
	h.t.Helper()
	var b strings.Builder
	for key, value := range settings {
		fmt.Fprintf(&b, "%s='%s'\n", key, value)
	}
	if err := os.WriteFile(filepath.Join(h.dir, "box.env"), []byte(b.String()), 0o600); err != nil {
		h.t.Fatal(err)
	}
}

// secret registers a text that must be seen nowhere.
func (h *home) secret(what, text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.secrets = append(h.secrets, secret{what: what, text: text})
	run.watch.plant(text)
}

// name returns a box's name of this run and has it removed in the end.
func (h *home) name(short string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	name := run.prefix + short
	h.names = append(h.names, name)
	return name
}

func (h *home) close() {
	t := h.t
	if t.Failed() {
		for _, name := range h.names {
			if logs, err := podman("logs", "--tail", "20", "hermes-box-"+name); err == nil {
				t.Logf("the log of %s:\n%s", name, logs)
			}
		}
	}
	for _, name := range h.names {
		if _, err := os.Stat(filepath.Join(h.dir, ".box/boxes", name+".json")); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if r := h.box("rm", name, "--force"); r.code != 0 {
			t.Errorf("remove %s at the end: %s", name, r)
		}
	}
	notes, _ := filepath.Glob(filepath.Join(h.dir, ".box/cache/templates/*.json")) // the pattern is fine
	for _, note := range notes {
		// Bases stay: the next home needs them.
		image := "localhost/hermes-box-template:" + strings.TrimSuffix(filepath.Base(note), ".json")
		if _, err := podman("image", "exists", image); err != nil {
			continue // of another driver
		}
		if out, err := podman("image", "rm", image); err != nil {
			t.Errorf("remove the template at the end: %v %s", err, out)
		}
	}
	h.searchForSecrets()
}

// result is what one run of box gave.
type result struct {
	args           []string
	code           int
	stdout, stderr string
}

func (r result) String() string {
	return fmt.Sprintf("box %s: exit code %d\nstdout: %s\nstderr: %s", strings.Join(r.args, " "), r.code, clip(r.stdout), clip(r.stderr))
}

func clip(s string) string {
	if len(s) > 6000 {
		return s[:3000] + "\n[…]\n" + s[len(s)-3000:]
	}
	return s
}

// limit bounds one run of box; the slow path has the longest.
const limit = 20 * time.Minute

func (h *home) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, run.program, args...)
	cmd.Env = h.env
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	return cmd
}

// box runs box to its end.
func (h *home) box(args ...string) result { return h.pipe(nil, args...) }

func (h *home) pipe(stdin io.Reader, args ...string) result {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := h.command(ctx, args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	return h.conclude(args, cmd.Run(), out.String(), errOut.String())
}

// conclude keeps what box printed. The output of commands that print a secret
// on purpose is kept by quiet alone.
func (h *home) conclude(args []string, err error, stdout, stderr string) result {
	r := result{args: args, stdout: stdout, stderr: stderr}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		r.code = exit.ExitCode()
	case err != nil:
		r.code, r.stderr = -1, stderr+err.Error()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(stdout) < 1<<20 {
		h.output.WriteString(stdout)
	}
	h.output.WriteString(stderr)
	return r
}

// must runs box, which must exit with 0, and returns its standard output.
func (h *home) must(args ...string) string {
	h.t.Helper()
	r := h.box(args...)
	if r.code != 0 {
		h.t.Fatal(r)
	}
	return r.stdout
}

// wants runs box, which must exit with code and say all of the words.
func (h *home) wants(code int, words []string, args ...string) result {
	h.t.Helper()
	r := h.box(args...)
	if r.code != code {
		h.t.Fatalf("want exit code %d: %s", code, r)
	}
	for _, w := range words {
		if !strings.Contains(r.stdout+r.stderr, w) {
			h.t.Fatalf("want %q: %s", w, r)
		}
	}
	return r
}

// in runs a shell script as the agent and returns what it printed.
func (h *home) in(name, script string) string {
	h.t.Helper()
	return strings.TrimSpace(h.must("enter", name, "--", "sh", "-c", script))
}

// token asks the box for one of its tokens and registers it as a secret.
// Its output is not kept.
func (h *home) token(name, which string) string {
	h.t.Helper()
	args := []string{"container", "exec", "hermes-box-" + name, wire.HBPath, "token", "agent"}
	if which == "operator" {
		args = []string{"container", "exec", "hermes-box-" + name, wire.HBPath, "executor-token"}
	}
	out, err := podman(args...)
	token := strings.TrimSpace(out)
	if err != nil || len(token) != 64 {
		h.t.Fatalf("the %s token of %s: %d bytes, %v", which, name, len(token), err)
	}
	h.secret("the "+which+" token of "+name, token)
	return token
}

// create makes a box and learns its secrets.
func (h *home) create(short string) string {
	h.t.Helper()
	name := h.name(short)
	h.must("new", name)
	h.token(name, "agent")
	h.token(name, "operator")
	return name
}

// record is the part of a box's registry record that tests look at.
type record struct {
	OwnerID  string `json:"owner_id"`
	HostPort int    `json:"host_port"`
}

func (h *home) record(name string) record {
	h.t.Helper()
	data, err := os.ReadFile(filepath.Join(h.dir, ".box/boxes", name+".json"))
	if err != nil {
		h.t.Fatal(err)
	}
	var rec record
	if err := json.Unmarshal(data, &rec); err != nil {
		h.t.Fatal(err)
	}
	return rec
}

// doctor runs `box doctor --json`, which must exit with code.
func (h *home) doctor(name string, code int) wire.Report {
	h.t.Helper()
	r := h.box("doctor", name, "--json")
	if r.code != code {
		h.t.Fatalf("want exit code %d: %s", code, r)
	}
	var report wire.Report
	if err := wire.DecodeStrict([]byte(r.stdout), &report); err != nil {
		h.t.Fatalf("%v: %s", err, r)
	}
	if report.Schema != 1 || report.Box != name || report.Healthy != (code == 0) {
		h.t.Fatalf("schema %d, box %q, healthy %v with exit code %d", report.Schema, report.Box, report.Healthy, code)
	}
	return report
}

func check(t *testing.T, report wire.Report, id string) wire.Check {
	t.Helper()
	for _, c := range report.Checks {
		if c.ID == id {
			return c
		}
	}
	t.Fatalf("the doctor has no check %s", id)
	return wire.Check{}
}

// eventually polls until ok has no complaint.
func eventually(t *testing.T, patience time.Duration, what string, ok func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %v", what, patience, err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// listen takes a port that a box had: an engine's processes let go of it a moment
// after their answer.
func (h *home) listen(port int) net.Listener {
	h.t.Helper()
	var l net.Listener
	eventually(h.t, time.Minute, "a free port", func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		return err
	})
	return l
}

// noTraces fails when the engine or the registry knows anything of the box.
func (h *home) noTraces(name string) {
	h.t.Helper()
	found, err := objects("hermes-box-" + name)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, object := range found {
		if strings.HasSuffix(object, " hermes-box-"+name) {
			h.t.Errorf("still there: %s", object)
		}
	}
	if _, err := os.Stat(filepath.Join(h.dir, ".box/boxes", name+".json")); !errors.Is(err, fs.ErrNotExist) {
		h.t.Errorf("the record of %s is still there (%v)", name, err)
	}
	if r := h.box("ls", "--json"); r.code != 0 || strings.Contains(r.stdout, name) {
		h.t.Errorf("ls still knows %s: %s", name, r)
	}
}

// transcripts returns the kept transcripts' contents by file name.
func (h *home) transcripts() map[string]string {
	h.t.Helper()
	all := map[string]string{}
	entries, err := os.ReadDir(filepath.Join(h.dir, ".box/transcripts"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(h.dir, ".box/transcripts", e.Name()))
		if err != nil {
			h.t.Fatal(err)
		}
		all[e.Name()] = string(data)
	}
	return all
}
