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

// quit asks QEMU to end, by its monitor. Best effort: the caller ends the
// process in any case; QEMU's own end flushes its disks.
func quit(ctx context.Context, socket string) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	// A socket's path is limited to 107 bytes, unix(7); through a descriptor
	// of its directory it is short.
	dir, err := os.Open(filepath.Dir(socket))
	if err != nil {
		return
	}
	defer func() { _ = dir.Close() }()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(socket)))
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	dec := json.NewDecoder(conn)
	var answer map[string]any
	if dec.Decode(&answer) != nil { // the greeting
		return
	}
	for _, command := range []string{"qmp_capabilities", "quit"} {
		if json.NewEncoder(conn).Encode(map[string]string{"execute": command}) != nil || dec.Decode(&answer) != nil {
			return
		}
	}
}
