package provision

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
)

// npmPrefix is where npm puts the tools.
func (r *run) npmPrefix() string { return filepath.Join(r.l.Opt(), "npm") }

// npmTool is a tool that comes as an npm package.
type npmTool struct {
	name   string // of the launcher
	pkg    string
	pin    string
	native []string // where the package keeps its own binary, should its install script be blocked
}

func (r *run) npmTools() []npmTool {
	all := []npmTool{
		{"claude", "@anthropic-ai/claude-code", r.req.Versions.Claude, []string{
			"node_modules/@anthropic-ai/claude-code-linux-*/claude", "../claude-code-linux-*/claude",
		}},
		{"codex", "@openai/codex", r.req.Versions.Codex, nil},
	}
	if r.req.Executor {
		all = append(all, npmTool{"executor", "executor", r.req.Versions.Executor, []string{
			"node_modules/executor-linux-*/bin/executor",
		}})
	}
	return all
}

// tools installs the agents below a prefix that is root's: a tool that could
// update itself would not be the one that was verified.
func tools(ctx context.Context, r *run) error {
	var scratch string
	for _, t := range r.npmTools() {
		dir := filepath.Join(r.npmPrefix(), "lib/node_modules", t.pkg)
		have := r.healthyVersion(ctx, t, dir)
		if have != "" && (t.pin == have || t.pin == "" && !r.req.Refresh) {
			r.note("already there: %s %s", t.name, have)
			continue
		}
		if scratch == "" {
			var drop func()
			var err error
			if scratch, drop, err = r.scratch(); err != nil {
				return err
			}
			defer drop()
		}
		if have != "" && t.pin == "" {
			latest, err := r.npmLatest(ctx, scratch, t.pkg)
			if err != nil {
				r.warn("%s stays at %s: %v", t.name, have, err)
				continue
			}
			if latest == have {
				r.note("already the newest: %s %s", t.name, have)
				continue
			}
		}
		now, err := r.installTool(ctx, t, dir, scratch)
		if err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
		r.note("installed %s %s", t.name, now)
	}
	return nil
}

// healthyVersion is the installed version when the tool's own word agrees with
// npm's, else "": whatever is wrong is then mended by installing it again.
func (r *run) healthyVersion(ctx context.Context, t npmTool, dir string) string {
	version, err := packageVersion(dir)
	if err != nil || !r.linked(t.name) {
		return ""
	}
	w, asked := r.words[t.name]
	if !asked {
		w.said, w.err = r.askVersion(ctx, t.name)
	}
	if r.agrees(t.name, version, w) != nil {
		return ""
	}
	return version
}

// probeVersion asks the tool itself, as the agent.
func (r *run) probeVersion(ctx context.Context, tool, version string) error {
	said, err := r.askVersion(ctx, tool)
	return r.agrees(tool, version, word{said, err})
}

// agrees compares the tool's own word with what npm installed.
func (r *run) agrees(tool, version string, w word) error {
	if w.err != nil {
		return w.err
	}
	if said := findVersion(w.said); said != version {
		return fmt.Errorf("%s --version says %q, npm installed %s", tool, strings.TrimSpace(w.said), version)
	}
	r.told(tool, version)
	return nil
}

// told notes what a tool has said of itself in this Run.
func (r *run) told(tool, version string) {
	if r.probed == nil {
		r.probed = map[string]string{}
	}
	r.probed[tool] = version
}

var versionWord = regexp.MustCompile(`[0-9]+\.[0-9]+(?:\.[0-9]+)?(?:-[0-9A-Za-z.-]+)?`)

// findVersion returns the first thing in a program's words that looks like a
// version.
func findVersion(s string) string { return versionWord.FindString(s) }

func (r *run) npm(ctx context.Context, scratch string, args ...string) (string, error) {
	var out string
	err := r.retry(ctx, "npm "+args[0], func(ctx context.Context) error {
		cmd := r.command(ctx, r.l.Path("/usr/local/bin/npm"), args...)
		cmd.Env = r.env(npmEnvironment(scratch)...)
		// Terminated, npm puts back what it has moved aside.
		defer gently(cmd, syscall.SIGTERM)()
		var err error
		out, err = r.quiet(cmd)
		return err
	})
	return out, explain(err, "the npm registry", "")
}

func (r *run) npmLatest(ctx context.Context, scratch, pkg string) (string, error) {
	out, err := r.npm(ctx, scratch, "view", pkg+"@latest", "version")
	if err != nil {
		return "", err
	}
	if out = strings.TrimSpace(out); !semver().MatchString(out) {
		return "", fmt.Errorf("npm says that the latest version is %q", out)
	}
	return out, nil
}

func (r *run) installTool(ctx context.Context, t npmTool, dir, scratch string) (string, error) {
	if err := dropRetired(dir); err != nil {
		return "", err
	}
	// "@latest" and not nothing: without it npm silently picks an older
	// release that suits an older node.
	wanted := t.pin
	if wanted == "" {
		wanted = "latest"
	}
	_, err := r.npm(ctx, scratch, "install", "--global", "--prefix", r.npmPrefix(), "--no-audit", "--no-fund",
		"--loglevel", "error", "--allow-scripts="+t.pkg, t.pkg+"@"+wanted)
	if err != nil {
		return "", err
	}
	version, err := packageVersion(dir)
	if err != nil {
		return "", err
	}
	if t.pin != "" && version != t.pin {
		return "", fmt.Errorf("npm installed %s instead of %s", version, t.pin)
	}
	freed, err := dropForeignLibc(dir)
	if err != nil {
		return "", err
	}
	if freed != "" {
		r.note("%s: removed %s, built for another C library", t.name, freed)
	}
	launcher := r.l.Path("/usr/local/bin/" + t.name)
	if _, err := link(launcher, filepath.Join(r.npmPrefix(), "bin", t.name)); err != nil {
		return "", err
	}
	probeErr := r.probeVersion(ctx, t.name, version)
	for _, pattern := range t.native {
		if probeErr == nil {
			break
		}
		matches, _ := filepath.Glob(filepath.Join(dir, pattern)) // patterns are constant
		for _, native := range matches {
			if _, err := link(launcher, native); err != nil {
				return "", err
			}
			if err := r.probeVersion(ctx, t.name, version); err == nil {
				r.note("%s: the package's launcher does not work (%v); using its native binary", t.name, probeErr)
				return version, nil
			}
		}
	}
	return version, probeErr
}

// dropRetired removes what a killed npm has left of a package: it moves the old
// one aside, always to the same name, and where that name is taken npm 10 fails
// for ever with ENOTEMPTY.
func dropRetired(dir string) error {
	parent, base := filepath.Split(dir)
	parent = filepath.Clean(parent)
	if real, err := filepath.EvalSymlinks(parent); err != nil || real != parent {
		return nil // nothing there, or no place of ours
	}
	entries, err := os.ReadDir(parent)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), "."+base+"-") {
			if err := os.RemoveAll(filepath.Join(parent, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// dropForeignLibc removes the variants of a tool that are built for musl: every
// supported distribution has glibc, and each variant is over 100 MB.
func dropForeignLibc(dir string) (string, error) {
	var removed []string
	for _, pattern := range []string{"node_modules/*-musl", "node_modules/@*/*-musl"} {
		matches, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return "", err
		}
		for _, m := range matches {
			other := strings.TrimSuffix(m, "-musl")
			if !exists(other) {
				continue // the only one there is
			}
			if err := os.RemoveAll(m); err != nil {
				return "", err
			}
			removed = append(removed, filepath.Base(m))
		}
	}
	return strings.Join(removed, " "), nil
}
