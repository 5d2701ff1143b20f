// Command probe is put into a machine by the conformance suite to listen and
// connect there: no base has to bring a tool for it.
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: probe listen ADDR TEXT, or probe connect ADDR [ADDR]")
	}
	if args[0] == "listen" {
		l, err := net.Listen("tcp", args[1])
		if err != nil {
			return err
		}
		fmt.Println("listening")
		for {
			conn, err := l.Accept()
			if err != nil {
				return err
			}
			_, _ = fmt.Fprintln(conn, args[2])
			_ = conn.Close()
		}
	}
	// connect prints what each address says, or that it was not reached.
	lines := make([]string, len(args)-1)
	var wg sync.WaitGroup
	for i, addr := range args[1:] {
		wg.Go(func() { lines[i] = addr + ": " + connect(addr) })
	}
	wg.Wait()
	fmt.Println(strings.Join(lines, "\n"))
	return nil
}

func connect(addr string) string {
	conn, err := net.DialTimeout("tcp", addr, 2*time.Second)
	if err != nil {
		return "unreachable"
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
	text, _ := io.ReadAll(io.LimitReader(conn, 100))
	return fmt.Sprintf("reached %q", text)
}
