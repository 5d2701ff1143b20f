package guest

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/guest/layout"
)

// fallbackTerm is a terminal that every base knows.
const fallbackTerm = "xterm-256color"

func syncDisks() { syscall.Sync() }

func (a *app) attachCommand() *cobra.Command {
	return verb("attach", "Attach the terminal to the tmux session main", "", cobra.NoArgs, func(*cobra.Command, []string) error {
		argv := []string{"tmux", "-u"}
		if !a.layout.Real() {
			// Not the tmux server of the person whose machine this is.
			sum := sha256.Sum256([]byte(a.layout.Home()))
			argv = append(argv, "-L", "hermes-box-"+hex.EncodeToString(sum[:4]))
		}
		argv = append(argv, "new-session", "-A", "-s", "main", "-c", workDir(a.layout))
		return a.execAsAgent(argv)
	})
}

func (a *app) runCommand() *cobra.Command {
	cmd := verb("run -- CMD [ARG…]", "Run a command as the agent, in its workspace", "", cobra.MinimumNArgs(1), func(cmd *cobra.Command, args []string) error {
		if cmd.ArgsLenAtDash() != 0 {
			return &exitError{exitUsage, errors.New("the command must come after --")}
		}
		return a.execAsAgent(args)
	})
	return cmd
}

// workDir is the workspace, or what there is of it.
func workDir(l layout.Layout) string {
	for _, dir := range []string{l.Workspace(), l.Home()} {
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			return dir
		}
	}
	return l.Path("/")
}

// execAsAgent replaces this process by the command, so that streams, signals
// and the exit code are the command's own. It returns only when that fails:
// 127 for a command that is not there, 126 for one that cannot be run.
func (a *app) execAsAgent(argv []string) error {
	env := a.layout.AgentEnv()
	if term := os.Getenv("TERM"); term != "" || argv[0] == "tmux" {
		env = append(env, "TERM="+safeTerm(term, hasTerminfo))
	}
	if a.layout.Real() && os.Geteuid() == 0 {
		if err := becomeAgent(); err != nil {
			return fmt.Errorf("become the agent: %w", err)
		}
	}
	syscall.Umask(0o022)
	dir := workDir(a.layout)
	if err := os.Chdir(dir); err != nil {
		return fmt.Errorf("enter the workspace: %w", err)
	}
	env = append(env, "PWD="+dir)
	path, err := findProgram(argv[0], pathOf(env))
	if err == nil {
		err = syscall.Exec(path, argv, env)
		if errors.Is(err, syscall.ENOEXEC) {
			// A script without #!, which a shell would run.
			err = syscall.Exec("/bin/sh", append([]string{"sh", path}, argv[1:]...), env)
		}
	}
	code := 126
	if errors.Is(err, fs.ErrNotExist) {
		code = 127
		if path == "" {
			err = errors.New("command not found")
		}
	}
	return &exitError{code, fmt.Errorf("%s: %w", argv[0], err)}
}

// becomeAgent gives up root for good, in all threads.
func becomeAgent() error {
	if err := syscall.Setgroups([]int{layout.AgentGID}); err != nil {
		return err
	}
	if err := syscall.Setgid(layout.AgentGID); err != nil {
		return err
	}
	return syscall.Setuid(layout.AgentUID)
}

func pathOf(env []string) string {
	for _, entry := range env {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			return value
		}
	}
	return ""
}

// findProgram looks a command up in the agent's PATH. As in a shell, a file
// that is there but not executable is remembered as the reason.
func findProgram(name, searchPath string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	var reason error = fs.ErrNotExist //nolint:staticcheck // another error may follow
	if name == "" {
		return "", reason
	}
	for dir := range strings.SplitSeq(searchPath, ":") {
		path := filepath.Join(dir, name)
		info, err := os.Stat(path)
		if err != nil || info.IsDir() {
			continue
		}
		if syscall.Access(path, 1) == nil { // X_OK
			return path, nil
		}
		reason = syscall.EACCES
	}
	return "", reason
}

// safeTerm returns term if it has the form of a terminal's name and the box
// knows the terminal, else one that is known everywhere.
func safeTerm(term string, known func(string) bool) string {
	if term == "" || len(term) > 32 || term[0] == '.' || strings.ContainsFunc(term, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._+-", r)
	}) || !known(term) {
		return fallbackTerm
	}
	return term
}

// hasTerminfo looks where ncurses of Debian and Ubuntu look.
func hasTerminfo(term string) bool {
	for _, dir := range []string{"/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo", "/usr/lib/terminfo"} {
		if _, err := os.Stat(filepath.Join(dir, term[:1], term)); err == nil {
			return true
		}
	}
	return false
}
