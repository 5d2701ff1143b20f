package channel

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"io"
	"log"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"hermes-box-lite/internal/process"
	"hermes-box-lite/internal/wire"
)

func newSigner(t *testing.T) ssh.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return signer
}

// served is a server on the loopback and its one client.
type served struct {
	addr         string
	host, client ssh.Signer
	powerOffs    atomic.Int32
}

func serve(t *testing.T) *served {
	t.Helper()
	s := &served{host: newSigner(t), client: newSigner(t)}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	s.addr = ln.Addr().String()
	server := New(s.host, s.client.PublicKey(), func() { s.powerOffs.Add(1) }, log.New(io.Discard, "", 0))
	go func() { _ = server.Serve(ln) }() // ends with the listener
	return s
}

func (s *served) dial(auth ...ssh.AuthMethod) (*ssh.Client, error) {
	return ssh.Dial("tcp", s.addr, &ssh.ClientConfig{
		User: "root", Auth: auth, HostKeyCallback: ssh.FixedHostKey(s.host.PublicKey()), Timeout: 20 * time.Second,
	})
}

func (s *served) connect(t *testing.T) *ssh.Client {
	t.Helper()
	c, err := s.dial(ssh.PublicKeys(s.client))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func open(t *testing.T, c *ssh.Client) *ssh.Session {
	t.Helper()
	s, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func encode(t *testing.T, argv ...string) string {
	t.Helper()
	command, err := wire.EncodeArgv(argv)
	if err != nil {
		t.Fatal(err)
	}
	return command
}

func exitStatus(t *testing.T, err error) int {
	t.Helper()
	var exit *ssh.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitStatus()
	}
	t.Fatal(err)
	return -1
}

func TestOnlyTheOneClient(t *testing.T) {
	s := serve(t)
	for what, auth := range map[string][]ssh.AuthMethod{
		"nothing": nil, "a password": {ssh.Password("")}, "another key": {ssh.PublicKeys(newSigner(t))},
	} {
		if c, err := s.dial(auth...); err == nil {
			_ = c.Close()
			t.Errorf("let in by %s", what)
		}
	}
	s.connect(t)
}

func TestNothingElseOfSSH(t *testing.T) {
	s := serve(t)
	c := s.connect(t)
	if conn, err := c.Dial("tcp", s.addr); err == nil {
		_ = conn.Close()
		t.Error("it forwards connections")
	}
	if l, err := c.Listen("tcp", "127.0.0.1:0"); err == nil {
		_ = l.Close()
		t.Error("it listens for its client")
	}
	for what, try := range map[string]func(*ssh.Session) error{
		"a subsystem":      func(s *ssh.Session) error { return s.RequestSubsystem("sftp") },
		"a shell":          func(s *ssh.Session) error { return s.Shell() },
		"a variable":       func(s *ssh.Session) error { return s.Setenv("LD_PRELOAD", "x") },
		"a shell's line":   func(s *ssh.Session) error { return s.Start("echo x") },
		"no argument":      func(s *ssh.Session) error { return s.Start("[]") },
		"more than a list": func(s *ssh.Session) error { return s.Start(encode(t, "true") + "[]") },
	} {
		if err := try(open(t, c)); err == nil {
			t.Errorf("it takes %s", what)
		}
	}
}

func TestExitCodes(t *testing.T) {
	c := serve(t).connect(t)
	for _, tc := range []struct {
		want int
		argv []string
	}{
		{0, []string{"true"}},
		{255, []string{"sh", "-c", "exit 255"}},
		{137, []string{"sh", "-c", "kill -9 $$"}},
		{127, []string{"/no/such/program"}},
		{126, []string{"/etc/hostname"}},
		{9, []string{"sh", "-c", "exec >&- 2>&-; exit 9"}},
	} {
		if got := exitStatus(t, open(t, c).Run(encode(t, tc.argv...))); got != tc.want {
			t.Errorf("%q: %d, want %d", tc.argv, got, tc.want)
		}
	}
}

func TestBytesArriveAsTheyAre(t *testing.T) {
	c := serve(t).connect(t)
	sent := make([]byte, 3<<20)
	_, _ = rand.Read(sent) // never fails
	s := open(t, c)
	var out, errOut bytes.Buffer
	s.Stdin, s.Stdout, s.Stderr = bytes.NewReader(sent), &out, &errOut
	if err := s.Run(encode(t, "sh", "-c", "cat; echo err >&2")); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out.Bytes(), sent) || errOut.String() != "err\n" {
		t.Errorf("%d bytes came back of %d, or others; stderr %q", out.Len(), len(sent), errOut.String())
	}
	odd := []string{"a b", "", "$(id)", "\xff\x00\x01"[:1], "'\"\\"}
	s = open(t, c)
	got, err := s.Output(encode(t, append([]string{"sh", "-c", `printf '%s|' "$@"`, "sh"}, odd...)...))
	if want := strings.Join(odd, "|") + "|"; err != nil || string(got) != want {
		t.Errorf("arguments arrived as %q, %v", got, err)
	}
}

// TestADaemonKeepsNobodyWaiting has a command leave two processes behind that
// keep its output open. The daemon, which has a session of its own before the
// command ends, lives on; the other one ends with the command.
func TestADaemonKeepsNobodyWaiting(t *testing.T) {
	c := serve(t).connect(t)
	out, err := open(t, c).Output(encode(t, "sh", "-c",
		`setsid sleep 60 & until [ "$(cut -d ' ' -f 6 /proc/$!/stat)" = $! ]; do sleep 0.01; done; echo $!; sleep 60 & echo $!`))
	pids := strings.Fields(string(out))
	if err != nil || len(pids) != 2 {
		t.Fatalf("%q, %v", out, err)
	}
	awaitEnd(t, pids[1])
	daemon, err := strconv.Atoi(pids[0])
	if err != nil {
		t.Fatal(err)
	}
	if st, err := process.ReadStat(daemon); err != nil || st.Dead() {
		t.Errorf("the daemon did not live on: %+v, %v", st, err)
	}
	_ = syscall.Kill(daemon, syscall.SIGKILL)
}

// TestACommandEndsWithItsClient kills whole sessions: by the client's request,
// by its channel's end and by the loss of its connection.
func TestACommandEndsWithItsClient(t *testing.T) {
	s := serve(t)
	for what, end := range map[string]func(*ssh.Client, *ssh.Session) error{
		"request": func(_ *ssh.Client, s *ssh.Session) error {
			_, err := s.SendRequest(wire.KillRequest, true, nil)
			if errors.Is(err, io.EOF) { // it ended before the answer
				err = nil
			}
			return err
		},
		"channel":    func(_ *ssh.Client, s *ssh.Session) error { return s.Close() },
		"connection": func(c *ssh.Client, _ *ssh.Session) error { return c.Close() },
	} {
		t.Run(what, func(t *testing.T) {
			c := s.connect(t)
			sess := open(t, c)
			out, err := sess.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			// A child, too, and both deaf to TERM.
			if err := sess.Start(encode(t, "sh", "-c", `trap '' TERM; sh -c 'while :; do sleep 0.1; done' & echo $$ $!; wait; while :; do sleep 0.1; done`)); err != nil {
				t.Fatal(err)
			}
			line := make([]byte, 64)
			n, err := out.Read(line)
			if err != nil {
				t.Fatal(err)
			}
			pids := strings.Fields(string(line[:n]))
			if len(pids) != 2 {
				t.Fatalf("%q", line[:n])
			}
			if err := end(c, sess); err != nil {
				t.Fatal(err)
			}
			for _, pid := range pids {
				awaitEnd(t, pid)
			}
		})
	}
}

func awaitEnd(t *testing.T, pid string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %s lives on: %s", pid, stat)
		}
	}
}

func TestTerminal(t *testing.T) {
	c := serve(t).connect(t)
	s := open(t, c)
	term := "xterm-256color$(id)"
	if err := s.RequestPty(term, 33, 99, nil); err != nil {
		t.Fatal(err)
	}
	in, err := s.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	s.Stdout = &out
	if err := s.Start(encode(t, "sh", "-c", `stty -echo; echo "$TERM"; stty size; while [ "$(stty size)" = "33 99" ]; do sleep 0.05; done; stty size; read line; exit 5`)); err != nil {
		t.Fatal(err)
	}
	if err := s.WindowChange(50, 200); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("x\n")); err != nil {
		t.Fatal(err)
	}
	if got := exitStatus(t, s.Wait()); got != 5 {
		t.Errorf("exit code %d", got)
	}
	// The first size may be the second one already.
	if text := out.String(); !strings.Contains(text, term+"\r\n") || !strings.HasSuffix(text, "50 200\r\n") {
		t.Errorf("the terminal shows %q", text)
	}
}

func TestPowerOff(t *testing.T) {
	s := serve(t)
	c := s.connect(t)
	if ok, _, err := c.SendRequest("reboot@hermes-box", true, nil); err != nil || ok || s.powerOffs.Load() != 0 {
		t.Errorf("an unknown request: %v, %v, %d", ok, err, s.powerOffs.Load())
	}
	if ok, _, err := c.SendRequest(wire.PowerOffRequest, true, nil); err != nil || !ok {
		t.Errorf("power off: %v, %v", ok, err)
	}
	for deadline := time.Now().Add(30 * time.Second); s.powerOffs.Load() != 1; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the machine was not powered off")
		}
	}
}
