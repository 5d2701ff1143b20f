package smolvm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// minimumVersion has labels, and loses nothing of a large standard input of
// `exec -i` (upstream issue 926).
func minimumVersion() [3]int { return [3]int{1, 8, 1} }

const (
	maxAnswer = 8 << 20  // of what smolvm answers, in bytes
	maxWords  = 64 << 10 // of its messages
)

// failure is what smolvm said when it did not succeed. Its texts decide nothing
// but hints: the state is asked for again.
type failure struct {
	verb string
	code int
	said string // escaped, on one line
}

func (e *failure) Error() string {
	if e.said == "" {
		return fmt.Sprintf("smolvm %s ended with %d", e.verb, e.code)
	}
	return "smolvm " + e.verb + ": " + e.said
}

// says reports whether an error is smolvm's own and contains any of the words.
func says(err error, words ...string) bool {
	var f *failure
	return errors.As(err, &f) && slices.ContainsFunc(words, func(w string) bool { return strings.Contains(f.said, w) })
}

// environment of smolvm. Left out: what would turn its messages into something
// else, and what would bind forwarded ports to another address than the
// loopback (src/cli/vm_common.rs). Put in: the egress floor that keeps a guest
// from the loopback and the private networks of its host (src/network/egress.rs);
// smolvm reads it when it starts a machine.
func environment() []string {
	env := slices.DeleteFunc(os.Environ(), func(entry string) bool {
		key, _, _ := strings.Cut(entry, "=")
		return slices.Contains([]string{"RUST_LOG", "SMOLVM_LOG_FORMAT", "SMOLVM_PUBLISH_ADDR", "SMOLVM_EGRESS_FLOOR"}, key)
	})
	return append(env, "SMOLVM_EGRESS_FLOOR=strict")
}

// command prepares a call of smolvm in a process group of its own: a Ctrl-C at
// the terminal is box's to handle, and a start that it hits would kill the
// machine.
func command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.Env = environment()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// run makes one call with an empty standard input and returns what it printed.
// Ending ctx interrupts it, and kills it when that does not help: an interrupted
// smolvm cleans up, a killed one leaves half a machine.
func (d *Driver) run(ctx context.Context, limit time.Duration, args ...string) ([]byte, error) {
	program, err := d.program(ctx)
	if err != nil {
		return nil, err
	}
	return d.runProgram(ctx, limit, program, nil, args...)
}

// runProgram is run; lines, unless nil, is told each line of the messages.
func (d *Driver) runProgram(ctx context.Context, limit time.Duration, program string, lines func(string), args ...string) ([]byte, error) {
	verb := strings.Join(args[:min(2, len(args))], " ")
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("smolvm %s did not end within %s", verb, limit))
	defer cancel()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("smolvm %s: %w", verb, context.Cause(ctx))
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer func() { _ = null.Close() }()
	out, words := &head{max: maxAnswer}, &tail{max: maxWords}
	var waitErr error
	cmd := command(program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = null, out, words
	if lines != nil {
		cmd.Stderr = io.MultiWriter(words, &lineWriter{tell: lines})
	}
	// A child that keeps our pipes must not keep us.
	cmd.WaitDelay = 5 * time.Second
	endWithCaller(cmd)
	started, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		// The kernel takes the end of the thread that made a process for the end
		// of its parent.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			waitErr = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	select {
	case <-ended:
	case <-ctx.Done():
		_ = cmd.Process.Signal(os.Interrupt)
		select {
		case <-ended:
		case <-time.After(d.opts.Patience.Kill):
			_ = cmd.Process.Kill()
			<-ended
		}
		return nil, fmt.Errorf("smolvm %s: %w", verb, context.Cause(ctx))
	}
	var exit *exec.ExitError
	switch {
	case errors.As(waitErr, &exit):
		return nil, &failure{verb, exit.ExitCode(), lastWords(words.buf)}
	case waitErr != nil && !errors.Is(waitErr, exec.ErrWaitDelay):
		return nil, fmt.Errorf("smolvm %s: %w", verb, waitErr)
	case out.over:
		return nil, fmt.Errorf("smolvm %s answered more than %d bytes", verb, maxAnswer)
	}
	return out.buf.Bytes(), nil
}

// lastWords is the last error in smolvm's messages, which may have several
// lines; else the last line.
func lastWords(messages []byte) string {
	text := strings.TrimSpace(string(messages))
	if i := strings.LastIndex("\n"+text, "\nError: "); i >= 0 {
		text = text[i+len("Error: "):]
	} else if i := strings.LastIndexByte(text, '\n'); i >= 0 {
		text = text[i+1:]
	}
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > 600 {
		text = text[:600] + "…"
	}
	return wire.Printable(text)
}

// head keeps the beginning of a stream.
type head struct {
	buf  bytes.Buffer
	max  int
	over bool
}

func (h *head) Write(p []byte) (int, error) {
	if room := h.max - h.buf.Len(); room < len(p) {
		h.over = true
		h.buf.Write(p[:room])
	} else {
		h.buf.Write(p)
	}
	return len(p), nil
}

// tail keeps the end of a stream.
type tail struct {
	buf []byte
	max int
}

func (t *tail) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - t.max; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

// lineWriter tells lines, bounded and escaped. Of a line that is said again and
// again with other figures, as progress is, it tells the first;
// of a bar without words, none.
type lineWriter struct {
	tell func(string)
	line []byte
	last string // its letters
}

func lettersOnly(r rune) rune {
	if unicode.IsLetter(r) {
		return r
	}
	return -1
}

func (l *lineWriter) Write(p []byte) (int, error) {
	for _, b := range p {
		switch {
		case b == '\n' || b == '\r':
			text := strings.TrimSpace(string(l.line))
			l.line = l.line[:0]
			shape := strings.Map(lettersOnly, text)
			if shape == "" || shape == l.last {
				continue
			}
			l.last = shape
			l.tell(wire.Printable(text))
		case len(l.line) < 400:
			l.line = append(l.line, b)
		}
	}
	return len(p), nil
}

var versionLine = regexp.MustCompile(`^smolvm (\d{1,6})\.(\d{1,6})\.(\d{1,6})(?:[-+ ].*)?$`)

// program is the path of smolvm, which must be the right program and new
// enough. Another project (CelestoAI's SmolVM) installs a program of that name.
func (d *Driver) program(ctx context.Context) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.path != "" {
		return d.path, nil
	}
	path, err := exec.LookPath(d.opts.Program)
	if err != nil {
		return "", &vm.EngineError{Engine: "smolvm", Reason: "is not installed or not on the PATH (it is made by github.com/smol-machines/smolvm)"}
	}
	out, err := d.runProgram(ctx, d.opts.Patience.Ask, path, nil, "--version")
	var refused *failure
	if err != nil && !errors.As(err, &refused) {
		return "", err
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	m := versionLine.FindStringSubmatch(first)
	if m == nil {
		if refused != nil {
			first = refused.said
		}
		return "", &vm.EngineError{Engine: "smolvm", Reason: fmt.Sprintf(
			"%s is another program of that name, not the smolvm of github.com/smol-machines/smolvm: asked for its version it says %q", path, wire.Printable(first[:min(80, len(first))]))}
	}
	var version [3]int
	minimum := minimumVersion()
	for i := range version {
		version[i], _ = strconv.Atoi(m[i+1]) // digits
	}
	if slices.Compare(version[:], minimum[:]) < 0 {
		return "", &vm.EngineError{Engine: "smolvm", Reason: fmt.Sprintf(
			"%s is version %d.%d.%d; %d.%d.%d or newer is needed, for labels and for large inputs of commands",
			path, version[0], version[1], version[2], minimum[0], minimum[1], minimum[2])}
	}
	d.path = path
	return path, nil
}

// Usable returns nil where a machine can be expected to start.
func (d *Driver) Usable(ctx context.Context) error {
	if _, err := d.program(ctx); err != nil {
		return err
	}
	return d.hypervisor()
}

// hypervisor looks at what smolvm itself looks at only when a machine starts.
func (d *Driver) hypervisor() error {
	if runtime.GOOS != "linux" {
		return nil
	}
	f, err := os.OpenFile(d.opts.KVM, os.O_RDWR, 0)
	switch {
	case err == nil:
		return f.Close()
	case errors.Is(err, fs.ErrPermission):
		return &vm.EngineError{
			Engine: "smolvm",
			Reason: d.opts.KVM + " may not be opened by this user: join its group and log in again (`test -r " + d.opts.KVM + " -a -w " + d.opts.KVM + "` tells whether that helped)",
			Fix:    `sudo usermod -aG kvm "$(id -un)"`,
		}
	case errors.Is(err, fs.ErrNotExist):
		return &vm.EngineError{
			Engine: "smolvm",
			Reason: d.opts.KVM + " is not there: virtualisation is off in the firmware, not passed to this machine, or its module is not loaded",
			Fix:    "sudo modprobe kvm_intel || sudo modprobe kvm_amd",
		}
	}
	return &vm.EngineError{Engine: "smolvm", Reason: err.Error()}
}

// listed is the part of smolvm's word on a machine that is used
// (src/cli/vm_common.rs). Unknown fields and states are fine: newer versions
// have more of both.
type listed struct {
	Name      string            `json:"name"`
	State     string            `json:"state"`
	CPUs      int               `json:"cpus"`
	MemoryMiB int               `json:"memory_mib"`
	CreatedAt int64             `json:"created_at"`
	Labels    map[string]string `json:"labels"`
}

// list returns all machines, sorted: smolvm's order is random. It is the only
// proof of absence, so anything but a clean and whole answer is an error.
func (d *Driver) list(ctx context.Context) ([]listed, error) {
	db, err := database()
	if err != nil {
		return nil, err
	}
	_, statErr := os.Stat(db)
	var out []byte
	for try := range 4 {
		if out, err = d.run(ctx, d.opts.Patience.Ask, "machine", "ls", "--json"); !says(err, "database") {
			break
		}
		// Others write; asking again does no harm.
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), err)
		case <-time.After(time.Duration(try+1) * 200 * time.Millisecond):
		}
	}
	if err != nil {
		return nil, err
	}
	machines, err := parseList(out)
	if err != nil {
		return nil, fmt.Errorf("smolvm machine ls: %w", err)
	}
	// smolvm makes a database where there is none, and then knows no machine.
	if errors.Is(statErr, fs.ErrNotExist) && len(machines) == 0 {
		if claimed, err := d.claimed(); err != nil {
			return nil, err
		} else if slices.ContainsFunc(claimed, func(c claim) bool { return c.Database == db }) {
			return nil, fmt.Errorf("smolvm's database %s was gone, although machines were made in it", db)
		}
	}
	return machines, nil
}

func parseList(out []byte) ([]listed, error) {
	if !bytes.HasPrefix(bytes.TrimSpace(out), []byte("[")) {
		return nil, errors.New("its answer is no list")
	}
	var machines []listed
	if err := json.Unmarshal(out, &machines); err != nil {
		return nil, fmt.Errorf("read its answer: %w", err)
	}
	slices.SortFunc(machines, func(a, b listed) int { return strings.Compare(a.Name, b.Name) })
	for i, m := range machines {
		if checkName(m.Name) != nil || m.State == "" {
			return nil, fmt.Errorf("it lists a machine %q in state %q", wire.Printable(m.Name), wire.Printable(m.State))
		}
		if i > 0 && machines[i-1].Name == m.Name {
			return nil, fmt.Errorf("it lists the machine %s twice", m.Name)
		}
	}
	return machines, nil
}

// find looks for one machine.
func (d *Driver) find(ctx context.Context, name string) (listed, bool, error) {
	all, err := d.list(ctx)
	if err != nil {
		return listed{}, false, err
	}
	i := slices.IndexFunc(all, func(m listed) bool { return m.Name == name })
	if i < 0 {
		return listed{}, false, nil
	}
	return all[i], true, nil
}

// state asks for one machine's state, cheaper than list; the question without
// --json would make a directory for a name that smolvm does not know.
func (d *Driver) state(ctx context.Context, name string) (string, error) {
	out, err := d.run(ctx, d.opts.Patience.Ask, "machine", "status", "--name", name, "--json")
	if err == nil {
		var m listed
		if err := json.Unmarshal(out, &m); err != nil || m.Name != name || m.State == "" {
			return "", errors.Join(fmt.Errorf("smolvm machine status %s: it does not answer in its usual form", name), err)
		}
		return m.State, nil
	}
	// Its words for absence are not stable; the list is certain.
	if _, found, listErr := d.find(ctx, name); listErr == nil && !found {
		return "", fmt.Errorf("smolvm machine %s: %w", name, vm.ErrNotFound)
	}
	return "", err
}
