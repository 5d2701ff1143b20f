package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// terminal holds all rules of talking to people.
//
// The answer of a command goes to stdout; progress, warnings and errors go to
// stderr. An error is `box: what: why`, lower case, followed by `hint:` lines
// that are commands. Progress on a terminal is one line that is redrawn with
// the elapsed time; elsewhere it is plain lines. Questions are asked only when
// stdin and stderr are terminals.
type terminal struct {
	stdin  *os.File
	stdout io.Writer
	stderr io.Writer
	live   bool // stderr is a terminal

	undoing sync.Mutex // not mu, which is held as long as a slow reader of stderr wants
	undo    func()     // what was done to the terminal; nil: nothing

	mu      sync.Mutex
	step    string
	started time.Time
	stop    chan struct{}
	// done of total bytes of the step; told is when a plain line last said so.
	bytes, total int64
	told         time.Time
}

func newTerminal(stdin *os.File, stdout, stderr io.Writer) *terminal {
	return &terminal{stdin: stdin, stdout: stdout, stderr: stderr, live: isTerminal(stderr)}
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && f != nil && term.IsTerminal(int(f.Fd()))
}

// Step implements box.Reporter.
func (t *terminal) Step(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.finishStep()
	t.step, t.started = name, time.Now()
	t.bytes, t.total, t.told = 0, 0, t.started
	if !t.live {
		_, _ = fmt.Fprintln(t.stderr, name)
		return
	}
	t.draw()
	stop := make(chan struct{})
	t.stop = stop
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				t.mu.Lock()
				if t.stop == stop {
					t.draw()
				}
				t.mu.Unlock()
			}
		}
	}()
}

// draw redraws the current step; the lock is held.
func (t *terminal) draw() {
	line := t.step + " "
	if t.bytes > 0 {
		line += t.progress() + " "
	}
	_, _ = fmt.Fprintf(t.stderr, "\r\x1b[K%s(%s)", line, time.Since(t.started).Round(time.Second))
}

// plainProgress is how often a step that goes on says so elsewhere than on a
// terminal.
const plainProgress = 15 * time.Second

// Progress implements box.Reporter.
func (t *terminal) Progress(done, total int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.bytes, t.total = done, total
	if t.live || time.Since(t.told) < plainProgress {
		return // a terminal is redrawn every second
	}
	t.told = time.Now()
	_, _ = fmt.Fprintf(t.stderr, "  %s\n", t.progress())
}

// progress is a bar with bytes, rate and the time that is left, or bytes and
// rate where the total is not known; the lock is held.
func (t *terminal) progress() string {
	elapsed := time.Since(t.started).Seconds()
	rate := float64(t.bytes) / max(elapsed, 0.001)
	if t.total <= 0 {
		return fmt.Sprintf("%s, %s/s", size(t.bytes), size(int64(rate)))
	}
	const width = 20
	share := min(max(float64(t.bytes)/float64(t.total), 0), 1)
	bar := strings.Repeat("#", int(share*width)) + strings.Repeat(".", width-int(share*width))
	const longest = 1000 * time.Hour // a box says the numbers
	left := time.Duration(min(float64(max(t.total-t.bytes, 0))/max(rate, 1)*float64(time.Second), float64(longest)))
	return fmt.Sprintf("[%s] %s of %s, %s/s, %s left", bar, size(t.bytes), size(t.total), size(int64(rate)), left.Round(time.Second))
}

// size is a number of bytes for people.
func size(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d bytes", n)
}

// finishStep ends the redrawing; the lock is held.
func (t *terminal) finishStep() {
	if t.stop == nil {
		return
	}
	close(t.stop)
	t.stop = nil
	t.draw()
	_, _ = fmt.Fprintln(t.stderr)
}

// Note implements box.Reporter.
func (t *terminal) Note(text string) { t.say("  " + text) }

// Warn implements box.Reporter.
func (t *terminal) Warn(text string) { t.say("box: warning: " + text) }

func (t *terminal) say(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stop != nil {
		_, _ = fmt.Fprint(t.stderr, "\r\x1b[K")
	}
	_, _ = fmt.Fprintln(t.stderr, line)
	if t.stop != nil {
		t.draw()
	}
}

// Write shows raw output of the box, for --verbose.
func (t *terminal) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		t.say("  | " + wire.Printable(strings.TrimRight(line, "\r\n")))
	}
	return len(p), nil
}

// done ends the progress.
func (t *terminal) done() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.finishStep()
}

// fail prints an error and its hints, each once.
func (t *terminal) fail(err error, hints []string) {
	for line := range strings.Lines(strings.TrimSpace(err.Error())) {
		_, _ = fmt.Fprintf(t.stderr, "box: %s\n", wire.Printable(strings.TrimRight(line, "\n")))
	}
	seen := map[string]bool{}
	for _, h := range hints {
		if !seen[h] {
			seen[h] = true
			_, _ = fmt.Fprintf(t.stderr, "hint: %s\n", h)
		}
	}
}

// errNotAsked says that a question could not be asked.
var errNotAsked = errors.New("this is not a terminal, so there is nobody to ask")

// ask puts a question and returns the line that was typed, or ctx's cause when
// it ends before.
func (t *terminal) ask(ctx context.Context, question string) (string, error) {
	if !isTerminal(t.stdin) || !t.live {
		return "", errNotAsked
	}
	_, _ = fmt.Fprint(t.stderr, question)
	type answer struct {
		line string
		err  error
	}
	typed := make(chan answer, 1)
	go func() { // a read from a terminal cannot be cancelled; the process ends soon
		line, err := bufio.NewReader(io.LimitReader(t.stdin, 4096)).ReadString('\n')
		typed <- answer{line, err}
	}()
	select {
	case <-ctx.Done():
		_, _ = fmt.Fprintln(t.stderr)
		return "", context.Cause(ctx)
	case a := <-typed:
		if a.err != nil && !errors.Is(a.err, io.EOF) {
			return "", a.err
		}
		return strings.TrimRight(a.line, "\r\n"), nil
	}
}

// hideTyping keeps what is typed from being shown until show is called. It
// comes before the first question: whoever answers at once, as a password
// manager does, must not be quicker than it.
func (t *terminal) hideTyping() (show func(), err error) {
	if !isTerminal(t.stdin) || !t.live {
		return nil, errNotAsked
	}
	fd := int(t.stdin.Fd())
	before, err := unix.IoctlGetTermios(fd, getTermios)
	if err != nil {
		return nil, fmt.Errorf("prepare the terminal: %w", err)
	}
	hidden := *before
	hidden.Lflag &^= unix.ECHO
	hidden.Lflag |= unix.ICANON | unix.ISIG | unix.ECHONL // of a line its end is seen
	hidden.Iflag |= unix.ICRNL
	if err := unix.IoctlSetTermios(fd, setTermios, &hidden); err != nil {
		return nil, fmt.Errorf("prepare the terminal: %w", err)
	}
	return t.restoredBy(func() { _ = unix.IoctlSetTermios(fd, setTermios, before) }), nil
}

// restoredBy remembers how the terminal becomes again what it was; the returned
// function does that.
func (t *terminal) restoredBy(undo func()) func() {
	t.undoing.Lock()
	defer t.undoing.Unlock()
	t.undo = undo
	return t.restore
}

// restore makes the terminal again what it was, once.
func (t *terminal) restore() {
	t.undoing.Lock()
	defer t.undoing.Unlock()
	if t.undo != nil {
		t.undo()
		t.undo = nil
	}
}

// interactive reports whether a command can be given a terminal: both ends
// must be one, or redirected output would be changed on its way.
func (t *terminal) interactive() bool { return isTerminal(t.stdin) && isTerminal(t.stdout) }

// raw puts the user's terminal into raw mode for a command in a box and
// follows its size. The returned function undoes both.
func (t *terminal) raw() (tty *vm.TTY, restore func(), err error) {
	fd := int(t.stdin.Fd())
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, nil, fmt.Errorf("prepare the terminal: %w", err)
	}
	size := func() vm.WinSize {
		cols, rows, err := term.GetSize(fd)
		if err != nil {
			return vm.WinSize{}
		}
		return vm.WinSize{Rows: uint16(rows), Cols: uint16(cols)} //nolint:gosec // a terminal's size fits
	}
	resize := make(chan vm.WinSize, 1)
	changed := make(chan os.Signal, 1)
	stop := make(chan struct{})
	signal.Notify(changed, syscall.SIGWINCH)
	go func() {
		for {
			select {
			case <-stop:
				return
			case <-changed:
				select {
				case resize <- size():
				case <-stop:
					return
				}
			}
		}
	}()
	undo := t.restoredBy(func() { _ = term.Restore(fd, old) })
	return &vm.TTY{Term: termName(os.Getenv("TERM")), Size: size(), Resize: resize}, func() {
		signal.Stop(changed)
		close(stop)
		undo()
	}, nil
}

// termName passes on a TERM that can be one; the box falls back when it does
// not know it.
func termName(name string) string {
	if name == "" || len(name) > 32 || strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._+-", r)
	}) {
		return "xterm-256color"
	}
	return name
}
