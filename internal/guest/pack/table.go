package pack

import (
	"path"
	"strings"
)

// exclusion is a kind of path below the agent's home that does not travel: it
// can be made again, or means something in one running box only.
type exclusion struct {
	pattern string // of path.Match; a matching directory is left out as a whole
	why     string
}

// Reasons.
const (
	cache    = "cache"
	program  = "programs, installed again"
	process  = "of a running process"
	logFile  = "log"
	oldCopy  = "older copies"
	ownToken = "token of this box"
)

// exclusions is the list of what stays behind. It follows what was measured of
// Executor 1.5.9, Claude Code 2.1.332 and Codex 0.171.0, and what
// `hermes backup` leaves out.
func exclusions() []exclusion {
	return []exclusion{
		{".cache", cache},
		{".npm", cache},
		{".lesshst", cache},

		{".executor/server-control/server.json", process},
		{".executor/server-control/startup.lock", process},
		{".executor/server-control/auth.json", ownToken},
		{".executor/server-control/auth.json.hb", ownToken},
		{".executor/daemon-*.json", process},
		{".executor/data.db.owner-lock", process},

		{".claude/telemetry", cache},
		{".claude/statsig", cache},
		{".claude/shell-snapshots", cache},
		{".claude/debug", logFile},
		{".claude/cache", cache},
		{".claude/ide", process},
		{".claude/sessions", process},
		{".claude/backups", oldCopy},

		{".codex/.tmp", cache},
		{".codex/tmp", cache},
		{".codex/cache", cache},
		{".codex/log", logFile},
		{".codex/logs_*.sqlite*", logFile},
		{".codex/shell_snapshots", cache},
		{".codex/thread-writer-locks", process},
		{".codex/app-server-control", process},
		{".codex/app-server-daemon", process},
		{".codex/skills/.system", program},

		{".hermes/hermes-agent", program},
		{".hermes/node", program},
		{".hermes/models", program},
		{".hermes/runtimes", program},
		{".hermes/venv", program},
		{".hermes/.venv", program},
		{".hermes/node_modules", program},
		{".hermes/__pycache__", cache},
		{".hermes/.cache", cache},
		{".hermes/backups", oldCopy},
		{".hermes/state-snapshots", oldCopy},
		{".hermes/checkpoints", oldCopy},
		{".hermes/browser-profile", cache},
		{".hermes/browser-profiles", cache},
		{".hermes/logs", logFile},
		{".hermes/gateway.pid", process},
		{".hermes/cron.pid", process},
		{".hermes/gateway.lock", process},
		{".hermes/processes.json", process},
		{".hermes/gateway_state.json", process},
		{".hermes/.backup.lock", process},

		{".local/state/nvim/swap", process},
		{".local/state/nvim/log", logFile},
		{".local/state/nvim/*.log", logFile},
	}
}

// hermesCaches are the parts of Hermes' cache that hold what people sent.
const hermesCaches = " images audio videos documents screenshots citations "

const homeEntry = "data/home/agent"

// excluded tells why an entry does not travel, or "".
func (p *packer) excluded(name string) string {
	switch name {
	case "data/.hermes-box":
		return "secrets of this box"
	case "data/lost+found":
		return "of the file system"
	}
	rel, ok := strings.CutPrefix(name, homeEntry+"/")
	if !ok || rel[0] != '.' { // as all patterns begin: a workspace costs nothing
		return ""
	}
	if part, ok := strings.CutPrefix(rel, ".hermes/cache/"); ok && !strings.Contains(part, "/") && !strings.Contains(hermesCaches, " "+part+" ") {
		return cache
	}
	for _, x := range p.exclusions {
		if hit, _ := path.Match(x.pattern, rel); hit { // the patterns are sound: a test says so
			return x.why
		}
	}
	return ""
}

// part is a tool's share of the state.
type part struct {
	name     string
	prefixes []string // below the agent's home
}

func parts() []part {
	return []part{
		{"executor", []string{".executor", ".local/share/executor"}},
		{"claude", []string{".claude", ".claude.json"}},
		{"codex", []string{".codex"}},
		{"hermes", []string{".hermes"}},
		{"neovim", []string{".config/nvim", ".local/share/nvim", ".local/state/nvim"}},
		{"workspace", []string{"workspace"}},
	}
}

// otherPart is the share of everything else.
const otherPart = "other"

func (p *packer) partOf(name string) string {
	rel, ok := strings.CutPrefix(name, homeEntry+"/")
	if !ok {
		return otherPart
	}
	for _, part := range p.parts {
		for _, prefix := range part.prefixes {
			if rel == prefix || strings.HasPrefix(rel, prefix+"/") {
				return part.name
			}
		}
	}
	return otherPart
}

// executorData is what belongs together with Executor's database: it is read
// while Executor is held.
func executorData() []string {
	return []string{homeEntry + "/.executor", homeEntry + "/.local/share/executor"}
}

// login is a file that logs a tool in, with a refresh token that can be used
// once: two live copies of it burn each other.
type login struct{ tool, file string }

func logins() []login {
	return []login{
		{"claude", homeEntry + "/.claude/.credentials.json"},
		{"codex", homeEntry + "/.codex/auth.json"},
		{"hermes", homeEntry + "/.hermes/auth.json"},
	}
}

// jsonFiles are read until they are whole: their programs replace them in
// place.
func isStateJSON(name string) bool {
	rel, ok := strings.CutPrefix(name, homeEntry+"/")
	if !ok {
		return false
	}
	switch rel {
	case ".claude.json", ".claude/settings.json", ".claude/.credentials.json",
		".codex/auth.json", ".hermes/auth.json", ".local/share/executor/auth.json":
		return true
	}
	return false
}
