package supervise

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// Op is a request to the supervisor.
type Op string

// Ops.
const (
	OpStatus   Op = "status"
	OpReady    Op = "ready"    // answers when Executor is healthy, or is not to run
	OpDown     Op = "down"     // pause, durably; answers when Executor is gone
	OpUp       Op = "up"       // end the pause; answers when Executor is healthy
	OpHold     Op = "hold"     // stop Executor while the connection stays open
	OpReload   Op = "reload"   // settings, environment, Executor or hb itself may have changed
	OpTicket   Op = "ticket"   // a single-use ticket for the door
	OpShutdown Op = "shutdown" // stop Executor for the machine's stop; not durable
)

// Phase is what Executor is doing. It is judged from the pause marker and the
// process together.
type Phase string

// Phases.
const (
	PhaseNotProvisioned Phase = "not-provisioned"
	PhaseDisabled       Phase = "disabled" // this box has no Executor
	PhaseStarting       Phase = "starting" // the process runs, the handshake has not succeeded yet
	PhaseRunning        Phase = "running"  // healthy
	PhaseWaiting        Phase = "waiting"  // it failed; the next start is due soon
	PhaseStopping       Phase = "stopping" // on its way down, not by a pause
	PhasePausing        Phase = "pausing"  // marker set, process alive
	PhasePaused         Phase = "paused"   // marker set, process gone
	PhaseHeld           Phase = "held"     // another operation keeps it down
	PhaseShutDown       Phase = "shut-down"
)

// Status is the supervisor's account of the box.
type Status struct {
	Phase     Phase  `json:"phase"`
	Paused    bool   `json:"paused"` // the marker alone
	PID       int    `json:"pid"`    // 0 = no process
	Restarts  int    `json:"restarts"`
	Problem   string `json:"problem"`    // why it is not running, or ""
	DoorError string `json:"door_error"` // why the door does not listen, or ""
	Box       string `json:"box"`
}

type request struct {
	Op     Op  `json:"op"`
	WaitMS int `json:"wait_ms"`
}

// Response is the supervisor's answer.
type Response struct {
	OK     bool   `json:"ok"`
	Error  string `json:"error,omitempty"`
	Note   string `json:"note,omitempty"`
	Ticket string `json:"ticket,omitempty"`
	Status Status `json:"status"`
}

// ErrNoSupervisor means that nothing answers on the control socket.
var ErrNoSupervisor = errors.New("the supervisor does not answer")

// maxSocketPath is sun_path without its NUL, unix(7).
const maxSocketPath = 107

// socketAddr returns a name for the socket that fits sun_path, through a
// descriptor of its directory when the real one does not.
func socketAddr(path string) (addr string, done func(), err error) {
	if len(path) <= maxSocketPath {
		return path, func() {}, nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, err
	}
	addr = "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path)
	return addr, func() { _ = dir.Close() }, nil
}

// listenControl replaces a left-over socket; the caller holds the lock that
// makes it the only worker.
func listenControl(l layout.Layout) (net.Listener, error) {
	path := l.ControlSocket()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	addr, done, err := socketAddr(path)
	if err != nil {
		return nil, err
	}
	defer done()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: addr, Net: "unix"})
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false) // the name may be a descriptor's that is closed by then
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return ln, nil
}

func dialControl(ctx context.Context, l layout.Layout) (net.Conn, error) {
	addr, done, err := socketAddr(l.ControlSocket())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoSupervisor, err)
	}
	defer done()
	conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", addr)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoSupervisor, err)
	}
	return conn, nil
}

// Ask sends one request; wait bounds how long the supervisor may take for it.
func Ask(ctx context.Context, l layout.Layout, op Op, wait time.Duration) (Response, error) {
	conn, err := dialControl(ctx, l)
	if err != nil {
		return Response{}, err
	}
	defer func() { _ = conn.Close() }()
	return exchange(ctx, conn, request{op, int(wait / time.Millisecond)})
}

func exchange(ctx context.Context, conn net.Conn, req request) (Response, error) {
	if err := conn.SetDeadline(time.Now().Add(time.Duration(req.WaitMS)*time.Millisecond + 10*time.Second)); err != nil {
		return Response{}, err
	}
	// After the other deadline, which must not take the place of this one.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	line, err := json.Marshal(req)
	if err != nil {
		return Response{}, err
	}
	var answer []byte
	_, err = conn.Write(append(line, '\n'))
	if err == nil {
		answer, err = bufio.NewReader(io.LimitReader(conn, wire.MaxLine)).ReadBytes('\n')
	}
	if err != nil {
		if ctx.Err() != nil {
			return Response{}, context.Cause(ctx)
		}
		return Response{}, fmt.Errorf("%w: %w", ErrNoSupervisor, err)
	}
	var resp Response
	if err := wire.DecodeStrict(answer, &resp); err != nil {
		return Response{}, fmt.Errorf("the supervisor's answer: %w", err)
	}
	if !resp.OK {
		return resp, errors.New(resp.Error)
	}
	return resp, nil
}

// HoldExecutor stops Executor and keeps it down until release is called or the
// calling program ends, however it ends. A pause stays a pause. The hold ends
// with the supervisor's worker too: release reports whether it was still held.
func HoldExecutor(ctx context.Context, l layout.Layout, wait time.Duration) (release func() (held bool), err error) {
	conn, err := dialControl(ctx, l)
	if err != nil {
		return nil, err
	}
	if _, err := exchange(ctx, conn, request{OpHold, int(wait / time.Millisecond)}); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return func() bool {
		defer func() { _ = conn.Close() }()
		return isOpen(conn)
	}, nil
}

// isOpen asks the kernel, without waiting, whether the other end of an idle
// connection is there. A process has closed its ends before another can see
// that it is gone.
func isOpen(conn net.Conn) bool {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	var b [1]byte
	var peekErr error
	err = raw.Control(func(fd uintptr) {
		_, _, peekErr = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	})
	return err == nil && errors.Is(peekErr, syscall.EAGAIN)
}

// StandIn keeps Executor down where no worker lives: none can begin until
// release is called or the calling program ends. What a dead worker has left
// of Executor is ended, as the next worker would. The error is
// ErrAnotherWorker when there is a worker after all.
func StandIn(l layout.Layout) (release func() error, err error) {
	if err := os.MkdirAll(l.Run(), 0o700); err != nil {
		return nil, err
	}
	lock, err := lockWorker(l)
	if err != nil {
		return nil, err
	}
	if _, err := endOrphan(l); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock.Close, nil
}

// acceptPause is between two tries to accept a connection, where the system is
// short of something.
const acceptPause = 200 * time.Millisecond

// serveControl answers until the listener is closed.
func (w *worker) serveControl(ctx context.Context, ln net.Listener) {
	for said := ""; ctx.Err() == nil; {
		conn, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			if said != err.Error() {
				said = err.Error()
				w.log.Printf("control socket: %v", err)
			}
			sleep(ctx, acceptPause)
			continue
		}
		said = ""
		go w.answer(ctx, conn)
	}
}

func (w *worker) answer(ctx context.Context, conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	br := bufio.NewReader(io.LimitReader(conn, 4096))
	line, err := br.ReadBytes('\n')
	if err != nil {
		return // nothing asked
	}
	var req request
	if err := wire.DecodeStrict(line, &req); err != nil {
		reply(conn, Response{Error: "not a request"})
		return
	}
	wait := min(time.Duration(req.WaitMS)*time.Millisecond, 10*time.Minute)
	ctx, cancel := context.WithTimeout(ctx, max(wait, time.Second))
	defer cancel()
	if req.Op == OpHold {
		w.hold(ctx, conn)
		return
	}
	if req.Op == OpStatus && outdated() && !w.exec.holding() {
		// Without an answer: who asks waits for a supervisor of its own version.
		w.log.Print("hb was replaced; the next worker runs the new one")
		w.retire()
		return
	}
	resp, err := w.perform(ctx, req.Op)
	resp.Status = w.exec.status()
	resp.OK = err == nil
	if err != nil {
		resp.Error = err.Error()
	}
	reply(conn, resp)
	if req.Op == OpReload && outdated() {
		w.log.Print("hb was replaced; the next worker runs the new one")
		w.retire()
	}
}

func (w *worker) perform(ctx context.Context, op Op) (Response, error) {
	switch op {
	case OpStatus:
		return Response{}, nil
	case OpReady:
		return Response{}, w.exec.settle(ctx)
	case OpDown:
		return Response{}, w.exec.pause(ctx)
	case OpUp:
		note, err := w.exec.resume(ctx)
		return Response{Note: note}, err
	case OpReload:
		return Response{}, w.exec.reload(ctx)
	case OpShutdown:
		return Response{}, w.exec.shutDown(ctx)
	case OpTicket:
		return Response{Ticket: w.door.NewTicket()}, nil
	default:
		return Response{}, errors.New("unknown request")
	}
}

// hold keeps Executor down while conn is open: the kernel closes it however
// the holder ends, so nothing can stay held for ever.
func (w *worker) hold(ctx context.Context, conn net.Conn) {
	err := w.exec.acquireHold(ctx)
	defer w.exec.releaseHold()
	if errors.Is(ctx.Err(), context.Canceled) {
		return // this worker ends: who asks waits for the next one
	}
	resp := Response{OK: err == nil, Status: w.exec.status()}
	if err != nil {
		resp.Error = err.Error()
	}
	if !reply(conn, resp) || err != nil {
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	var b [1]byte
	_, _ = conn.Read(b[:]) // returns when the holder is gone
}

func reply(conn net.Conn, resp Response) bool {
	line, err := json.Marshal(resp)
	if err != nil {
		return false
	}
	_ = conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
	_, err = conn.Write(append(line, '\n'))
	return err == nil
}
