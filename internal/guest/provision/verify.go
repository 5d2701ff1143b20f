package provision

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// tool is a program that must be there, and how it tells its version.
type tool struct{ name, versionArg string }

// managedTools are ours; the others come from the distribution.
func managedTools(s layout.Settings) []tool {
	all := []tool{{"claude", "--version"}, {"codex", "--version"}}
	if s.Executor {
		all = append(all, tool{"executor", "--version"})
	}
	if s.Hermes {
		all = append(all, tool{"hermes", "--version"})
	}
	return append(all, tool{"node", "--version"}, tool{"npm", "--version"})
}

func requiredTools(l layout.Layout, s layout.Settings) []tool {
	all := managedTools(s)
	if !l.Real() {
		return all
	}
	return append(all,
		tool{"git", "--version"}, tool{"curl", "--version"}, tool{"tmux", "-V"}, tool{"nvim", "--version"},
		tool{"rg", "--version"}, tool{"jq", "--version"}, tool{"sudo", "--version"}, tool{"less", "--version"}, tool{"ssh", "-V"})
}

// surrounding is one of the environments in which programs of the agent run.
type surrounding struct {
	name string
	// command runs the probe script, for limit at most. The nonce is nobody
	// else's.
	command func(script, nonce string, limit time.Duration) (args []string)
	// undo removes what a command leaves that was killed; nil: it leaves nothing.
	undo func(nonce string) (args []string)
	// limit is for a probe that runs no tool; slow is what helps when there is
	// no answer within it.
	limit time.Duration
	slow  string
}

const fixWaiting = "bash -lxc true # shows where ~/.profile, or what it reads, waits; let it wait in interactive shells only"

// tmuxHarness runs the probe in a real session of a tmux server of its own:
// below directory $1 the script $2, for at most $3 seconds. The server is beyond
// the reach of whoever kills the harness. So its first session ends it, which
// also keeps it: it would end with the probe's, and leave the next client
// without an answer.
const tmuxHarness = `set -eu
mkdir -m 700 "$1"
trap 'tmux -S "$1/s" kill-server 2>/dev/null || :; rm -rf "$1"' EXIT
printf '%s' "$2" >"$1/probe"
tmux -S "$1/s" -f /etc/tmux.conf new-session -d "sleep $3; trap '' HUP; tmux -S '$1/s' kill-server; rm -rf '$1'" ';' \
	new-session -d -x 80 -y 24 "bash -l '$1/probe' >'$1/out' 2>/dev/null; tmux -S '$1/s' wait-for -S done"
tmux -S "$1/s" wait-for done
cat "$1/out"
`

func tmuxSurrounding() surrounding {
	dir := func(nonce string) string { return "/tmp/hb-probe." + nonce }
	return surrounding{
		"tmux",
		func(script, nonce string, limit time.Duration) []string {
			return []string{"/bin/bash", "-c", tmuxHarness, "probe", dir(nonce), script, strconv.Itoa(int(limit.Seconds()) + 1)}
		},
		func(nonce string) []string {
			return []string{"/bin/sh", "-c", `tmux -S "$1/s" kill-server; rm -rf "$1"`, "undo", dir(nonce)}
		},
		lookLimit, fixWaiting,
	}
}

func surroundings(l layout.Layout) []surrounding {
	shell := func(name string, args ...string) surrounding {
		return surrounding{name: name, limit: lookLimit, command: func(script, _ string, _ time.Duration) []string {
			return append(slices.Clone(args), script)
		}}
	}
	service := shell("service", "/bin/sh", "-c")
	if !l.Real() {
		return []surrounding{service}
	}
	login := shell("login", "/bin/bash", "-l", "-c")
	login.slow = fixWaiting
	return []surrounding{service, login, shell("non-login", "/bin/bash", "-c"), tmuxSurrounding()}
}

// finding is what one environment says of one tool.
type finding struct {
	path    string
	exit    int
	version string // first line of what it printed; "" when it was not run
	err     string // why nothing is known
	fix     string // what helps, when it is not a repair
}

// probeScript asks for all tools in one shell. Every line that counts carries
// a nonce, because start-up files may print whatever they like.
func probeScript(nonce string, tools []tool, run bool) string {
	var b strings.Builder
	// What a tool writes on its first start is the agent's state: private.
	b.WriteString("umask 077\nprobe() {\n\tp=$(command -v \"$1\") || { echo \"" + nonce + "|$1||127|\"; return; }\n")
	// The text of an alias may have any form.
	b.WriteString("\tcase $p in /*) ;; *) echo \"" + nonce + "|$1|-|127|\"; return;; esac\n")
	if run {
		// Executor takes 17 s for its version in an emulated machine, and took
		// over a minute while its host was busy.
		b.WriteString("\to=$(timeout 240 \"$1\" \"$2\" </dev/null 2>&1); r=$?\n\to=${o%%\n*}\n")
	} else {
		b.WriteString("\tr=0 o=\n\t[ -x \"$p\" ] || r=126\n")
	}
	b.WriteString("\tprintf '%s|%s|%s|%s|%.200s\\n' '" + nonce + "' \"$1\" \"$p\" \"$r\" \"$o\"\n}\n")
	for _, t := range tools {
		b.WriteString("probe " + t.name + " " + t.versionArg + "\n")
	}
	return b.String()
}

// parseProbe reads the lines of a probe, strictly.
func parseProbe(out, nonce string, tools []tool) map[string]finding {
	found := map[string]finding{}
	for line := range strings.Lines(out) {
		rest, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), nonce+"|")
		if !ok {
			continue
		}
		f := strings.SplitN(rest, "|", 4)
		if len(f) != 4 || !slices.ContainsFunc(tools, func(t tool) bool { return t.name == f[0] }) {
			continue
		}
		exit, err := strconv.Atoi(f[2])
		if err != nil || exit < 0 || exit > 255 || len(f[1]) > 4096 {
			continue
		}
		if f[1] != "" && !filepath.IsAbs(f[1]) {
			// An alias or a function of the user's shell: it is found there,
			// but it is not the program that was asked for.
			found[f[0]] = finding{
				exit: 127, err: "is an alias or a function there",
				fix: "bash -lc 'type " + f[0] + "' # shows it; remove it from ~/.profile, or from what that reads",
			}
			continue
		}
		found[f[0]] = finding{path: f[1], exit: exit, version: wire.Printable(strings.TrimSpace(f[3]))}
	}
	for _, t := range tools {
		if _, ok := found[t.name]; !ok {
			found[t.name] = finding{exit: -1, err: "no answer"}
		}
	}
	return found
}

// How long a probe may take. One that runs no tool has only the start of a
// shell to wait for, a second in an emulated machine, unless a start-up file
// waits for somebody to type something.
const (
	lookLimit = 2 * time.Minute
	runLimit  = 12 * time.Minute
	undoLimit = 30 * time.Second
)

// probe asks for tools in one environment.
func probe(ctx context.Context, l layout.Layout, s surrounding, tools []tool, run bool, log io.Writer) map[string]finding {
	limit := s.limit
	if run {
		limit = runLimit
	}
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var raw [8]byte
	_, _ = rand.Read(raw[:]) // never fails, by its documentation
	nonce := "hb" + hex.EncodeToString(raw[:])
	args := s.command(probeScript(nonce, tools, run), nonce, limit)
	cmd := l.AgentCommand(within, args[0], args[1:]...)
	out := &limited{max: 256 << 10}
	cmd.Stdout, cmd.Stderr = out, log
	err := cmd.Run()
	if err != nil && s.undo != nil {
		undo(ctx, l, s.undo(nonce))
	}
	found := parseProbe(out.String(), nonce, tools)
	if err == nil {
		return found
	}
	for name, f := range found {
		if f.exit >= 0 {
			continue
		}
		f.err = "no answer: " + err.Error()
		if !run && ctx.Err() == nil && within.Err() != nil {
			f.err, f.fix = "no answer within "+limit.String(), s.slow
		}
		found[name] = f
	}
	return found
}

// undo runs a command that cleans up, also when ctx has ended.
func undo(ctx context.Context, l layout.Layout, args []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	_ = l.AgentCommand(ctx, args[0], args[1:]...).Run() // what is not there cannot be ended
}

// survey is the state of all required tools in all environments.
type survey struct {
	tools []tool
	envs  []string
	found map[string]map[string]finding // by environment, then tool
}

// look runs the survey. The tools themselves are run once, in the service
// environment; in the others a tool is run only when it is another program
// than there, so that the whole takes seconds. Tools that have told their
// version a moment ago are not run again there: each run is a matter of half a
// minute in an emulated machine.
func look(ctx context.Context, l layout.Layout, settings layout.Settings, told map[string]string, starts Started, log io.Writer) survey {
	s := survey{tools: requiredTools(l, settings), found: map[string]map[string]finding{}}
	var mu sync.Mutex
	var wg sync.WaitGroup
	around := surroundings(l)
	for i, env := range around {
		s.envs = append(s.envs, env.name)
		wg.Go(func() {
			var found map[string]finding
			if i == 0 {
				found = probeOnce(ctx, l, env, s.tools, told, starts, log)
			} else {
				found = probe(ctx, l, env, s.tools, false, log)
			}
			mu.Lock()
			defer mu.Unlock()
			s.found[env.name] = found
		})
	}
	wg.Wait()
	reference := s.found[around[0].name]
	for _, env := range around[1:] {
		var others []tool
		for _, t := range s.tools {
			if f := s.found[env.name][t.name]; f.exit == 0 && f.path != reference[t.name].path {
				others = append(others, t)
			}
		}
		if len(others) > 0 {
			for name, f := range probe(ctx, l, env, others, true, log) {
				if slices.ContainsFunc(others, func(t tool) bool { return t.name == name }) {
					s.found[env.name][name] = f
				}
			}
		}
	}
	return s
}

// probeOnce runs the tools that have not told their version yet. The word of
// the others counts for the launcher that it was asked of.
func probeOnce(ctx context.Context, l layout.Layout, env surrounding, tools []tool, told map[string]string, starts Started, log io.Writer) map[string]finding {
	paths := map[string]finding{}
	if len(told) > 0 {
		paths = probe(ctx, l, env, tools, false, log)
	}
	found := map[string]finding{}
	var rest []tool
	for _, t := range tools {
		f := paths[t.name]
		if version, ok := told[t.name]; ok && f.trouble() == "" && f.path == l.Path("/usr/local/bin/"+t.name) {
			f.version = version
			found[t.name] = f
		} else {
			rest = append(rest, t)
		}
	}
	maps.Copy(found, probeApart(ctx, l, env, rest, starts, log))
	return found
}

// probeApart runs tools, the slowest beside the others. One that has just shown
// that it starts is only looked for.
func probeApart(ctx context.Context, l layout.Layout, env surrounding, tools []tool, starts Started, log io.Writer) map[string]finding {
	found := map[string]finding{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, group := range lanes(tools, func(t tool) string { return t.name }) {
		wg.Go(func() {
			run := len(group) != 1 || starts == nil || !starts(ctx, group[0].name)
			f := probe(ctx, l, env, group, run, log)
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(found, f)
		})
	}
	wg.Wait()
	return found
}

// trouble says what is wrong with a finding, or "".
func (f finding) trouble() string {
	switch {
	case f.err != "":
		return f.err
	case f.path == "":
		return "not found"
	case f.exit != 0:
		return strings.TrimSpace(fmt.Sprintf("%s exits with %d %s", f.path, f.exit, f.version))
	}
	return ""
}

// checks makes one check per tool.
func (s survey) checks(fix string) []wire.Check {
	var checks []wire.Check
	for _, t := range s.tools {
		c := wire.Check{ID: "tool." + t.name, Status: wire.Pass}
		reference := s.found[s.envs[0]][t.name]
		helps := fix
		var bad []string
		for _, env := range s.envs {
			f := s.found[env][t.name]
			if why := f.trouble(); why != "" {
				bad = append(bad, env+": "+why)
			}
			if f.fix != "" {
				helps = f.fix
			}
		}
		version := displayVersion(reference.version)
		if len(bad) > 0 {
			c.Status, c.Fix = wire.Fail, helps
			c.Summary = t.name + " is missing or broken in: " + strings.Join(failedEnvs(bad), ", ")
			c.Evidence = strings.Join(bad, "; ")
			if version != "" {
				c.Evidence += "; version " + version
			}
		} else {
			c.Summary = strings.TrimSpace(t.name + " " + version)
			c.Evidence = reference.path + " in: " + strings.Join(s.envs, ", ")
		}
		checks = append(checks, c)
	}
	return checks
}

func failedEnvs(bad []string) []string {
	var names []string
	for _, b := range bad {
		name, _, _ := strings.Cut(b, ":")
		names = append(names, name)
	}
	return names
}

var plainNumber = regexp.MustCompile(`\b[0-9]+\b`)

// displayVersion prefers the version in a tool's words to the words.
func displayVersion(words string) string {
	if v := findVersion(words); v != "" {
		return v
	}
	if v := plainNumber.FindString(words); v != "" {
		return v // less counts its releases
	}
	return words
}

// verify is the last word on the tools: none can be missing silently.
func verify(ctx context.Context, r *run) error {
	if !r.l.Real() {
		for _, t := range managedTools(r.settings()) {
			if path := r.l.Path("/usr/local/bin/" + t.name); !exists(path) {
				return fmt.Errorf("%s is missing: %s", t.name, path)
			}
		}
	}
	if r.prepared {
		r.note("already verified: %d tools", len(r.versions.Tools))
		return nil
	}
	s := look(ctx, r.l, r.settings(), r.probed, nil, r.log)
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.fault(); err != nil {
		return err
	}
	r.versions = s.manifest()
	r.note("all there: %d tools, in %s", len(s.tools), strings.Join(s.envs, ", "))
	return writeVerified(r.l, r.versions)
}

// fault says which tools are missing or broken, and what helps if anything
// does but a repair; nil means none.
func (s survey) fault() error {
	var bad []string
	helps := ""
	for _, c := range s.checks("") {
		if c.Status != wire.Pass {
			bad = append(bad, strings.TrimPrefix(c.ID, "tool.")+" ("+c.Evidence+")")
			helps = cmp.Or(helps, c.Fix)
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return &hintedError{errors.New("missing or broken: " + strings.Join(bad, ", ")), helps}
}

// verifiedPath is a file of the system that says which tools were verified in
// it, for the copies of the system. The runtime manifest is part of the state.
func verifiedPath(l layout.Layout) string { return filepath.Join(l.Opt(), "verified.json") }

func writeVerified(l layout.Layout, m wire.RuntimeManifest) error {
	m.Time = time.Time{} // what does not change is not written again
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	_, err = writeIfDiffers(verifiedPath(l), append(data, '\n'), 0o644)
	return err
}

func readVerified(l layout.Layout) (wire.RuntimeManifest, bool) {
	data, err := os.ReadFile(verifiedPath(l))
	var m wire.RuntimeManifest
	if err != nil || wire.DecodeStrict(data, &m) != nil || m.Schema != 1 || len(m.Tools) == 0 {
		return wire.RuntimeManifest{}, false
	}
	m.Time = time.Now().UTC().Truncate(time.Second)
	return m, true
}

// lists reports whether m knows every one of the tools.
func lists(m wire.RuntimeManifest, tools []tool) bool {
	return !slices.ContainsFunc(tools, func(t tool) bool {
		return !slices.ContainsFunc(m.Tools, func(v wire.ToolVersion) bool { return v.Name == t.name })
	})
}

// Started reports whether a tool has just been started in the service
// environment, by the same name, and has proven that it works.
type Started func(ctx context.Context, tool string) bool

// Checks asks every required tool for its version, by name, as the agent, in
// login, non-login, tmux and service environments. starts may be nil.
func Checks(ctx context.Context, l layout.Layout, starts Started) []wire.Check {
	settings, err := l.ReadSettings()
	if err != nil {
		return []wire.Check{{
			ID: "tool.settings", Status: wire.Fail, Summary: "the box has not been provisioned",
			Evidence: err.Error(), Fix: "box repair NAME",
		}}
	}
	ctx, cancel := context.WithTimeout(ctx, 12*time.Minute)
	defer cancel()
	return look(ctx, l, settings, nil, starts, io.Discard).checks("box repair " + settings.BoxName)
}

// Versions collects the versions of the tools. HB is left to the caller.
func Versions(ctx context.Context, l layout.Layout) (wire.RuntimeManifest, error) {
	settings, err := l.ReadSettings()
	if err != nil {
		return wire.RuntimeManifest{}, fmt.Errorf("read settings: %w", err)
	}
	tools := requiredTools(l, settings)
	env := surroundings(l)[0]
	s := survey{tools: tools, envs: []string{env.name}, found: map[string]map[string]finding{
		env.name: probe(ctx, l, env, tools, true, io.Discard),
	}}
	return s.manifest(), ctx.Err()
}

func (s survey) manifest() wire.RuntimeManifest {
	m := wire.RuntimeManifest{Schema: 1, Time: time.Now().UTC().Truncate(time.Second)}
	for _, t := range s.tools {
		if f := s.found[s.envs[0]][t.name]; f.trouble() == "" {
			m.Tools = append(m.Tools, wire.ToolVersion{Name: t.name, Version: displayVersion(f.version), Path: f.path})
		}
	}
	return m
}

func (r *run) settings() layout.Settings {
	return layout.Settings{
		BoxName: r.req.BoxName, HostPort: r.req.HostPort,
		Executor: r.req.Executor, Hermes: r.req.Hermes, WireMCP: r.req.WireMCP,
	}
}

// hbVersion asks this very program for its version.
func hbVersion(ctx context.Context, l layout.Layout) string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := l.AgentCommand(ctx, self, "--version").Output()
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return wire.Printable(strings.TrimPrefix(strings.TrimSpace(line), "hb "))
}
