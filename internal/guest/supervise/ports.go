package supervise

import (
	"net"
	"os"
	"strconv"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// executorPort is Executor's own loopback port; nobody but the door uses it.
const executorPort = 4787

// Variables that move the ports of a box which is only a directory, so that
// many can live on one machine. A real box ignores them.
const (
	DoorAddrVar     = "HB_DOOR_ADDR"
	ExecutorPortVar = "HB_EXECUTOR_PORT"
)

// Ports says where door and Executor listen.
type Ports struct {
	Door     string // address to listen on
	Executor int    // port on 127.0.0.1
}

// PortsOf returns the ports of the box.
func PortsOf(l layout.Layout) Ports {
	p := Ports{Door: "0.0.0.0:" + strconv.Itoa(wire.DoorPort), Executor: executorPort}
	if l.Real() {
		return p
	}
	p.Door = "127.0.0.1:" + strconv.Itoa(wire.DoorPort)
	if addr := os.Getenv(DoorAddrVar); addr != "" {
		if _, _, err := net.SplitHostPort(addr); err == nil {
			p.Door = addr
		}
	}
	if n, err := strconv.ParseUint(os.Getenv(ExecutorPortVar), 10, 16); err == nil && n > 0 {
		p.Executor = int(n)
	}
	return p
}

// DoorURL is the door's address for programs inside the box.
func (p Ports) DoorURL() string {
	_, port, err := net.SplitHostPort(p.Door)
	if err != nil {
		port = strconv.Itoa(wire.DoorPort) // PortsOf makes only good addresses
	}
	return "http://127.0.0.1:" + port
}

// MCPURL is the endpoint that the tools are wired to.
func (p Ports) MCPURL() string { return p.DoorURL() + "/mcp" }

func (p Ports) executorAddr() string { return "127.0.0.1:" + strconv.Itoa(p.Executor) }
