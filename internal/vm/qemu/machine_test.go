//go:build linux

package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/vmtest"
)

// TestMachine runs one real machine on a host whose KVM must first be tried,
// loses its process from the record, and looks for traces after its removal.
func TestMachine(t *testing.T) {
	base := vmtest.BaseFromEnv(t)
	dir := os.Getenv("BOX_QEMU_DIR")
	if dir == "" {
		dir = t.TempDir()
	}
	hb := buildHB(t)
	d := New(Options{Dir: dir, HB: func() ([]byte, error) { return hb, nil }})
	works := kvmPlausible()
	if !works {
		// A device that opens, or is not even there, and boots nothing.
		d.plausible = func() bool { return true }
		d.kvmBoot = 5 * time.Second
	}
	if err := os.Remove(d.verdictPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(d.verdictPath()) })
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()

	spec := vm.Spec{
		Name: "real" + newUUID()[:6], OwnerID: newUUID(), Base: base,
		CPUs: 1, MemoryMiB: 512, HostPort: freePort(t), GuestPort: 4788,
	}
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(ctx), spec.Name, spec.OwnerID); err != nil && !errors.Is(err, vm.ErrNotFound) {
			t.Error(err)
		}
	})
	if _, err := d.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := d.Start(ctx, spec.Name); err != nil {
		t.Fatal(err)
	}
	t.Logf("first start with KVM to be tried: %s", time.Since(begin).Round(time.Second))
	// Root in the guest does not fill the host's disk by way of its console.
	const much = 1 << 20
	say := fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x >/dev/console", much)
	if code, err := d.Exec(ctx, spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", say}}); err != nil || code != 0 {
		t.Errorf("writing to the console: %d, %v", code, err)
	}
	if info, err := os.Stat(filepath.Join(d.dir(spec.Name), "console.log")); err != nil || info.Size() > much/2 {
		t.Errorf("the console's file: %v, %v", info, err)
	}
	m, err := d.Inspect(ctx, spec.Name)
	if err != nil {
		t.Fatal(err)
	}
	want, notes := vm.IsolationEmulated, 1
	if works {
		want, notes = vm.IsolationKVM, 0
	}
	if m.Isolation != want || len(m.Notes) != notes || notes == 1 && m.Notes[0] != lyingKVM {
		t.Errorf("after the first start: %+v", m)
	}
	if k := d.kvm(); k.use != works || k.lies == works {
		t.Errorf("remembered: %+v", k)
	}

	// The second start does not try again: what it would find now fails at once.
	if err := d.Stop(ctx, spec.Name); err != nil {
		t.Fatal(err)
	}
	verdict, err := os.Stat(d.verdictPath())
	if err != nil {
		t.Fatal(err)
	}
	begin = time.Now()
	if err := d.Start(ctx, spec.Name); err != nil {
		t.Fatal(err)
	}
	t.Logf("second start: %s", time.Since(begin).Round(time.Second))
	if again, err := os.Stat(d.verdictPath()); err != nil || !works && again.ModTime() != verdict.ModTime() {
		t.Errorf("the verdict was made anew (%v)", err)
	}

	// A start that was killed before it recorded the process.
	r, err := d.load(spec.Name)
	if err != nil {
		t.Fatal(err)
	}
	lost := r
	lost.QEMU = process.ID{}
	if err := d.save(lost); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(ctx, spec.Name); err != nil {
		t.Errorf("start of a machine whose process was not recorded: %v", err)
	}
	var out bytes.Buffer
	code, err := d.Exec(ctx, spec.Name, vm.Command{Argv: []string{"cat", "/proc/sys/kernel/hostname"}, Stdout: &out})
	if err != nil || code != 0 || strings.TrimSpace(out.String()) != spec.Name {
		t.Errorf("the host name is %q, %d, %v", out.String(), code, err)
	}
	keysAreSecret(t, d, r)

	if err := d.Delete(ctx, spec.Name, spec.OwnerID); err != nil {
		t.Fatal(err)
	}
	for what, p := range map[string]process.ID{"qemu": r.QEMU, "passt": r.Passt} {
		if p.PID != 0 && p.Alive() {
			t.Errorf("%s %d survived", what, p.PID)
		}
	}
	if r.QEMU.PID == 0 {
		t.Error("the machine had no process on record")
	}
	for _, port := range []int{r.ChannelPort, r.HostPort} {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			t.Errorf("port %d: %v", port, err)
			continue
		}
		_ = l.Close()
	}
	for _, path := range append(scratch(t, d, spec.Name), d.dir(spec.Name), filepath.Join(dir, "locks", spec.Name)) {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there (%v)", path, err)
		}
	}
	if got := inside(d.dir(spec.Name)); len(got) > 0 {
		t.Errorf("processes still work there: %q", got)
	}
}

func scratch(t *testing.T, d *Driver, name string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(d.machines(), ".*-"+name+".*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// inside lists the processes with a working or open file below a directory.
func inside(dir string) []string {
	var found []string
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, link := range append(links, fds...) {
		if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, dir) {
			found = append(found, link+" -> "+to)
		}
	}
	return found
}

// keysAreSecret looks at who may read the machine's keys, and for them in the
// arguments and environments of its processes.
func keysAreSecret(t *testing.T, d *Driver, r record) {
	t.Helper()
	entries, err := os.ReadDir(d.dir(r.Name))
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(d.machines()); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory of machines: %v, %v", info, err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode().IsRegular() && info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", e.Name(), info.Mode(), err)
		}
	}
	for _, p := range []process.ID{r.QEMU, r.Passt} {
		if p.PID == 0 {
			continue
		}
		for _, file := range []string{"cmdline", "environ"} {
			data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.PID), file))
			if err != nil {
				t.Error(err)
			}
			if bytes.Contains(data, []byte("PRIVATE KEY")) || bytes.Contains(data, []byte("BOX_PASSPHRASE")) {
				t.Errorf("a secret in %s of %d", file, p.PID)
			}
		}
	}
	var shown []byte
	if m, err := d.Inspect(t.Context(), r.Name); err == nil {
		shown, _ = json.Marshal(m)
	}
	if bytes.Contains(shown, []byte("PRIVATE KEY")) {
		t.Error("the machine's description holds a key")
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	port, err := pickPort()
	if err != nil {
		t.Fatal(err)
	}
	return port
}
