package qemu

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/process"
)

// end terminates the process, and kills it when that takes too long.
func end(ctx context.Context, p process.ID) error {
	for i := 0; p.Alive(); i++ {
		switch i {
		case 0:
			_ = syscall.Kill(p.PID, syscall.SIGTERM)
		case 250: // 5 s
			_ = syscall.Kill(p.PID, syscall.SIGKILL)
		case 1500:
			return fmt.Errorf("process %d does not end", p.PID)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// findMachine looks for the QEMU process of a machine by the UUID in its
// arguments.
func findMachine(id string) (process.ID, bool) {
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(data, []byte("\x00-uuid\x00"+id+"\x00")) {
			continue
		}
		program, _, _ := strings.Cut(string(data), "\x00")
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil || filepath.Base(program) != hostSystem().program {
			continue
		}
		if p := process.Identify(pid); p.Alive() {
			return p, true
		}
	}
	return process.ID{}, false
}
