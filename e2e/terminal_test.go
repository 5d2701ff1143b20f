//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
)

// session is box on a terminal of its own, with a person's hands.
type session struct {
	t    *testing.T
	cmd  *exec.Cmd
	tty  *os.File
	done chan struct{} // closed when the terminal has no more output

	mu     sync.Mutex
	screen strings.Builder // everything that was printed
	read   int             // how much of it expect has consumed
}

// patience is for one answer on a terminal.
const patience = 60 * time.Second

// terminal starts box on a pseudo-terminal.
func (h *home) terminal(args ...string) *session {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	h.t.Cleanup(cancel)
	s := &session{t: h.t, cmd: h.command(ctx, args...), done: make(chan struct{})}
	tty, err := pty.StartWithSize(s.cmd, &pty.Winsize{Rows: 40, Cols: 120})
	if err != nil {
		h.t.Fatal(err)
	}
	s.tty = tty
	h.t.Cleanup(func() { _ = tty.Close() })
	go func() {
		defer close(s.done)
		buf := make([]byte, 4096)
		for {
			n, err := tty.Read(buf) // EIO when box and its children have ended
			s.mu.Lock()
			s.screen.Write(buf[:n])
			s.mu.Unlock()
			h.mu.Lock()
			h.output.Write(buf[:n])
			h.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return s
}

func (s *session) send(keys string) {
	s.t.Helper()
	if _, err := s.tty.WriteString(keys); err != nil {
		s.t.Fatal(err)
	}
}

// expect waits until text is printed after what was expected before.
func (s *session) expect(text string) {
	s.t.Helper()
	eventually(s.t, patience, fmt.Sprintf("%q on the terminal", text), func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		all := s.screen.String()
		if i := strings.Index(all[s.read:], text); i >= 0 {
			s.read += i + len(text)
			return nil
		}
		return fmt.Errorf("after what came before there is only %q", clip(all[s.read:]))
	})
}

// exit waits for box's end and returns its exit code.
func (s *session) exit() int {
	s.t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- s.cmd.Wait() }()
	select {
	case err := <-ended:
		<-s.done
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			s.t.Fatal(err)
		}
		return s.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		_ = s.cmd.Process.Kill()
		s.t.Fatalf("box did not end; the terminal shows %q", clip(s.screen.String()))
		return -1
	}
}
