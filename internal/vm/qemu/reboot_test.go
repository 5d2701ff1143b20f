//go:build linux

package qemu

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/vm"
)

// After the host was restarted its old pids belong to others, sockets and pid
// files are still there, and nothing runs.
func TestAfterTheHostsReboot(t *testing.T) {
	d, r := driver(t)
	// Whoever has the pids now is not to be taken for the machine, or ended.
	innocent := []process.ID{process.Identify(standIn(t, newUUID()).Process.Pid), process.Identify(standIn(t, newUUID()).Process.Pid)}
	const otherBoot = "00000000-0000-0000-0000-000000000000"
	r.QEMU, r.Passt = innocent[0], innocent[1]
	r.QEMU.BootID, r.Passt.BootID = otherBoot, otherBoot
	r.Isolation = string(vm.IsolationKVM)
	l, err := net.Listen("tcp", "127.0.0.1:0") // somebody has the channel's old port
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	r.ChannelPort = l.Addr().(*net.TCPAddr).Port
	if err := d.save(r); err != nil {
		t.Fatal(err)
	}
	dir := d.dir(r.Name)
	for _, name := range []string{"qmp.sock", "passt.pid", "passt.sock", "console.log", "qemu.log", "initramfs.cpio"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strconv.Itoa(innocent[0].PID)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "stale.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "stale.sock"), filepath.Join(dir, "qmp.sock")); err != nil {
		t.Fatal(err)
	}

	if m, err := d.Inspect(t.Context(), r.Name); err != nil || m.State != vm.Stopped || m.OwnerID != r.OwnerID {
		t.Errorf("inspect: %+v, %v", m, err)
	}
	if list, err := d.List(t.Context()); err != nil || len(list) != 1 || list[0].State != vm.Stopped {
		t.Errorf("list: %+v, %v", list, err)
	}
	if _, err := d.Exec(t.Context(), r.Name, vm.Command{Argv: []string{"true"}}); err == nil || !strings.Contains(err.Error(), vm.ErrNotRunning.Error()) {
		t.Errorf("exec: %v", err)
	}
	if err := d.Stop(t.Context(), r.Name); err != nil {
		t.Errorf("stop: %v", err)
	}
	for _, p := range innocent {
		if !p.Alive() {
			t.Fatal("stop has ended a process that only has a pid of the other boot")
		}
	}
	if err := d.Delete(t.Context(), r.Name, r.OwnerID); err != nil {
		t.Errorf("delete: %v", err)
	}
	for _, p := range innocent {
		if !p.Alive() {
			t.Fatal("delete has ended a process that only has a pid of the other boot")
		}
	}
	nothingLeft(t, d)
}
