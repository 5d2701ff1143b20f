package attach

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/vm"
)

// stalling is a disk that takes nothing for a while, when all else is done.
type stalling struct {
	strings.Builder
	until <-chan struct{}
}

func (s *stalling) Write(p []byte) (int, error) {
	<-s.until
	return s.Builder.Write(p)
}

// The last bytes of a process arrive, however long their writer takes for them.
func TestSlowWriter(t *testing.T) {
	t.Parallel()
	const size, patience = 200 << 10, time.Second
	until := make(chan struct{})
	to := &stalling{until: until}
	ended := make(chan struct{})
	go func() {
		time.Sleep(2 * patience) // longer than the process is waited for
		close(until)
		<-ended
	}()
	code, err := run(context.Background(), exec.Command("/bin/sh", "-c", "head -c 204800 /dev/zero; exit 3"), vm.Command{Stdout: to}, patience)
	close(ended)
	if code != 3 || err != nil || to.Len() != size {
		t.Errorf("%d, %v, %d bytes", code, err, to.Len())
	}
}

// What a process leaves behind does not hold up its end, nor does a reader that
// gave up.
func TestLeftBehind(t *testing.T) {
	t.Parallel()
	const patience = time.Second
	// A child has the output open until somebody opens the FIFO, after this.
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/bin/sh", "-c", `echo said; cat <"$0" & exit 4`, fifo)
	var out strings.Builder
	pr, pw := io.Pipe()
	defer func() { _ = pw.Close() }()
	code, err := run(context.Background(), cmd, vm.Command{Stdout: &out, Stdin: pr}, patience)
	if f, err := os.OpenFile(fifo, os.O_WRONLY, 0); err != nil || f.Close() != nil {
		t.Error(err)
	}
	if code != 4 || err != nil || out.String() != "said\n" {
		t.Errorf("%d, %v, %q", code, err, out.String())
	}

	full := errors.New("full")
	refusing := writer(func([]byte) (int, error) { return 0, full })
	if code, err := run(context.Background(), exec.Command("/bin/cat", "/dev/zero"), vm.Command{Stdout: refusing}, patience); !errors.Is(err, full) {
		t.Errorf("%d, %v", code, err)
	}

	ctx, cancel := context.WithCancelCause(context.Background())
	stuck := writer(func([]byte) (int, error) { cancel(full); select {} })
	if code, err := run(ctx, exec.Command("/bin/cat", "/dev/zero"), vm.Command{Stdout: stuck}, patience); !errors.Is(err, full) {
		t.Errorf("%d, %v", code, err)
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }
