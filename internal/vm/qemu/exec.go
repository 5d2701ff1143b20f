package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"golang.org/x/crypto/ssh"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// dial opens the channel of a machine, whose host key is pinned.
func dial(ctx context.Context, r record) (*ssh.Client, error) {
	key, err := ssh.ParsePrivateKey([]byte(r.ClientKey))
	if err != nil {
		return nil, fmt.Errorf("the machine's client key: %w", err)
	}
	host, _, _, _, err := ssh.ParseAuthorizedKey([]byte(r.HostPub))
	if err != nil {
		return nil, fmt.Errorf("the machine's host key: %w", err)
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(r.ChannelPort))
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	config := &ssh.ClientConfig{
		User: "root", Auth: []ssh.AuthMethod{ssh.PublicKeys(key)}, HostKeyCallback: ssh.FixedHostKey(host),
		HostKeyAlgorithms: []string{ssh.KeyAlgoED25519},
	}
	if r.Isolation == string(vm.IsolationEmulated) {
		// Instructions for AES are slow where they are emulated: 8 MB in took
		// 3.9 s with AES-GCM and 1.6 s with this.
		config.Ciphers = []string{ssh.CipherChaCha20Poly1305}
	}
	c, channels, requests, err := ssh.NewClientConn(conn, addr, config)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	_ = conn.SetDeadline(time.Time{})
	return ssh.NewClient(c, channels, requests), nil
}

// connect is dial for a machine that should answer.
func (d *Driver) connect(ctx context.Context, name string) (*ssh.Client, error) {
	r, err := d.load(name)
	if err != nil {
		return nil, err
	}
	if !r.QEMU.Alive() {
		return nil, fmt.Errorf("qemu machine %s: %w", name, vm.ErrNotRunning)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("the machine does not answer"))
	defer cancel()
	for {
		client, err := dial(ctx, r)
		if err == nil {
			return client, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// Exec implements vm.Driver.
func (d *Driver) Exec(ctx context.Context, name string, c vm.Command) (int, error) {
	payload, err := wire.EncodeArgv(c.Argv)
	if err != nil {
		return 0, err
	}
	client, err := d.connect(ctx, name)
	if err != nil {
		return 0, err
	}
	defer func() { _ = client.Close() }()
	session, err := client.NewSession()
	if err != nil {
		return 0, fmt.Errorf("open a session: %w", err)
	}
	defer func() { _ = session.Close() }()
	// The session itself waits for the command, which waits for its reader.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	session.Stdout, session.Stderr = vm.Watched(c.Stdout, cancel), vm.Watched(c.Stderr, cancel)
	if c.TTY != nil {
		if err := requestTerminal(session, c.TTY); err != nil {
			return 0, err
		}
	}
	stdin, err := session.StdinPipe()
	if err != nil {
		return 0, err
	}
	if err := session.Start(payload); err != nil {
		return 0, fmt.Errorf("start the command: %w", err)
	}
	ended := make(chan struct{})
	defer close(ended)
	if c.TTY != nil {
		go follow(session, c.TTY.Resize, ended)
	}
	go func() {
		if c.Stdin != nil {
			_, _ = io.Copy(stdin, c.Stdin) // the command may stop reading when it likes
		}
		if c.TTY == nil || c.Stdin != nil {
			_ = stdin.Close()
		}
	}()
	result := make(chan error, 1)
	go func() { result <- session.Wait() }()
	select {
	case err = <-result:
		if ctx.Err() != nil { // it may have ended over that
			return 0, context.Cause(ctx)
		}
	case <-ctx.Done():
		return 0, errors.Join(context.Cause(ctx), kill(session))
	}
	var exit *ssh.ExitError
	switch {
	case err == nil:
		return 0, nil
	case errors.As(err, &exit):
		return exit.ExitStatus(), nil
	}
	if m, inspectErr := d.Inspect(ctx, name); inspectErr == nil && m.State != vm.Running {
		return 0, fmt.Errorf("qemu machine %s: %w", name, vm.ErrNotRunning)
	}
	return 0, fmt.Errorf("the channel to the machine broke: %w", err)
}

// kill has the guest end the command before the channel closes.
func kill(session *ssh.Session) error {
	done := make(chan error, 1)
	go func() {
		_, err := session.SendRequest(wire.KillRequest, true, nil)
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil && !errors.Is(err, io.EOF) { // EOF: it has ended meanwhile
			return fmt.Errorf("end the command in the guest: %w", err)
		}
		return nil
	case <-time.After(20 * time.Second):
		return errors.New("end the command in the guest: no answer")
	}
}

func requestTerminal(session *ssh.Session, tty *vm.TTY) error {
	size := tty.Size
	if size.Rows == 0 || size.Cols == 0 {
		size = vm.WinSize{Rows: 24, Cols: 80}
	}
	if err := session.RequestPty(tty.Term, int(size.Rows), int(size.Cols), ssh.TerminalModes{}); err != nil {
		return fmt.Errorf("ask for a terminal: %w", err)
	}
	return nil
}

// follow passes the terminal's size on.
func follow(session *ssh.Session, resize <-chan vm.WinSize, ended <-chan struct{}) {
	for resize != nil {
		select {
		case <-ended:
			return
		case size, ok := <-resize:
			if !ok {
				return
			}
			_ = session.WindowChange(int(size.Rows), int(size.Cols))
		}
	}
}

// requestPowerOff asks the guest's init to end everything.
func requestPowerOff(ctx context.Context, r record) error {
	client, err := dial(ctx, r)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	ok, _, err := client.SendRequest(wire.PowerOffRequest, true, nil)
	if err == nil && !ok {
		err = errors.New("the guest refuses to power off")
	}
	return err
}
