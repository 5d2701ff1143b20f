package provision

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"hermes-box-lite/internal/guest/layout"
)

const sudoersPath = "/etc/sudoers.d/hermes-box"

// agent makes the user whose state the box holds, and the directories of that
// state. Trees that are there already are not walked: a recursive change of
// owner costs minutes and a gigabyte of copied-up files.
func agent(ctx context.Context, r *run) error {
	did := 0
	if r.l.Real() {
		for _, do := range []func(context.Context) (bool, error){r.group, r.user, r.sudoers} {
			changed, err := do(ctx)
			if err != nil {
				return err
			}
			if changed {
				did++
			}
		}
	} else if err := os.MkdirAll(r.l.Path("/data/home"), 0o755); err != nil {
		return err
	}
	// In a directory of the fake driver no user is switched: whoever runs this
	// is the agent.
	uid, gid := layout.AgentUID, layout.AgentGID
	if !r.l.Real() {
		uid, gid = os.Geteuid(), os.Getegid()
	}
	for _, d := range []struct {
		path     string
		mode     os.FileMode
		uid, gid int
	}{
		{r.l.Data(), 0o755, 0, 0},
		{r.l.Path("/data/home"), 0o755, 0, 0},
		{r.l.Home(), 0o700, uid, gid},
		{r.l.Secrets(), 0o700, 0, 0},
	} {
		changed, err := directory(d.path, d.mode, d.uid, d.gid)
		if err != nil {
			return err
		}
		if changed {
			did++
		}
	}
	changed, err := reclaim(r.l.Workspace(), uid, gid)
	if err != nil {
		return fmt.Errorf("the agent's workspace: %w", err)
	}
	if changed {
		did++
	}
	// What is inside the home is the agent's: made by the agent, so that
	// whatever links are there lead nowhere that the agent cannot go.
	out, err := r.quiet(r.l.AgentCommand(ctx, "/bin/sh", "-c", homeScript))
	if err != nil {
		return fmt.Errorf("the agent's home: %w", err)
	}
	did += strings.Count(out, "made ")
	if did == 0 {
		r.note("already there: user %s (%d), its home and sudo", layout.AgentName, layout.AgentUID)
	} else {
		r.note("user %s (%d), its home and sudo: %d changes", layout.AgentName, layout.AgentUID, did)
	}
	return nil
}

const homeScript = `set -eu
umask 022
# A link that leads nowhere today is the user's own arrangement, too.
[ -e workspace ] || [ -L workspace ] || { mkdir workspace; echo made workspace; }
for d in .claude .codex .config .executor; do
	# Secrets will be in them: a tool that makes them itself may not care.
	[ -e "$d" ] || [ -L "$d" ] || { mkdir -m 700 "$d"; echo "made $d"; }
done
for f in .bashrc .profile; do
	if [ ! -e "$f" ] && [ ! -L "$f" ] && [ -e "/etc/skel/$f" ]; then
		cp "/etc/skel/$f" "$f"
		echo "made $f"
	fi
done
`

// account is a line of passwd(5) or group(5).
type account struct {
	name string
	id   int
	rest []string
}

func readAccounts(path string) ([]account, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var all []account
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		fields := strings.Split(sc.Text(), ":")
		if len(fields) < 3 {
			continue
		}
		if id, err := strconv.Atoi(fields[2]); err == nil {
			all = append(all, account{fields[0], id, fields[3:]})
		}
	}
	return all, sc.Err()
}

// claim says whether the account (name, id) is there. A name or an id that
// belongs to something else is an error: the id is fixed, because state moves
// between boxes without a change of owner.
func claim(kind string, all []account, name string, id int) (*account, error) {
	var found *account
	for i, a := range all {
		switch {
		case a.name == name && a.id == id:
			found = &all[i]
		case a.name == name:
			return nil, baseConflict(fmt.Errorf("the base has a %s %s with id %d, a box needs %d", kind, name, a.id, id))
		case a.id == id:
			return nil, baseConflict(fmt.Errorf("the base uses the %s id %d for %q, a box needs it for %s", kind, id, a.name, name))
		}
	}
	return found, nil
}

func baseConflict(err error) error {
	return &hintedError{err, "choose another BASE_IMAGE in box.env"}
}

func (r *run) group(ctx context.Context) (bool, error) {
	all, err := readAccounts("/etc/group")
	if err != nil {
		return false, err
	}
	g, err := claim("group", all, layout.AgentName, layout.AgentGID)
	if err != nil || g != nil {
		return false, err
	}
	return true, r.loud(r.command(ctx, "groupadd", "-g", strconv.Itoa(layout.AgentGID), layout.AgentName))
}

func (r *run) user(ctx context.Context) (bool, error) {
	const home, shell = "/data/home/agent", "/bin/bash"
	all, err := readAccounts("/etc/passwd")
	if err != nil {
		return false, err
	}
	u, err := claim("user", all, layout.AgentName, layout.AgentUID)
	if err != nil {
		return false, err
	}
	uid, gid := strconv.Itoa(layout.AgentUID), strconv.Itoa(layout.AgentGID)
	if u == nil {
		return true, r.loud(r.command(ctx, "useradd", "-u", uid, "-g", gid, "-M", "-d", home, "-s", shell, layout.AgentName))
	}
	if len(u.rest) == 4 && u.rest[0] == gid && u.rest[2] == home && u.rest[3] == shell {
		return false, nil
	}
	return true, r.loud(r.command(ctx, "usermod", "-g", gid, "-d", home, "-s", shell, layout.AgentName))
}

// sudoers gives the agent root without a password; sudo keeps the variables
// without which programs run through it cannot reach the network.
func (r *run) sudoers(ctx context.Context) (bool, error) {
	keep := append([]string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}, caVariables()...)
	text := "# Written by Hermes Box; changes are lost.\n" +
		"Defaults:" + layout.AgentName + " env_keep += \"" + strings.Join(keep, " ") + "\"\n" +
		layout.AgentName + " ALL=(ALL:ALL) NOPASSWD: ALL\n"
	if exists("/usr/sbin/visudo") {
		// sudo ignores names with a dot, so that a bad draft can do no harm.
		draft := sudoersPath + ".draft"
		if err := os.WriteFile(draft, []byte(text), 0o440); err != nil {
			return false, err
		}
		err := r.loud(r.command(ctx, "visudo", "-q", "-c", "-f", draft))
		if err := errors.Join(err, os.Remove(draft)); err != nil {
			return false, fmt.Errorf("sudo rule: %w", err)
		}
	}
	return writeOwned(sudoersPath, []byte(text), 0o440, 0, 0)
}
