package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"
)

// qmpPatience is how long QEMU may take for a command.
const qmpPatience = 10 * time.Second

// command is one command of QEMU's monitor protocol, docs/interop/qmp-spec.
type command struct {
	Execute   string `json:"execute"`
	Arguments any    `json:"arguments,omitempty"`
}

// monitor has the QEMU of a machine execute commands, the first failure ends
// it.
func (d *Driver) monitor(ctx context.Context, name string, commands ...command) error {
	ctx, cancel := context.WithTimeout(ctx, qmpPatience)
	defer cancel()
	// A socket's path is limited to 107 bytes, unix(7); through a descriptor
	// of its directory it is short.
	dir, err := os.Open(d.dir(name))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join("/proc/self/fd", fmt.Sprint(dir.Fd()), "qmp.sock"))
	if err != nil {
		return fmt.Errorf("reach QEMU's monitor: %w", err)
	}
	defer func() { _ = conn.Close() }()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()

	messages := json.NewDecoder(conn)
	var greeting json.RawMessage
	if err := messages.Decode(&greeting); err != nil {
		return fmt.Errorf("QEMU's monitor: %w", err)
	}
	requests := json.NewEncoder(conn)
	for _, c := range append([]command{{Execute: "qmp_capabilities"}}, commands...) {
		if err := requests.Encode(c); err != nil {
			return fmt.Errorf("QEMU's monitor: %s: %w", c.Execute, err)
		}
		if err := answerOf(messages); err != nil {
			return fmt.Errorf("QEMU's monitor: %s: %w", c.Execute, err)
		}
	}
	return nil
}

// answerOf returns what QEMU says to a command; events come between.
func answerOf(messages *json.Decoder) error {
	for {
		var m struct {
			Return json.RawMessage `json:"return"`
			Error  *struct{ Desc string }
		}
		if err := messages.Decode(&m); err != nil {
			return err
		}
		switch {
		case m.Error != nil:
			return fmt.Errorf("%s", m.Error.Desc)
		case m.Return != nil:
			return nil
		}
	}
}
