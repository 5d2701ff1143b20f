package supervise

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/process"
)

// runVar marks the environment of one run of Executor, so that its processes
// are recognised without trusting a name or a number that may be reused.
const runVar = "HERMES_BOX_RUN"

// record says which run of Executor the worker started. It is written before
// the spawn (without pid) and again after it, so that a worker killed in
// between leaves no unknown process.
type record struct {
	Run   string `json:"run"`
	PID   int    `json:"pid"`   // also the process group
	Start uint64 `json:"start"` // of pid, in clock ticks since boot
}

func recordPath(l layout.Layout) string { return filepath.Join(l.Run(), "executor.json") }

func (r record) write(l layout.Layout) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return atomicfile.Write(recordPath(l), data, 0o600)
}

func readRecord(l layout.Layout) (record, error) {
	data, err := os.ReadFile(recordPath(l))
	if err != nil {
		return record{}, err
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, fmt.Errorf("%s: %w", recordPath(l), err)
	}
	return r, nil
}

// living returns the processes of a run that are alive: of its group, with its
// mark in the environment, and the leader only with its start time.
func (r record) living() []int {
	if r.Run == "" {
		return nil
	}
	mark := []byte(runVar + "=" + r.Run)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		st, err := process.ReadStat(pid)
		if err != nil || st.Dead() {
			continue
		}
		if r.PID != 0 && st.Group != r.PID || pid == r.PID && st.Start != r.Start {
			continue
		}
		environ, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if errors.Is(err, fs.ErrPermission) && r.PID != 0 && st.Start >= r.Start && r.leaderIsOursOrGone() {
			// Root in a container may not read the environment of another user
			// (it lacks CAP_SYS_PTRACE). The group's number cannot have been
			// given away while the group has members.
			pids = append(pids, pid)
			continue
		}
		if err != nil {
			continue // gone, or nothing is known about it
		}
		for entry := range bytes.SplitSeq(environ, []byte{0}) {
			if bytes.Equal(entry, mark) {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// leaderIsOursOrGone is false when the number was given to another process.
func (r record) leaderIsOursOrGone() bool {
	st, err := process.ReadStat(r.PID)
	return err != nil || st.Start == r.Start
}

// endOrphan ends what is left of the run that an earlier worker recorded.
func endOrphan(l layout.Layout) (ended int, err error) {
	r, err := readRecord(l)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, errors.Join(err, os.Remove(recordPath(l)))
	}
	pids := r.living()
	ended = len(pids)
	for _, step := range []struct {
		signal   syscall.Signal
		patience time.Duration
	}{{syscall.SIGTERM, 5 * time.Second}, {syscall.SIGKILL, 5 * time.Second}} {
		deadline := time.Now().Add(step.patience)
		for _, pid := range pids {
			_ = syscall.Kill(pid, step.signal) // gone already is as good
		}
		for len(pids) > 0 && time.Now().Before(deadline) {
			time.Sleep(20 * time.Millisecond)
			pids = r.living()
		}
	}
	if len(pids) > 0 {
		return ended, fmt.Errorf("end the Executor of an earlier worker: pid %d does not go", pids[0])
	}
	return ended, os.Remove(recordPath(l))
}
