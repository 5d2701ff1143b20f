// Package qemu runs boxes as virtual machines of QEMU on Linux hosts: with KVM
// where KVM really works, by software emulation elsewhere.
//
// A machine is a directory: its record with the owner id, a copy-on-write
// system disk over a cached base, the disk of /data, and a seed with keys of
// its own. hb is the init of the guest and answers on an SSH channel with a
// pinned host key. The network is passt's, without the mapping of the gateway
// to the host, so that the host's loopback is out of reach; where passt is
// missing it is QEMU's user networking, and the machine's notes say so.
//
// The driver needs no root. It believes in a process only when pid, start time
// and the host's boot id are the recorded ones.
package qemu

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sync/errgroup"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// Options are what a Driver is made of.
type Options struct {
	// Dir keeps machines, converted bases and kernels.
	Dir string
	// HB returns the hb binary for this host's architecture: the guests' init.
	HB func() ([]byte, error)
	// Kernel is a directory with boot/vmlinuz* and lib/modules, or a kernel
	// package (.deb); "" takes the base's own kernel, else the one that the
	// host's package client brings.
	Kernel string
	// Emulate never uses KVM.
	Emulate bool
}

// Driver implements vm.Driver.
type Driver struct {
	opts Options

	// What only tests replace.
	plausible func() bool   // whether KVM may work here
	kvmBoot   time.Duration // how long a machine may take with KVM
	emulated  time.Duration // how long by emulation
}

var (
	_ vm.Driver = (*Driver)(nil)
	_ vm.Cacher = (*Driver)(nil)
	_ vm.Cloner = (*Driver)(nil)
)

// New returns a driver; it touches nothing yet.
func New(o Options) *Driver {
	return &Driver{opts: o, plausible: kvmPlausible, kvmBoot: kvmBoot, emulated: emulatedBoot}
}

// Name implements vm.Driver.
func (d *Driver) Name() string { return "qemu" }

// record is machine.json.
type record struct {
	Name        string     `json:"name"`
	OwnerID     string     `json:"owner_id"`
	ID          string     `json:"id"` // also the machine's UUID
	CPUs        int        `json:"cpus"`
	MemoryMiB   int        `json:"memory_mib"`
	HostPort    int        `json:"host_port"`
	GuestPort   int        `json:"guest_port"`
	Workload    []string   `json:"workload"`
	Base        string     `json:"base"` // hexadecimal digest
	System      disk       `json:"system"`
	Data        disk       `json:"data"`
	HostKey     string     `json:"host_key"`
	HostPub     string     `json:"host_pub"`
	ClientKey   string     `json:"client_key"`
	ClientPub   string     `json:"client_pub"`
	ChannelPort int        `json:"channel_port"` // of the last start
	Isolation   string     `json:"isolation"`    // of the last start
	Notes       []string   `json:"notes"`        // of the last start
	QEMU        process.ID `json:"qemu"`         // of the last start
	Passt       process.ID `json:"passt"`
}

func (d *Driver) machines() string              { return filepath.Join(d.opts.Dir, "machines") }
func (d *Driver) dir(name string) string        { return filepath.Join(d.machines(), name) }
func (d *Driver) recordPath(name string) string { return filepath.Join(d.dir(name), "machine.json") }

// lock serializes what changes one machine.
func (d *Driver) lock(ctx context.Context, name string) (unlock func(), err error) {
	dir := filepath.Join(d.opts.Dir, "locks")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return flock(ctx, filepath.Join(dir, name))
}

func flock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			if isAt(f, path) {
				return func() { _ = f.Close() }, nil
			}
			// Its last holder removed it.
			_ = f.Close()
			if f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
				return nil, err
			}
			continue
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(err, f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), f.Close())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// isAt reports whether a path still names an open file.
func isAt(f *os.File, path string) bool {
	own, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(path)
	return err == nil && os.SameFile(own, there)
}

// scratch are the directories in which a machine is made or to which it is
// moved for its removal. No name of a machine has a dot in it.
func (d *Driver) making(name string) string   { return ".making-" + name + "." }
func (d *Driver) removing(name string) string { return ".removing-" + name + "." }

// sweep removes what killed calls left of a machine that they were making or
// removing. The caller holds the machine's lock.
func (d *Driver) sweep(name string) error {
	var errs []error
	for _, prefix := range []string{d.making(name), d.removing(name)} {
		found, err := filepath.Glob(filepath.Join(d.machines(), prefix+"*"))
		errs = append(errs, err)
		for _, path := range found {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	return errors.Join(errs...)
}

// load reads a machine's record. A directory without one is left-over storage
// and nobody's.
func (d *Driver) load(name string) (record, error) { return d.read(name, runningMachines) }

// read is load for who knows the processes, or looks for them when they are
// needed.
func (d *Driver) read(name string, running func() map[string]process.ID) (record, error) {
	data, err := os.ReadFile(d.recordPath(name))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(d.dir(name)); err == nil {
			return record{Name: name}, nil
		} else if !errors.Is(err, fs.ErrNotExist) {
			return record{}, err
		}
		return record{}, fmt.Errorf("qemu machine %s: %w", name, vm.ErrNotFound)
	}
	if err != nil {
		return record{}, err
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, fmt.Errorf("%s: %w", d.recordPath(name), err)
	}
	if r.Name != name || r.OwnerID == "" || r.ID == "" {
		return record{}, fmt.Errorf("%s is not the record of machine %s", d.recordPath(name), name)
	}
	if r.System.Top == "" { // a record of before there were layers
		r.System, r.Data = disk{Top: firstSystem}, disk{Top: firstData}
	}
	if !r.QEMU.Alive() {
		// A start that was killed may have started it and not come to record it.
		r.QEMU = running()[r.ID] // none: nobody needs to look again
	}
	return r, nil
}

func (d *Driver) save(r record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Write(d.recordPath(r.Name), append(data, '\n'), 0o600)
}

func (d *Driver) describe(r record) vm.Machine {
	m := vm.Machine{
		Name: r.Name, EngineID: r.ID, OwnerID: r.OwnerID, State: vm.Stopped,
		Isolation: vm.Isolation(r.Isolation), HostPort: r.HostPort, Notes: r.Notes,
	}
	switch {
	case r.ID == "":
		m.State = vm.Unknown
	case r.QEMU.Alive():
		m.State = vm.Running
	}
	if m.Isolation == "" {
		m.Isolation = vm.IsolationEmulated
	}
	return m
}

// Inspect implements vm.Driver.
func (d *Driver) Inspect(ctx context.Context, name string) (vm.Machine, error) {
	if ctx.Err() != nil {
		return vm.Machine{}, context.Cause(ctx)
	}
	r, err := d.load(name)
	if err != nil {
		return vm.Machine{}, err
	}
	return d.describe(r), nil
}

// List implements vm.Driver.
func (d *Driver) List(ctx context.Context) ([]vm.Machine, error) {
	entries, err := os.ReadDir(d.machines())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	running := sync.OnceValue(runningMachines) // once for all
	list := make([]vm.Machine, len(entries))
	var readers errgroup.Group
	readers.SetLimit(runtime.GOMAXPROCS(0))
	for i, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue // being made or being removed
		}
		readers.Go(func() error {
			r, err := d.read(e.Name(), running)
			switch {
			case errors.Is(err, vm.ErrNotFound):
			case err != nil:
				// A damaged record: something is there, nobody knows whose.
				list[i] = vm.Machine{Name: e.Name(), State: vm.Unknown, Isolation: vm.IsolationEmulated}
			default:
				list[i] = d.describe(r)
			}
			return context.Cause(ctx)
		})
	}
	if err := readers.Wait(); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list, func(m vm.Machine) bool { return m.Name == "" }), nil
}

// defaultStorageGiB is the sparse size of /data's disk.
const defaultStorageGiB = 64

// systemGiB is the sparse size of a machine's system disk: a base with its tools
// needs so much.
func systemGiB(spec vm.Spec) int { return max(8, spec.SystemGiB) }

// Create implements vm.Driver.
func (d *Driver) Create(ctx context.Context, spec vm.Spec) (vm.Machine, error) {
	if spec.Template != "" {
		return d.fromTemplate(ctx, spec)
	}
	if err := d.admit(spec); err != nil { // before a base is converted
		return vm.Machine{}, err
	}
	base, release, err := d.convert(ctx, spec.Base)
	if err != nil {
		return vm.Machine{}, fmt.Errorf("prepare the base's disk: %w", err)
	}
	defer release()
	return d.make(ctx, spec, func(dir string, r *record) error {
		r.Base, r.System = base, disk{Top: firstSystem}
		if err := overlay(ctx, dir, baseFile(base, baseDisk), firstSystem, systemGiB(spec)); err != nil {
			return err
		}
		return d.emptyData(ctx, spec, dir, r)
	})
}

// admit refuses what cannot be made.
func (d *Driver) admit(spec vm.Spec) error {
	if err := requireTools(lookPath); err != nil {
		return err
	}
	if spec.MemoryMiB < 256 {
		return fmt.Errorf("a virtual machine needs at least 256 MiB of memory, not %d", spec.MemoryMiB)
	}
	if _, err := os.Lstat(d.dir(spec.Name)); err == nil {
		return fmt.Errorf("%s: %w", d.dir(spec.Name), vm.ErrExists)
	}
	return nil
}

// make makes a machine with the disks that fill provides. The machine's
// directory, with the owner id in its record, appears by one rename.
func (d *Driver) make(ctx context.Context, spec vm.Spec, fill func(dir string, r *record) error) (vm.Machine, error) {
	if err := d.admit(spec); err != nil {
		return vm.Machine{}, err
	}
	if err := os.MkdirAll(d.machines(), 0o700); err != nil {
		return vm.Machine{}, err
	}
	unlock, err := d.lock(ctx, spec.Name)
	if err != nil {
		return vm.Machine{}, err
	}
	defer unlock()
	if err := d.sweep(spec.Name); err != nil {
		return vm.Machine{}, err
	}
	making, err := os.MkdirTemp(d.machines(), d.making(spec.Name))
	if err != nil {
		return vm.Machine{}, err
	}
	r, err := d.populate(making, spec, fill)
	if err == nil {
		// A directory that is not empty is never replaced by rename(2).
		if err = os.Rename(making, d.dir(spec.Name)); errors.Is(err, syscall.EEXIST) || errors.Is(err, syscall.ENOTEMPTY) {
			err = fmt.Errorf("%s: %w", d.dir(spec.Name), vm.ErrExists)
		}
	}
	if err != nil {
		return vm.Machine{}, errors.Join(err, os.RemoveAll(making))
	}
	return d.describe(r), atomicfile.SyncDir(d.machines())
}

func (d *Driver) populate(dir string, spec vm.Spec, fill func(dir string, r *record) error) (record, error) {
	r := record{
		Name: spec.Name, OwnerID: spec.OwnerID, ID: newUUID(), CPUs: max(1, spec.CPUs), MemoryMiB: spec.MemoryMiB,
		HostPort: spec.HostPort, GuestPort: spec.GuestPort, Workload: spec.Workload,
	}
	var err error
	if r.HostKey, r.HostPub, err = newKey(); err != nil {
		return r, err
	}
	if r.ClientKey, r.ClientPub, err = newKey(); err != nil {
		return r, err
	}
	if err := fill(dir, &r); err != nil {
		return r, err
	}
	body, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return r, err
	}
	return r, atomicfile.Write(filepath.Join(dir, "machine.json"), body, 0o600)
}

// emptyData makes the disk of an empty /data.
func (d *Driver) emptyData(ctx context.Context, spec vm.Spec, dir string, r *record) error {
	storage := spec.StorageGiB
	if storage == 0 {
		storage = defaultStorageGiB
	}
	r.Data = disk{Top: firstData}
	path := filepath.Join(dir, firstData)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(path, int64(storage)<<30); err != nil {
		return err
	}
	return run(ctx, dir, "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-L", "data", firstData)
}

func newUUID() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// newKey makes an ed25519 key pair in OpenSSH's forms.
func newKey() (private, public string, err error) {
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", "", err
	}
	block, err := ssh.MarshalPrivateKey(priv, "")
	if err != nil {
		return "", "", err
	}
	sshPub, err := ssh.NewPublicKey(pub)
	if err != nil {
		return "", "", err
	}
	return string(pem.EncodeToMemory(block)), string(ssh.MarshalAuthorizedKey(sshPub)), nil
}

// Delete implements vm.Driver.
func (d *Driver) Delete(ctx context.Context, name, ownerID string) error {
	unlock, err := d.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	if err := d.sweep(name); err != nil {
		return err
	}
	r, err := d.load(name)
	if err != nil {
		if errors.Is(err, vm.ErrNotFound) {
			err = errors.Join(err, d.forgetLock(name))
		}
		return err
	}
	if ownerID == "" || r.OwnerID != ownerID {
		return fmt.Errorf("qemu machine %s: %w", name, vm.ErrNotOwner)
	}
	if err := errors.Join(end(ctx, r.QEMU), end(ctx, r.Passt)); err != nil {
		return fmt.Errorf("end the processes of %s: %w", name, err)
	}
	// Out of the way first, in one step: half a machine must not be found.
	trash := filepath.Join(d.machines(), d.removing(name)+r.ID)
	if err := os.Rename(d.dir(name), trash); err != nil {
		return err
	}
	if err := os.RemoveAll(trash); err != nil {
		return fmt.Errorf("remove %s: %w", trash, err)
	}
	if _, err := os.Lstat(d.dir(name)); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is still there after its removal", d.dir(name))
	}
	return d.forgetLock(name)
}

// forgetLock removes a lock's file, which the caller holds; whoever waits for
// it notices.
func (d *Driver) forgetLock(name string) error {
	if err := os.Remove(filepath.Join(d.opts.Dir, "locks", name)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// system is the QEMU program and machine type for an architecture, and what
// the kernel is told on a processor in software.
type system struct{ program, machine, console, pkg, emulation string }

// emulatedX86 are the kernel's parameters (its Documentation/admin-guide/
// kernel-parameters.txt) on QEMU's own x86 processor. Its time stamp counter is
// the host's, but does not say that it is constant, so that the kernel takes
// the HPET instead: then every look at the clock is a system call, and an exit
// from the translated code. Tables of five levels cost a fifth level at every
// miss of the software TLB. And the errors of real processors, which the kernel
// works around at every system call, are not in this one. Together they took a
// fifth to a quarter off the tools' start (measured: npm 3.5 -> 2.8 s, codex
// 2.1 -> 1.5 s).
const emulatedX86 = "tsc=reliable no5lvl mitigations=off"

func hostSystem() system {
	if runtime.GOARCH == "arm64" {
		return system{"qemu-system-aarch64", "virt", "ttyAMA0", "qemu-system-arm", ""}
	}
	return system{"qemu-system-x86_64", "q35", "ttyS0", "qemu-system-x86", emulatedX86}
}

// requireTools names the first missing program and its package.
func requireTools(look func(string) (string, error)) error {
	if runtime.GOOS != "linux" {
		return &vm.EngineError{Engine: "qemu", Reason: "this driver is for Linux hosts"}
	}
	sys := hostSystem()
	for _, tool := range []struct{ program, pkg string }{
		{sys.program, sys.pkg}, {"qemu-img", "qemu-utils"}, {"mke2fs", "e2fsprogs"},
	} {
		if _, err := look(tool.program); err != nil {
			return &vm.EngineError{Engine: "qemu", Reason: tool.program + " is not installed", Fix: "sudo apt-get install " + tool.pkg}
		}
	}
	return nil
}

// lookPath also looks where administrators' programs are, which are not on
// every user's PATH.
func lookPath(program string) (string, error) {
	path, err := exec.LookPath(program)
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if err == nil {
			break
		}
		path, err = exec.LookPath(filepath.Join(dir, program))
	}
	return path, err
}

// run executes a program of the host in dir; its error has the last lines
// that the program wrote.
func run(ctx context.Context, dir, program string, args ...string) error {
	path, err := lookPath(program)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = dir
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", program, context.Cause(ctx))
	}
	if err != nil {
		// The last line may only say that it failed.
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		lines = lines[max(0, len(lines)-2):]
		return fmt.Errorf("%s: %s (%w)", program, wire.Printable(strings.Join(lines, "; ")), err)
	}
	return nil
}
