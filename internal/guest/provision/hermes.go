package provision

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"hermes-box-lite/internal/guest/layout"
)

const (
	// hermesInstaller is the address that Hermes Agent's own documentation
	// gives for its installer.
	hermesInstaller = "https://hermes-agent.nousresearch.com/install.sh"
	hermesDir       = "/opt/hermes-box/hermes"
	hermesHome      = "/data/home/agent/.hermes"
	hermesOff       = "; INSTALL_HERMES=false in box.env makes a box without Hermes"
	maxLauncher     = 64 << 10
)

// hermes runs the official installer. It runs as the agent, because it fills
// the agent's ~/.hermes; its code and its Python go below /opt/hermes-box, so
// that they stay out of the state.
func hermes(ctx context.Context, r *run) error {
	if !r.req.Hermes {
		r.note("not asked for")
		return nil
	}
	pin := r.req.Versions.Hermes
	have := r.hermesVersion(ctx)
	// Unlike the other tools Hermes is not refreshed unasked: its installer
	// takes minutes, and Hermes has an update command of its own.
	if have != "" && (pin == "" || have == pin) {
		r.note("already there: hermes %s", have)
		return nil
	}
	if err := r.installHermes(ctx, pin); err != nil {
		var hint *hintedError
		if errors.As(err, &hint) {
			return err
		}
		return &hintedError{err, "the transcript has the installer's whole output" + hermesOff}
	}
	now := r.hermesVersion(ctx)
	if now == "" {
		return &hintedError{
			errors.New("hermes --version does not work after its installation"),
			"the transcript has the installer's whole output" + hermesOff,
		}
	}
	if pin != "" && now != pin {
		r.warn("hermes says it is %s, HERMES_VERSION asks for %s", now, pin)
	}
	r.note("installed hermes %s", now)
	return nil
}

func (r *run) hermesVersion(ctx context.Context) string {
	if !r.linked("hermes") {
		return ""
	}
	out, err := r.quiet(r.l.AgentCommand(ctx, "hermes", "--version"))
	if err != nil {
		return ""
	}
	return findVersion(out)
}

func (r *run) installHermes(ctx context.Context, pin string) error {
	source := r.req.HermesInstaller
	if source == "" {
		source = hermesInstaller
	}
	script, err := r.openInstaller(ctx, source)
	if err != nil {
		return err
	}
	defer func() { _ = script.Close() }()
	scratch, drop, err := r.scratch()
	if err != nil {
		return err
	}
	defer drop()
	if err := os.Chown(scratch, layout.AgentUID, layout.AgentGID); err != nil {
		return err
	}
	for _, dir := range []string{hermesDir, hermesDir + "-runtime"} {
		if _, err := directory(dir, 0o755, layout.AgentUID, layout.AgentGID); err != nil {
			return err
		}
	}
	// Secrets will be in it; the installer would let others look.
	if err := r.loud(r.l.AgentCommand(ctx, "/bin/mkdir", "-p", "-m", "700", hermesHome)); err != nil {
		return err
	}
	args := []string{"-s", "--", "--non-interactive", "--hermes-home", hermesHome, "--dir", hermesDir, "--skip-setup"}
	if pin != "" {
		args = append(args, "--commit", "v"+pin)
	}
	cmd := r.l.AgentCommand(ctx, "/bin/bash", args...)
	// The script comes on standard input, as in the documented
	// `curl … | bash -s --`: the file is root's alone.
	cmd.Stdin = script
	cmd.Env = append(cmd.Env, networkEnvironment(r.req)...)
	cmd.Env = append(cmd.Env,
		"DEBIAN_FRONTEND=noninteractive",
		"TMPDIR="+scratch,
		// uv's defaults would put Python and a cache into the state.
		"UV_PYTHON_INSTALL_DIR="+hermesDir+"-runtime/python",
		"UV_TOOL_DIR="+hermesDir+"-runtime/tools",
		"UV_CACHE_DIR="+scratch+"/uv",
		"npm_config_cache="+scratch+"/npm",
	)
	if err := r.loud(cmd); err != nil {
		return explain(fmt.Errorf("the installer of Hermes (%s): %w", source, err), "a server that Hermes' installer needs", hermesOff)
	}
	return r.linkHermes()
}

// openInstaller returns the installer's script, downloaded if need be.
func (r *run) openInstaller(ctx context.Context, source string) (*os.File, error) {
	if filepath.IsAbs(source) {
		f, err := os.Open(source)
		if err != nil {
			return nil, err
		}
		if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
			return nil, errors.Join(fmt.Errorf("%s is not a file", source), err, f.Close())
		}
		return f, nil
	}
	dir, err := os.MkdirTemp("", "hermes-installer-*") // 0700
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }() // the open file outlives its name
	path := filepath.Join(dir, "install.sh")
	err = r.retry(ctx, "download", func(ctx context.Context) error {
		return r.loud(r.command(ctx, "curl", "-fsSL", "--proto", "=http,https", "--connect-timeout", "10", "--max-time", "120",
			"--max-filesize", "5000000", "-o", path, "--", source))
	})
	if err != nil {
		return nil, explain(fmt.Errorf("download Hermes' installer from %s: %w", source, err), "Hermes' installer", hermesOff)
	}
	return os.Open(path)
}

// linkHermes puts Hermes on every PATH. Depending on the installer's version
// its launcher is somewhere in the code's directory or in a home.
func (r *run) linkHermes() error {
	const launcher = "/usr/local/bin/hermes"
	candidates := []string{
		hermesDir + "/venv/bin/hermes", hermesDir + "/.venv/bin/hermes", hermesDir + "/bin/hermes", hermesDir + "/hermes",
		"/data/home/agent/.local/bin/hermes", "/root/.local/bin/hermes",
	}
	for _, c := range candidates {
		real, err := filepath.EvalSymlinks(c)
		if err != nil {
			continue
		}
		fi, err := os.Stat(real)
		if err != nil || !fi.Mode().IsRegular() || fi.Mode().Perm()&0o111 == 0 {
			continue
		}
		if strings.HasPrefix(real, hermesDir) {
			_, err := link(launcher, real)
			return err
		}
		// A script in a home is not on every PATH, and a home is state: keep
		// a copy of it with the tools.
		data, err := readBounded(real, maxLauncher)
		if err != nil {
			return err
		}
		kept := hermesDir + "-runtime/hermes"
		if _, err := writeOwned(kept, data, 0o755, 0, 0); err != nil {
			return err
		}
		_, err = link(launcher, kept)
		return err
	}
	if exists(launcher) {
		return nil // the installer put it there itself
	}
	return fmt.Errorf("the installer left no launcher (looked for %s)", strings.Join(candidates, ", "))
}

// readBounded reads a file where the agent may have put anything: it waits for
// no pipe and follows no link.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil, errors.Join(fmt.Errorf("%s is not a file", path), err)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	return data, err
}
