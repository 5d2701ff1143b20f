// Package process identifies processes beyond their pid, which the kernel uses
// again: by their start time and the host's boot. Linux tells both under /proc;
// where there is no /proc no process is known and none counts as alive.
//
// The callers are the drivers whose machines are processes of the host, and
// what keeps processes in a box.
package process

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// ID identifies a process for good.
type ID struct {
	PID     int    `json:"pid"`
	Started string `json:"started"` // in the kernel's ticks since boot
	BootID  string `json:"boot_id"`
}

// Identify returns the identity of a running process. That of a process which
// has ended is never alive.
func Identify(pid int) ID {
	id := ID{PID: pid, BootID: BootID()}
	if s, err := ReadStat(pid); err == nil && !s.Dead() {
		id.Started = strconv.FormatUint(s.Start, 10)
	}
	return id
}

// Alive reports whether this very process runs. A zombie does not.
func (id ID) Alive() bool {
	if id.PID <= 0 || id.Started == "" {
		return false
	}
	s, err := ReadStat(id.PID)
	return err == nil && !s.Dead() && strconv.FormatUint(s.Start, 10) == id.Started && id.BootID == BootID()
}

// BootID names this boot of the host, "unknown" where the kernel does not.
func BootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(data))
}

// Stat is what proc_pid_stat(5) tells about a process.
type Stat struct {
	State   byte
	Group   int
	Session int
	Start   uint64 // in the kernel's ticks since boot
}

// Dead reports a process that has ended, and may only not have been waited
// for.
func (s Stat) Dead() bool { return s.State == 'Z' || s.State == 'X' }

// ReadStat asks the kernel.
func ReadStat(pid int) (Stat, error) {
	path := "/proc/" + strconv.Itoa(pid) + "/stat"
	data, err := os.ReadFile(path)
	if err != nil {
		return Stat{}, err
	}
	s, err := parse(string(data))
	if err != nil {
		return Stat{}, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// parse reads fields 3, 5, 6 and 22. Field 2 is the process's name, in
// brackets, which it chooses itself: it may hold brackets and blanks too, hence
// the last bracket.
func parse(s string) (Stat, error) {
	end := strings.LastIndexByte(s, ')')
	f := strings.Fields(s[end+1:])
	if end < 0 || len(f) < 20 {
		return Stat{}, errors.New("not a process status")
	}
	group, groupErr := strconv.Atoi(f[2])
	session, sessionErr := strconv.Atoi(f[3])
	start, startErr := strconv.ParseUint(f[19], 10, 64)
	if err := errors.Join(groupErr, sessionErr, startErr); err != nil {
		return Stat{}, err
	}
	return Stat{State: f[0][0], Group: group, Session: session, Start: start}, nil
}
