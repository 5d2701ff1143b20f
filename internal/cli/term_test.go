package cli

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// The passphrase is answered in the moment in which its question is printed,
// which no person manages, but a password manager does.
func TestQuickAnswersAreNotShown(t *testing.T) {
	t.Parallel()
	outside, inside, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = outside.Close(), inside.Close() })
	echoes := func() bool {
		state, err := unix.IoctlGetTermios(int(inside.Fd()), getTermios)
		if err != nil {
			t.Fatal(err)
		}
		return state.Lflag&unix.ECHO != 0
	}
	if !echoes() {
		t.Fatal("a terminal that never echoes shows nothing here")
	}
	var asked strings.Builder
	stderr := writerFunc(func(p []byte) (int, error) {
		asked.Write(p)
		if echoes() {
			t.Errorf("what is typed is shown when %q is printed", p)
		}
		return outside.WriteString("correct horse\r")
	})
	a := &app{term: &terminal{stdin: inside, stderr: stderr, live: true}}
	p, err := a.passphrase(context.Background(), true)
	if err != nil || asked.String() != "Passphrase of the archive: The same once more: " {
		t.Errorf("%v %v, asked %q", p, err, asked.String())
	}
	if !echoes() {
		t.Error("what is typed is not shown any more")
	}
}

// Nobody reads what is said any more, as in a pager: that keeps nobody from
// leaving the terminal as it was.
func TestTheTerminalIsRestoredBesideABlockedWrite(t *testing.T) {
	t.Parallel()
	reading, writing := io.Pipe()
	term := newTerminal(nil, nil, writing)
	undone := make(chan struct{})
	undo := term.restoredBy(func() { close(undone) })
	said := make(chan struct{})
	go func() { term.say("a line"); close(said) }()
	if _, err := reading.Read(make([]byte, 1)); err != nil { // the rest is still being written
		t.Fatal(err)
	}
	go undo()
	select {
	case <-undone:
	case <-time.After(time.Minute):
		t.Error("the terminal stays as it is until somebody reads")
	}
	_ = reading.Close()
	<-said
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
