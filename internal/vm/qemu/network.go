package qemu

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// reachesHost is the note of a machine without passt.
const reachesHost = "the box can reach services on this host's loopback, because passt is not installed: sudo apt-get install passt, then box stop and box start"

// network is what QEMU needs for the guest's network device.
type network struct {
	args  []string
	files []*os.File // inherited from descriptor 3 on
}

func (n network) close() {
	for _, f := range n.files {
		_ = f.Close()
	}
}

// startNetwork starts passt, joined to QEMU by a socket pair that only the two
// of them have. Its gateway is not mapped to the host. Without passt it is
// QEMU's user networking, and the record says what that means.
func (d *Driver) startNetwork(r *record) (network, error) {
	r.Passt = process{}
	path, err := lookPath("passt")
	if err != nil {
		r.Notes = append(r.Notes, reachesHost)
		args := fmt.Sprintf("user,id=net,hostfwd=tcp:127.0.0.1:%d-:%d", r.ChannelPort, wire.ChannelPort)
		if r.HostPort != 0 {
			args += fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-:%d", r.HostPort, r.GuestPort)
		}
		return network{args: []string{"-netdev", args}}, nil
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return network{}, fmt.Errorf("socket pair: %w", err)
	}
	defer func() { _ = theirs.Close() }()
	log, err := os.Create(filepath.Join(d.dir(r.Name), "passt.log"))
	if err != nil {
		_ = ours.Close()
		return network{}, err
	}
	defer func() { _ = log.Close() }()

	ports := fmt.Sprintf("127.0.0.1/%d:%d", r.ChannelPort, wire.ChannelPort)
	args := []string{
		"--foreground", "--fd", "3", "--no-map-gw", "--ipv4-only",
		"--address", guestAddress, "--netmask", "24", "--gateway", guestGateway, "--dns-forward", guestDNS,
		"--udp-ports", "none", "--tcp-ports", ports,
	}
	if r.HostPort != 0 {
		args = append(args, "--tcp-ports", fmt.Sprintf("127.0.0.1/%d:%d", r.HostPort, r.GuestPort))
	}
	cmd := exec.Command(path, args...)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = ours.Close()
		return network{}, fmt.Errorf("passt: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	r.Passt = identify(cmd.Process.Pid)
	if err := awaitBound(r.ChannelPort, ended); err != nil {
		_ = ours.Close()
		why := lastLine(log.Name())
		if strings.Contains(strings.ToLower(why), "bind") {
			return network{}, fmt.Errorf("passt: %s: %w", why, vm.ErrPortTaken)
		}
		return network{}, fmt.Errorf("passt: %s: %w", why, err)
	}
	return network{
		args:  []string{"-netdev", "stream,id=net,server=off,addr.type=fd,addr.str=3"},
		files: []*os.File{ours},
	}, nil
}

// socketPair returns two joined sockets that no other child inherits.
func socketPair() (a, b *os.File, err error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, err
	}
	for _, fd := range pair {
		syscall.CloseOnExec(fd)
	}
	return os.NewFile(uintptr(pair[0]), "socket"), os.NewFile(uintptr(pair[1]), "socket"), nil
}

// awaitBound returns when passt listens, or has ended.
func awaitBound(port int, ended <-chan error) error {
	for range 250 {
		if listening(port) {
			return nil
		}
		select {
		case err := <-ended:
			return errors.Join(errors.New("ended at once"), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return fmt.Errorf("does not listen on port %d", port)
}

// listening looks in the kernel's table, proc_net_tcp: a connection would be
// passed on to a guest that is not there yet.
func listening(port int) bool {
	data, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return false
	}
	want := "0100007F:" + strings.ToUpper(strconv.FormatInt(int64(port)+0x10000, 16)[1:])
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 3 && f[1] == want && f[3] == "0A" {
			return true
		}
	}
	return false
}
