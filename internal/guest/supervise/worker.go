package supervise

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"hermes-box-lite/internal/guest/door"
	"hermes-box-lite/internal/guest/identity"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/secrets"
	"hermes-box-lite/internal/guest/wiring"
	"hermes-box-lite/internal/mcp"
)

// worker does the work of the supervisor.
type worker struct {
	l     layout.Layout
	ports Ports
	log   *log.Logger
	exec  *executor
	door  *door.Door

	rewiring sync.Mutex
	// retire ends this worker, so that the guardian starts the next one.
	retire context.CancelFunc
}

// ErrAnotherWorker means that a worker serves this box already.
var ErrAnotherWorker = errors.New("another supervisor serves this box")

// Worker keeps the box going until ctx ends, then stops Executor gracefully.
// owner is the box's owner id; "" leaves the machine's identity as it is.
func Worker(ctx context.Context, l layout.Layout, owner string, logger *log.Logger) error {
	ctx, retire := context.WithCancel(ctx)
	defer retire()
	if err := os.MkdirAll(l.Run(), 0o700); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	if err := os.Chmod(l.Run(), 0o700); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	lock, err := lockWorker(l)
	if err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	defer func() { _ = lock.Close() }()
	// Also while paused: a pause with a live process would be none.
	if n, err := endOrphan(l); err != nil {
		return fmt.Errorf("worker: %w", err)
	} else if n > 0 {
		logger.Printf("ended %d processes of an earlier worker's Executor", n)
	}
	if owner != "" {
		renewed, err := identity.Assume(ctx, l, owner)
		if err != nil {
			return fmt.Errorf("worker: %w", err)
		}
		for _, what := range renewed {
			logger.Printf("renewed the identity of the %s", what)
		}
	}
	tokens, err := secrets.Ensure(l)
	if err != nil {
		return fmt.Errorf("worker: %w", err)
	}

	gid := -1
	if l.Real() {
		gid = layout.AgentGID
	}
	w := &worker{l: l, ports: PortsOf(l), log: logger, retire: retire}
	w.exec = newExecutor(l, w.ports, logger, &rotatingLog{path: l.ExecutorLog(), maxSize: logFileSize, gid: gid, now: time.Now})
	w.door = door.New(door.Config{Tokens: tokens, BoxName: w.exec.boxName, Upstream: w.exec.upstream, Now: time.Now})
	w.exec.onHealthy = func(s layout.Settings) { w.rewire(ctx, s, tokens.Agent) }

	control, err := listenControl(l)
	if err != nil {
		return fmt.Errorf("worker: control socket: %w", err)
	}
	server := w.door.Server(logger)
	var running sync.WaitGroup
	running.Go(func() { w.exec.loop(ctx) })
	running.Go(func() { w.serveDoor(ctx, server) })
	go w.serveControl(ctx, control)
	<-ctx.Done()
	_ = server.Close()  // streams last for ever: there is nothing to wait for
	_ = control.Close() // status answers to nobody from here
	running.Wait()
	return nil
}

// outdated reports whether hb was replaced since this worker started.
func outdated() bool {
	path, err := os.Executable()
	if err != nil {
		return false
	}
	running, err := os.Stat("/proc/self/exe")
	if err != nil {
		return false
	}
	installed, err := os.Stat(path)
	return err == nil && !os.SameFile(running, installed)
}

// lockWorker makes this worker the only one. The descriptor is close-on-exec,
// so that no child keeps the lock of a dead worker.
func lockWorker(l layout.Layout) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(l.Run(), "supervisor.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrAnotherWorker
		}
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// serveDoor listens until ctx ends, again and again if the port is taken.
func (w *worker) serveDoor(ctx context.Context, server *http.Server) {
	for ctx.Err() == nil {
		ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", w.ports.Door)
		if err == nil {
			w.exec.setDoorError("")
			err = server.Serve(ln)
		}
		if ctx.Err() != nil {
			return
		}
		w.log.Printf("door: %v", err)
		w.exec.setDoorError(err.Error())
		sleep(ctx, 2*time.Second)
	}
}

// rewire asserts the tools' MCP configuration, after the endpoint that goes
// into it has proven itself. Errors are only logged: the box works without.
func (w *worker) rewire(ctx context.Context, s layout.Settings, token string) {
	if !s.WireMCP {
		return
	}
	w.rewiring.Lock()
	defer w.rewiring.Unlock()
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	url := w.ports.MCPURL()
	res, err := mcp.Probe(ctx, mcp.Target{URL: url, Token: token})
	if err != nil || !res.Healthy() {
		w.log.Printf("wiring: the door is not healthy yet: %s", res.Summary)
		return
	}
	changed, err := wiring.Apply(ctx, w.l, wiring.Endpoint{URL: url, Token: token})
	if err != nil {
		w.log.Printf("wiring: %v", err)
	}
	for _, tool := range changed {
		w.log.Printf("wiring: %s now uses %s", tool, url)
	}
}
