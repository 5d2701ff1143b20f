package supervise

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/guest/layout"
)

// Deadlines of the end. Engines kill a machine's command 10 s after a TERM
// (podman's and docker's default), so all of it takes less.
const (
	workerPatience = 7 * time.Second
	othersPatience = time.Second
)

// Guardian runs `self supervise --worker`, with the owner id if it is not "",
// for ever, reaps what nobody else
// waits for, and ends when ctx does: worker first, then, as PID 1, everything
// else, then sync.
func Guardian(ctx context.Context, l layout.Layout, self, owner string, logger *log.Logger) error {
	// The worker gets a signal when this thread ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Orphans come here also when something else is PID 1.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("supervise: become the reaper: %w", err)
	}
	child := make(chan os.Signal, 1)
	signal.Notify(child, syscall.SIGCHLD)
	defer signal.Stop(child)

	g := &guardian{self: self, args: []string{"hb", "supervise", "--worker"}, log: logger}
	if owner != "" {
		g.args = append(g.args, "--owner", owner)
	}
	for {
		delay := g.keepWorker()
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
			timer.Stop()
			return g.end(l, child)
		case <-child:
		case <-timer.C:
		}
		timer.Stop()
		g.reap()
	}
}

type guardian struct {
	self     string
	args     []string // of the worker
	log      *log.Logger
	worker   int // 0 = none
	started  time.Time
	failures int
	next     time.Time
	ending   bool
}

// keepWorker starts the worker if it is due and returns when to look again.
func (g *guardian) keepWorker() time.Duration {
	if g.worker != 0 {
		return time.Minute
	}
	if wait := time.Until(g.next); wait > 0 {
		return wait
	}
	// Not os/exec: its Wait would compete with reap for the exit status.
	pid, err := syscall.ForkExec(g.self, g.args, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM},
	})
	if err != nil {
		g.log.Printf("start the worker: %v", err)
		g.backOff()
		return time.Until(g.next)
	}
	g.worker, g.started = pid, time.Now()
	return time.Minute
}

func (g *guardian) backOff() {
	g.next = time.Now().Add(min(10*time.Second, 100*time.Millisecond<<min(g.failures, 8)))
	g.failures++
}

// reap collects every ended child.
func (g *guardian) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if pid != g.worker {
			continue
		}
		g.worker = 0
		if time.Since(g.started) > 30*time.Second {
			g.failures = 0
		}
		if !g.ending {
			g.log.Printf("the worker ended (%s); it is restarted", describeWait(status))
			g.backOff()
		}
	}
}

func describeWait(s syscall.WaitStatus) string {
	if s.Signaled() {
		return "signal " + s.Signal().String()
	}
	return fmt.Sprintf("exit code %d", s.ExitStatus())
}

// end brings everything down within workerPatience and a little.
func (g *guardian) end(l layout.Layout, child <-chan os.Signal) error {
	g.ending = true
	if g.worker != 0 {
		_ = syscall.Kill(g.worker, syscall.SIGTERM) // gone already is as good
		if !g.reapUntil(child, workerPatience, func() bool { return g.worker == 0 }) {
			_ = syscall.Kill(g.worker, syscall.SIGKILL)
			g.reapUntil(child, time.Second, func() bool { return g.worker == 0 })
		}
	}
	var err error
	if os.Getpid() == 1 {
		// Editors and agents get their chance to save.
		_ = syscall.Kill(-1, syscall.SIGTERM)
		g.reapUntil(child, othersPatience, noChildren)
	} else {
		_, err = endOrphan(l)
	}
	if l.Real() { // a host's disks are not this box's
		syscall.Sync()
	}
	return err
}

func (g *guardian) reapUntil(child <-chan os.Signal, patience time.Duration, done func() bool) bool {
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		g.reap()
		if done() {
			return true
		}
		select {
		case <-deadline.C:
			return false
		case <-child:
		}
	}
}

func noChildren() bool {
	_, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
	return errors.Is(err, syscall.ECHILD)
}
