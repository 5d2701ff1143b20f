package supervise

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/process"
)

// A hold that ended with its worker is no hold, and its release says so.
func TestHoldLost(t *testing.T) {
	l := layout.At(t.TempDir())
	if err := os.MkdirAll(l.Run(), 0o700); err != nil {
		t.Fatal(err)
	}
	ln, err := listenControl(l)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	for _, lost := range []bool{false, true} {
		held := make(chan net.Conn, 1)
		go func() {
			conn, err := ln.Accept()
			if err == nil {
				_, _ = bufio.NewReader(conn).ReadBytes('\n')
				reply(conn, Response{OK: true})
			}
			held <- conn
		}()
		release, err := HoldExecutor(t.Context(), l, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		conn := <-held
		if lost {
			_ = conn.Close()
		}
		if held := release(); held == lost {
			t.Errorf("lost %t, held %t", lost, held)
		}
		_ = conn.Close()
	}
}

// A worker that ends gives no hold, which would be over at once.
func TestEndingWorkerGivesNoHold(t *testing.T) {
	l := layout.At(t.TempDir())
	logger := log.New(io.Discard, "", 0)
	w := &worker{l: l, log: logger, exec: newExecutor(l, PortsOf(l), logger, newLog(t, 100))}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ours, theirs := net.Pipe()
	defer func() { _ = ours.Close() }()
	go w.answer(ctx, theirs)
	if resp, err := exchange(t.Context(), ours, request{OpHold, 1000}); !errors.Is(err, ErrNoSupervisor) {
		t.Errorf("%+v, %v", resp, err)
	}
}

// While somebody stands in for the worker, there is no Executor and no worker.
func TestStandIn(t *testing.T) {
	l := layout.At(t.TempDir())
	release, err := StandIn(l)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lockWorker(l); !errors.Is(err, ErrAnotherWorker) {
		t.Errorf("a worker beside it: %v", err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
	left := child(t, "left")
	st, err := process.ReadStat(left.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := (record{Run: "left", PID: left.Process.Pid, Start: st.Start}).write(l); err != nil {
		t.Fatal(err)
	}
	lock, err := lockWorker(l)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := StandIn(l); !errors.Is(err, ErrAnotherWorker) {
		t.Errorf("beside a worker: %v", err)
	}
	if st, err := process.ReadStat(left.Process.Pid); err != nil || st.Dead() {
		t.Error("a living worker's Executor was ended")
	}
	_ = lock.Close()
	release, err = StandIn(l)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := process.ReadStat(left.Process.Pid); err == nil && !st.Dead() {
		t.Error("what a dead worker left lives on")
	}
	_ = release()
}

// scarce is a listener that fails before it has a connection.
type scarce struct {
	net.Listener
	failures int
	conns    chan net.Conn
}

func (s *scarce) Accept() (net.Conn, error) {
	if s.failures > 0 {
		s.failures--
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	if conn, ok := <-s.conns; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}

func TestControlSocketOutlivesErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said bytes.Buffer
		w := &worker{log: log.New(&said, "", 0)}
		ln := &scarce{failures: 5, conns: make(chan net.Conn, 1)}
		ours, theirs := net.Pipe()
		ln.conns <- theirs
		close(ln.conns)
		w.serveControl(t.Context(), ln)
		if _, err := ours.Write([]byte("nonsense\n")); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(ours).ReadString('\n')
		if err != nil || !strings.Contains(line, "not a request") {
			t.Errorf("%q, %v", line, err)
		}
		if n := strings.Count(said.String(), "too many open files"); n != 1 {
			t.Errorf("said %d times: %s", n, &said)
		}
	})
}

// endsAt is a connection whose owner's context ends while a deadline is set.
type endsAt struct {
	net.Conn
	end func()
}

func (c *endsAt) SetDeadline(t time.Time) error {
	if end := c.end; end != nil {
		c.end = nil
		end()
	}
	return c.Conn.SetDeadline(t)
}

func TestContextThatEndsAsTheDeadlineIsSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ours, theirs := net.Pipe()
		defer func() { _ = theirs.Close() }()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		start := time.Now()
		_, err := exchange(ctx, &endsAt{ours, func() { cancel(); synctest.Wait() }}, request{OpStatus, 60_000})
		if !errors.Is(err, context.Canceled) || time.Since(start) != 0 {
			t.Errorf("%v after %s", err, time.Since(start))
		}
		_ = ours.Close()
	})
}
