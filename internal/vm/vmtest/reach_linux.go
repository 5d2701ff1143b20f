package vmtest

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"hermes-box-lite/internal/vm"
)

// inNamespace tells the re-executed test binary that it is inside.
const inNamespace = "VMTEST_IN_NAMESPACE"

// reach proves that the host's loopback and another box's ports cannot be
// reached from inside. A guest that probes must never find a real network, so
// the test runs itself again in a network namespace that it made, with no
// interface but the loopback and what the engine adds.
func (s *suite) reach(t *testing.T) {
	if !s.Isolated {
		t.Skip("machines of this driver share the host's network")
	}
	if os.Getenv(inNamespace) == "" {
		if os.Geteuid() != 0 {
			t.Skip("making a network namespace needs root")
		}
		cmd := exec.Command(os.Args[0], "-test.run", "^"+strings.ReplaceAll(t.Name(), "/", "$/^")+"$", "-test.v", "-test.timeout", "5m")
		cmd.Env = append(os.Environ(), inNamespace+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("in a network namespace of its own: %v\n%s", err, out)
		} else if !bytes.Contains(out, []byte("the control was reached")) {
			t.Errorf("in a network namespace of its own nothing was proven:\n%s", out)
		}
		return
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("bring up the loopback: %v %s", err, out)
	}
	// Engines look for a way out of the host; this one leads nowhere.
	for _, args := range []string{"link add out type dummy", "addr add 192.0.2.1/24 dev out", "link set out up", "route add default via 192.0.2.2"} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Logf("ip %s: %v %s", args, err, out)
			break
		}
	}
	host, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = host.Close() }()
	go func() {
		for {
			conn, err := host.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprintln(conn, "the host's secret")
			_ = conn.Close()
		}
	}()
	hostPort := host.Addr().(*net.TCPAddr).Port

	a, b := s.spec(t, s.prefix+"-reach-a"), s.spec(t, s.prefix+"-reach-b")
	a.HostPort, a.GuestPort = freePort(t), guestPort
	b.HostPort, b.GuestPort = freePort(t), guestPort
	s.create(t, a)
	s.create(t, b)
	s.serve(t, b.Name, fmt.Sprintf("0.0.0.0:%d", guestPort), "the other box's secret")
	s.push(t, a.Name)
	// The control: what is to be unreachable is really there.
	if got := dial(fmt.Sprintf("127.0.0.1:%d", b.HostPort)); got != "the other box's secret" {
		t.Fatalf("the other box's port says %q on the host", got)
	}
	t.Log("the control was reached")

	// Every address that might lead out: the guest's own gateway and its
	// neighbours, the loopback, and the other box's own addresses.
	var targets []string
	ips := append(s.addresses(t, b.Name), append(s.gateways(t, a.Name), "127.0.0.1")...)
	for _, own := range s.addresses(t, a.Name) {
		// Where engines put their own end of a network.
		network := own[:strings.LastIndex(own, ".")]
		ips = append(ips, network+".1", network+".2")
	}
	slices.Sort(ips)
	for _, ip := range slices.Compact(ips) {
		for _, port := range []int{hostPort, a.HostPort, b.HostPort, guestPort} {
			targets = append(targets, fmt.Sprintf("%s:%d", ip, port))
		}
	}
	var out bytes.Buffer
	code, err := s.Driver.Exec(s.ctx(t), a.Name, vm.Command{Argv: append([]string{"/tmp/probe", "connect"}, targets...), Stdout: &out})
	if err != nil || code != 0 {
		t.Fatalf("probe: %d, %v", code, err)
	}
	if strings.Count(out.String(), "\n") != len(targets) {
		t.Errorf("probed %d addresses, heard of %q", len(targets), out.String())
	}
	if strings.Contains(out.String(), "secret") {
		t.Errorf("reached from inside:\n%s", out.String())
	}
}

// addresses are the machine's IPv4 addresses, from its own kernel.
func (s *suite) addresses(t *testing.T, name string) []string {
	t.Helper()
	var ips []string
	out := s.sh(t, name, "cat /proc/net/fib_trie")
	lines := strings.Split(out, "\n")
	for i, line := range lines {
		if i > 0 && strings.Contains(line, "host LOCAL") {
			ip := strings.TrimSpace(strings.TrimLeft(lines[i-1], " |-"))
			if !strings.HasPrefix(ip, "127.") {
				ips = append(ips, ip)
			}
		}
	}
	if len(ips) == 0 {
		t.Fatalf("%s has no address: %s", name, out)
	}
	return ips
}

// gateways are the first hops in the machine's routing table.
func (s *suite) gateways(t *testing.T, name string) []string {
	t.Helper()
	var ips []string
	for line := range strings.Lines(s.sh(t, name, "cat /proc/net/route")) {
		f := strings.Fields(line)
		if len(f) < 3 || f[2] == "00000000" || len(f[2]) != 8 {
			continue
		}
		var b [4]byte
		if _, err := fmt.Sscanf(f[2], "%02x%02x%02x%02x", &b[3], &b[2], &b[1], &b[0]); err == nil {
			ips = append(ips, net.IP(b[:]).String())
		}
	}
	return ips
}
