// Package channel is how a virtual machine's host executes commands in it: an
// SSH server that knows one client key, takes argument lists instead of shell
// lines, and ends a command with its whole session when its client goes away.
// It has nothing else of SSH: no forwarding, no subsystems, no users.
package channel

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/wire"
)

// Server answers one host.
type Server struct {
	config   *ssh.ServerConfig
	powerOff func()
	log      *log.Logger
}

// New returns a server with the host key that the client expects; powerOff is
// called when the host asks for it.
func New(hostKey ssh.Signer, client ssh.PublicKey, powerOff func(), logger *log.Logger) *Server {
	want := string(client.Marshal())
	config := &ssh.ServerConfig{
		PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			if string(key.Marshal()) != want {
				return nil, errors.New("unknown key")
			}
			return nil, nil
		},
	}
	config.AddHostKey(hostKey)
	return &Server{config, powerOff, logger}
}

// Serve answers until the listener fails.
func (s *Server) Serve(ln net.Listener) error {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		go s.serve(conn)
	}
}

func (s *Server) serve(raw net.Conn) {
	defer func() { _ = raw.Close() }()
	_ = raw.SetDeadline(time.Now().Add(time.Minute))
	conn, channels, requests, err := ssh.NewServerConn(raw, s.config)
	if err != nil {
		return // a port scan, or a client that gave up
	}
	_ = raw.SetDeadline(time.Time{})
	go s.global(requests)
	for ch := range channels {
		if ch.ChannelType() != "session" {
			_ = ch.Reject(ssh.UnknownChannelType, "only sessions")
			continue
		}
		channel, reqs, err := ch.Accept()
		if err != nil {
			continue
		}
		go (&session{channel: channel, log: s.log, gone: make(chan struct{}), answered: make(chan struct{})}).serve(reqs)
	}
	_ = conn.Close()
}

func (s *Server) global(requests <-chan *ssh.Request) {
	for r := range requests {
		ok := r.Type == wire.PowerOffRequest
		if r.WantReply {
			_ = r.Reply(ok || r.Type == "keepalive@openssh.com", nil)
		}
		if ok {
			s.powerOff()
		}
	}
}

// session is one command.
type session struct {
	channel ssh.Channel
	log     *log.Logger
	term    string
	size    *pty.Winsize // nil: no terminal
	asked   bool         // a command was asked for

	mu     sync.Mutex
	cmd    *exec.Cmd
	master *os.File
	gone   chan struct{} // closed when the command has ended

	answered chan struct{} // closed when the request for the command was answered
}

// serve handles requests until the channel closes; a command that still runs
// then is ended.
func (s *session) serve(requests <-chan *ssh.Request) {
	answered := false
	for r := range requests {
		ok := s.handle(r)
		if r.WantReply {
			_ = r.Reply(ok, nil)
		}
		if r.Type == "exec" && ok {
			answered = true
			close(s.answered)
		}
	}
	if !answered {
		close(s.answered)
	}
	s.kill()
}

func (s *session) handle(r *ssh.Request) bool {
	switch r.Type {
	case "pty-req":
		var p struct {
			Term                      string
			Cols, Rows, Width, Height uint32
			Modes                     string
		}
		if ssh.Unmarshal(r.Payload, &p) != nil {
			return false
		}
		s.term, s.size = p.Term, winsize(p.Cols, p.Rows)
		return true
	case "window-change":
		var p struct{ Cols, Rows, Width, Height uint32 }
		if ssh.Unmarshal(r.Payload, &p) != nil {
			return false
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.master != nil && resize(s.master, winsize(p.Cols, p.Rows)) == nil
	case "exec":
		var p struct{ Command string }
		if ssh.Unmarshal(r.Payload, &p) != nil {
			return false
		}
		argv, err := wire.DecodeArgv(p.Command)
		if err != nil || s.asked {
			return false
		}
		s.asked = true
		s.start(argv)
		return true
	case wire.KillRequest:
		s.kill()
		return true
	}
	return false
}

// resize leaves the file as it is: pty.Setsize would make it a blocking one,
// while others use it and close it.
func resize(master *os.File, size *pty.Winsize) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var setErr error
	err = raw.Control(func(fd uintptr) {
		setErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols}) //nolint:gosec // a descriptor
	})
	return errors.Join(err, setErr)
}

func winsize(cols, rows uint32) *pty.Winsize {
	return &pty.Winsize{Cols: uint16(min(cols, 1<<15)), Rows: uint16(min(rows, 1<<15))} //nolint:gosec // bounded
}

// start runs the command and returns when it runs; what a shell would say of
// a command that cannot be run is said by its exit code.
func (s *session) start(argv []string) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "USER=root", "LOGNAME=root", "LANG=C.UTF-8",
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var err error
	var drained func()
	if s.size != nil {
		cmd.Env = append(cmd.Env, "TERM="+s.term)
		drained, err = s.startTerminal(cmd)
	} else {
		drained, err = s.startPlain(cmd)
	}
	if err != nil {
		code := 126
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			code = 127
		}
		_, _ = io.WriteString(s.channel.Stderr(), err.Error()+"\n")
		go s.finish(code)
		return
	}
	go func() {
		code := exitCode(cmd.Wait())
		close(s.gone)
		drained()
		s.finish(code)
	}()
}

func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			return 128 + int(status.Signal())
		}
		return exit.ExitCode()
	}
	return 126
}

// finish tells the exit code, after the answer to the request: a client that
// sees the channel close before that one knows nothing.
func (s *session) finish(code int) {
	<-s.answered
	payload := binary.BigEndian.AppendUint32(nil, uint32(code)) //nolint:gosec // 0 to 255
	_, _ = s.channel.SendRequest("exit-status", false, payload)
	_ = s.channel.Close()
}

func (s *session) startTerminal(cmd *exec.Cmd) (drained func(), err error) {
	master, err := pty.StartWithAttrs(cmd, s.size, &syscall.SysProcAttr{Setsid: true, Setctty: true})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.cmd, s.master = cmd, master
	s.mu.Unlock()
	go func() { _, _ = io.Copy(master, s.channel) }()
	out := copying(s.channel, master)
	return func() {
		out.drain()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.master = nil // no size is set from now on
		_ = master.Close()
	}, nil
}

func (s *session) startPlain(cmd *exec.Cmd) (drained func(), err error) {
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, outR.Close(), outW.Close())
	}
	cmd.Stdout, cmd.Stderr = outW, errW
	err = cmd.Start()
	_, _ = outW.Close(), errW.Close()
	if err != nil {
		return nil, errors.Join(err, outR.Close(), errR.Close())
	}
	s.mu.Lock()
	s.cmd = cmd
	s.mu.Unlock()
	go func() {
		_, _ = io.Copy(stdin, s.channel) // the command may stop reading when it likes
		_ = stdin.Close()
	}()
	out, errOut := copying(s.channel, outR), copying(s.channel.Stderr(), errR)
	return func() { out.drain(); errOut.drain() }, nil
}

// copier passes output on. The end of a command is not the end of its output:
// a daemon that it left behind may keep the pipe open for ever.
type copier struct {
	from    *os.File
	busy    atomic.Bool
	moved   atomic.Int64
	drained chan struct{}
}

func copying(to io.Writer, from *os.File) *copier {
	c := &copier{from: from, drained: make(chan struct{})}
	go func() {
		defer close(c.drained)
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				c.busy.Store(true)
				if _, werr := to.Write(buf[:n]); werr != nil {
					// Nobody listens; the command must not block on us.
					_, _ = io.Copy(io.Discard, from)
					return
				}
				c.moved.Add(int64(n))
				c.busy.Store(false)
			}
			if err != nil {
				return
			}
		}
	}()
	return c
}

// drain returns when the output has ended, or nothing more came for a while
// after the command's end.
func (c *copier) drain() {
	defer func() { _ = c.from.Close() }()
	for idle := 0; idle < 5; {
		before := c.moved.Load()
		select {
		case <-c.drained:
			return
		case <-time.After(100 * time.Millisecond):
		}
		if c.busy.Load() || c.moved.Load() != before {
			idle = 0
		} else {
			idle++
		}
	}
}

// kill ends every process of the command's session, politely and then for
// good, and returns when they are gone. Daemons with a session of their own
// (tmux's server) stay.
func (s *session) kill() {
	s.mu.Lock()
	cmd := s.cmd
	s.mu.Unlock()
	if cmd == nil || cmd.Process == nil {
		return
	}
	for i := range 40 {
		left := members(cmd.Process.Pid)
		if len(left) == 0 {
			return
		}
		sig := syscall.SIGTERM
		if i >= 10 {
			sig = syscall.SIGKILL
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, sig)
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
		select {
		case <-s.gone:
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// members lists the living processes of a session.
func members(sid int) []int {
	paths, _ := filepath.Glob("/proc/[0-9]*") // the pattern is fine
	var pids []int
	for _, path := range paths {
		pid, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			continue
		}
		if st, err := process.ReadStat(pid); err == nil && !st.Dead() && st.Session == sid {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Listen listens for the host, again and again until ctx ends or it succeeds.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	for {
		ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", addr)
		if err == nil {
			return ln, nil
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(100 * time.Millisecond):
		}
	}
}
