//go:build linux

package qemu

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/vm"
)

const someDigest = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

// readCPIO takes an archive apart by its own reading of the format.
func readCPIO(t *testing.T, data []byte) map[string]string {
	t.Helper()
	entries := map[string]string{}
	for at := 0; ; {
		if len(data)-at < 110 || string(data[at:at+6]) != "070701" {
			t.Fatalf("no header at %d of %d", at, len(data))
		}
		field := func(i int) int {
			n, err := strconv.ParseInt(string(data[at+6+8*i:at+14+8*i]), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(n)
		}
		mode, size, nameSize := field(1), field(6), field(11)
		name := string(data[at+110 : at+110+nameSize-1])
		body := (at + 110 + nameSize + 3) &^ 3
		if name == "TRAILER!!!" {
			return entries
		}
		entries[name] = fmt.Sprintf("%o %s", mode, data[body:body+size])
		at = (body + size + 3) &^ 3
	}
}

func TestCPIO(t *testing.T) {
	var c cpio
	c.dir("dev")
	c.file("init", 0o755, []byte("program"))
	c.file("seed.json", 0o600, []byte("{}"))
	c.file("empty", 0o644, nil)
	data := c.bytes()
	want := map[string]string{"dev": "40755 ", "init": "100755 program", "seed.json": "100600 {}", "empty": "100644 "}
	if diff := cmp.Diff(want, readCPIO(t, data)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	if path, err := exec.LookPath("cpio"); err == nil {
		cmd := exec.Command(path, "-t", "--quiet")
		cmd.Stdin = strings.NewReader(string(data))
		out, err := cmd.Output()
		if err != nil || string(out) != "dev\ninit\nseed.json\nempty\n" {
			t.Errorf("cpio -t: %q, %v", out, err)
		}
	}
}

// standIn is a process that looks like a machine's QEMU.
func standIn(t *testing.T, id string) *exec.Cmd {
	t.Helper()
	cmd := &exec.Cmd{
		Path: "/bin/sh", Args: []string{hostSystem().program, "-c", "read line; :", "sh", "-uuid", id, "-smp", "1"},
	}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	return cmd
}

func TestProcessIdentity(t *testing.T) {
	cmd := standIn(t, newUUID())
	p := process.Identify(cmd.Process.Pid)
	if !p.Alive() {
		t.Fatalf("%+v is not alive", p)
	}
	for what, other := range map[string]process.ID{
		"a pid used again": {PID: p.PID, Started: p.Started + "1", BootID: p.BootID},
		"another boot":     {PID: p.PID, Started: p.Started, BootID: "00000000-0000-0000-0000-000000000000"},
		"no start time":    {PID: p.PID, BootID: p.BootID},
		"no pid":           {Started: p.Started, BootID: p.BootID},
		"nothing":          {},
	} {
		if other.Alive() {
			t.Errorf("%s counts as alive", what)
		}
		if err := end(t.Context(), other); err != nil || !p.Alive() {
			t.Fatalf("%s: end: %v; the process lives: %v", what, err, p.Alive())
		}
	}
	if err := end(t.Context(), p); err != nil || p.Alive() {
		t.Errorf("end: %v; alive: %v", err, p.Alive()) // a zombie here, which is no life
	}
}

// driver returns a driver with a machine "alpha" on disk that never ran.
func driver(t *testing.T) (*Driver, record) {
	t.Helper()
	d := New(Options{Dir: t.TempDir(), HB: func() ([]byte, error) { return []byte("hb"), nil }})
	r := record{Name: "alpha", OwnerID: "owner", ID: newUUID(), CPUs: 1, MemoryMiB: 512, Base: someDigest}
	if err := os.MkdirAll(d.dir(r.Name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.save(r); err != nil {
		t.Fatal(err)
	}
	return d, r
}

// TestStartedAndNotRecorded has a machine whose start was killed before it
// could write down the process.
func TestStartedAndNotRecorded(t *testing.T) {
	d, r := driver(t)
	if m, err := d.Inspect(t.Context(), r.Name); err != nil || m.State != vm.Stopped {
		t.Fatalf("before: %+v, %v", m, err)
	}
	other := standIn(t, newUUID())
	cmd := standIn(t, r.ID)
	own := process.Identify(cmd.Process.Pid)
	if m, err := d.Inspect(t.Context(), r.Name); err != nil || m.State != vm.Running {
		t.Errorf("with its process: %+v, %v", m, err)
	}
	if err := d.Delete(t.Context(), r.Name, r.OwnerID); err != nil {
		t.Fatal(err)
	}
	if own.Alive() {
		t.Error("the machine's process survived its removal")
	}
	if !process.Identify(other.Process.Pid).Alive() {
		t.Error("another machine's process was ended")
	}
	nothingLeft(t, d)
}

// nothingLeft fails when a machine, or anything half-way, is in the driver's
// directory.
func nothingLeft(t *testing.T, d *Driver) {
	t.Helper()
	for _, dir := range []string{"machines", "locks"} {
		entries, err := os.ReadDir(filepath.Join(d.opts.Dir, dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		for _, e := range entries {
			t.Errorf("left: %s/%s", dir, e.Name())
		}
	}
}

func TestDamagedRecordIsKept(t *testing.T) {
	for what, content := range map[string]string{
		"empty": "", "no JSON": "{", "another machine's": `{"name":"beta","owner_id":"owner","id":"x"}`, "no owner": `{"name":"alpha","id":"x"}`,
	} {
		t.Run(what, func(t *testing.T) {
			d, r := driver(t)
			if err := os.WriteFile(d.recordPath(r.Name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			_, inspect := d.Inspect(t.Context(), r.Name)
			for op, err := range map[string]error{
				"inspect": inspect, "stop": d.Stop(t.Context(), r.Name), "delete": d.Delete(t.Context(), r.Name, r.OwnerID),
			} {
				if err == nil || errors.Is(err, vm.ErrNotFound) {
					t.Errorf("%s: %v", op, err)
				}
			}
			if got, err := os.ReadFile(d.recordPath(r.Name)); err != nil || string(got) != content {
				t.Errorf("the record is %q now, %v", got, err)
			}
			list, err := d.List(t.Context())
			if err != nil || len(list) != 1 || list[0].State != vm.Unknown || list[0].OwnerID != "" {
				t.Errorf("list: %+v, %v", list, err)
			}
		})
	}
}

// TestScratchIsSwept has directories that killed calls left.
func TestScratchIsSwept(t *testing.T) {
	for _, op := range []string{"delete", "delete of nothing", "create"} {
		t.Run(op, func(t *testing.T) {
			d, r := driver(t)
			base := vm.Base{Digest: "sha256:" + someDigest}
			stale := []string{".making-alpha.123", ".removing-alpha." + r.ID}
			others := []string{".making-alpha-b.123", ".removing-beta.1"}
			for _, dir := range append(stale, others...) {
				if err := os.MkdirAll(filepath.Join(d.machines(), dir, "x"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			var err error
			switch op {
			case "delete of nothing":
				if err := os.RemoveAll(d.dir(r.Name)); err != nil {
					t.Fatal(err)
				}
				if err = d.Delete(t.Context(), r.Name, r.OwnerID); errors.Is(err, vm.ErrNotFound) {
					err = nil
				}
			case "delete":
				err = d.Delete(t.Context(), r.Name, r.OwnerID)
			case "create":
				if err := os.RemoveAll(d.dir(r.Name)); err != nil {
					t.Fatal(err)
				}
				fakeBase(t, d)
				_, err = d.Create(t.Context(), vm.Spec{Name: r.Name, OwnerID: "o", Base: base, MemoryMiB: 512, StorageGiB: 1})
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, dir := range stale {
				if _, err := os.Stat(filepath.Join(d.machines(), dir)); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: %v", dir, err)
				}
			}
			for _, dir := range others {
				if _, err := os.Stat(filepath.Join(d.machines(), dir)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// fakeBase is a converted base that nothing can boot.
func fakeBase(t *testing.T, d *Driver) {
	t.Helper()
	if err := requireTools(lookPath); err != nil {
		t.Skip(err)
	}
	dir := filepath.Join(d.opts.Dir, "bases", someDigest)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, baseDisk), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestKVMVerdict(t *testing.T) {
	d, _ := driver(t)
	d.plausible = func() bool { return false }
	if got := d.kvm(); got.use {
		t.Errorf("without hardware: %+v", got)
	}
	d.plausible = func() bool { return true }
	if got, want := d.kvm(), (kvmChoice{use: true}); got != want {
		t.Errorf("nothing known: %+v", got)
	}
	for _, works := range []bool{true, false} {
		if err := d.rememberKVM(works); err != nil {
			t.Fatal(err)
		}
		if got, want := d.kvm(), (kvmChoice{use: works, proven: works, lies: !works}); got != want {
			t.Errorf("remembered %v: %+v", works, got)
		}
	}
	for what, text := range map[string]string{"another boot": `{"boot_id":"x","works":false}`, "damage": "{"} {
		if err := os.WriteFile(d.verdictPath(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, want := d.kvm(), (kvmChoice{use: true}); got != want {
			t.Errorf("%s: %+v", what, got)
		}
	}
	d.opts.Emulate = true
	if got := d.kvm(); got.use {
		t.Errorf("told to emulate: %+v", got)
	}
}

func TestHardwareKVM(t *testing.T) {
	for _, c := range []struct {
		flags, modules string
		want           bool
	}{
		{"fpu vmx sse", "kvm_intel", true},
		{"fpu svm sse", "kvm_amd", true},
		{"fpu sse", "kvm_intel", false}, // /dev/kvm of another kind
		{"fpu vmx", "kvm_pvm", false},
		{"fpu vmx", "kvm_amd", false},
		{"fpu vmxnet", "kvm_intel", false},
	} {
		info := "processor\t: 0\nmodel name\t: vmx svm\nflags\t\t: " + c.flags + "\n"
		if got := hardwareKVM(info, func(m string) bool { return m == c.modules }); got != c.want {
			t.Errorf("flags %q with %s: %v", c.flags, c.modules, got)
		}
	}
}

// only leaves nothing but some programs of this host on the PATH.
func only(t *testing.T, programs ...string) {
	t.Helper()
	dir := t.TempDir()
	for _, p := range programs {
		path, err := lookPath(p)
		if err != nil {
			t.Skip(err)
		}
		if err := os.Symlink(path, filepath.Join(dir, p)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
}

func engineError(t *testing.T, err error, reason, fix string) {
	t.Helper()
	var e *vm.EngineError
	if !errors.As(err, &e) || !strings.Contains(e.Reason, reason) || !strings.Contains(e.Fix, fix) {
		t.Errorf("%#v, want the reason %q and the fix %q", err, reason, fix)
	}
}

func TestMissingTools(t *testing.T) {
	sys := hostSystem()
	for program, pkg := range map[string]string{sys.program: sys.pkg, "qemu-img": "qemu-utils", "mke2fs": "e2fsprogs"} {
		err := requireTools(func(p string) (string, error) {
			if p == program {
				return "", exec.ErrNotFound
			}
			return "/usr/bin/" + p, nil
		})
		engineError(t, err, program+" is not installed", "apt-get install "+pkg)
	}
	only(t)
	d, r := driver(t)
	_, err := d.Create(t.Context(), vm.Spec{Name: "beta", OwnerID: "o", MemoryMiB: 512})
	engineError(t, err, "is not installed", "apt-get install")
	engineError(t, d.Start(t.Context(), r.Name), "is not installed", "apt-get install")
	_, err = d.fetchKernel(t.Context())
	engineError(t, err, "brings no kernel", "box help config")
	// What needs no program works.
	if _, err := d.Inspect(t.Context(), r.Name); err != nil {
		t.Error(err)
	}
	if err := d.Delete(t.Context(), r.Name, r.OwnerID); err != nil {
		t.Error(err)
	}
	nothingLeft(t, d)
}

func TestWithoutPasst(t *testing.T) {
	only(t)
	d, r := driver(t)
	r.ChannelPort, r.HostPort, r.GuestPort = 5001, 5002, 80
	nw, err := d.startNetwork(&r)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"-netdev", "user,id=out", "-device", "virtio-net-pci,netdev=out,romfile=",
		"-netdev", "user,id=in,restrict=on,net=10.0.3.0/24,hostfwd=tcp:127.0.0.1:5001-10.0.3.15:4722,hostfwd=tcp:127.0.0.1:5002-10.0.3.15:80",
		"-device", "virtio-net-pci,netdev=in,romfile=",
	}
	if diff := cmp.Diff(want, nw.args); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	if m := d.describe(r); len(m.Notes) != 1 || !strings.Contains(m.Notes[0], "apt-get install passt") {
		t.Errorf("notes: %q", m.Notes)
	}
}

func TestPortTaken(t *testing.T) {
	d, r := driver(t)
	if err := requireTools(lookPath); err != nil {
		t.Skip(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	r.HostPort, r.GuestPort = l.Addr().(*net.TCPAddr).Port, 80
	if err := d.save(r); err != nil {
		t.Fatal(err)
	}
	d.plausible = func() bool { return false }
	if err := d.Start(t.Context(), r.Name); !errors.Is(err, vm.ErrPortTaken) {
		t.Errorf("start: %v", err)
	}
	if m, err := d.Inspect(t.Context(), r.Name); err != nil || m.State != vm.Stopped {
		t.Errorf("after that: %+v, %v", m, err)
	}
}

func TestTooLittleMemory(t *testing.T) {
	d, _ := driver(t)
	if err := requireTools(lookPath); err != nil {
		t.Skip(err)
	}
	if _, err := d.Create(t.Context(), vm.Spec{Name: "beta", OwnerID: "o", MemoryMiB: 64}); err == nil || !strings.Contains(err.Error(), "256 MiB") {
		t.Errorf("create: %v", err)
	}
	if _, err := d.Inspect(t.Context(), "beta"); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("after that: %v", err)
	}
}

// TestFullDisk fills a disk of a few megabytes while a base is converted and
// while a machine is made.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a small disk needs root")
	}
	if err := requireTools(lookPath); err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	d := New(Options{Dir: dir, HB: func() ([]byte, error) { return nil, nil }})
	tarball := filepath.Join(t.TempDir(), "base.tar")
	writeTar(t, tarball, 8<<20)
	spec := vm.Spec{Name: "alpha", OwnerID: "o", MemoryMiB: 512, Base: vm.Base{Digest: "sha256:" + strings.Repeat("ab", 32), Tar: tarball}}
	_, err := d.Create(t.Context(), spec)
	if err == nil || !strings.Contains(err.Error(), "prepare the base's disk: ") || !strings.Contains(err.Error(), "tar: large: ") {
		t.Errorf("convert: %v", err)
	}
	if found, _ := filepath.Glob(filepath.Join(dir, "bases", "*ab*")); len(found) != 1 || !strings.HasSuffix(found[0], ".lock") {
		t.Errorf("left of the conversion: %q", found)
	}
	fakeBase(t, d)
	spec.Base.Digest = "sha256:" + someDigest
	if _, err := d.Create(t.Context(), spec); err == nil {
		t.Error("a machine of 64 GiB was made on a full disk")
	} else {
		t.Log(err)
	}
	if entries, err := os.ReadDir(d.machines()); err != nil || len(entries) != 0 {
		t.Errorf("left of the machine: %v, %v", entries, err)
	}
}

func writeTar(t *testing.T, path string, size int64) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(f)
	if err := w.WriteHeader(&tar.Header{Name: "large", Mode: 0o644, Size: size, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 1<<16)
	for i := range block {
		block[i] = byte(i*7 + i>>8) // nothing that is stored as a hole
	}
	for n := int64(0); n < size; n += int64(len(block)) {
		if _, err := w.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestLockOfARemovedMachine has a waiter for a lock whose file the holder
// removes.
func TestLockOfARemovedMachine(t *testing.T) {
	d, _ := driver(t)
	unlock, err := d.lock(t.Context(), "alpha")
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		next, err := d.lock(context.WithoutCancel(t.Context()), "alpha")
		if err == nil {
			// It holds the file that the others see.
			short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			if _, again := d.lock(short, "alpha"); again == nil {
				err = errors.New("two hold the lock")
			}
			next()
		}
		got <- err
	}()
	if err := d.forgetLock("alpha"); err != nil {
		t.Fatal(err)
	}
	unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// Only a processor in software is told what holds for it alone: the errors of a
// real one are worked around.
func TestKernelParameters(t *testing.T) {
	d, r := driver(t)
	line := func(accel string) string {
		args := d.arguments(r, accel)
		i := slices.Index(args, "-append")
		if i < 0 || i+1 == len(args) {
			t.Fatalf("%s: no kernel command line in %q", accel, args)
		}
		return args[i+1]
	}
	special := hostSystem().emulation
	if got := line("kvm"); strings.Contains(got, "mitigations") || strings.Contains(got, "tsc") {
		t.Errorf("KVM: %q", got)
	}
	if got := line("tcg,thread=multi"); !strings.HasSuffix(got, special) || !strings.Contains(got, " rdinit=/init") {
		t.Errorf("emulated: %q, want %q at its end", got, special)
	}
}
