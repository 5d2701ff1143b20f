// Command probe is put into a machine by the conformance suite to listen and
// connect there: no base has to bring a tool for it.
package main

import (
	"fmt"
	"io"
	"net"
	"os"
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
		return fmt.Errorf("usage: probe listen ADDR TEXT | probe connect ADDR...")
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
	for _, addr := range args[1:] {
		conn, err := net.DialTimeout("tcp", addr, 2*time.Second)
		if err != nil {
			fmt.Printf("%s: unreachable\n", addr)
			continue
		}
		_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
		text, _ := io.ReadAll(io.LimitReader(conn, 100))
		_ = conn.Close()
		fmt.Printf("%s: reached %q\n", addr, text)
	}
	return nil
}
