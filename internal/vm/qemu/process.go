package qemu

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process identifies a process beyond its pid, which is used again.
type process struct {
	PID     int    `json:"pid"`
	Started string `json:"started"` // in the kernel's ticks since boot
	BootID  string `json:"boot_id"` // of the host
}

func identify(pid int) process {
	return process{PID: pid, Started: startTime(pid), BootID: bootID()}
}

func (p process) alive() bool {
	return p.PID > 0 && p.Started != "" && p.BootID == bootID() && startTime(p.PID) == p.Started
}

// end terminates the process, and kills it when that takes too long.
func (p process) end(ctx context.Context) error {
	for i := 0; p.alive(); i++ {
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

// startTime is field 22 of /proc/PID/stat, "" for no process or a zombie,
// proc(5).
func startTime(pid int) string {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ""
	}
	_, rest, ok := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return ""
	}
	return fields[19]
}

func bootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(data))
}
