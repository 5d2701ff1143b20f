package box

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
)

// PortsExhaustedError says that no port of the range is free.
type PortsExhaustedError struct{ Lo, Hi int }

func (e *PortsExhaustedError) Error() string {
	return fmt.Sprintf("no free port from EXECUTOR_PORT_LO to EXECUTOR_PORT_HI (%d-%d)", e.Lo, e.Hi)
}

// Hint shows who has them.
func (e *PortsExhaustedError) Hint() string { return "box ls" }

// portsLock is no box's name.
const portsLock = "_ports"

// reservePort picks a loopback port that no other box has and nobody listens
// on, and writes rec with it, all under one lock. Ports in avoid were found
// taken later than this check.
func (m *Manager) reservePort(ctx context.Context, rec *Record, avoid map[int]bool) error {
	l, err := m.home.wait(ctx, portsLock)
	if err != nil {
		return err
	}
	defer l.release()
	used := map[int]bool{}
	names, err := m.registry.names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if name == rec.Name {
			continue
		}
		other, err := m.registry.get(name)
		if errors.Is(err, ErrNotFound) {
			continue // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("find a free port: %w", err)
		}
		used[other.HostPort] = true
	}
	for port := m.config.PortLo; port <= m.config.PortHi; port++ {
		if used[port] || avoid[port] || !portFree(port) {
			continue
		}
		rec.HostPort = port
		return m.durable(ctx, "step.reserve", func() error { return m.registry.put(*rec) })
	}
	return &PortsExhaustedError{m.config.PortLo, m.config.PortHi}
}

// portFree tries both loopback families: a foreign listener on either would
// be what a browser reaches under the box's name.
func portFree(port int) bool {
	for _, addr := range []string{"127.0.0.1", "::1"} {
		l, err := net.Listen("tcp", net.JoinHostPort(addr, strconv.Itoa(port)))
		if err != nil {
			if addr == "::1" && !hasIPv6Loopback() {
				continue
			}
			return false
		}
		_ = l.Close()
	}
	return true
}

func hasIPv6Loopback() bool {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		return false
	}
	_ = l.Close()
	return true
}
