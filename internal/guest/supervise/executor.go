package supervise

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"hermes-box-lite/internal/guest/door"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/secrets"
	"hermes-box-lite/internal/mcp"
	"hermes-box-lite/internal/process"
)

// Times of the supervision.
const (
	tick           = time.Second            // how soon a change on disk is noticed
	startLimit     = 5 * time.Minute        // first start: 8.5 s with cold caches, 22 s emulated on an idle host (measured), minutes on a busy one
	maxReadyPause  = 250 * time.Millisecond // between handshakes with a starting Executor
	stopPatience   = 6 * time.Second        // Executor 1.5.9 ends within 30 ms of a TERM
	liveInterval   = 60 * time.Second       // between handshakes with a running Executor
	liveFailures   = 3                      // failed ones in a row before a restart
	firstBackoff   = 250 * time.Millisecond
	maxBackoff     = 30 * time.Second
	steadyAfter    = 30 * time.Second // healthy so long: the next failure counts as the first
	shutDownExpiry = 2 * time.Minute  // a stop of the machine that never came
)

// executor keeps Executor in the wanted state. Everything that decides about
// its process (check, spawn, stop, pause, hold) happens under mu, so that two
// can never be started and a queued start can never overtake a pause.
type executor struct {
	l         layout.Layout
	ports     Ports
	log       *log.Logger
	out       *rotatingLog
	onHealthy func(settings layout.Settings) // called without mu, in its own goroutine

	kick chan struct{} // wakes the loop

	mu          sync.Mutex
	changed     chan struct{} // closed and replaced at every change
	cur         *run          // nil: no process
	settings    layout.Settings
	provisioned bool
	holds       int
	closing     bool      // the worker is ending
	downUntil   time.Time // shut down for the machine's stop
	problem     string
	failures    int
	restarts    int
	nextStart   time.Time
	doorError   string

	generation map[string]bool // fingerprint of the binary -> takes the token as an argument; loop's own
}

// run is one process of Executor.
type run struct {
	rec         record
	secret      string
	fingerprint string
	done        chan struct{} // closed when the process is gone
	ready       bool
	readySince  time.Time
	stopping    bool   // asked to end
	verdict     string // why the supervisor ended it, or ""
}

func newExecutor(l layout.Layout, ports Ports, logger *log.Logger, out *rotatingLog) *executor {
	return &executor{
		l: l, ports: ports, log: logger, out: out,
		kick: make(chan struct{}, 1), changed: make(chan struct{}),
		generation: map[string]bool{},
	}
}

// loop reconciles until ctx ends, then stops Executor.
func (e *executor) loop(ctx context.Context) {
	for ctx.Err() == nil {
		next := e.reconcile(ctx)
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
		case <-e.kick:
		case <-timer.C:
		}
		timer.Stop()
	}
	e.mu.Lock()
	e.closing = true
	e.stopLocked("")
	e.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopPatience+2*time.Second)
	defer cancel()
	if err := e.waitGone(ctx); err != nil {
		e.log.Print(err)
	}
}

func (e *executor) wake() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// broadcast tells waiters that something changed. Callers hold mu.
func (e *executor) broadcast() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// await returns when cond, called under mu, is true.
func (e *executor) await(ctx context.Context, cond func() bool) error {
	for {
		e.mu.Lock()
		ok, changed := cond(), e.changed
		e.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

func (e *executor) waitGone(ctx context.Context) error {
	if err := e.await(ctx, func() bool { return e.cur == nil }); err != nil {
		return fmt.Errorf("wait for Executor to end: %w", err)
	}
	return nil
}

// wanted decides whether Executor should run. Callers hold mu.
func (e *executor) wanted() bool {
	paused, err := secrets.Paused(e.l)
	if err != nil {
		e.problem = err.Error()
	}
	return e.provisioned && e.settings.Executor && !paused && err == nil &&
		!e.held() && !e.closing && !time.Now().Before(e.downUntil)
}

// held reports whether another operation keeps Executor down, be it across
// restarts of the supervisor. Callers hold mu.
func (e *executor) held() bool {
	awaits, err := secrets.AwaitsState(e.l)
	return e.holds > 0 || awaits || err != nil
}

// holding reports whether an operation that asked this worker keeps Executor
// down.
func (e *executor) holding() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.holds > 0
}

// reconcile brings the process closer to what is wanted and returns when to
// look again.
func (e *executor) reconcile(ctx context.Context) time.Duration {
	settings, err := e.l.ReadSettings()
	e.mu.Lock()
	e.provisioned = err == nil
	if err == nil {
		e.settings = settings
	} else if !errors.Is(err, fs.ErrNotExist) {
		e.problem = "read the settings: " + err.Error()
	}
	e.broadcast() // what was read decides about the phase, as does the time
	want := e.wanted()
	if !want {
		e.stopLocked("")
	}
	due := e.nextStart
	doubtful := e.failures > 0
	idle := e.cur == nil
	e.mu.Unlock()
	if !want || !idle {
		return tick
	}
	if wait := time.Until(due); wait > 0 {
		return min(wait, tick)
	}

	// The binary is asked which generation it is without the mutex, since that
	// takes a while; the decision to start is made afresh afterwards.
	binary, err := e.findBinary()
	var argvToken bool
	if err == nil {
		argvToken, err = e.tokenInArguments(ctx, binary, doubtful)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cur != nil || !e.wanted() {
		return 0
	}
	if err == nil {
		err = e.spawnLocked(ctx, argvToken, binary)
	}
	if err != nil && ctx.Err() == nil {
		e.failedLocked(err.Error())
	}
	e.broadcast()
	return tick
}

// failedLocked notes a failure and sets the time of the next start.
func (e *executor) failedLocked(problem string) {
	if e.problem != problem {
		e.log.Printf("executor: %s", problem)
	}
	e.problem = problem
	backoff := maxBackoff
	if e.failures < 7 {
		backoff = min(maxBackoff, firstBackoff<<e.failures)
	}
	e.failures++
	e.nextStart = time.Now().Add(backoff)
}

// binaryFile is the program as the agent's PATH finds it.
type binaryFile struct {
	path        string
	real        string // path without links
	fingerprint string // changes when an update replaces it
}

func (e *executor) findBinary() (binaryFile, error) {
	for _, entry := range e.l.AgentEnv() {
		value, ok := strings.CutPrefix(entry, "PATH=")
		if !ok {
			continue
		}
		for dir := range strings.SplitSeq(value, ":") {
			path := filepath.Join(dir, "executor")
			info, err := os.Stat(path)
			if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
				continue
			}
			real, err := filepath.EvalSymlinks(path)
			if err != nil {
				continue
			}
			return binaryFile{path, real, fmt.Sprintf("%s %d %d", real, info.Size(), info.ModTime().UnixNano())}, nil
		}
	}
	return binaryFile{}, errors.New("executor is not installed: it is not on the agent's PATH")
}

// tokenInArguments tells the two generations apart. Up to 1.5.11 the token can
// only be given as an argument, and --auth-password exists; from 1.5.12 it is
// read from server-control/auth.json (executor commit 19c2657f3, "harden local
// auth"). Only `daemon run` may be asked: the help of other verbs starts an
// unauthenticated daemon (measured with 1.5.9).
//
// The question costs a whole start of the program, so a release of our own
// installation that is known to be of the older generation is not asked, unless
// a start has failed.
func (e *executor) tokenInArguments(ctx context.Context, b binaryFile, doubtful bool) (bool, error) {
	if old, known := e.generation[b.fingerprint]; known {
		return old, nil
	}
	if !doubtful && e.olderRelease(b) {
		return true, nil
	}
	// Over 30 s in an emulated machine on a busy host (measured).
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	// Already this makes directories, which shall be the agent's alone.
	cmd := e.l.AgentCommand(ctx, "/bin/sh", "-c", "umask 077; exec executor daemon run --help </dev/null")
	var out cappedBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	help := out.String()
	if !strings.Contains(help, "--hostname") {
		return false, errors.Join(errors.New("ask executor for its options: no help was printed"), err)
	}
	old := strings.Contains(help, "--auth-password")
	e.generation[b.fingerprint] = old
	return old, nil
}

// olderRelease reports whether the program belongs to a package below our own
// directory, which is root's, whose release is known to be of the older
// generation.
func (e *executor) olderRelease(b binaryFile) bool {
	if !strings.HasPrefix(b.real, e.l.Opt()+"/") {
		return false
	}
	// node_modules/executor/bin/executor, or the same in the package that
	// carries the native program.
	data, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(b.real)), "package.json"))
	if err != nil {
		return false
	}
	var pkg struct{ Name, Version string }
	if json.Unmarshal(data, &pkg) != nil || pkg.Name != "executor" && !strings.HasPrefix(pkg.Name, "executor-linux-") {
		return false
	}
	parts := strings.Split(pkg.Version, ".")
	if len(parts) != 3 {
		return false
	}
	var release [3]int
	for i, part := range parts {
		if release[i], err = strconv.Atoi(part); err != nil || release[i] < 0 {
			return false // 1.5.12-beta.1 is not known
		}
	}
	return slices.Compare(release[:], []int{1, 5, 11}) <= 0 // the last one
}

// cappedBuffer keeps the first 64 KiB.
type cappedBuffer struct{ bytes.Buffer }

func (b *cappedBuffer) Write(p []byte) (int, error) {
	if room := 64<<10 - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// startScript runs as the agent, so that no link in its home can lead root
// astray. Stale files make Executor refuse to start after a reboot: "is
// registered but is not reachable" (measured with 1.5.9). Directories that a
// mere `executor --version` made with another umask are closed. The umask is set
// here and not in this process, whose umask belongs to all threads: 1.5.9
// writes its token 0644 otherwise.
const startScript = `umask 077
for own in "$HOME/.executor" "$HOME/.local/share/executor"; do
	[ ! -d "$own" ] || chmod go= "$own"
done
d=$HOME/.executor/server-control
rm -f "$d/server.json" "$d/startup.lock" "$HOME"/.executor/daemon-*.json
if [ "$1" = file ]; then
	mkdir -p "$d" && cat >"$d/auth.json.hb" && mv -f "$d/auth.json.hb" "$d/auth.json" || exit 1
fi
shift
exec executor "$@" </dev/null
`

// environment of Executor: the agent's, and what is Executor's own.
func (e *executor) environment(s layout.Settings) []string {
	env := append(e.l.AgentEnv(), "EXECUTOR_DISABLE_UPDATE_CHECK=1")
	if s.HostPort != 0 && s.BoxName != "" {
		// For OAuth callbacks and approval links, which the host's browser opens.
		env = append(env, "EXECUTOR_WEB_BASE_URL=http://"+s.BoxName+".localhost:"+strconv.Itoa(s.HostPort))
	}
	return env
}

func (e *executor) fingerprintOf(b binaryFile, s layout.Settings) string {
	return b.fingerprint + "\n" + strings.Join(e.environment(s), "\n")
}

// PortTaken is the problem of an Executor whose port another program has.
func PortTaken(ports Ports) string {
	return fmt.Sprintf("port %d inside the box is held by another program (see: ss -ltnp)", ports.Executor)
}

// spawnLocked starts Executor. Callers hold mu and have seen that none runs.
func (e *executor) spawnLocked(ctx context.Context, argvToken bool, b binaryFile) error {
	// Executor moves or hangs when its port is taken (measured), so the port is
	// tried first.
	ln, err := net.Listen("tcp4", e.ports.executorAddr())
	if err != nil {
		return errors.New(PortTaken(e.ports))
	}
	if err := ln.Close(); err != nil {
		return fmt.Errorf("try the port: %w", err)
	}

	r := &run{
		rec: record{Run: secrets.NewToken()[:32]}, secret: secrets.NewToken(),
		fingerprint: e.fingerprintOf(b, e.settings), done: make(chan struct{}),
	}
	args := []string{"daemon", "run", "--foreground", "--port", strconv.Itoa(e.ports.Executor), "--hostname", "127.0.0.1"}
	mode, stdin := "argument", ""
	if argvToken {
		// No other way in this generation. In the form --flag=value a token
		// can never be taken for a flag.
		args = append(args, "--auth-token="+r.secret)
	} else {
		mode, stdin = "file", `{"token":"`+r.secret+`"}`
	}
	cmd := e.l.AgentCommand(context.WithoutCancel(ctx), "/bin/sh", append([]string{"-c", startScript, "hb-executor", mode}, args...)...)
	cmd.Env = append(e.environment(e.settings), runVar+"="+r.rec.Run)
	cmd.Stdin = strings.NewReader(stdin)
	pr, pw, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("start executor: %w", err)
	}
	cmd.Stdout, cmd.Stderr = pw, pw
	if err := r.rec.write(e.l); err != nil {
		return errors.Join(fmt.Errorf("record the start: %w", err), pr.Close(), pw.Close())
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start executor: %w", err), pr.Close(), pw.Close())
	}
	_ = pw.Close() // the child has its own
	r.rec.PID = cmd.Process.Pid
	if st, err := process.ReadStat(r.rec.PID); err == nil {
		r.rec.Start = st.Start
	}
	if err := r.rec.write(e.l); err != nil {
		e.log.Printf("record the start: %v", err) // the first record still finds it
	}
	if e.failures > 0 {
		e.restarts++ // after a failure, not at somebody's wish
	}
	e.cur = r
	e.out.line(fmt.Sprintf("[hb] started executor, pid %d", r.rec.PID))
	go e.collect(r, cmd, pr)
	go e.watch(ctx, r)
	return nil
}

// collect copies the output, waits for the end and clears up.
func (e *executor) collect(r *run, cmd *exec.Cmd, output *os.File) {
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		w := &lineWriter{log: e.out, secret: r.secret}
		_, _ = io.Copy(w, output) // ends with the last writer or the close below
		w.flush()
	}()
	err := cmd.Wait()
	// What Executor left in its group must not keep the port or the pipe.
	for _, pid := range r.rec.living() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	select {
	case <-copied:
	case <-time.After(time.Second):
	}
	_ = output.Close()
	<-copied

	e.mu.Lock()
	defer e.mu.Unlock()
	how := describeExit(err)
	e.out.line("[hb] executor ended: " + how)
	if r.ready && time.Since(r.readySince) > steadyAfter {
		e.failures = 0
	}
	switch {
	case r.verdict != "":
		e.failedLocked(r.verdict)
	case !r.stopping:
		e.failedLocked("executor ended by itself: " + how)
	}
	e.cur = nil
	if err := os.Remove(recordPath(e.l)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.log.Printf("remove the record: %v", err)
	}
	close(r.done)
	e.broadcast()
	e.wake()
}

func describeExit(err error) string {
	var exit *exec.ExitError
	if err == nil {
		return "exit code 0"
	}
	if errors.As(err, &exit) {
		switch code := exit.ExitCode(); code {
		case 130, 143:
			return "stopped (exit code " + strconv.Itoa(code) + ")" // its way to answer INT and TERM
		case 126, 127:
			return "it cannot be run (exit code " + strconv.Itoa(code) + ")"
		}
		return exit.String()
	}
	return err.Error()
}

// watch proves health: first until the handshake succeeds, then now and then.
func (e *executor) watch(ctx context.Context, r *run) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-r.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	// A handshake that is given up only has to be made again.
	target := mcp.Target{
		URL: "http://" + e.ports.executorAddr() + "/mcp", Token: r.secret,
		RequestTimeout: 20 * time.Second, TotalTimeout: 45 * time.Second,
	}
	deadline := time.Now().Add(startLimit)
	pause := 100 * time.Millisecond
	for {
		res, err := mcp.Probe(ctx, target)
		if err != nil {
			return // the run is over
		}
		if res.Healthy() {
			break
		}
		if time.Now().After(deadline) {
			e.condemn(r, "not healthy after its start: "+res.Summary)
			return
		}
		if !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, maxReadyPause)
	}
	e.mu.Lock()
	if e.cur != r || r.stopping {
		e.mu.Unlock()
		return
	}
	r.ready, r.readySince = true, time.Now()
	e.problem = ""
	settings := e.settings
	e.broadcast()
	e.mu.Unlock()
	if e.onHealthy != nil {
		go e.onHealthy(settings)
	}

	for failures := 0; ; {
		if !sleep(ctx, liveInterval) {
			return
		}
		res, err := mcp.Probe(ctx, target)
		if err != nil {
			return
		}
		if res.Healthy() {
			failures = 0
			continue
		}
		if failures++; failures >= liveFailures {
			e.condemn(r, "no longer healthy: "+res.Summary)
			return
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// condemn ends a run that is alive but not healthy; it counts as a failure.
func (e *executor) condemn(r *run, why string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cur == r {
		e.stopLocked(why)
	}
}

// stopLocked asks the current run to end, first politely. Callers hold mu.
func (e *executor) stopLocked(verdict string) {
	r := e.cur
	if r == nil || r.stopping {
		return
	}
	r.stopping, r.ready, r.verdict = true, false, verdict
	e.broadcast()
	_ = syscall.Kill(-r.rec.PID, syscall.SIGTERM) // a group of its own; not yet waited for, so the number is its
	go func() {
		timer := time.NewTimer(stopPatience)
		defer timer.Stop()
		select {
		case <-r.done:
		case <-timer.C:
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.cur == r {
				_ = syscall.Kill(-r.rec.PID, syscall.SIGKILL)
			}
		}
	}()
}

// pause writes the marker and returns when the process is gone.
func (e *executor) pause(ctx context.Context) error {
	e.mu.Lock()
	err := secrets.SetPaused(e.l, true)
	if err == nil {
		e.stopLocked("")
		e.problem, e.failures, e.nextStart = "", 0, time.Time{}
		e.broadcast()
	}
	e.mu.Unlock()
	if err != nil {
		return err
	}
	return e.waitGone(ctx)
}

// resume removes the marker and returns when Executor is healthy, or at once
// when something else than a pause keeps it down.
func (e *executor) resume(ctx context.Context) (note string, err error) {
	settings, settingsErr := e.l.ReadSettings() // they may be younger than the last tick
	e.mu.Lock()
	if settingsErr == nil {
		e.settings, e.provisioned = settings, true
	}
	err = secrets.SetPaused(e.l, false)
	e.downUntil = time.Time{}
	e.failures, e.nextStart = 0, time.Time{}
	e.broadcast()
	e.mu.Unlock()
	if err != nil {
		return "", err
	}
	e.wake()
	err = e.await(ctx, func() bool {
		switch e.phaseLocked() {
		case PhaseRunning:
			return true
		case PhaseHeld:
			note = "another operation keeps Executor down; it starts when that ends"
			return true
		case PhaseDisabled:
			note = "this box has no Executor (INSTALL_EXECUTOR=false)"
			return true
		case PhaseNotProvisioned:
			note = "the box is not provisioned yet; Executor starts afterwards"
			return true
		case PhasePaused, PhasePausing:
			note = "paused again in the meantime"
			return true
		default:
			return false
		}
	})
	if err != nil {
		e.mu.Lock()
		problem := e.problem
		e.mu.Unlock()
		if problem == "" {
			problem = "it has not become healthy in time"
		}
		return "", errors.New("Executor is not up: " + problem)
	}
	return note, nil
}

// settle returns when Executor is healthy, or is not to run.
func (e *executor) settle(ctx context.Context) error {
	return e.await(ctx, func() bool {
		phase := e.phaseLocked()
		return phase == PhaseRunning || phase == PhasePaused || phase == PhaseDisabled
	})
}

func (e *executor) acquireHold(ctx context.Context) error {
	e.mu.Lock()
	e.holds++
	e.stopLocked("")
	e.broadcast()
	e.mu.Unlock()
	return e.waitGone(ctx)
}

func (e *executor) releaseHold() {
	e.mu.Lock()
	e.holds--
	e.failures, e.nextStart = 0, time.Time{}
	e.broadcast()
	e.mu.Unlock()
	e.wake()
}

// reload restarts Executor if what it was started with has changed. Who wants
// that does not stop the machine: a shutdown whose stop was interrupted is over.
func (e *executor) reload(context.Context) error {
	settings, err := e.l.ReadSettings()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	binary, binErr := e.findBinary()
	e.mu.Lock()
	defer e.mu.Unlock()
	if err == nil {
		e.settings, e.provisioned = settings, true
	}
	if e.cur != nil && binErr == nil && e.cur.fingerprint != e.fingerprintOf(binary, settings) {
		e.stopLocked("")
	}
	e.failures, e.nextStart, e.downUntil = 0, time.Time{}, time.Time{}
	e.broadcast()
	e.wake()
	return nil
}

// shutDown stops Executor because the machine is about to stop. If that never
// comes, Executor returns by itself.
func (e *executor) shutDown(ctx context.Context) error {
	e.mu.Lock()
	e.downUntil = time.Now().Add(shutDownExpiry)
	e.stopLocked("")
	e.broadcast()
	e.mu.Unlock()
	return e.waitGone(ctx)
}

func (e *executor) phaseLocked() Phase {
	paused, err := secrets.Paused(e.l)
	paused = paused || err != nil
	alive := e.cur != nil
	switch {
	case paused && alive:
		return PhasePausing
	case paused:
		return PhasePaused
	case alive && e.cur.stopping:
		return PhaseStopping
	case alive && e.cur.ready:
		return PhaseRunning
	case alive:
		return PhaseStarting
	case e.closing || time.Now().Before(e.downUntil):
		return PhaseShutDown
	case !e.provisioned:
		return PhaseNotProvisioned
	case !e.settings.Executor:
		return PhaseDisabled
	case e.held():
		return PhaseHeld
	case e.problem != "":
		return PhaseWaiting
	default:
		return PhaseStarting
	}
}

func (e *executor) status() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := Status{Phase: e.phaseLocked(), Restarts: e.restarts, Box: e.settings.BoxName, DoorError: e.doorError}
	s.Paused = s.Phase == PhasePaused || s.Phase == PhasePausing
	if s.Phase != PhaseRunning {
		s.Problem = e.problem
	}
	if e.cur != nil {
		s.PID = e.cur.rec.PID
	}
	return s
}

func (e *executor) boxName() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.settings.BoxName
}

// upstream tells the door where to go.
func (e *executor) upstream() door.Upstream {
	e.mu.Lock()
	defer e.mu.Unlock()
	phase := e.phaseLocked()
	if phase == PhaseRunning {
		return door.Upstream{Addr: e.ports.executorAddr(), Secret: e.cur.secret}
	}
	reason := "Executor is " + string(phase)
	switch phase {
	case PhasePaused, PhasePausing:
		reason = "Executor is paused (hb up resumes it)"
	case PhaseWaiting:
		reason = "Executor is starting again after a failure (see hb status)"
	case PhaseDisabled:
		reason = "This box has no Executor"
	}
	return door.Upstream{Reason: reason}
}

func (e *executor) setDoorError(s string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.doorError = s
}
