//go:build linux

package cli_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/cli/clitest"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/fake"
	"hermes-box-lite/internal/wire"
)

// Variables of TestFaults.
const (
	faultsVar = "FAULTS"      // "all": every cell; a number: one of so many
	seedVar   = "FAULTS_SEED" // which of them
	cellVar   = "FAULTS_CELL" // only cells whose name holds this text
)

// An ordinary run takes one of so many cells, the same ones each time: a test
// that fails on some days only tells of the day, not of the change. Of this seed
// they are of all verbs and all kinds.
const (
	faultsSample = 66
	faultsSeed   = 0
)

// faultWorkers is more than there are processors: much of a cell is waiting.
const faultWorkers = 8

// faultVerb is a row of tables: one verb in one situation.
type faultVerb struct {
	title string
	args  func(*rig) []string
	start string // the situation of alpha: absent, interrupted, stopped or running; cold: absent, and no template
	// with is a fault that is always there, for the ways out of a failure.
	with, withWhat string
	// from and until bound the points that are of interest, by their beginnings.
	from, until string
}

func faultVerbs() []faultVerb {
	words := func(args ...string) func(*rig) []string { return func(*rig) []string { return args } }
	save := func(r *rig) []string {
		r.saves++
		return []string{"save", "alpha", filepath.Join(r.home, fmt.Sprintf("saves/%d.gpg", r.saves))}
	}
	return []faultVerb{
		{title: "new", args: words("new", "alpha"), start: "absent"},
		{title: "new, failing", args: words("new", "alpha"), start: "absent", with: "step.new.provision:exec.provision@1", withWhat: "error cut", from: "fault "},
		{title: "new, over left-overs", args: words("new", "alpha"), start: "interrupted", until: "step.new.base"},
		{title: "new, keeping its system", args: words("new", "alpha"), start: "cold", from: "step.new.provision:exec.provision", until: "step.new.start-Executor"},
		{title: "fork", args: words("fork", "other", "alpha"), start: "absent"},
		{title: "fork, streamed", args: words("fork", "other", "alpha", "--fresh-logins"), start: "absent", until: "step.fork.start-Executor"},
		{title: "load", args: func(r *rig) []string { return []string{"load", r.archive, "alpha"} }, start: "absent"},
		{title: "save", args: save, start: "running"},
		{title: "save, of a stopped box", args: save, start: "stopped"},
		{title: "repair", args: words("repair", "alpha"), start: "running"},
		{title: "start", args: words("start", "alpha"), start: "stopped"},
		{title: "stop", args: words("stop", "alpha"), start: "running"},
		{title: "rm", args: words("rm", "alpha", "--force"), start: "running"},
	}
}

// faultKind is a column.
type faultKind struct {
	title, what string
	codes       []int // that the verb may end with
}

func faultKinds() []faultKind {
	failed := []int{0, 1, 3, 8} // 0: it was done without
	return []faultKind{
		{"error", "error injected", failed},
		{"error after", "after error injected", failed},
		{"hang", "hang", failed},
		{"HUP", "signal HUP", []int{129, 0}}, // 0: it was done already
		{"INT", "signal INT", []int{130, 0}},
		{"TERM", "signal TERM", []int{143, 0}},
		{"INT INT", "twice INT", []int{130, 0}},
		{"KILL", "kill", []int{137}},
		{"KILL after", "after kill", []int{137}},
		{"lie", "lie", failed},
	}
}

// sudden: the command itself had no chance to clean up.
func (k faultKind) sudden() bool {
	return strings.HasSuffix(k.what, "kill") || strings.HasPrefix(k.what, "twice")
}

// patience sorts the cells that wait for deadlines before those that do not.
func (k faultKind) patience() int {
	if k.what == "hang" {
		return 0
	}
	return 1
}

// applies reports whether a fault makes sense at a point: only engines and
// guests hang or lie, and moving a state takes as long as it takes.
func (k faultKind) applies(point string) bool {
	if k.what != "hang" && k.what != "lie" {
		return true
	}
	_, call, isCall := strings.Cut(point, ":")
	if !isCall {
		call = point
	}
	if strings.HasPrefix(call, "step.") {
		return false
	}
	return k.what == "lie" || !strings.HasPrefix(call, "exec.unpack") && point != "step.save.save:exec.pack@1" && point != "step.fork.restore:exec.pack@2"
}

type faultCell struct {
	verb  int
	point string
	kind  int
}

// rig is a home in which many cells are run, one after the other.
type rig struct {
	t                     *testing.T
	home, engine, archive string
	env                   []string
	drv                   *fake.Driver
	saves, cells          int
	other                 map[string]string // what must stay as it is
	port                  int               // that alpha had last
}

const faultMarker = "planted-plaintext-of-the-state"

func newRig(t *testing.T) (*rig, error) {
	engine, err := newEngine()
	if err != nil {
		return nil, err
	}
	home, err := newScratch("box-faults-")
	if err != nil {
		return nil, err
	}
	r := &rig{t: t, engine: engine, home: home, drv: fake.New(engine, "")}
	t.Cleanup(func() {
		for _, fault := range audit(engine, home) {
			t.Error(fault)
		}
		if err := errors.Join(endEngine(engine), os.RemoveAll(home)); err != nil {
			t.Error(err)
		}
	})
	for _, dir := range []string{"tmp", "saves"} {
		if err := os.Mkdir(filepath.Join(r.home, dir), 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(r.home, "box.env"), []byte(baseSettings()), 0o600); err != nil {
		return nil, err
	}
	r.env = append(os.Environ(), "BOX_HOME="+r.home, "HOME="+r.home, "TMPDIR="+filepath.Join(r.home, "tmp"),
		"BOX_PASSPHRASE=secret", clitest.EngineVar+"="+engine, clitest.SaidVar+"="+filepath.Join(engine, "said"))
	if err := r.must("new", "other"); err != nil {
		return nil, err
	}
	if err := r.plant("other"); err != nil {
		return nil, err
	}
	r.archive = filepath.Join(r.home, "other.gpg")
	if err := r.must("save", "other", r.archive); err != nil {
		return nil, err
	}
	r.other = r.fingerprint()
	return r, nil
}

func (r *rig) workspace(name string) string {
	return filepath.Join(r.drv.Root(name), "data/home/agent/workspace")
}

// plant puts the marker into a box.
func (r *rig) plant(name string) error {
	return os.WriteFile(filepath.Join(r.workspace(name), "marker"), []byte(strings.Repeat(faultMarker, 100)), 0o644)
}

// fingerprint is the record, the machine and the state of the other box.
func (r *rig) fingerprint() map[string]string {
	found := map[string]string{}
	for _, file := range []string{r.recordPath("other"), filepath.Join(r.engine, "machines/other/machine.json")} {
		data, err := os.ReadFile(file)
		found[file] = fmt.Sprintf("%s %v", data, err)
	}
	_ = filepath.WalkDir(r.workspace("other"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			data, err := os.ReadFile(path)
			found[path] = fmt.Sprintf("%s %v", data, err)
		}
		return nil
	})
	return found
}

func (r *rig) recordPath(name string) string {
	return filepath.Join(r.home, ".box/boxes", name+".json")
}

// record is the record of a box; nil when there is none.
func (r *rig) record(name string) *box.Record {
	data, err := os.ReadFile(r.recordPath(name))
	if err != nil {
		return nil
	}
	var rec box.Record
	if err := json.Unmarshal(data, &rec); err != nil {
		return &box.Record{Name: "damaged"}
	}
	return &rec
}

// run runs box in a process of its own. A signal that ended it is 128+n, and
// -1 that it did not end.
func (r *rig) run(env []string, args ...string) (code int, stdout, stderr string) {
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, boxPath(), args...)
	cmd.Env = append(slices.Clone(r.env), env...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil || err != nil && !errors.As(err, &exit):
		return -1, out.String(), fmt.Sprintf("%v\n%s", err, errOut.String())
	case exit != nil && exit.Sys().(syscall.WaitStatus).Signaled():
		return 128 + int(exit.Sys().(syscall.WaitStatus).Signal()), out.String(), errOut.String()
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

// must is run for a command that has to end with one of the codes, or 0.
func (r *rig) must(args ...string) error { return r.mustEnd([]int{0}, args...) }

func (r *rig) mustEnd(codes []int, args ...string) error {
	if code, _, stderr := r.run(nil, args...); !slices.Contains(codes, code) {
		return fmt.Errorf("box %s: exit code %d\n%s", strings.Join(args, " "), code, indent(stderr))
	}
	return nil
}

func indent(text string) string {
	return "    | " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    | ")
}

// bring takes alpha to a situation.
func (r *rig) bring(to string) error {
	if to == "absent" || to == "interrupted" || to == "cold" {
		if err := r.drop(); err != nil {
			return err
		}
		if to == "cold" {
			return r.must("cache", "prune", "--all")
		}
		if to == "absent" {
			return nil
		}
		const point = "step.new.provision:exec.provision@1"
		if err := r.drv.Fault(point, "kill"); err != nil {
			return err
		}
		return errors.Join(r.mustEnd([]int{137}, "new", "alpha"), r.drv.Fault(point, ""))
	}
	if r.record("alpha") == nil {
		if err := r.must("new", "alpha"); err != nil {
			return err
		}
	}
	if err := r.plant("alpha"); err != nil {
		return err
	}
	machine, err := r.drv.Inspect(context.Background(), "alpha")
	if err != nil || string(machine.State) == to {
		return err
	}
	return r.must(map[string]string{"running": "start", "stopped": "stop"}[to], "alpha")
}

// drop takes alpha away, as no verb does: without a word, and in no time.
func (r *rig) drop() error {
	if _, err := os.Stat(r.drv.Root("alpha")); err == nil {
		if err := r.drv.Kill("alpha"); err != nil {
			return err
		}
	}
	err := os.Remove(r.recordPath("alpha"))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(filepath.Dir(r.drv.Root("alpha"))))
}

// learn runs a verb once and returns the points that it reaches.
func (r *rig) learn(v faultVerb) ([]string, error) {
	if err := r.bring(v.start); err != nil {
		return nil, err
	}
	if v.with != "" {
		if err := r.drv.Fault(v.with, v.withWhat); err != nil {
			return nil, err
		}
		defer func() { _ = r.drv.Fault(v.with, "") }()
	}
	lines, code, stderr, err := r.traced(nil, v.args(r)...)
	if err != nil {
		return nil, err
	}
	if code != 0 && v.with == "" {
		return nil, fmt.Errorf("%s: exit code %d\n%s", v.title, code, indent(stderr))
	}
	var points []string
	hello := regexp.MustCompile(`exec\.hello@\d+$`)
	begun, before := v.from == "", ""
	for _, line := range lines {
		if !begun {
			begun = strings.HasPrefix(line, v.from)
			continue
		}
		if v.until != "" && strings.HasPrefix(line, v.until) {
			break
		}
		// How often the supervisor is asked whether it is up depends on time.
		if kind := hello.ReplaceAllString(line, ""); kind != line && kind == before {
			continue
		} else {
			before = kind
		}
		points = append(points, line)
	}
	if len(points) < 3 {
		return nil, fmt.Errorf("%s: only %d points: %v", v.title, len(points), lines)
	}
	return points, nil
}

// traced runs a command and returns the points that it reached.
func (r *rig) traced(env []string, args ...string) (lines []string, code int, stderr string, err error) {
	path, err := r.drv.Trace()
	if err != nil {
		return nil, 0, "", err
	}
	code, _, stderr = r.run(env, args...)
	data, err := os.ReadFile(path)
	return strings.Split(strings.TrimSpace(string(data)), "\n"), code, stderr, errors.Join(err, os.Remove(path))
}

// errNotReached: the command took another way this time.
var errNotReached = errors.New("the point was not reached")

// cell runs one cell. The errors are what did not converge.
func (r *rig) cell(v faultVerb, point string, kind faultKind) (code int, err error) {
	if err := r.bring(v.start); err != nil {
		return 0, fmt.Errorf("before: %w", err)
	}
	r.cells++
	args := v.args(r)
	verb := args[0]
	faults := map[string]string{point: kind.what}
	if v.with != "" {
		faults[v.with] = v.withWhat
	}
	for p, what := range faults {
		if err := r.drv.Fault(p, what); err != nil {
			return 0, err
		}
	}
	var env []string
	if kind.what == "hang" {
		env = []string{clitest.EngineLimitVar + "=4s", clitest.GuestLimitVar + "=6s", clitest.CleanupLimitVar + "=4s"}
	}
	lines, code, said, err := r.traced(env, args...)
	for p := range faults {
		err = errors.Join(err, r.drv.Fault(p, ""))
	}
	if err != nil {
		return code, err
	}
	var wrong []error
	note := func(err error) {
		if err != nil {
			wrong = append(wrong, err)
		}
	}
	reached := slices.Contains(lines, "fault "+point)
	if !slices.Contains(kind.codes, code) && reached {
		note(fmt.Errorf("exit code %d", code))
	}

	// At once, and before anything else is run.
	note(r.invariants(kind.sudden()))
	rec := r.record("alpha")
	if rec != nil && kind.sudden() && begun(lines, verb) && (rec.Operation == nil || rec.Operation.Verb != verb) {
		note(fmt.Errorf("the journal says %+v", rec.Operation))
	}
	switch {
	case code == 8 && rec == nil && point != "step.forget@1" && // whose removal may not be durable
		(verb != "fork" || slices.Contains(lines, "step.fork.create@1")): // else it is the source that is not ours
		note(errors.New("a person must act, and the record is gone"))
	case verb == "new" && v.start == "absent" && code != 0 && code != 8 && !kind.sudden() && rec != nil:
		note(errors.New("the failed new left its box"))
	case verb == "fork" && code != 0 && code != 8 && !kind.sudden() && rec != nil:
		note(errors.New("the failed fork left its box"))
	case verb == "load" && code != 0 && code != 8 && !kind.sudden() && rec != nil && rec.Phase != box.Ready:
		note(errors.New("the failed load left a box that never was ready"))
	case !creates(verb) && verb != "rm" && rec == nil:
		note(errors.New("the box is lost"))
	}

	// What it printed helps.
	if !kind.sudden() {
		note(r.followHints(said))
	}
	// What ls says helps.
	note(r.followListing())
	// The same again.
	rec = r.record("alpha")
	switch {
	case verb == "rm":
		note(r.mustEnd([]int{0, 4}, args...))
	case creates(verb) && rec != nil && rec.Phase == box.Ready:
		note(r.must("doctor", "alpha"))
	default:
		note(r.must(v.args(r)...))
	}
	if verb == "load" || verb == "fork" {
		_, err := os.Stat(filepath.Join(r.workspace("alpha"), "marker"))
		note(err) // the state, and not only a box
	}
	if verb != "stop" && verb != "rm" && v.start != "stopped" {
		note(r.serving())
	}
	note(r.invariants(false))
	if kind.what == "lie" && verb == "save" && v.start == "stopped" && point == "inspect@2" {
		// Of a box whose engine did not say that it is stopped nobody knows that
		// it may be stopped again.
		note(r.must("stop", "alpha"))
	}
	note(r.settled(v))
	if verb == "save" && v.start == "stopped" {
		// A stop in it that was cut short keeps Executor down for two minutes
		// unless the box is stopped, started or repaired.
		note(r.must([]string{"stop", "start", "repair"}[r.cells%3], "alpha"))
	}
	if r.cells%10 == 0 {
		note(r.must("doctor", "other"))
	}
	if len(wrong) > 0 {
		return code, fmt.Errorf("%w\nit said:\n%s", errors.Join(wrong...), indent(said))
	}
	if !reached {
		return code, errNotReached
	}
	return code, nil
}

// followHints runs what a failed command advised.
func (r *rig) followHints(said string) error {
	var wrong []error
	for line := range strings.Lines(said) {
		if hint, ok := strings.CutPrefix(strings.TrimSpace(line), "hint: box "); ok {
			wrong = append(wrong, r.follow(hint))
		} else if path, ok := strings.CutPrefix(strings.TrimSpace(line), "hint: less "); ok {
			_, err := os.Stat(path)
			wrong = append(wrong, err)
		}
	}
	return errors.Join(wrong...)
}

// follow runs an advised command. Where it asks, the answer is yes.
func (r *rig) follow(line string) error {
	args := strings.Fields(line)
	if args[0] == "rm" && len(args) == 2 {
		args = append(args, "--force")
		return r.mustEnd([]int{0, 4}, args...) // 4: an earlier hint has done it
	}
	return r.must(args...)
}

var quotedCommand = regexp.MustCompile("(interrupted while |the last )?`box ([^`]+)`")

// followListing runs what ls advises; where it offers a choice, each in turn.
func (r *rig) followListing() error {
	note, state, err := r.listed("alpha")
	if err != nil {
		return err
	}
	rec := r.record("alpha")
	if rec == nil {
		if state != "" {
			return fmt.Errorf("ls shows a box without a record: %s", state)
		}
		return nil
	}
	if trace := rec.Operation != nil || rec.Phase != box.Ready; trace != (note != "") {
		return fmt.Errorf("ls says %q of %s in phase %s with %+v", note, state, rec.Phase, rec.Operation)
	}
	if note == "" {
		return nil
	}
	var offers []string
	for _, m := range quotedCommand.FindAllStringSubmatch(note, -1) {
		if m[1] == "" {
			offers = append(offers, m[2])
		}
	}
	if len(offers) == 0 {
		return fmt.Errorf("ls explains nothing: %q", note)
	}
	if err := r.follow(offers[r.cells%len(offers)]); err != nil {
		return fmt.Errorf("ls said %q: %w", note, err)
	}
	return nil
}

// listed is what ls says of a box.
func (r *rig) listed(name string) (note, state string, err error) {
	code, out, stderr := r.run(nil, "ls", "--json")
	var list struct {
		Boxes []struct{ Name, State, Note string }
	}
	if err := json.Unmarshal([]byte(out), &list); code != 0 || err != nil {
		return "", "", fmt.Errorf("ls: exit code %d, %w\n%s", code, err, indent(stderr))
	}
	for _, b := range list.Boxes {
		if b.Name == name {
			return b.Note, b.State, nil
		}
		if b.Name == "other" && (b.State != "running" || b.Note != "") {
			return "", "", fmt.Errorf("ls says of the other box: %s, %s", b.State, b.Note)
		}
	}
	return "", "", nil
}

// creates: the verb makes a box.
func creates(verb string) bool { return verb == "new" || verb == "load" || verb == "fork" }

// begun reports whether a verb was sure to have journalled a step when its
// fault happened, and had not completed.
func begun(lines []string, verb string) bool {
	first := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "step."+verb+".") })
	fault := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "fault ") })
	if creates(verb) { // its first steps have no record
		first = slices.Index(lines, "step."+verb+".create@1")
	}
	done := func(l string) bool { return strings.Contains(l, ".complete@") || strings.Contains(l, "step.forget@") }
	return first >= 0 && fault > first+1 && !slices.ContainsFunc(lines, done)
}

// serving: Executor is up, and not only supposed to be back soon.
func (r *rig) serving() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		var said bytes.Buffer
		_, err := r.drv.Exec(ctx, "alpha", vm.Command{Argv: []string{wire.HBPath, "status"}, Stdout: &said, Stderr: &said})
		if strings.Contains(said.String(), "running, pid") {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("Executor is not up again: %w\n%s", err, indent(said.String()))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// settled: everything is as if nothing had happened.
func (r *rig) settled(v faultVerb) error {
	note, state, err := r.listed("alpha")
	want := "running"
	switch verb := v.title; {
	case verb == "rm":
		want = ""
	case verb == "stop", v.start == "stopped" && verb != "start":
		want = "stopped"
	}
	if err == nil && (state != want || note != "") {
		err = fmt.Errorf("in the end ls says %q, %q", state, note)
	}
	return err
}

// invariants are what holds after every command; unfinished: it was ended
// suddenly, and the next one may find left-overs.
func (r *rig) invariants(unfinished bool) error {
	var wrong []error
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }

	records, _ := filepath.Glob(filepath.Join(r.home, ".box/boxes/*"))
	machines, _ := filepath.Glob(filepath.Join(r.engine, "machines/*"))
	recorded, made := baseNames(records), baseNames(machines)
	for _, name := range made {
		if !slices.Contains(recorded, name+".json") {
			bad("an orphan machine: %s", name)
		}
	}
	for _, name := range recorded {
		if !unfinished && !slices.Contains(made, strings.TrimSuffix(name, ".json")) && r.settledRecord(name) {
			bad("a record without a machine: %s", name)
		}
	}
	for _, root := range runningRoots(r.engine) {
		if !slices.Contains(made, filepath.Base(filepath.Dir(root))) {
			bad("a process runs in %s, which is gone", root)
		}
	}
	locks, _ := filepath.Glob(filepath.Join(r.home, ".box/locks/*"))
	for _, path := range locks {
		if isHeld(path) {
			bad("%s is held", path)
		}
	}
	_ = filepath.WalkDir(r.home, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil //nolint:nilerr // nothing to read
		}
		if !unfinished && (strings.HasSuffix(path, ".partial") || strings.Contains(filepath.Base(path), ".tmp-")) {
			bad("left over: %s", path)
		}
		if data, err := os.ReadFile(path); err == nil && bytes.Contains(data, []byte(faultMarker)) {
			bad("plaintext of the state in %s", path)
		}
		return nil
	})
	now := r.fingerprint()
	for file, content := range r.other {
		if now[file] != content {
			bad("the other box changed: %s", file)
		}
	}
	if rec := r.record("alpha"); rec != nil {
		r.port = rec.HostPort
	} else if r.port != 0 {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(r.port)))
		if err != nil {
			bad("alpha is gone, and its port is not free: %w", err)
		} else {
			_ = l.Close()
		}
	}
	return errors.Join(wrong...)
}

// settledRecord reports whether a record file claims that all is well.
func (r *rig) settledRecord(file string) bool {
	rec := r.record(strings.TrimSuffix(file, ".json"))
	return rec == nil || rec.Operation == nil && rec.Phase == box.Ready
}

func baseNames(paths []string) []string {
	names := make([]string, len(paths))
	for i, p := range paths {
		names[i] = filepath.Base(p)
	}
	return names
}

// runningRoots are the machines of an engine in which something runs.
func runningRoots(engine string) []string {
	var roots []string
	processes, _ := os.ReadDir("/proc")
	for _, p := range processes {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		data, err := os.ReadFile("/proc/" + p.Name() + "/environ")
		if err != nil {
			continue
		}
		for kv := range bytes.SplitSeq(data, []byte{0}) {
			if root, ok := strings.CutPrefix(string(kv), "HB_ROOT="); ok && strings.HasPrefix(root, engine+"/") {
				roots = append(roots, root)
			}
		}
	}
	return roots
}

// lockGrace is how long a lock may outlive its process: a child that was just
// forked has it until it becomes another program.
const lockGrace = 2 * time.Second

func isHeld(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	for deadline := time.Now().Add(lockGrace); ; time.Sleep(20 * time.Millisecond) {
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			return false
		}
		if time.Now().After(deadline) {
			return true
		}
	}
}

// faultQueue hands out cells, preferring those that start with what the cell
// before has left.
type faultQueue struct {
	mu    sync.Mutex
	verbs []faultVerb
	cells []faultCell
}

func (q *faultQueue) next(present bool) (c faultCell, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.cells) == 0 {
		return faultCell{}, false
	}
	i := slices.IndexFunc(q.cells, func(c faultCell) bool {
		needs := q.verbs[c.verb].start
		return (needs == "running" || needs == "stopped") == present
	})
	i = max(i, 0)
	c = q.cells[i]
	q.cells = slices.Delete(q.cells, i, i+1)
	return c, true
}

// makeRigs makes n homes side by side.
func makeRigs(t *testing.T, n int) []*rig {
	t.Helper()
	rigs, errs := make([]*rig, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { rigs[i], errs[i] = newRig(t) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return rigs
}

// learnAll returns the points of every verb, each learned in any of the homes.
func learnAll(t *testing.T, rigs []*rig, verbs []faultVerb) [][]string {
	t.Helper()
	points, errs := make([][]string, len(verbs)), make([]error, len(verbs))
	var next atomic.Int64
	var wg sync.WaitGroup
	for _, r := range rigs {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(verbs)); i = next.Add(1) - 1 {
				points[i], errs[i] = r.learn(verbs[i])
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return points
}

// faultsChosen reads the variables of TestFaults: one of so many cells, which
// of them, and what is in their names.
func faultsChosen() (one, seed int, named string) {
	one, seed, named = faultsSample, faultsSeed, os.Getenv(cellVar)
	if n, err := strconv.Atoi(os.Getenv(faultsVar)); err == nil && n > 0 {
		one = n
	}
	if os.Getenv(faultsVar) == "all" || named != "" {
		one = 1
	}
	if n, err := strconv.Atoi(os.Getenv(seedVar)); err == nil {
		seed = n
	}
	return one, seed, named
}

// inSample reports whether a cell is in the sample of one of so many that the
// seed names. It depends on nothing but the cell's name: which points a verb
// reaches, and in which order, varies a little.
func inSample(name string, one, seed int) bool {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return int(h.Sum32())%one == seed%one
}

// TestFaults interrupts every mutating verb at every point that it reaches, in
// every way, and looks at what it and the next commands make of it.
func TestFaults(t *testing.T) {
	t.Parallel()
	began := time.Now()
	verbs, kinds := faultVerbs(), faultKinds()
	one, seed, named := faultsChosen()
	rigs := makeRigs(t, 2)
	points := learnAll(t, rigs, verbs)
	var chosen []faultCell
	total := 0
	for i, v := range verbs {
		for _, p := range points[i] {
			for k, kind := range kinds {
				name := v.title + "/" + p + "/" + kind.title
				if !kind.applies(p) || !strings.Contains(name, named) {
					continue
				}
				total++
				if inSample(name, one, seed) {
					chosen = append(chosen, faultCell{i, p, k})
				}
			}
		}
	}
	// Those that wait come first, so that at the end nobody waits for them alone.
	queued := slices.Clone(chosen)
	slices.SortStableFunc(queued, func(a, b faultCell) int {
		return cmp.Compare(kinds[a.kind].patience(), kinds[b.kind].patience())
	})
	q := &faultQueue{verbs: verbs, cells: queued}
	results := map[faultCell]string{}
	unconverged, unreached := 0, 0
	var mu sync.Mutex
	work := func(r *rig) {
		for {
			c, ok := q.next(r.record("alpha") != nil)
			if !ok {
				return
			}
			v, kind := verbs[c.verb], kinds[c.kind]
			code, err := r.cell(v, c.point, kind)
			if errors.Is(err, errNotReached) {
				code, err = r.cell(v, c.point, kind)
			}
			mu.Lock()
			results[c] = strconv.Itoa(code)
			if one == 1 && len(results)%100 == 0 {
				fmt.Fprintf(os.Stderr, "%d of %d cells, %d unconverged\n", len(results), len(chosen), unconverged)
			}
			switch {
			case errors.Is(err, errNotReached):
				results[c] = "?"
				unreached++
			case err != nil:
				results[c] += "!"
				unconverged++
				t.Errorf("%s, %s at %s: %v", v.title, kind.title, c.point, err)
			}
			mu.Unlock()
			if err != nil && !errors.Is(err, errNotReached) && r.must("rm", "alpha", "--force") != nil {
				if r, err = newRig(t); err != nil { // the next ones are not to suffer from it
					t.Error(err)
					return
				}
			}
		}
	}
	var wg sync.WaitGroup
	for i := range min(faultWorkers, 1+len(chosen)/10) { // a home of its own costs some cells
		wg.Go(func() {
			if i < len(rigs) {
				work(rigs[i])
			} else if r, err := newRig(t); err != nil {
				t.Error(err)
			} else {
				work(r)
			}
		})
	}
	wg.Wait()
	if one == 1 {
		printFaults(verbs, kinds, points, results)
	}
	summary := fmt.Sprintf("%d of %d cells (FAULTS=%d FAULTS_SEED=%d), %d unconverged, %d not reached, %s",
		len(chosen), total, one, seed, unconverged, unreached, time.Since(began).Round(time.Second))
	t.Log(summary)
	if one == 1 {
		fmt.Println(summary)
	}
	// A small sample may have a few cells of points that are not always reached.
	if unreached > max(3, len(chosen)/50) {
		t.Errorf("%d of %d cells prove nothing: their point was not reached", unreached, len(chosen))
	}
}

// printFaults prints the table: exit codes, with ! where it did not converge,
// ? where the point was not reached and - where the fault makes no sense.
func printFaults(verbs []faultVerb, kinds []faultKind, points [][]string, results map[faultCell]string) {
	shown := map[int]bool{}
	for c := range results {
		shown[c.verb] = true
	}
	for i, v := range verbs {
		if !shown[i] {
			continue
		}
		fmt.Printf("\n%-60s", "box "+v.title)
		for _, k := range kinds {
			fmt.Printf(" %10s", k.title)
		}
		fmt.Println()
		for _, p := range points[i] {
			if !slices.ContainsFunc(slices.Collect(maps.Keys(results)), func(c faultCell) bool { return c.verb == i && c.point == p }) {
				continue
			}
			fmt.Printf("  %-58s", p)
			for k := range kinds {
				result, ok := results[faultCell{i, p, k}]
				if !ok {
					result = "-"
				}
				fmt.Printf(" %10s", result)
			}
			fmt.Println()
		}
	}
}
