//go:build linux

package fake_test

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/fake"
	"hermes-box-lite/internal/vm/vmtest"
)

func TestConformance(t *testing.T) {
	dir := t.TempDir()
	d := fake.New(dir, "")
	leftOver := func(t *testing.T, name string) {
		t.Helper()
		path := filepath.Join(dir, "machines", name, "root", "data")
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(filepath.Join(dir, "machines", name)) })
	}
	vmtest.Run(t, vmtest.Harness{
		Driver: d, Foreign: leftOver, LeftOver: leftOver,
		Crash: func(t *testing.T, name string) {
			if err := d.Kill(name); err != nil {
				t.Fatal(err)
			}
		},
	})
}

// A machine's own ports go to nobody else while it runs: neither to a listener
// that takes any port, nor to a connection. They are named in the record.
func TestAMachineHoldsItsPorts(t *testing.T) {
	dir := t.TempDir()
	d := fake.New(dir, "")
	spec := vm.Spec{Name: "alpha", OwnerID: strings.Repeat("a", 32)}
	if _, err := d.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context(), spec.Name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Kill(spec.Name); err != nil {
			t.Error(err)
		}
	})
	data, err := os.ReadFile(filepath.Join(dir, "machines/alpha/machine.json"))
	if err != nil {
		t.Fatal(err)
	}
	var machine struct {
		Door     string `json:"door_port"`
		Executor string `json:"executor_port"`
	}
	if err := json.Unmarshal(data, &machine); err != nil {
		t.Fatal(err)
	}
	server, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Close() }()
	anyOf := func(port string) (listens, connects bool) {
		t.Helper()
		number, err := strconv.Atoi(port)
		if err != nil {
			t.Fatal(err)
		}
		if l, err := (&net.ListenConfig{Control: fromOnly(t, number)}).Listen(t.Context(), "tcp4", "127.0.0.1:0"); err == nil {
			listens = true
			_ = l.Close()
		}
		if c, err := (&net.Dialer{Control: fromOnly(t, number)}).DialContext(t.Context(), "tcp4", server.Addr().String()); err == nil {
			connects = true
			_ = c.(*net.TCPConn).SetLinger(0) // no trace of it keeps the port
			_ = c.Close()
		}
		return listens, connects
	}
	for what, port := range map[string]string{"door": machine.Door, "Executor": machine.Executor} {
		if listens, connects := anyOf(port); listens || connects {
			t.Errorf("the port of the machine's %s is given away: to a listener %v, to a connection %v", what, listens, connects)
		}
		l, err := net.Listen("tcp4", "127.0.0.1:"+port)
		if err != nil {
			t.Errorf("the %s cannot listen: %v", what, err)
			continue
		}
		_ = l.Close()
	}
	if err := d.Stop(t.Context(), spec.Name); err != nil {
		t.Fatal(err)
	}
	if listens, _ := anyOf(machine.Executor); !listens {
		t.Error("the port of a stopped machine is not free, so this test proves nothing")
	}
}

// fromOnly has the kernel choose among one port.
func fromOnly(t *testing.T, port int) func(_, _ string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_LOCAL_PORT_RANGE, port<<16|port)
		})
		if errors.Is(failed, unix.ENOPROTOOPT) {
			t.Skip("the kernel cannot be told which ports to choose from (before Linux 6.3)")
		}
		return errors.Join(err, failed)
	}
}
