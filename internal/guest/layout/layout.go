// Package layout knows where everything is inside a box, who the agent is,
// and how to run a program as the agent. All of hb asks it instead of
// spelling paths.
//
// A Layout has a root: "" in a real box. The fake driver runs the real hb
// against a directory; there every path lies below the root and no user is
// switched.
package layout

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/atomicfile"
)

// AgentUID and AgentGID are fixed, so that state moves between boxes without
// a change of owner.
const (
	AgentName = "agent"
	AgentUID  = 1001
	AgentGID  = 1001
	// RootVar names the environment variable that moves the root.
	RootVar = "HB_ROOT"
)

// Layout is the map of one box.
type Layout struct{ root string }

// FromEnv returns the layout that the environment asks for: RootVar, else a
// real box.
func FromEnv() Layout { return At(os.Getenv(RootVar)) }

// At returns the layout below root; "" or "/" is a real box.
func At(root string) Layout {
	if root == "/" {
		root = ""
	}
	return Layout{root: strings.TrimRight(root, "/")}
}

// Real reports whether this is a real box and not a directory of the fake
// driver.
func (l Layout) Real() bool { return l.root == "" }

// Path returns the place of an absolute guest path.
func (l Layout) Path(abs string) string { return l.root + abs }

// Data is the state; everything else in the box is replaceable.
func (l Layout) Data() string { return l.Path("/data") }

// Home is the agent's home directory.
func (l Layout) Home() string { return l.Path("/data/home/agent") }

// Workspace is where the agent works.
func (l Layout) Workspace() string { return filepath.Join(l.Home(), "workspace") }

// Secrets holds tokens and the pause marker: root only, never in an archive.
func (l Layout) Secrets() string { return l.Path("/data/.hermes-box") }

// Run holds sockets, locks and pid files of this boot.
func (l Layout) Run() string { return l.Path("/run/hermes-box") }

// ControlSocket is where the supervisor answers.
func (l Layout) ControlSocket() string { return filepath.Join(l.Run(), "control.sock") }

// DamageNote is where the boot of a machine tells that the state's disk is
// damaged, and was mounted read-only for that.
func (l Layout) DamageNote() string { return l.Path("/run/hermes-box-damage") }

// MendMarker asks the next boot of a machine to mend the state's disk also
// where that is a guess. The name is that of sysvinit's.
const MendMarker = "/forcefsck"

// Opt holds the managed tools.
func (l Layout) Opt() string { return l.Path("/opt/hermes-box") }

// Provisioned is the marker of a system disk on which provisioning has
// succeeded; its content is the last request's box name and port.
func (l Layout) Provisioned() string { return filepath.Join(l.Opt(), "provisioned.json") }

// EnvFile is the root-owned copy of box.env.
func (l Layout) EnvFile() string { return l.Path("/etc/hermes-box.env") }

// Environment holds KEY=VALUE lines (proxies, CA variables, switches of the
// tools) that every process of the agent gets; written by provisioning.
func (l Layout) Environment() string { return filepath.Join(l.Opt(), "environment") }

// ExecutorLog is Executor's rotated log.
func (l Layout) ExecutorLog() string { return l.Path("/var/log/hermes-box/executor.log") }

// RuntimeManifest records the versions of the tools.
func (l Layout) RuntimeManifest() string {
	return filepath.Join(l.Home(), ".config/hermes-box/runtime-manifest")
}

// AgentEnv is the environment of every program run as the agent: fixed basics
// and the lines of Environment. It never contains the caller's own variables.
func (l Layout) AgentEnv() []string {
	path := "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
	if !l.Real() {
		path = l.Path("/usr/local/bin") + ":" + path
	}
	env := []string{
		"HOME=" + l.Home(), "USER=" + AgentName, "LOGNAME=" + AgentName, "SHELL=/bin/bash",
		"LANG=C.UTF-8", "PATH=" + path,
	}
	if !l.Real() {
		env = append(env, RootVar+"="+l.root)
		for _, port := range []string{"HB_DOOR_ADDR", "HB_EXECUTOR_PORT"} { // of this machine, see package supervise
			if value, ok := os.LookupEnv(port); ok {
				env = append(env, port+"="+value)
			}
		}
	}
	data, err := os.ReadFile(l.Environment())
	if err != nil {
		return env // not provisioned yet
	}
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if key, _, ok := strings.Cut(line, "="); ok && key != "" && !strings.HasPrefix(line, "#") {
			env = append(env, line)
		}
	}
	return env
}

// AgentCommand prepares a program that runs as the agent, in its home, with
// AgentEnv and nothing else, in a process group of its own that is killed as
// a whole when ctx ends.
func (l Layout) AgentCommand(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	if !strings.Contains(name, "/") {
		// The lookup must use the agent's PATH, not that of the caller.
		cmd = exec.CommandContext(ctx, "/usr/bin/env", append([]string{name}, args...)...)
	}
	cmd.Env = l.AgentEnv()
	cmd.Dir = l.Home()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if l.Real() && os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: AgentUID, Gid: AgentGID}
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	return cmd
}

// Settings is the content of Provisioned: what a provisioned box must know
// about itself to run.
type Settings struct {
	BoxName  string `json:"box_name"`
	HostPort int    `json:"host_port"` // forwarded port of the door; 0 = none
	Executor bool   `json:"executor"`
	Hermes   bool   `json:"hermes"`
	WireMCP  bool   `json:"wire_mcp"`
}

// ReadSettings returns the settings of a provisioned box; fs.ErrNotExist
// means that provisioning has not succeeded yet.
func (l Layout) ReadSettings() (Settings, error) {
	data, err := os.ReadFile(l.Provisioned())
	if err != nil {
		return Settings{}, err
	}
	var s Settings
	if err := json.Unmarshal(data, &s); err != nil {
		return Settings{}, fmt.Errorf("%s: %w", l.Provisioned(), err)
	}
	return s, nil
}

// WriteSettings marks the box as provisioned.
func (l Layout) WriteSettings(s Settings) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Write(l.Provisioned(), append(data, '\n'), 0o644)
}
