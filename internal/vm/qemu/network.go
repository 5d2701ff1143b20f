package qemu

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/wire"
)

// reachesHost is the note of a machine without passt.
const reachesHost = "the box can reach services on this host's loopback, because passt is not installed: sudo apt-get install passt, then box stop and box start"

// noNetwork is the note of a machine that was started on a host without a
// network; passt's reason follows.
const noNetwork = "the box has no network, because this host had none when it started; box stop and box start when there is one: "

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

// startNetwork prepares two devices.
//
// The first is the guest's way out: passt, joined to QEMU by a socket pair that
// only the two of them have. Its gateway is not mapped to the host. Without
// passt it is QEMU's user networking, and the record says what that means.
//
// The second brings the host in, and nothing else: QEMU's user networking with
// restrict=on, which has no way from the guest to anywhere. The host's streams
// do not go through passt, because passt 0.0~git20230309 of Debian 12 stops for
// minutes when it has to send faster than its peer reads: it drops what the
// guest then sends again at ever longer intervals.
func (d *Driver) startNetwork(r *record) (network, error) {
	r.Passt = process.ID{}
	in := "user,id=in,restrict=on,net=" + channelNet + fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-%s:%d", r.ChannelPort, channelAddress, wire.ChannelPort)
	if r.HostPort != 0 {
		in += fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-%s:%d", r.HostPort, channelAddress, r.GuestPort)
	}
	devices := []string{"-device", "virtio-net-pci,netdev=out,romfile=", "-netdev", in, "-device", "virtio-net-pci,netdev=in,romfile="}
	path, err := lookPath("passt")
	if err != nil {
		r.Notes = append(r.Notes, reachesHost)
		return network{args: append([]string{"-netdev", "user,id=out"}, devices...)}, nil
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return network{}, fmt.Errorf("socket pair: %w", err)
	}
	defer func() { _ = theirs.Close() }()
	log, err := emptyFile(filepath.Join(d.dir(r.Name), passtLog))
	if err != nil {
		_ = ours.Close()
		return network{}, err
	}
	defer func() { _ = log.Close() }()

	cmd := exec.Command(path, "--foreground", "--fd", "3", "--no-map-gw", "--ipv4-only",
		"--address", guestAddress, "--netmask", "24", "--gateway", guestGateway, "--dns-forward", guestDNS,
		"--udp-ports", "none", "--tcp-ports", "none")
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = ours.Close()
		return network{}, fmt.Errorf("passt: %w", err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }() // reaps it, should this process live on
	if !staysUp(log.Name(), ended) {
		_ = ours.Close()
		r.Notes = append(r.Notes, noNetwork+lastLine(log.Name()))
		return network{args: append([]string{"-netdev", "user,id=out,restrict=on"}, devices...)}, nil
	}
	r.Passt = process.Identify(cmd.Process.Pid)
	return network{
		args:  append([]string{"-netdev", "stream,id=out,server=off,addr.type=fd,addr.str=3"}, devices...),
		files: []*os.File{ours},
	}, nil
}

const passtLog = "passt.log"

// staysUp reports whether passt has not ended soon after its first words. It
// ends when it finds no network on the host.
func staysUp(log string, ended <-chan struct{}) bool {
	spoke := false
	for range 100 {
		select {
		case <-ended:
			return false
		case <-time.After(50 * time.Millisecond):
		}
		if spoke {
			break
		}
		info, err := os.Stat(log)
		spoke = err == nil && info.Size() > 0
	}
	return true
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
