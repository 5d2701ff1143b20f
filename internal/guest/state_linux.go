package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

const (
	spaceFail   = 256 << 20
	spaceInfo   = 1 << 30
	inodesShare = 100 // one in so many must be free
)

// stateChecks judge what is durable.
func (a *app) stateChecks(ctx context.Context, repair string) []wire.Check {
	l := a.layout
	checks := []wire.Check{a.mountedCheck()}
	var st syscall.Statfs_t
	if err := syscall.Statfs(l.Data(), &st); err != nil {
		return append(checks, wire.Check{ID: "state.space", Status: wire.Fail, Summary: "the state cannot be examined", Evidence: l.Data() + ": " + err.Error(), Fix: repair})
	}
	checks = append(checks, spaceCheck(l.Data(), st.Bavail*uint64(st.Bsize), st.Files, st.Ffree)) //nolint:gosec,unconvert // Bsize is never negative

	home, err := a.askAgent(ctx, "check-home")
	var agentSees homeReport
	if err == nil {
		err = wire.DecodeStrict(home, &agentSees)
	}
	writable := wire.Check{ID: "state.writable", Status: wire.Pass, Summary: "the agent can write its home"}
	const rdonly = 1 // ST_RDONLY, statfs(2)
	switch {
	case st.Flags&rdonly != 0:
		writable.Status, writable.Summary, writable.Evidence = wire.Fail, "the state is mounted read-only", l.Data()
		writable.Fix = "sudo mount -o remount,rw " + l.Data()
		if note, err := os.ReadFile(l.DamageNote()); err == nil {
			writable.Summary, writable.Evidence = "the state's disk is damaged, so it is mounted read-only", string(note)
			writable.Fix = "sudo touch " + layout.MendMarker + " # save the box first; then stop and start it: e2fsck mends the disk, by guesses too"
		}
	case err != nil:
		writable.Status, writable.Summary, writable.Evidence, writable.Fix = wire.Fail, "the agent's home cannot be examined", err.Error(), repair
	case len(agentSees.NotWritable) > 0:
		writable.Status, writable.Summary = wire.Fail, "the agent cannot write its home"
		writable.Evidence, writable.Fix = strings.Join(agentSees.NotWritable, ", "), repair
	case agentSees.Elsewhere != "": // a user's own arrangement, which nobody mends
		writable.Status, writable.Summary = wire.Info, "the workspace is no directory that the agent can write"
		writable.Evidence = agentSees.Elsewhere
	}
	checks = append(checks, writable, a.ownerCheck(repair))

	sec := wire.Check{ID: "state.secrets", Status: wire.Pass, Summary: "files with secrets are their owner's alone"}
	if path, problem := a.ownSecretsProblem(); problem != "" {
		agentSees.LooseSecrets = append(agentSees.LooseSecrets, looseFile{path, problem, false})
	}
	if len(agentSees.LooseSecrets) > 0 {
		first := agentSees.LooseSecrets[0]
		sec.Status, sec.Summary = wire.Fail, "files with secrets are open to others"
		sec.Evidence = first.Path + ": " + first.Problem
		sec.Fix = repair
		if first.Root { // repair changes no owners in the home
			sec.Fix = "sudo chown " + layout.AgentName + ": " + first.Path
		}
	} else if err != nil {
		sec.Status, sec.Summary = wire.Skip, "the agent's home cannot be examined"
	}
	return append(checks, sec, a.sqliteCheck(ctx, repair))
}

// mountedCheck: where /data is no mount of its own the state lives and dies
// with the system disk, which some drivers do on purpose.
func (a *app) mountedCheck() wire.Check {
	c := wire.Check{ID: "state.mounted", Status: wire.Pass, Summary: a.layout.Data() + " is a mount of its own"}
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err == nil && isMountPoint(string(data), a.layout.Data()) {
		return c
	}
	info, err := os.Stat(a.layout.Data())
	if err != nil || !info.IsDir() {
		return wire.Check{ID: c.ID, Status: wire.Fail, Summary: a.layout.Data() + " is not there", Evidence: fmt.Sprint(err), Fix: "box stop NAME && box start NAME"}
	}
	c.Status, c.Summary = wire.Info, a.layout.Data()+" lies on the system disk"
	return c
}

// isMountPoint reads proc_pid_mountinfo(5): the fifth field, with octal
// escapes for space, tab, newline and backslash.
func isMountPoint(mountinfo, dir string) bool {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for line := range strings.Lines(mountinfo) {
		if f := strings.Fields(line); len(f) > 4 && unescape.Replace(f[4]) == dir {
			return true
		}
	}
	return false
}

func spaceCheck(dir string, free, inodes, freeInodes uint64) wire.Check {
	c := wire.Check{ID: "state.space", Status: wire.Pass, Evidence: dir, Summary: fmt.Sprintf("%d MiB free", free>>20)}
	switch {
	case free < spaceFail:
		c.Status = wire.Fail
	case inodes > 0 && freeInodes < inodes/inodesShare: // 0: a file system without a fixed number
		c.Status = wire.Fail
		c.Summary = fmt.Sprintf("%d of %d inodes free", freeInodes, inodes)
	case free < spaceInfo:
		c.Status = wire.Info
	}
	if c.Status == wire.Fail {
		c.Fix = "du -xh --max-depth=3 " + dir + " | sort -h | tail # then remove what is not needed"
	}
	return c
}

func (a *app) ownerCheck(repair string) wire.Check {
	c := wire.Check{ID: "state.owner", Status: wire.Pass, Summary: "the home belongs to the agent"}
	uid := uint32(os.Geteuid())
	if a.layout.Real() {
		uid = layout.AgentUID
	}
	var wrong []string
	for _, path := range []string{a.layout.Home(), a.layout.Workspace()} {
		info, err := os.Lstat(path)
		if err != nil {
			if path == a.layout.Home() {
				wrong = append(wrong, err.Error())
			}
			continue
		}
		if path == a.layout.Workspace() && !info.IsDir() {
			continue // it matters where a link leads, not whose it is
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != uid {
			wrong = append(wrong, fmt.Sprintf("%s belongs to uid %d", path, st.Uid))
		}
	}
	if len(wrong) > 0 {
		c.Status, c.Summary, c.Evidence, c.Fix = wire.Fail, "the home does not belong to the agent", strings.Join(wrong, "; "), repair
	}
	return c
}

// askAgent runs a hidden verb of hb as the agent: root follows no path in a
// directory that the agent can rearrange.
func (a *app) askAgent(ctx context.Context, name string, args ...string) ([]byte, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, sqliteLimit+10*time.Second)
	defer cancel()
	cmd := a.layout.AgentCommand(ctx, self, append([]string{name}, args...)...)
	if _, err := os.Stat(cmd.Dir); err != nil {
		return nil, err
	}
	var stdout, stderr limitedBuffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		line, _, _ := strings.Cut(stderr.String(), "\n")
		return nil, fmt.Errorf("%s as the agent: %w %s", name, err, line)
	}
	if stdout.full {
		return nil, fmt.Errorf("%s as the agent: too much output", name)
	}
	return stdout.Bytes(), nil
}

// limitedBuffer keeps what a document may have at most.
type limitedBuffer struct {
	bytes.Buffer
	full bool
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	if b.Len()+len(p) > wire.MaxDocument {
		b.full = true
		return len(p), nil
	}
	return b.Buffer.Write(p)
}

type looseFile struct {
	Path    string `json:"path"`
	Problem string `json:"problem"`
	Root    bool   `json:"root"`
}

type homeReport struct {
	NotWritable  []string    `json:"not_writable"`
	Elsewhere    string      `json:"elsewhere,omitempty"` // the workspace, if it is no directory, and why it cannot be written
	LooseSecrets []looseFile `json:"loose_secrets"`
	Closed       []string    `json:"closed,omitempty"`
}

// checkHomeCommand looks at the agent's home with the agent's own rights.
func (a *app) checkHomeCommand() *cobra.Command {
	var closing bool
	cmd := verb("check-home", "Look at the home as the agent", "", cobra.NoArgs, func(*cobra.Command, []string) error {
		var r homeReport
		for _, dir := range []string{a.layout.Home(), a.layout.Workspace()} {
			const writeAndEnter = 2 | 1 // W_OK|X_OK: access(2) writes nothing
			err := syscall.Access(dir, writeAndEnter)
			info, statErr := os.Lstat(dir)
			switch {
			case err == nil:
			case dir == a.layout.Workspace() && errors.Is(err, fs.ErrNotExist):
			case dir == a.layout.Workspace() && statErr == nil && !info.IsDir():
				r.Elsewhere = dir + ": " + err.Error()
			default:
				r.NotWritable = append(r.NotWritable, dir+": "+err.Error())
			}
		}
		for _, name := range secretFiles() {
			path := filepath.Join(a.layout.Home(), name)
			info, err := os.Stat(path)
			if err != nil || !info.Mode().IsRegular() {
				continue // most boxes have only some of them, and a device keeps no secret
			}
			st, ok := info.Sys().(*syscall.Stat_t)
			switch {
			case ok && int(st.Uid) != os.Geteuid():
				r.LooseSecrets = append(r.LooseSecrets, looseFile{path, fmt.Sprintf("belongs to uid %d", st.Uid), true})
			case info.Mode().Perm()&0o077 == 0:
			case closing:
				if err := os.Chmod(path, info.Mode().Perm()&^0o077); err != nil {
					return err
				}
				r.Closed = append(r.Closed, path)
			default:
				r.LooseSecrets = append(r.LooseSecrets, looseFile{Path: path, Problem: "mode " + info.Mode().Perm().String()})
			}
		}
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		return a.printf("%s\n", line)
	})
	cmd.Flags().BoolVar(&closing, "close", false, "and close files with secrets to others")
	return cmd
}

func (a *app) sqliteCheck(ctx context.Context, repair string) wire.Check {
	c := wire.Check{ID: "state.sqlite", Status: wire.Pass}
	out, err := a.askAgent(ctx, "check-sqlite")
	if err != nil {
		c.Status, c.Summary, c.Evidence = wire.Fail, "the databases cannot be examined", err.Error()
		c.Fix = repair
		return c
	}
	var results []sqliteResult
	sc := bufio.NewScanner(bytes.NewReader(out))
	for sc.Scan() {
		var r sqliteResult
		if err := wire.DecodeStrict(sc.Bytes(), &r); err != nil {
			c.Status, c.Summary, c.Evidence, c.Fix = wire.Fail, "the databases cannot be examined", err.Error(), repair
			return c
		}
		results = append(results, r)
	}
	return summarizeSQLite(results)
}
