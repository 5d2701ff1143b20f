package provision

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strconv"
	"strings"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// environment writes the variables that every process of the agent gets. It
// comes before the tools, because their verification uses it.
func environment(_ context.Context, r *run) error {
	lines := append([]string{
		// The tools are root's and pinned; their own updaters and telemetry
		// only cost time in a box without a network.
		"DISABLE_AUTOUPDATER=1",
		"DISABLE_UPDATES=1",
		"DISABLE_TELEMETRY=1",
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
		"EXECUTOR_DISABLE_UPDATE_CHECK=1",
		"EDITOR=nvim",
		"COLORTERM=truecolor",
	}, networkEnvironment(r.req)...)
	if err := os.MkdirAll(r.l.Opt(), 0o755); err != nil {
		return err
	}
	// A proxy may carry a password: the agent may read it, others may not.
	changed, err := writeOwned(r.l.Environment(), []byte(strings.Join(lines, "\n")+"\n"), 0o640, 0, layout.AgentGID)
	if err != nil {
		return err
	}
	if changed {
		r.note("wrote %s", r.l.Environment())
	} else {
		r.note("already there: %s", r.l.Environment())
	}
	return nil
}

// profileScript exports the environment file's lines in login shells. It reads
// the file instead of repeating it, so that no value needs quoting and no
// secret of a proxy lands in a file that everybody can read.
const profileScript = `# Written by Hermes Box; changes are lost.
if [ -r /opt/hermes-box/environment ]; then
	while IFS= read -r hermes_box_line || [ -n "$hermes_box_line" ]; do
		case "$hermes_box_line" in
		[A-Za-z_]*=*) export "$hermes_box_line" ;;
		esac
	done </opt/hermes-box/environment
	unset hermes_box_line
fi
`

// assets refreshes the files of ours that are not state.
func assets(ctx context.Context, r *run) error {
	changed := 0
	files := []struct {
		path string
		data []byte
		mode os.FileMode
	}{
		{"/etc/hermes-box.env", []byte(r.req.EnvFile), 0o644},
		{"/etc/profile.d/hermes-box.sh", []byte(profileScript), 0o644},
		{"/etc/tmux.conf", []byte(tmuxConf(r.tmuxVersion(ctx), r.terminfo("tmux-256color"))), 0o644},
	}
	for _, f := range files {
		did, err := writeOwned(r.l.Path(f.path), f.data, f.mode, 0, 0)
		if err != nil {
			return err
		}
		if did {
			r.note("wrote %s", f.path)
			changed++
		}
	}
	if target := r.l.Path(wire.HBPath); exists(target) {
		did, err := link(r.l.Path("/usr/local/bin/hb"), target)
		if err != nil {
			return err
		}
		if did {
			r.note("linked /usr/local/bin/hb")
			changed++
		}
	} else if r.l.Real() {
		return fmt.Errorf("%s is not there", wire.HBPath)
	}
	named, err := r.nameHost()
	if err != nil {
		return err
	}
	if changed == 0 && !named {
		r.note("already there: box.env, profile, tmux.conf, hb, hosts")
	}
	return nil
}

// nameHost makes the box know its own name, without which sudo complains and
// programs wait for DNS. Lines are only added: engines may own the file.
func (r *run) nameHost() (added bool, err error) {
	path := r.l.Path("/etc/hosts")
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if !r.settled {
		if data, err = r.forgetHost(path, data); err != nil {
			return false, err
		}
	}
	known := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		line, _, _ = strings.Cut(line, "#")
		if fields := strings.Fields(line); len(fields) > 1 {
			for _, name := range fields[1:] {
				known[name] = true
			}
		}
	}
	missing := ""
	if len(data) > 0 && !bytes.HasSuffix(data, []byte("\n")) {
		missing = "\n"
	}
	for name, addr := range map[string]string{"localhost": "127.0.0.1", r.req.BoxName: ownAddress} {
		if name != "" && !known[name] {
			missing += addr + "\t" + name + "\n"
			added = true
		}
	}
	if !added {
		return false, nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return false, err
	}
	_, err = f.WriteString(missing)
	if err = errors.Join(err, f.Close()); err == nil {
		r.note("added the box's name to /etc/hosts")
	}
	return true, err
}

// forgetHost drops the line that nameHost wrote in the box whose system this
// one is a copy of.
func (r *run) forgetHost(path string, data []byte) ([]byte, error) {
	var kept []byte
	for line := range bytes.Lines(data) {
		f := bytes.Split(bytes.TrimSuffix(line, []byte("\n")), []byte("\t"))
		if len(f) == 2 && string(f[0]) == ownAddress && boxName().Match(f[1]) && string(f[1]) != r.req.BoxName {
			continue
		}
		kept = append(kept, line...)
	}
	if len(kept) == len(data) {
		return data, nil
	}
	return kept, os.WriteFile(path, kept, 0o644) // in place: engines may own the file
}

// ownAddress is where Debian has a machine's own name, hosts(5).
const ownAddress = "127.0.1.1"

// tmuxRelease is tmux's version as two numbers.
type tmuxRelease struct{ major, minor int }

func (v tmuxRelease) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}

var tmuxVersionText = regexp.MustCompile(`^tmux (?:next-)?([0-9]{1,3})\.([0-9]{1,3})`)

// tmuxVersion asks tmux for its version; the oldest that Debian and Ubuntu
// still ship when it cannot be told.
func (r *run) tmuxVersion(ctx context.Context) tmuxRelease {
	oldest := tmuxRelease{3, 2}
	if !r.l.Real() {
		return oldest
	}
	out, err := r.quiet(r.command(ctx, "tmux", "-V"))
	if err != nil {
		return oldest
	}
	m := tmuxVersionText.FindStringSubmatch(out)
	if m == nil {
		return oldest
	}
	major, _ := strconv.Atoi(m[1]) // digits by the pattern
	minor, _ := strconv.Atoi(m[2])
	return tmuxRelease{major, minor}
}

func (r *run) terminfo(name string) bool {
	for _, dir := range []string{"/usr/share/terminfo/", "/lib/terminfo/", "/etc/terminfo/"} {
		if exists(r.l.Path(dir + name[:1] + "/" + name)) {
			return true
		}
	}
	return false
}

// tmuxConf is the system-wide configuration. Options that a version does not
// know would make tmux complain at every start, hence the versions, which are
// from tmux's CHANGES file: terminal-features and extended-keys came with 3.2,
// allow-passthrough with 3.3, extended-keys-format with 3.5.
func tmuxConf(v tmuxRelease, hasTerminfo bool) string {
	var b bytes.Buffer
	set := func(s string) { b.WriteString(s + "\n") }
	set("# Written by Hermes Box; changes are lost. Your own settings belong into ~/.tmux.conf.")
	if hasTerminfo {
		set(`set -g default-terminal "tmux-256color"`)
	} else {
		set(`set -g default-terminal "screen-256color"`)
	}
	set(`set -g mouse on`)
	set(`set -g history-limit 50000`)
	set(`set -g focus-events on`)
	set(`set -s escape-time 10`)
	set(`# Programs in panes may write the clipboard of the terminal in front (OSC 52).`)
	set(`set -s set-clipboard on`)
	if v.atLeast(3, 2) {
		set(`set -as terminal-features ",*:RGB:clipboard:extkeys:focus:title"`)
		set(`# Shift+Enter and other modified keys reach the programs.`)
		set(`set -s extended-keys on`)
	} else {
		set(`set -as terminal-overrides ",*:Tc"`)
	}
	if v.atLeast(3, 5) {
		set(`set -s extended-keys-format csi-u`)
	}
	if v.atLeast(3, 3) {
		set(`set -g allow-passthrough on`)
	}
	set(`set -ga update-environment "COLORTERM TERM_PROGRAM TERM_PROGRAM_VERSION"`)
	return b.String()
}
