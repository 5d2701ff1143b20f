// Package boot is hb as the init of a virtual machine: it loads the modules
// that the host chose, brings up disks, network, name and clock, moves into the
// root filesystem, and then keeps two children going: the execution channel
// and the machine's workload. It needs no program of the guest.
package boot

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/guest/channel"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// Disks and network devices, in the order in which the driver attaches them.
const (
	systemDisk = "/dev/vda"
	dataDisk   = "/dev/vdb"
	wayOut     = "eth0"
	wayIn      = "eth1" // of the host
)

// channelArg makes a child the execution channel.
const channelArg = "channel"

// IsInit reports whether this process is the init of a machine.
func IsInit(args []string) bool { return os.Getpid() == 1 && filepath.Base(args[0]) == "init" }

// IsChannel reports whether this process is init's child for the channel.
func IsChannel(args []string) bool {
	return len(args) == 2 && filepath.Base(args[0]) == "init" && args[1] == channelArg
}

// Init runs the machine and never returns.
func Init() {
	logger := log.New(os.Stderr, "hb init: ", 0)
	seed, err := setUp(logger)
	if err != nil {
		logger.Printf("error: %v", err)
	} else {
		run(seed, logger)
	}
	powerOff(logger)
}

// setUp takes the machine from the initramfs to its root filesystem.
func setUp(logger *log.Logger) (wire.Seed, error) {
	for _, m := range []struct{ source, target, kind string }{
		{"devtmpfs", "/dev", "devtmpfs"}, {"proc", "/proc", "proc"}, {"sysfs", "/sys", "sysfs"},
	} {
		if err := mount(m.source, m.target, m.kind, 0, ""); err != nil {
			return wire.Seed{}, err
		}
	}
	if console, err := os.OpenFile("/dev/console", os.O_RDWR, 0); err == nil {
		logger.SetOutput(console)
	}
	data, err := os.ReadFile(wire.SeedPath)
	if err != nil {
		return wire.Seed{}, err
	}
	var seed wire.Seed
	if err := json.Unmarshal(data, &seed); err != nil {
		return seed, fmt.Errorf("%s: %w", wire.SeedPath, err)
	}
	if err := os.Remove(wire.SeedPath); err != nil {
		return seed, err
	}
	loadModules(logger)
	setClock(seed.Time, logger)
	if err := disks(logger); err != nil {
		return seed, err
	}
	if err := network(seed); err != nil {
		return seed, fmt.Errorf("network: %w", err)
	}
	if len(seed.Workload) > 0 {
		// The supervisor need not wait until the host brings hb. Should this
		// not work, the host does.
		if err := place("/proc/self/exe", wire.HBPath); err != nil {
			logger.Printf("put hb at its place: %v", err)
		}
	}
	return seed, identity(seed)
}

// place copies a program to where there is none; another one stays.
func place(program, at string) error {
	if _, err := os.Lstat(at); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	in, err := os.Open(program)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	draft := at + ".draft"
	out, err := os.OpenFile(draft, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err = errors.Join(err, out.Sync(), out.Close()); err == nil {
		err = os.Rename(draft, at)
	}
	if err != nil {
		return errors.Join(err, os.Remove(draft))
	}
	return nil
}

func mount(source, target, kind string, flags uintptr, options string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := syscall.Mount(source, target, kind, flags, options); err != nil && !errors.Is(err, syscall.EBUSY) {
		return fmt.Errorf("mount %s on %s: %w", source, target, err)
	}
	return nil
}

// loadModules loads what the host listed. A module that the kernel has built
// in, or does not like, is no reason to stop: what is missing shows soon.
func loadModules(logger *log.Logger) {
	list, err := os.Open(wire.ModulesPath)
	if err != nil {
		return
	}
	defer func() { _ = list.Close() }()
	for scan := bufio.NewScanner(list); scan.Scan(); {
		f, err := os.Open(scan.Text())
		if err == nil {
			err = errors.Join(unix.FinitModule(int(f.Fd()), "", 0), f.Close())
		}
		if err != nil && !errors.Is(err, syscall.EEXIST) {
			logger.Printf("module %s: %v", scan.Text(), err)
		}
	}
}

// setClock trusts the host's clock where the machine's own is far from it.
func setClock(host int64, logger *log.Logger) {
	if wrong(time.Now().Unix(), host) {
		if err := SetClock(host); err != nil {
			logger.Printf("set the clock: %v", err)
		}
	}
}

// wrong reports a clock that is far from what the host's was a moment ago, when
// it started the machine. A host that tells no time is no reason to touch it.
func wrong(now, host int64) bool {
	skew := now - host
	return host > 0 && (skew < -2 || skew > 120)
}

// SetClock sets the kernel's clock, in seconds since 1970.
func SetClock(unixTime int64) error {
	return unix.ClockSettime(unix.CLOCK_REALTIME, &unix.Timespec{Sec: unixTime})
}

// disks makes the system disk the root and mounts the disk of the state.
func disks(logger *log.Logger) error {
	const root = "/newroot"
	for _, disk := range []string{systemDisk, dataDisk} {
		if err := await(disk); err != nil {
			return err
		}
	}
	if err := mount(systemDisk, root, "ext4", unix.MS_NOATIME, ""); err != nil {
		return err
	}
	if err := grow(systemDisk, root); err != nil {
		logger.Printf("grow %s: %v", systemDisk, err)
	}
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		if err := os.MkdirAll(root+dir, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(dir, root+dir, "", syscall.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := syscall.Mount(".", "/", "", syscall.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := syscall.Chroot("."); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	for _, m := range []struct{ kind, target, options string }{
		{"tmpfs", "/run", "mode=0755,size=20%"},
		{"tmpfs", "/tmp", "mode=1777,size=50%"},
		{"devpts", "/dev/pts", "gid=5,mode=620,ptmxmode=666"},
		{"tmpfs", "/dev/shm", "mode=1777"},
		{"cgroup2", "/sys/fs/cgroup", ""},
	} {
		if err := mount(m.kind, m.target, m.kind, unix.MS_NOSUID, m.options); err != nil {
			logger.Print(err)
		}
	}
	for name, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"} {
		_ = os.Symlink(target, "/dev/"+name)
	}
	return state(logger)
}

// state mounts the disk of the state; read-only, and with a note for the
// doctor, when it is damaged beyond what is safe to mend unasked: so it can be
// looked at and saved.
func state(logger *log.Logger) error {
	flags := uintptr(unix.MS_NOATIME | unix.MS_NOSUID | unix.MS_NODEV)
	damage, err := check(checker, dataDisk, os.Remove(layout.MendMarker) == nil)
	if err != nil {
		logger.Printf("check %s: %v", dataDisk, err) // mounting it will tell
	}
	if damage != "" {
		logger.Printf("%s is damaged, and mounted read-only: %s", dataDisk, damage)
		flags |= unix.MS_RDONLY
		if err := os.WriteFile(layout.At("").DamageNote(), []byte(damage+"\n"), 0o644); err != nil {
			logger.Print(err)
		}
	}
	if err := mount(dataDisk, "/data", "ext4", flags, ""); err != nil || damage != "" {
		return err
	}
	if err := grow(dataDisk, "/data"); err != nil {
		logger.Printf("grow %s: %v", dataDisk, err)
	}
	_ = os.Remove("/data/lost+found") // only when empty; e2fsck makes it when it needs one
	return nil
}

// checker is the base's own; one without it leaves the journal to the kernel.
const checker = "/sbin/e2fsck"

// check looks at a file system that is not mounted. What the journal holds and
// what loses nothing is mended (e2fsck -p), with mend also what is a guess (-y).
// It returns what is still damaged. The exit codes are those of e2fsck(8).
func check(program, disk string, mend bool) (damage string, err error) {
	if _, err := os.Stat(program); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	args := []string{"-p", disk}
	if mend {
		args = []string{"-f", "-y", disk}
	}
	out, err := exec.Command(program, args...).CombinedOutput()
	var exit *exec.ExitError
	if err == nil || !errors.As(err, &exit) {
		return "", err
	}
	const mended, rebootAdvised, left = 1, 2, 4
	switch code := exit.ExitCode(); {
	case code&^(mended|rebootAdvised) == 0:
		return "", nil
	case code&left != 0:
		return wire.Printable(lastWords(string(out))), nil
	default:
		return "", fmt.Errorf("exit code %d: %s", code, wire.Printable(lastWords(string(out))))
	}
}

// lastWords are the last lines of an output, on one line.
func lastWords(out string) string {
	words := strings.Join(strings.Fields(out), " ")
	return words[max(0, len(words)-300):]
}

// await waits for a device, which appears a moment after its driver.
func await(path string) error {
	for range 500 {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("%s did not appear", path)
}

// ioctls of linux/fs.h and ext4: BLKGETSIZE64 and EXT4_IOC_RESIZE_FS.
const (
	blkGetSize64 = 0x80081272
	ext4ResizeFS = 0x40086610
	worthGrowing = 8 << 20 // bytes
)

// grow makes an ext4 filesystem as large as its disk.
func grow(disk, at string) error {
	d, err := os.Open(disk)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	var size uint64
	if err := ioctl(d, blkGetSize64, &size); err != nil {
		return err
	}
	dir, err := os.Open(at)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return err
	}
	block := uint64(st.Bsize) //nolint:gosec // positive
	if !hasRoom(st.Blocks*block, size) {
		return nil
	}
	blocks := size / block
	return ioctl(dir, ext4ResizeFS, &blocks)
}

// hasRoom reports whether a filesystem is so much smaller than its disk that it
// is to be grown. statfs(2) leaves out the filesystem's own tables.
func hasRoom(filesystem, disk uint64) bool { return filesystem+disk/16+worthGrowing < disk }

func ioctl(f *os.File, request uintptr, arg *uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(arg))); errno != 0 { //nolint:gosec // as ioctl(2) wants it
		return errno
	}
	return nil
}

// network configures both interfaces, by the ioctls of netdevice(7).
func network(seed wire.Seed) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := up(fd, "lo"); err != nil {
		return err
	}
	for device, address := range map[string]string{wayOut: seed.Address, wayIn: seed.ChannelAddress} {
		if err := configure(fd, device, address); err != nil {
			return fmt.Errorf("%s: %w", device, err)
		}
	}
	gateway := net.ParseIP(seed.Gateway).To4()
	if gateway == nil {
		return fmt.Errorf("the gateway %q is no address", seed.Gateway)
	}
	if err := defaultRoute(gateway); err != nil {
		return fmt.Errorf("default route: %w", err)
	}
	// A link into /run of a service that does not run here would dangle.
	if err := os.Remove("/etc/resolv.conf"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile("/etc/resolv.conf", []byte("nameserver "+seed.DNS+"\n"), 0o644)
}

func configure(fd int, device, address string) error {
	if err := await("/sys/class/net/" + device); err != nil {
		return err
	}
	ip, ipNet, err := net.ParseCIDR(address)
	if err != nil {
		return err
	}
	for _, set := range []struct {
		request uint
		addr    []byte
	}{{unix.SIOCSIFADDR, ip.To4()}, {unix.SIOCSIFNETMASK, ipNet.Mask}} {
		req, err := unix.NewIfreq(device)
		if err != nil {
			return err
		}
		if err := req.SetInet4Addr(set.addr); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, set.request, req); err != nil {
			return err
		}
	}
	return up(fd, device)
}

func up(fd int, name string) error {
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, req); err != nil {
		return err
	}
	req.SetUint16(req.Uint16() | unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}

// defaultRoute asks for 0.0.0.0/0 by rtnetlink(7).
func defaultRoute(gateway net.IP) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Sendto(fd, routeRequest(gateway), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return err
	}
	if n < unix.SizeofNlMsghdr+4 {
		return io.ErrUnexpectedEOF
	}
	if code := *(*int32)(unsafe.Pointer(&answer[unix.SizeofNlMsghdr])); code != 0 { //nolint:gosec // nlmsgerr begins with it
		return syscall.Errno(-code)
	}
	return nil
}

// routeRequest is the message that asks for the default route.
func routeRequest(gateway net.IP) []byte {
	msg := struct {
		unix.NlMsghdr
		unix.RtMsg
		unix.RtAttr
		gateway [4]byte
	}{
		NlMsghdr: unix.NlMsghdr{Type: unix.RTM_NEWROUTE, Flags: unix.NLM_F_REQUEST | unix.NLM_F_CREATE | unix.NLM_F_ACK, Seq: 1},
		RtMsg: unix.RtMsg{
			Family: unix.AF_INET, Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_BOOT,
			Scope: unix.RT_SCOPE_UNIVERSE, Type: unix.RTN_UNICAST,
		},
		RtAttr:  unix.RtAttr{Len: unix.SizeofRtAttr + 4, Type: unix.RTA_GATEWAY},
		gateway: [4]byte(gateway.To4()),
	}
	msg.NlMsghdr.Len = uint32(unsafe.Sizeof(msg))
	return unsafe.Slice((*byte)(unsafe.Pointer(&msg)), unsafe.Sizeof(msg)) //nolint:gosec // a plain struct
}

// identity gives the machine its name and an id of its own.
func identity(seed wire.Seed) error {
	if err := syscall.Sethostname([]byte(seed.Hostname)); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if err := os.WriteFile("/etc/hostname", []byte(seed.Hostname+"\n"), 0o644); err != nil {
		return err
	}
	if data, err := os.ReadFile("/etc/machine-id"); err == nil && len(strings.TrimSpace(string(data))) == 32 {
		return nil
	}
	uuid, err := os.ReadFile("/proc/sys/kernel/random/uuid")
	if err != nil {
		return err
	}
	return os.WriteFile("/etc/machine-id", []byte(strings.ReplaceAll(string(uuid), "-", "")), 0o444)
}

// child is a process that run keeps going.
type child struct {
	argv    []string
	env     []string
	stdin   string
	pid     int
	started time.Time
	due     time.Time
}

// start starts the child when it is due.
func (c *child) start(logger *log.Logger) {
	if c.pid != 0 || time.Now().Before(c.due) {
		return
	}
	c.started, c.due = time.Now(), time.Now().Add(time.Second)
	cmd := exec.Command(c.argv[0], c.argv[1:]...)
	if c.argv[0] == "/proc/self/exe" {
		cmd.Args[0] = "init"
	}
	cmd.Env, cmd.Dir = c.env, "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(c.stdin), logger.Writer(), logger.Writer()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		logger.Printf("start %s: %v", c.argv[0], err)
		return
	}
	c.pid = cmd.Process.Pid
}

// run keeps the children going until it is told to end.
func run(seed wire.Seed, logger *log.Logger) {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}
	secret, err := json.Marshal(seed)
	if err != nil {
		logger.Print(err)
		return
	}
	ch := &child{argv: []string{"/proc/self/exe", channelArg}, env: env, stdin: string(secret)}
	workload := &child{argv: seed.Workload, env: env}
	children := []*child{ch}
	if len(seed.Workload) > 0 {
		children = append(children, workload)
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGTERM, syscall.SIGINT, syscall.SIGPWR)
	logger.Print("up")
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		for _, c := range children {
			c.start(logger)
		}
		select {
		case sig := <-signals:
			if sig != syscall.SIGCHLD {
				end(workload, logger)
				return
			}
		case <-tick.C:
		}
		reap(children)
	}
}

// reap collects ended processes; PID 1 inherits every orphan.
func reap(children []*child) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		for _, c := range children {
			if c.pid == pid {
				c.pid = 0
			}
		}
	}
}

// Patience with what has to end, before it is killed.
const (
	workloadPatience = 20 * time.Second
	othersPatience   = 2 * time.Second
)

// end stops the workload in order, then everything else.
func end(workload *child, logger *log.Logger) {
	logger.Print("going down")
	if workload.pid != 0 {
		_ = syscall.Kill(workload.pid, syscall.SIGTERM)
		for deadline := time.Now().Add(workloadPatience); workload.pid != 0 && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			reap([]*child{workload})
		}
	}
	_ = syscall.Kill(-1, syscall.SIGTERM)
	for deadline := time.Now().Add(othersPatience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		reap(nil)
		if _, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); errors.Is(err, syscall.ECHILD) {
			break
		}
	}
	_ = syscall.Kill(-1, syscall.SIGKILL)
	reap(nil)
}

// powerOff leaves clean filesystems behind.
func powerOff(logger *log.Logger) {
	syscall.Sync()
	for _, at := range []string{"/data", "/"} {
		if err := syscall.Mount("", at, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
			logger.Printf("remount %s: %v", at, err)
		}
	}
	syscall.Sync()
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// Channel runs the execution channel; the seed comes on standard input.
func Channel(stdin io.Reader) error {
	data, err := io.ReadAll(io.LimitReader(stdin, wire.MaxDocument))
	if err != nil {
		return err
	}
	var seed wire.Seed
	if err := json.Unmarshal(data, &seed); err != nil {
		return fmt.Errorf("channel: the seed: %w", err)
	}
	hostKey, err := ssh.ParsePrivateKey([]byte(seed.HostKey))
	if err != nil {
		return fmt.Errorf("channel: the host key: %w", err)
	}
	client, _, _, _, err := ssh.ParseAuthorizedKey([]byte(seed.ClientKey))
	if err != nil {
		return fmt.Errorf("channel: the client's key: %w", err)
	}
	logger := log.New(os.Stderr, "hb channel: ", 0)
	server := channel.New(hostKey, client, func() { _ = syscall.Kill(1, syscall.SIGTERM) }, logger)
	ln, err := channel.Listen(context.Background(), fmt.Sprintf("0.0.0.0:%d", wire.ChannelPort))
	if err != nil {
		return fmt.Errorf("channel: %w", err)
	}
	return server.Serve(ln)
}
