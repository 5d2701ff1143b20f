package fake

import (
	"fmt"
	"os"
	"syscall"
)

// HoldPort has the kernel choose a free port of the loopback. Until held is
// closed it chooses that port for nobody else, neither for a listener without a
// port nor for a connection; a program that names the port can listen there, as
// often as it likes. Whatever inherits held keeps the port, too.
func HoldPort() (port int, held *os.File, err error) {
	// A socket that is bound and does not listen. Package net has none.
	syscall.ForkLock.RLock()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return 0, nil, fmt.Errorf("hold a port: %w", err)
	}
	held = os.NewFile(uintptr(fd), "held port")
	// Listeners of package net share their address with others like them.
	err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	var addr syscall.Sockaddr
	if err == nil {
		addr, err = syscall.Getsockname(fd)
	}
	if err != nil {
		_ = held.Close()
		return 0, nil, fmt.Errorf("hold a port: %w", err)
	}
	return addr.(*syscall.SockaddrInet4).Port, held, nil
}
