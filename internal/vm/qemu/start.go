package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// The guest's network, which is QEMU's and passt's own and reaches nobody
// else. The addresses are those of QEMU's user networking.
const (
	guestAddress = "10.0.2.15"
	guestGateway = "10.0.2.2"
	guestDNS     = "10.0.2.3"

	channelNet     = "10.0.3.0/24" // the host's way in
	channelAddress = "10.0.3.15"
)

// How long a machine may take until its channel answers.
const (
	kvmBoot      = 90 * time.Second
	emulatedBoot = 6 * time.Minute // 6 s here, far more on a busy or slow host
)

// Start implements vm.Driver.
func (d *Driver) Start(ctx context.Context, name string) error {
	if err := requireTools(lookPath); err != nil {
		return err
	}
	unlock, err := d.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := d.load(name)
	if err != nil {
		return err
	}
	if r.ID == "" {
		return fmt.Errorf("%s is left-over storage without a record", d.dir(name))
	}
	if r.QEMU.Alive() {
		return d.awaitChannel(ctx, r, d.emulated)
	}
	if err := end(ctx, r.Passt); err != nil {
		return err
	}
	kvm := d.kvm()
	r.Notes = nil
	if kvm.use {
		err := d.boot(ctx, &r, "kvm", d.kvmBoot)
		if err == nil {
			return d.rememberKVM(true)
		}
		if kvm.proven || ctx.Err() != nil || errors.Is(err, vm.ErrPortTaken) {
			return err
		}
	}
	if kvm.use || kvm.lies {
		r.Notes = []string{lyingKVM}
	}
	if err := d.boot(ctx, &r, "tcg,thread=multi", d.emulated); err != nil || !kvm.use {
		return err
	}
	// KVM opens and yet does not run what emulation runs: remembered for this
	// boot of the host.
	return d.rememberKVM(false)
}

// boot starts the machine with an accelerator and waits for its channel.
func (d *Driver) boot(ctx context.Context, r *record, accel string, limit time.Duration) error {
	err := d.launch(r, accel)
	if saveErr := d.save(*r); err == nil {
		err = saveErr
	}
	if err == nil {
		err = d.awaitChannel(ctx, *r, limit)
	}
	if err != nil {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		err = errors.Join(err, end(cleanup, r.QEMU), end(cleanup, r.Passt))
	}
	return err
}

// muteConsole lets the file of a console that is no longer of interest grow no
// more: root in the guest could fill the host's disk with it. Should QEMU refuse,
// all goes on as before.
func (d *Driver) muteConsole(ctx context.Context, name string) {
	null := map[string]any{"type": "null", "data": map[string]any{}}
	_ = d.monitor(ctx, name, command{"chardev-change", map[string]any{"id": "console", "backend": null}})
}

// launch starts the processes of the machine.
func (d *Driver) launch(r *record, accel string) error {
	r.Isolation = string(vm.IsolationEmulated)
	if strings.HasPrefix(accel, "kvm") {
		r.Isolation = string(vm.IsolationKVM)
	}
	if r.HostPort != 0 && !free(r.HostPort) {
		return fmt.Errorf("127.0.0.1:%d: %w", r.HostPort, vm.ErrPortTaken)
	}
	port, err := pickPort()
	if err != nil {
		return err
	}
	r.ChannelPort = port
	if err := d.writeInitramfs(*r); err != nil {
		return fmt.Errorf("write the initramfs: %w", err)
	}
	nw, err := d.startNetwork(r)
	if err != nil {
		return err
	}
	defer nw.close()
	// The port is on disk before there is anything to reach by it, so that a
	// machine whose start was killed can still be found and used.
	if err := d.save(*r); err != nil {
		return err
	}

	path, err := lookPath(hostSystem().program)
	if err != nil {
		return err
	}
	dir := d.dir(r.Name)
	cmd := exec.Command(path, append(d.arguments(*r, accel), nw.args...)...)
	cmd.Dir = dir
	cmd.ExtraFiles = nw.files
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	log, err := emptyFile(filepath.Join(dir, "qemu.log"))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	console, err := emptyFile(filepath.Join(dir, "console.log")) // QEMU keeps its mode
	if err != nil {
		return err
	}
	_ = console.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	r.QEMU = process.Identify(cmd.Process.Pid)
	go func() { _ = cmd.Wait() }() // reap it, should this process live on
	return nil
}

// emptyFile opens a file of its owner's alone.
func emptyFile(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
}

func (d *Driver) arguments(r record, accel string) []string {
	sys := hostSystem()
	cpu, kernel := "max", "console="+sys.console+" quiet panic=1 net.ifnames=0 rdinit=/init"
	if strings.HasPrefix(accel, "kvm") {
		cpu = "host"
	} else if sys.emulation != "" {
		kernel += " " + sys.emulation
	}
	return []string{
		"-name", "hermes-box-" + r.Name + ",process=hermes-box-" + r.Name, "-uuid", r.ID,
		"-machine", sys.machine, "-accel", accel, "-cpu", cpu,
		"-smp", strconv.Itoa(r.CPUs), "-m", strconv.Itoa(r.MemoryMiB) + "M",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", baseFile(r.Base, baseKernel), "-initrd", "initramfs.cpio",
		"-append", kernel,
		"-drive", "file=" + r.System.Top + ",if=none,id=" + systemDrive + ",format=" + formatOf(r.System.Top) + ",discard=unmap",
		"-device", "virtio-blk-pci,drive=" + systemDrive,
		"-drive", "file=" + r.Data.Top + ",if=none,id=" + dataDrive + ",format=" + formatOf(r.Data.Top) + ",discard=unmap",
		"-device", "virtio-blk-pci,drive=" + dataDrive,
		"-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
		"-chardev", "file,id=console,path=console.log", "-serial", "chardev:console",
		"-qmp", "unix:qmp.sock,server=on,wait=off",
	}
}

// writeInitramfs joins the kernel's modules, hb as init and the seed.
func (d *Driver) writeInitramfs(r record) error {
	modules, err := os.ReadFile(filepath.Join(d.dir(r.Name), baseFile(r.Base, baseModules)))
	if err != nil {
		return err
	}
	hb, err := d.opts.HB()
	if err != nil {
		return err
	}
	seed, err := json.Marshal(wire.Seed{
		Hostname: r.Name, HostKey: r.HostKey, ClientKey: r.ClientPub, Workload: r.Workload,
		ChannelAddress: channelAddress + "/24", Address: guestAddress + "/24", Gateway: guestGateway, DNS: guestDNS, Time: time.Now().Unix(),
	})
	if err != nil {
		return err
	}
	var own cpio
	own.buf.Grow(len(hb) + 64<<10)
	for _, dir := range []string{"dev", "proc", "sys", "newroot"} {
		own.dir(dir)
	}
	own.file("init", 0o755, hb)
	own.file(strings.TrimPrefix(wire.SeedPath, "/"), 0o600, seed)
	f, err := os.OpenFile(filepath.Join(d.dir(r.Name), "initramfs.cpio"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(modules)
	if err == nil {
		_, err = f.Write(own.bytes())
	}
	return errors.Join(err, f.Close())
}

func free(port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

func pickPort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

// awaitChannel returns when commands can be executed; from then on the console
// is silent. The forwarded port
// accepts connections before the guest listens, so only a handshake counts.
func (d *Driver) awaitChannel(ctx context.Context, r record, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the machine did not answer within %s", limit))
	defer cancel()
	for {
		attempt, done := context.WithTimeout(ctx, 10*time.Second)
		client, err := dial(attempt, r)
		done()
		if err == nil && r.networkAlive() {
			d.muteConsole(ctx, r.Name)
			return client.Close()
		}
		if !r.QEMU.Alive() {
			if words := d.lastWords(r.Name); strings.Contains(words, "host forwarding rule") {
				return fmt.Errorf("%s: %w", words, vm.ErrPortTaken)
			}
			return fmt.Errorf("the machine ended while it started: %s", d.lastWords(r.Name))
		}
		if !r.networkAlive() {
			return fmt.Errorf("the network of the machine ended while it started: %s", lastLine(filepath.Join(d.dir(r.Name), passtLog)))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", context.Cause(ctx), d.lastWords(r.Name))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (r record) networkAlive() bool { return r.Passt.PID == 0 || r.Passt.Alive() }

// lastWords is what QEMU or the guest's console said last.
func (d *Driver) lastWords(name string) string {
	if line := lastLine(filepath.Join(d.dir(name), "qemu.log")); line != "" {
		return line
	}
	return "the console's last line is: " + lastLine(filepath.Join(d.dir(name), "console.log"))
}

func lastLine(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	const tail = 4096 // bytes; who writes it is not to be trusted with more
	if info, err := f.Stat(); err == nil {
		_, _ = f.Seek(max(0, info.Size()-tail), io.SeekStart)
	}
	data, _ := io.ReadAll(io.LimitReader(f, tail))
	data = bytes.TrimSpace(data)
	if i := bytes.LastIndexByte(data, '\n'); i >= 0 {
		data = data[i+1:]
	}
	return wire.Printable(string(data))
}

// powerOffPatience is how long a guest may take to end its services and sync.
const powerOffPatience = 90 * time.Second

// Stop implements vm.Driver: the guest powers itself off; one that does not is
// ended by QEMU.
func (d *Driver) Stop(ctx context.Context, name string) error {
	unlock, err := d.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := d.load(name)
	if err != nil {
		return err
	}
	if r.QEMU.Alive() {
		polite, cancel := context.WithTimeout(ctx, powerOffPatience)
		if err := requestPowerOff(polite, r); err == nil {
			for r.QEMU.Alive() && polite.Err() == nil {
				time.Sleep(50 * time.Millisecond)
			}
		}
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if r.QEMU.Alive() {
			_ = d.monitor(ctx, name, command{Execute: "quit"}) // end is next
		}
	}
	return errors.Join(end(ctx, r.QEMU), end(ctx, r.Passt))
}
