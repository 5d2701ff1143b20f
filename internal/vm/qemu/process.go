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
	// The name before it may hold anything, also a bracket and a blank.
	end := strings.LastIndex(string(data), ") ")
	if end < 0 {
		return ""
	}
	fields := strings.Fields(string(data[end+2:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return ""
	}
	return fields[19]
}

// findMachine looks for the QEMU process of a machine by the UUID in its
// arguments.
func findMachine(id string) (process, bool) {
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
		if p := identify(pid); p.alive() {
			return p, true
		}
	}
	return process{}, false
}

func bootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(data))
}
