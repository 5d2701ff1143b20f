package qemu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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

// runningMachines looks for all QEMU processes, by the UUID in their arguments.
func runningMachines() map[string]process.ID {
	found := map[string]process.ID{}
	proc, err := os.Open("/proc")
	if err != nil {
		return found
	}
	defer func() { _ = proc.Close() }()
	names, _ := proc.Readdirnames(-1) // what was read is all that can be known
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		data, err := os.ReadFile("/proc/" + name + "/cmdline")
		if err != nil {
			continue // it has ended
		}
		args := strings.Split(string(data), "\x00")
		i := slices.Index(args, "-uuid")
		if i < 0 || i+1 == len(args) || filepath.Base(args[0]) != hostSystem().program {
			continue
		}
		if p := process.Identify(pid); p.Alive() {
			found[args[i+1]] = p
		}
	}
	return found
}
