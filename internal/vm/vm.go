// Package vm is the contract between the life of a box and the engines that
// run machines. A Driver creates, finds, starts, stops, deletes and executes
// commands in machines; everything above it (ownership, registry, rollback)
// belongs to package box.
//
// The one rule that shapes every method: unknown is never absent. ErrNotFound
// means that the engine answered cleanly and the machine is certainly not
// there. Any other error means that nothing is known, so nothing may be
// deleted or forgotten because of it.
//
// The package uses the standard library only. Its implementations live in the
// packages below it and all pass the conformance suite in vm/vmtest.
package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Sentinels on which callers branch.
var (
	// ErrNotFound: the engine answered, and no such machine exists.
	ErrNotFound = errors.New("no such machine")
	// ErrExists: the name, or storage that the name would use, is taken. It
	// may belong to anybody; the driver adopted and changed nothing.
	ErrExists = errors.New("a machine of this name already exists")
	// ErrNotOwner: the machine's owner id is not the one given; it was left
	// untouched.
	ErrNotOwner = errors.New("the machine is not ours")
	// ErrNotRunning: the command could not be run because the machine is
	// stopped.
	ErrNotRunning = errors.New("the machine is not running")
	// ErrPortTaken: the machine's loopback port was bound by something else
	// between its reservation and its use. The caller may try another.
	ErrPortTaken = errors.New("the port is taken")
	// ErrNoTemplate: there is no template of this id.
	ErrNoTemplate = errors.New("no such template")
	// ErrInUse: a machine needs what was to be evicted; it was left alone.
	ErrInUse = errors.New("a machine needs it")
	// ErrCannotClone: this machine can not be cloned, now or for good; its
	// state has to be copied in another way.
	ErrCannotClone = errors.New("the machine cannot be cloned")
)

// EngineError says that the engine itself is missing or unusable, and how to
// mend that.
type EngineError struct {
	Engine string // "podman", "qemu", "smolvm"
	Reason string // lower case, no full stop
	Fix    string // a command that works, or empty
}

func (e *EngineError) Error() string { return e.Engine + ": " + e.Reason }

// Hint returns the command that mends it, or "".
func (e *EngineError) Hint() string { return e.Fix }

// State of a machine as its engine tells it.
type State string

// States.
const (
	// Running: commands can be executed.
	Running State = "running"
	// Stopped: it exists and can be started. A machine that was created and
	// never started is stopped too.
	Stopped State = "stopped"
	// Unknown: it exists, but the engine cannot say more (half-way between
	// two states, unreachable, broken). Never a reason to delete.
	Unknown State = "unknown"
)

// Isolation names what stands between a box and its host. It is shown to the
// user as it is.
type Isolation string

// Isolations.
const (
	IsolationKVM      Isolation = "vm (kvm)"
	IsolationEmulated Isolation = "vm (emulated)"
	// IsolationHypervisor is Apple's Hypervisor.framework.
	IsolationHypervisor Isolation = "vm (hypervisor)"
	IsolationContainer  Isolation = "container (shared kernel)"
	IsolationNone       Isolation = "none (fake)"
)

// Machine is what an engine knows of one machine.
type Machine struct {
	Name      string // the box's name
	EngineID  string // the engine's own id; stable while the machine lives
	OwnerID   string // the label written by Create; "" when it is not ours
	State     State
	Isolation Isolation
	HostPort  int // loopback port forwarded to the guest; 0 = none
	// Notes are weaknesses that the user should know, a line each.
	Notes []string
}

// Base is a root filesystem prepared by package rootfs.
type Base struct {
	Digest string // "sha256:" + 64 hex, of the content it was made from
	Tar    string // path of an uncompressed tar of the root filesystem
}

// Spec is what Create needs.
type Spec struct {
	Name    string
	OwnerID string // 32 hex; travels into the engine in the very call that creates the machine
	Base    Base
	// Template, unless it is "", is the id of the template to start from in
	// place of Base; only for drivers that are a Cacher.
	Template string
	// Workload is the machine's long-lived command. It is run as root, on
	// every start, by engines whose machines have a main command.
	Workload   []string
	CPUs       int
	MemoryMiB  int
	SystemGiB  int // size of the system disk, where the engine has one
	StorageGiB int // size of the disk of /data, where it is one of its own; 0 = the engine's default
	HostPort   int // loopback port of the host to forward; 0 = none
	GuestPort  int // the guest's side of HostPort
}

// WinSize is the size of a terminal in character cells.
type WinSize struct{ Rows, Cols uint16 }

// TTY asks for a pseudo-terminal in the guest. All output arrives on
// Command.Stdout, in raw form; the caller owns the mode of its own terminal.
type TTY struct {
	Term   string         // TERM for the command
	Size   WinSize        // initial size; zero means 80x24
	Resize <-chan WinSize // later sizes; may be nil
}

// Command is one command to execute as root in the guest.
type Command struct {
	Argv   []string  // never empty; never carries secrets: it shows in process lists
	Stdin  io.Reader // nil: empty
	Stdout io.Writer // nil: discarded
	Stderr io.Writer // nil: discarded; unused with a TTY
	TTY    *TTY      // nil: plain streams
}

// Watched returns a writer that writes to w and hands failed the first error of
// that. Nil stays nil. A driver ends a command with it whose output nobody takes
// any more: it may be one that never ends by itself.
func Watched(w io.Writer, failed func(error)) io.Writer {
	if w == nil {
		return nil
	}
	return &watched{w, failed}
}

type watched struct {
	w      io.Writer
	failed func(error)
}

func (w *watched) Write(p []byte) (int, error) {
	n, err := w.w.Write(p)
	if err != nil {
		w.failed(fmt.Errorf("pass the command's output on: %w", err))
	}
	return n, err
}

// Driver runs machines. Implementations are safe for concurrent use, also by
// several processes.
type Driver interface {
	// Name is the driver's word in box.env and in the registry.
	Name() string
	// Create makes a stopped or running machine, with /data empty and durable
	// across Stop and Start, labelled with the owner id by the same call that
	// makes it. It returns ErrExists when the name, or left-over storage of
	// that name, is there already, and never adopts either. After any other
	// error the machine may or may not exist: the caller asks Inspect.
	Create(ctx context.Context, spec Spec) (Machine, error)
	// Inspect returns one machine, ours or not. ErrNotFound is certain.
	Inspect(ctx context.Context, name string) (Machine, error)
	// List returns all machines of the engine, ours and foreign.
	List(ctx context.Context) ([]Machine, error)
	// Start returns when commands can be executed. Idempotent.
	Start(ctx context.Context, name string) error
	// Stop returns when the machine is down. Idempotent.
	Stop(ctx context.Context, name string) error
	// Delete removes the machine and its storage after checking that both
	// carry the owner id, and returns nil only when the absence of all of it
	// was verified. ErrNotOwner: refused, nothing was removed. ErrNotFound:
	// it was not there to begin with.
	Delete(ctx context.Context, name, ownerID string) error
	// Exec runs a command in a running machine as root. The exit code is the
	// guest command's own and only valid with a nil error (a command killed
	// by signal n counts as 128+n); an error means that the transport failed,
	// the command could not be run, or ctx ended or its output could not be
	// written, in which cases the guest's process was killed as far as the
	// engine could be reached.
	Exec(ctx context.Context, name string, cmd Command) (exit int, err error)
}

// Cached is a system that a driver keeps, so that machines start quickly.
type Cached struct {
	ID       string    // of a template as it was given to MakeTemplate, of a base its digest
	Template bool      // a template, not a base in the driver's own form
	Made     time.Time // UTC
	Bytes    int64     // on this host's disks; 0 = not known
	InUse    bool      // a machine or a template needs it
}

// CheckTemplateID refuses what is not an id as MakeTemplate takes it: 64 lower
// hex digits.
func CheckTemplateID(id string) error {
	if len(id) != 64 || strings.Trim(id, "0123456789abcdef") != "" {
		return fmt.Errorf("%q is not the id of a template", id)
	}
	return nil
}

// Cacher is an optional power of a driver: it keeps systems from which
// machines start quickly. Everything that it keeps can be made again.
type Cacher interface {
	// MakeTemplate keeps the system of a machine, without what is in /data,
	// under id (64 hex); a template of that id is replaced in one step. The
	// machine is stopped or its guest has just synced; it may be stopped and
	// started again meanwhile, and runs afterwards if it did before. What it
	// does next changes nothing in the template. ErrNotOwner as for Delete.
	MakeTemplate(ctx context.Context, name, ownerID, id string) error
	// Cached returns all that is kept, in no order. What is half made or half
	// removed is not part of it.
	Cached(ctx context.Context) ([]Cached, error)
	// Evict removes one of them; ErrInUse and ErrNoTemplate are possible.
	Evict(ctx context.Context, id string) error
}

// Cloner is an optional power of a driver.
type Cloner interface {
	// Clone is Create for a machine whose system and /data begin as those of
	// another one, ours by its owner id, in about the time of a start: nothing
	// is copied. spec.Base and spec.Template are ignored. The source runs on;
	// what it has written to its disks (the caller quiesces its guest) is in
	// the clone, and what either does next is not in the other. Each can be
	// deleted first. ErrCannotClone: nothing was made.
	Clone(ctx context.Context, source, sourceOwnerID string, spec Spec) (Machine, error)
}
