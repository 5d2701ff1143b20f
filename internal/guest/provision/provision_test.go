package provision

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

func goodRequest() wire.ProvisionRequest {
	return wire.ProvisionRequest{Protocol: wire.Protocol, BoxName: "alpha", HostPort: 4790, NodeMajor: 22, Executor: true, WireMCP: true}
}

func certificate(t *testing.T, name string) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Unix(0, 0), NotAfter: time.Unix(4e9, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func TestValidate(t *testing.T) {
	if err := validate(goodRequest()); err != nil {
		t.Fatal(err)
	}
	full := goodRequest()
	full.Versions = wire.Pins{Claude: "2.1.197", Codex: "0.171.0", Executor: "1.5.9-beta.1", Hermes: "2026.9.24"}
	full.HTTPProxy, full.HTTPSProxy, full.NoProxy = "http://u:p%40@proxy.example:3128", "http://[::1]:8080/", "localhost,.example.com, 10.0.0.0/8"
	full.Timezone, full.HermesInstaller = "America/Argentina/Buenos_Aires", "https://example.com/install.sh"
	full.CABundle = "# ours\n" + certificate(t, "x")
	if err := validate(full); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*wire.ProvisionRequest){
		"protocol":           func(r *wire.ProvisionRequest) { r.Protocol++ },
		"name":               func(r *wire.ProvisionRequest) { r.BoxName = "../x" },
		"port":               func(r *wire.ProvisionRequest) { r.HostPort = 65536 },
		"node":               func(r *wire.ProvisionRequest) { r.NodeMajor = 4 },
		"env file":           func(r *wire.ProvisionRequest) { r.EnvFile = "a\x00" },
		"tag as version":     func(r *wire.ProvisionRequest) { r.Versions.Claude = "latest" },
		"range as version":   func(r *wire.ProvisionRequest) { r.Versions.Codex = "^1.2.3" },
		"option as version":  func(r *wire.ProvisionRequest) { r.Versions.Executor = "--registry=http://x" },
		"URL as version":     func(r *wire.ProvisionRequest) { r.Versions.Claude = "https://evil.example/x.tgz" },
		"version and more":   func(r *wire.ProvisionRequest) { r.Versions.Hermes = "1.2.3\nrm" },
		"proxy with a quote": func(r *wire.ProvisionRequest) { r.HTTPProxy = "http://a\";Dpkg::Pre-Invoke {\"x\";};//" },
		"proxy with a line":  func(r *wire.ProvisionRequest) { r.HTTPSProxy = "http://a\nLD_PRELOAD=/x" },
		"proxy scheme":       func(r *wire.ProvisionRequest) { r.HTTPProxy = "file:///etc/passwd" },
		"no proxy":           func(r *wire.ProvisionRequest) { r.NoProxy = "a\nb" },
		"time zone":          func(r *wire.ProvisionRequest) { r.Timezone = "../../etc/passwd" },
		"installer":          func(r *wire.ProvisionRequest) { r.HermesInstaller = "ftp://x/y" },
		"installer relative": func(r *wire.ProvisionRequest) { r.HermesInstaller = "install.sh" },
		"CA":                 func(r *wire.ProvisionRequest) { r.CABundle = "hello" },
	} {
		r := full
		spoil(&r)
		err := validate(r)
		if err == nil {
			t.Errorf("%s: accepted", name)
		} else if strings.Contains(err.Error(), "p%40") {
			t.Errorf("%s: %v shows the proxy's password", name, err)
		}
	}
}

func TestParseBundle(t *testing.T) {
	a, b := certificate(t, "a"), certificate(t, "b")
	key := string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")}))
	junk := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("junk")}))
	for _, c := range []struct {
		name, text string
		n          int // -1: refused
	}{
		{"none", " \n", 0},
		{"one", a, 1},
		{"two and words", "# A\n" + a + "\nB:\n" + b, 2},
		{"twice", a + b + a, 2},
		{"crlf", strings.ReplaceAll(a, "\n", "\r\n"), 1},
		{"private key", a + key, -1},
		{"junk in PEM", junk, -1},
		{"HTML", "<html>", -1},
		{"cut", a + b[:len(b)-40], -1},
		{"huge", strings.Repeat("#\n", maxBundle), -1},
	} {
		certs, err := parseBundle(c.text)
		if c.n < 0 != (err != nil) || err == nil && len(certs) != c.n {
			t.Errorf("%s: %d certificates, %v", c.name, len(certs), err)
		}
	}
}

func TestCertificates(t *testing.T) {
	root := t.TempDir()
	dir, bundle := filepath.Join(root, "local/hermes-box"), filepath.Join(root, "ssl/certs/ca.crt")
	a, b := certificate(t, "a"), certificate(t, "b")
	sync := func(text string) [3]int {
		t.Helper()
		certs, err := parseBundle(text)
		if err != nil {
			t.Fatal(err)
		}
		stale, added, err := syncCertificates(dir, certs)
		if err != nil {
			t.Fatal(err)
		}
		appended, err := appendMissing(bundle, certs)
		if err != nil {
			t.Fatal(err)
		}
		return [3]int{stale, added, appended}
	}
	if got := sync(a); got != [3]int{0, 1, 1} {
		t.Errorf("first: %v", got)
	}
	if got := sync(a); got != [3]int{0, 0, 0} {
		t.Errorf("again: %v", got)
	}
	if got := sync(a + b); got != [3]int{0, 1, 1} {
		t.Errorf("one more: %v", got)
	}
	if data, err := os.ReadFile(bundle); err != nil || string(data) != a+b {
		t.Errorf("bundle: %v %q", err, data)
	}
	if got := sync(b); got != [3]int{1, 0, 0} {
		t.Errorf("one less: %v", got)
	}
	if got := sync(""); got != [3]int{1, 0, 0} {
		t.Errorf("none: %v", got)
	}
}

func TestClaim(t *testing.T) {
	path := filepath.Join(t.TempDir(), "passwd")
	if err := os.WriteFile(path, []byte("root:x:0:0:root:/root:/bin/bash\nubuntu:x:1000:1000::/home/ubuntu:/bin/bash\nagent:x:1001:1001::/data/home/agent:/bin/bash\nbroken\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	all, err := readAccounts(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		id    int
		found bool
		err   string
	}{
		{"agent", 1001, true, ""},
		{"other", 1002, false, ""},
		{"agent", 1002, false, "with id 1001"},
		{"other", 1001, false, `for "agent"`},
		{"agent", 1000, false, ""},
	} {
		a, err := claim("user", all, c.name, c.id)
		if c.name == "agent" && c.id == 1000 {
			if err == nil {
				t.Error("accepted two conflicts")
			}
			continue
		}
		if (a != nil) != c.found || (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s %d: %v %v", c.name, c.id, a, err)
		}
	}
}

func TestNetworkEnvironment(t *testing.T) {
	r := goodRequest()
	if got := networkEnvironment(r); len(got) != 0 {
		t.Errorf("nothing asked for: %v", got)
	}
	r.HTTPSProxy = "http://p:1"
	want := []string{
		"HTTPS_PROXY=http://p:1", "https_proxy=http://p:1",
		"NO_PROXY=127.0.0.1,localhost,::1", "no_proxy=127.0.0.1,localhost,::1",
	}
	if diff := cmp.Diff(want, networkEnvironment(r)); diff != "" {
		t.Error(diff)
	}
	r.NoProxy = "localhost, .example.com"
	if got := networkEnvironment(r)[2]; got != "NO_PROXY=localhost,.example.com,127.0.0.1,::1" {
		t.Error(got)
	}
	r.CABundle = certificate(t, "x")
	if got := strings.Join(networkEnvironment(r), " "); !strings.Contains(got, "NODE_EXTRA_CA_CERTS="+bundlePath) {
		t.Error(got)
	}
}

func TestAptProxies(t *testing.T) {
	l := layout.At(t.TempDir())
	var events bytes.Buffer
	r := &run{l: l, req: goodRequest(), emit: wire.NewEmitter(&events), log: io.Discard}
	r.req.HTTPProxy, r.req.NoProxy = "http://u:p@proxy:3128", "localhost, .example.com,mirror.example,10.0.0.0/8"
	if err := r.aptProxies(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(l.Path(aptProxy))
	if err != nil {
		t.Fatal(err)
	}
	want := "Acquire::http::Proxy \"http://u:p@proxy:3128\";\nAcquire::http::Proxy::localhost \"DIRECT\";\nAcquire::https::Proxy::localhost \"DIRECT\";\n" +
		"Acquire::http::Proxy::mirror.example \"DIRECT\";\nAcquire::https::Proxy::mirror.example \"DIRECT\";\n"
	if _, got, _ := strings.Cut(string(data), "\n"); got != want {
		t.Error(cmp.Diff(want, got))
	}
	if fi, _ := os.Stat(l.Path(aptProxy)); fi.Mode().Perm() != 0o640 {
		t.Errorf("others can read it: %v", fi.Mode())
	}
	r.req.HTTPProxy = ""
	if err := errors.Join(r.aptProxies(), r.aptProxies()); err != nil || exists(l.Path(aptProxy)) {
		t.Errorf("not taken back: %v", err)
	}
	if strings.Contains(events.String(), "u:p") {
		t.Error("an event shows the password")
	}
}

func TestParsers(t *testing.T) {
	for in, want := range map[string]string{
		"2.1.332 (Claude Code)\n": "2.1.332", "codex-cli 0.171.0": "0.171.0", "executor v1.5.9": "1.5.9", "v22.23.5": "22.23.5",
		"tmux 3.3a": "3.3", "OpenSSH_9.2p1 Debian": "9.2", "1.0.0-beta.2": "1.0.0-beta.2", "none": "",
	} {
		if got := findVersion(in); got != want {
			t.Errorf("findVersion(%q) = %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{"less 590 (GNU regular expressions)": "590", "jq-1.6": "1.6", "words": "words"} {
		if got := displayVersion(in); got != want {
			t.Errorf("displayVersion(%q) = %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]int{"v22.1.0": 22, "v8.0.0": 8, "22.1.0": 0, "v22": 0, "": 0} {
		if got := majorOf(in); got != want {
			t.Errorf("majorOf(%q) = %d", in, got)
		}
	}
	for in, want := range map[string]string{`"1.2.3"`: "1.2.3", `["1.2.3","1.10.0"]`: "1.10.0", `[]`: "", `{"error":1}`: "", "": ""} {
		if got := lastVersion(in); got != want {
			t.Errorf("lastVersion(%q) = %q", in, got)
		}
	}
	for in, want := range map[string]int{
		"nodejs:\n  Installed: (none)\n  Candidate: 18.20.4+dfsg-1~deb12u1\n": 18, "  Candidate: 1:22.1\n": 22, "  Candidate: (none)\n": 0, "": 0,
	} {
		if got := candidateMajor(in); got != want {
			t.Errorf("candidateMajor(%q) = %d", in, got)
		}
	}
}

func TestCommandErrors(t *testing.T) {
	var log bytes.Buffer
	r := &run{l: layout.At(""), req: goodRequest(), emit: wire.NewEmitter(io.Discard), log: &log}
	sh := func(script string) error {
		return r.loud(r.command(context.Background(), "/bin/sh", "-c", script))
	}
	err := explain(sh(`echo working; echo "E: Failed to fetch http://u:secret@h/x  Could not resolve 'h'" >&2; exit 100`), "the mirror", "; or else")
	var hint interface{ Hint() string }
	if !errors.As(err, &hint) || !strings.Contains(hint.Hint(), "HTTP_PROXY") || !strings.Contains(hint.Hint(), "; or else") {
		t.Errorf("no usable hint: %v", err)
	}
	for _, part := range []string{"the mirror could not be reached", "exit code 100", "Could not resolve"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not say %q", err, part)
		}
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("%v shows a password", err)
	}
	if !strings.Contains(log.String(), "working") {
		t.Error("the transcript lacks the output")
	}
	err = explain(sh(`echo "curl: (60) SSL certificate problem: self-signed certificate" >&2; exit 60`), "x", "")
	if !errors.As(err, &hint) || !strings.Contains(hint.Hint(), "EXTRA_CA_FILE") {
		t.Errorf("no hint about CAs: %v", err)
	}
	if err := explain(sh(`echo "dpkg: broken" >&2; exit 1`), "x", ""); errors.As(err, &hint) {
		t.Errorf("a hint about the network for another reason: %v", err)
	}
	if err := sh(`i=0; while [ $i -lt 3000 ]; do echo "line $i"; i=$((i+1)); done; exit 3`); !strings.Contains(err.Error(), "line 2999") || len(err.Error()) > 2000 {
		t.Errorf("not the last lines: %.200s", err)
	}
}

// TestCommandKilled: when the context ends the program's children end too.
func TestCommandKilled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	pipeR, pipeW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pipeR.Close() }()
	r := &run{l: layout.At(""), req: goodRequest(), emit: wire.NewEmitter(io.Discard), log: io.Discard}
	cmd := r.command(ctx, "/bin/sh", "-c", "sleep 600 & echo up >&3; wait")
	cmd.ExtraFiles = []*os.File{pipeW}
	done := make(chan error, 1)
	go func() { done <- r.loud(cmd) }()
	buf := make([]byte, 8)
	if _, err := pipeR.Read(buf); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("no error")
	}
	_ = pipeW.Close()
	// The end of the pipe means that the grandchild, too, is gone.
	if err := pipeR.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := pipeR.Read(buf); err != io.EOF {
		t.Errorf("a child is still there: %v", err)
	}
}

func TestTmuxConf(t *testing.T) {
	for _, c := range []struct {
		v         tmuxRelease
		has, lack []string
	}{
		{tmuxRelease{3, 1}, []string{`terminal-overrides`}, []string{"extended-keys", "terminal-features", "passthrough"}},
		{tmuxRelease{3, 2}, []string{"terminal-features", "extended-keys on", "set-clipboard on"}, []string{"passthrough", "csi-u"}},
		{tmuxRelease{3, 4}, []string{"allow-passthrough on", "tmux-256color"}, []string{"csi-u"}},
		{tmuxRelease{3, 5}, []string{"csi-u", "mouse on"}, nil},
	} {
		text := tmuxConf(c.v, true)
		for _, s := range c.has {
			if !strings.Contains(text, s) {
				t.Errorf("%v lacks %q", c.v, s)
			}
		}
		for _, s := range c.lack {
			if strings.Contains(text, s) {
				t.Errorf("%v has %q", c.v, s)
			}
		}
	}
	if !strings.Contains(tmuxConf(tmuxRelease{3, 4}, false), "screen-256color") {
		t.Error("no fallback without terminfo")
	}
}

// TestTmuxAccepts loads the configuration into the tmux of this machine.
func TestTmuxAccepts(t *testing.T) {
	tmux, err := exec.LookPath("tmux")
	if err != nil {
		t.Skip("no tmux here")
	}
	out, err := exec.Command(tmux, "-V").Output()
	m := tmuxVersionText.FindSubmatch(out)
	if err != nil || m == nil {
		t.Fatalf("%q %v", out, err)
	}
	var v tmuxRelease
	if _, err := fmt.Sscanf(string(m[1])+" "+string(m[2]), "%d %d", &v.major, &v.minor); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "hb") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	conf := filepath.Join(dir, "tmux.conf")
	if err := os.WriteFile(conf, []byte(tmuxConf(v, true)), 0o644); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	t.Cleanup(func() { _ = exec.Command(tmux, "-S", socket, "kill-server").Run() })
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(tmux, append([]string{"-S", socket, "-f", "/dev/null"}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("tmux %v: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	run("new-session", "-d", "-s", "x", "sleep 600")
	run("source-file", conf)
	if got := run("show-options", "-gv", "default-terminal"); got != "tmux-256color" {
		t.Errorf("default-terminal %q", got)
	}
	if got := run("show-options", "-sv", "set-clipboard"); got != "on" {
		t.Errorf("set-clipboard %q", got)
	}
}

// TestProfileScript: the lines of the environment file arrive literally.
func TestProfileScript(t *testing.T) {
	dir := t.TempDir()
	env := filepath.Join(dir, "environment")
	value := "http://u:$(touch " + dir + "/bad)`id`'\"\\ ;x@h"
	if err := os.WriteFile(env, []byte("# words\nA_PROXY="+value+"\n=x\n1BAD=y\n\nLAST=1"), 0o644); err != nil {
		t.Fatal(err)
	}
	script := strings.ReplaceAll(profileScript, "/opt/hermes-box/environment", env)
	for _, shell := range []string{"/bin/sh", "/bin/bash"} {
		out, err := exec.Command(shell, "-euc", script+"\nprintf '%s|%s' \"$A_PROXY\" \"$LAST\"").CombinedOutput()
		if err != nil || string(out) != value+"|1" {
			t.Errorf("%s: %q %v", shell, out, err)
		}
	}
	if exists(filepath.Join(dir, "bad")) {
		t.Error("a value was executed")
	}
}

func TestProbe(t *testing.T) {
	dir := t.TempDir()
	write := func(name, script string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write("good", `echo "good 1.2.3"; echo more`)
	write("bad", `echo "cannot start" >&2; exit 42`)
	write("loud", `printf '|%s|\033[31mred\n' "$1"`)
	tools := []tool{{"good", "--version"}, {"bad", "--version"}, {"loud", "-V"}, {"missing", "--version"}}
	nonce := "hb0123"
	for _, shell := range []string{"/bin/sh", "/bin/bash"} {
		cmd := exec.Command(shell, "-c", "echo noise; "+probeScript(nonce, tools, true))
		cmd.Env = []string{"PATH=" + dir + ":/usr/bin:/bin"}
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]finding{
			"good":    {path: dir + "/good", version: "good 1.2.3"},
			"bad":     {path: dir + "/bad", exit: 42, version: "cannot start"},
			"loud":    {path: dir + "/loud", version: `|-V|\x1b[31mred`},
			"missing": {exit: 127},
		}
		if diff := cmp.Diff(want, parseProbe(string(out), nonce, tools), cmp.AllowUnexported(finding{})); diff != "" {
			t.Errorf("%s: %s", shell, diff)
		}
	}
	none := parseProbe("hb0123|stranger|/x|0|1\nhb0123|good|/x|zero|1\nother|good|/x|0|1\n", nonce, tools[:1])
	if none["good"].trouble() == "" {
		t.Error("took a stranger's answer")
	}
}

// A name that the user's shell takes for itself is nothing that a repair mends.
func TestShadowedTool(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "claude"), []byte("#!/bin/sh\necho 1.2.3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	tools := []tool{{"claude", "--version"}}
	const want = "bash -lc 'type claude' # shows it; remove it from ~/.profile, or from what that reads"
	for _, profile := range []string{"shopt -s expand_aliases; alias claude='claude --x | tee |0| log'\n", "claude() { :; }\n"} {
		for _, run := range []bool{false, true} {
			cmd := exec.Command("/bin/bash", "-c", profile+probeScript("n", tools, run))
			cmd.Env = []string{"PATH=" + dir + ":/usr/bin:/bin"}
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			s := survey{tools: tools, envs: []string{"service", "login"}, found: map[string]map[string]finding{
				"service": {"claude": {path: dir + "/claude"}}, "login": parseProbe(string(out), "n", tools),
			}}
			c := s.checks("box repair alpha")[0]
			if c.Status != wire.Fail || !strings.Contains(c.Evidence, "login: is an alias or a function") || c.Fix != want {
				t.Errorf("%q: %+v", profile, c)
			}
			var hint interface{ Hint() string }
			if err := s.fault(); !errors.As(err, &hint) || hint.Hint() != want {
				t.Errorf("%q: a repair says %v", profile, err)
			}
		}
	}
}

// TestSurveyChecks: a tool that is missing in one environment only is a fault
// that names it.
func TestSurveyChecks(t *testing.T) {
	fine := finding{path: "/usr/local/bin/claude", version: "2.1.332 (Claude Code)"}
	s := survey{tools: []tool{{"claude", "--version"}}, envs: []string{"service", "login", "tmux"}, found: map[string]map[string]finding{
		"service": {"claude": fine}, "login": {"claude": fine}, "tmux": {"claude": {exit: 127}},
	}}
	want := []wire.Check{{
		ID: "tool.claude", Status: wire.Fail, Summary: "claude is missing or broken in: tmux",
		Evidence: "tmux: not found; version 2.1.332", Fix: "box repair alpha",
	}}
	if diff := cmp.Diff(want, s.checks("box repair alpha")); diff != "" {
		t.Error(diff)
	}
	s.found["tmux"]["claude"] = fine
	want = []wire.Check{{
		ID: "tool.claude", Status: wire.Pass, Summary: "claude 2.1.332", Evidence: "/usr/local/bin/claude in: service, login, tmux",
	}}
	if diff := cmp.Diff(want, s.checks("box repair alpha")); diff != "" {
		t.Error(diff)
	}
	delete(s.found, "tmux") // the environment itself could not be made
	s.found["tmux"] = parseProbe("", "n", s.tools)
	if got := s.checks("")[0]; got.Status != wire.Fail {
		t.Error("a silent environment counts as healthy")
	}
}

// A shell that gives no answer in time is nothing that a repair mends.
func TestSlowStartUpFiles(t *testing.T) {
	l := layout.At(t.TempDir())
	if err := os.MkdirAll(l.Home(), 0o755); err != nil {
		t.Fatal(err)
	}
	tools := []tool{{"claude", "--version"}}
	slow := surrounding{
		name: "login", limit: time.Millisecond, slow: fixWaiting,
		command: func(string, string, time.Duration) []string { return []string{"/bin/sleep", "600"} },
	}
	s := survey{tools: tools, envs: []string{"login"}, found: map[string]map[string]finding{
		"login": probe(t.Context(), l, slow, tools, false, io.Discard),
	}}
	c := s.checks("box repair alpha")[0]
	if c.Status != wire.Fail || c.Evidence != "login: no answer within 1ms" || c.Fix != fixWaiting {
		t.Errorf("%+v", c)
	}
}

// waitingBox is a box whose ~/.profile waits for input, for which it opens the
// pipe up; the end of the pipe means that nothing of it is left.
func waitingBox(t *testing.T) (l layout.Layout, up *os.File) {
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skip("no tmux here")
	}
	l = layout.At(t.TempDir())
	pipe := l.Path("/up")
	if err := errors.Join(os.MkdirAll(l.Home(), 0o755), syscall.Mkfifo(pipe, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(l.Home(), ".profile"), []byte("exec 3>"+pipe+"\necho \"$TMUX\" >&3\nread answer\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	up, err := os.OpenFile(pipe, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = up.Close() })
	return l, up
}

func TestTmuxProbe(t *testing.T) {
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skip("no tmux here")
	}
	l := layout.At(t.TempDir())
	if err := os.MkdirAll(l.Home(), 0o755); err != nil {
		t.Fatal(err)
	}
	profile := "echo noise; echo \"$TMUX\" >" + l.Path("/seen") + "\n"
	if err := os.WriteFile(filepath.Join(l.Home(), ".profile"), []byte(profile), 0o644); err != nil {
		t.Fatal(err)
	}
	found := probe(t.Context(), l, tmuxSurrounding(), []tool{{"bash", "--version"}, {"none", "-V"}}, true, io.Discard)
	if f := found["bash"]; f.trouble() != "" || !strings.Contains(f.version, "bash") || found["none"].exit != 127 {
		t.Errorf("%+v", found)
	}
	seen, err := os.ReadFile(l.Path("/seen"))
	socket, _, inTmux := strings.Cut(string(seen), ",")
	if err != nil || !inTmux || exists(filepath.Dir(socket)) {
		t.Errorf("%q, %v", seen, err)
	}
}

// A shell that waits for input in its start-up files is not waited for, and
// leaves no tmux server.
func TestWaitingProfile(t *testing.T) {
	l, up := waitingBox(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	found := make(chan map[string]finding, 1)
	go func() {
		found <- probe(ctx, l, tmuxSurrounding(), []tool{{"bash", "--version"}}, false, io.Discard)
	}()
	dir := waits(t, up)
	cancel()
	if f := (<-found)["bash"]; !strings.Contains(f.trouble(), "no answer") {
		t.Errorf("%+v", f)
	}
	ends(t, up)
	if exists(dir) {
		t.Errorf("%s is still there", dir)
	}
}

// The server ends also when nobody is left who would end it.
func TestForgottenTmuxServerEnds(t *testing.T) {
	l, up := waitingBox(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := tmuxSurrounding()
	nonce := filepath.Base(filepath.Dir(t.TempDir())) // no other test's
	args := s.command("", nonce, 2*time.Second)
	cmd := l.AgentCommand(ctx, args[0], args[1:]...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waits(t, up)
	cancel()
	if err := cmd.Wait(); err == nil {
		t.Error("the harness was not killed")
	}
	ends(t, up)
}

// waits returns the directory of the tmux server in which a shell waits.
func waits(t *testing.T, up *os.File) string {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	if err := up.SetReadDeadline(deadline); err != nil {
		t.Fatal(err)
	}
	for buf := make([]byte, 256); ; {
		n, err := up.Read(buf)
		if err == io.EOF && time.Now().Before(deadline) { // no shell yet
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		socket, _, _ := strings.Cut(string(buf[:n]), ",")
		return filepath.Dir(socket)
	}
}

// ends returns when the shell has ended.
func ends(t *testing.T, up *os.File) {
	t.Helper()
	if _, err := up.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("a shell waits for ever: %v", err)
	}
}

func fakeBox(t *testing.T, tools ...string) layout.Layout {
	t.Helper()
	l := layout.At(t.TempDir())
	if err := os.MkdirAll(l.Path("/usr/local/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range tools {
		if err := os.WriteFile(l.Path("/usr/local/bin/"+name), []byte("#!/bin/sh\necho "+name+" 1.2.3\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// events runs provisioning and returns what it said.
func events(t *testing.T, l layout.Layout, req wire.ProvisionRequest) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := Run(context.Background(), l, req, wire.NewEmitter(&out))
	return out.String(), err
}

func TestRunBelowARoot(t *testing.T) {
	all := []string{"claude", "codex", "executor", "node", "npm"}
	l := fakeBox(t, all...)
	req := goodRequest()
	req.EnvFile = "NODE_MAJOR=22\n"
	req.HTTPProxy = "http://u:secret@proxy:1"
	out, err := events(t, l, req)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if strings.Contains(out, "secret") {
		t.Error("an event shows the proxy's password")
	}
	settings, err := l.ReadSettings()
	if diff := cmp.Diff(layout.Settings{BoxName: "alpha", HostPort: 4790, Executor: true, WireMCP: true}, settings); diff != "" || err != nil {
		t.Errorf("%s %v", diff, err)
	}
	if data, err := os.ReadFile(l.EnvFile()); err != nil || string(data) != req.EnvFile {
		t.Errorf("%q %v", data, err)
	}
	if !strings.Contains(strings.Join(l.AgentEnv(), " "), "http_proxy=http://u:secret@proxy:1") {
		t.Error("the agent does not get the proxy")
	}
	for _, path := range []string{l.Workspace(), l.Secrets()} {
		if fi, err := os.Stat(path); err != nil || !fi.IsDir() {
			t.Errorf("%s: %v", path, err)
		}
	}
	if fi, err := os.Stat(l.Secrets()); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", fi, err)
	}
	data, err := os.ReadFile(l.RuntimeManifest())
	if err != nil {
		t.Fatal(err)
	}
	var m wire.RuntimeManifest
	if err := wire.DecodeStrict(data, &m); err != nil || len(m.Tools) != len(all) || m.Tools[0].Version != "1.2.3" {
		t.Errorf("%+v %v", m, err)
	}
	if fi, err := os.Stat(l.RuntimeManifest()); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", fi, err)
	}
	for _, c := range Checks(context.Background(), l, nil) {
		if c.Status != wire.Pass {
			t.Errorf("%+v", c)
		}
	}
	before := snapshot(t, l.Path(""))
	if out, err := events(t, l, req); err != nil || strings.Contains(out, "wrote") {
		t.Errorf("again: %v\n%s", err, out)
	}
	if diff := cmp.Diff(before, snapshot(t, l.Path(""))); diff != "" {
		t.Errorf("a second run changed something:\n%s", diff)
	}
}

// snapshot lists files with their times of change and contents.
func snapshot(t *testing.T, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err == nil && !d.IsDir() {
			all[path] = fi.Mode().String() + fi.ModTime().String()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestRunNamesWhatIsMissing(t *testing.T) {
	_, err := events(t, fakeBox(t, "claude", "executor", "node", "npm"), goodRequest())
	if err == nil || !strings.HasPrefix(err.Error(), "provision: verify: codex is missing") {
		t.Errorf("error %v", err)
	}
	l := fakeBox(t, "claude", "codex", "executor", "node", "npm")
	if err := os.WriteFile(l.Path("/usr/local/bin/codex"), []byte("#!/bin/sh\necho no libc >&2; exit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err = events(t, l, goodRequest())
	if err == nil || !strings.Contains(err.Error(), "codex") || !strings.Contains(err.Error(), "no libc") {
		t.Errorf("error %v", err)
	}
	if _, err := l.ReadSettings(); err == nil {
		t.Error("a box that is not whole is marked as provisioned")
	}
	req := goodRequest()
	req.Versions.Claude = "latest"
	var step *StepError
	if _, err := events(t, l, req); !errors.As(err, &step) || step.Step != "preflight" {
		t.Errorf("error %v", err)
	}
}

// A workspace is mended where it is a directory, and left alone where it is the
// user's own arrangement: neither keeps the box from being provisioned.
func TestWorkspaces(t *testing.T) {
	foreign := func(path string) error {
		if os.Geteuid() != 0 {
			return nil // only root can give files away
		}
		return os.Lchown(path, 12345, 12345)
	}
	uid := func(path string) uint32 {
		t.Helper()
		fi, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		return fi.Sys().(*syscall.Stat_t).Uid
	}
	for _, tt := range []struct {
		name   string
		put    func(workspace, elsewhere string) error
		mended bool
	}{
		{"none", func(string, string) error { return nil }, true},
		{"another's", func(workspace, _ string) error {
			return errors.Join(os.Mkdir(workspace, 0o755), foreign(workspace))
		}, true},
		{"read-only", func(workspace, _ string) error { return os.Mkdir(workspace, 0o500) }, true},
		{"a link", func(workspace, elsewhere string) error {
			return errors.Join(os.Symlink(elsewhere, workspace), foreign(elsewhere))
		}, false},
		{"a link to nothing", func(workspace, elsewhere string) error { return os.Symlink(elsewhere+"/none", workspace) }, false},
		{"a file", func(workspace, _ string) error { return os.WriteFile(workspace, nil, 0o600) }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := fakeBox(t, "claude", "codex", "executor", "node", "npm")
			elsewhere := t.TempDir()
			if err := errors.Join(os.MkdirAll(l.Home(), 0o700), tt.put(l.Workspace(), elsewhere)); err != nil {
				t.Fatal(err)
			}
			inside := filepath.Join(l.Workspace(), "inside")
			if tt.name == "another's" {
				if err := errors.Join(os.WriteFile(inside, nil, 0o600), foreign(inside)); err != nil {
					t.Fatal(err)
				}
			}
			was := uid(elsewhere)
			if out, err := events(t, l, goodRequest()); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if got := uid(elsewhere); got != was {
				t.Errorf("where the link leads belongs to %d instead of %d", got, was)
			}
			fi, err := os.Lstat(l.Workspace())
			if err != nil {
				t.Fatal(err)
			}
			if fi.IsDir() != tt.mended || tt.mended && (int(uid(l.Workspace())) != os.Geteuid() || fi.Mode()&0o700 != 0o700) {
				t.Errorf("%v, of %d", fi.Mode(), uid(l.Workspace()))
			}
			if tt.name == "another's" && os.Geteuid() == 0 && uid(inside) != 12345 {
				t.Error("what is in the workspace was given away")
			}
		})
	}
}

// A clone has the tools of its source's settings; today's may ask for more.
func TestPreparedByOtherSettings(t *testing.T) {
	l := fakeBox(t, "claude", "codex", "executor", "node", "npm", "hermes")
	prepared := func(hermes bool) bool {
		t.Helper()
		req := goodRequest()
		req.Prepared, req.Hermes = true, hermes
		out, err := events(t, l, req)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return strings.Contains(out, "already verified")
	}
	for _, tt := range []struct{ hermes, want bool }{
		{false, false}, // nothing was verified yet
		{false, true},
		{true, false},
		{true, true},
		{false, true}, // more than it needs
	} {
		if got := prepared(tt.hermes); got != tt.want {
			t.Errorf("hermes %v: taken for verified: %v", tt.hermes, got)
		}
	}
}

func TestChecksUnprovisioned(t *testing.T) {
	if got := Checks(context.Background(), fakeBox(t), nil); len(got) != 1 || got[0].Status != wire.Fail {
		t.Errorf("%+v", got)
	}
}

func TestDropForeignLibc(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"x-linux-x64", "x-linux-x64-musl", "@s/y-musl", "@s/z-musl", "@s/z"} {
		if err := os.MkdirAll(filepath.Join(dir, "node_modules", d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	got, err := dropForeignLibc(dir)
	if err != nil || got != "x-linux-x64-musl z-musl" {
		t.Errorf("%q %v", got, err)
	}
	if !exists(filepath.Join(dir, "node_modules/@s/y-musl")) {
		t.Error("removed the only variant")
	}
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	secret := filepath.Join(dir, "other")
	if err := errors.Join(os.WriteFile(secret, []byte("keep"), 0o600), os.Symlink(secret, path)); err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{true, false} {
		if changed, err := writeIfDiffers(path, []byte("new"), 0o644); err != nil || changed != want {
			t.Errorf("write %d: %v %v", i, changed, err)
		}
	}
	if data, _ := os.ReadFile(secret); string(data) != "keep" {
		t.Error("wrote through a link")
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if changed, err := writeIfDiffers(path, []byte("new"), 0o644); err != nil || !changed {
		t.Errorf("mode: %v %v", changed, err)
	}
	name := filepath.Join(dir, "l")
	for i, want := range []bool{true, false} {
		if changed, err := link(name, "/target"); err != nil || changed != want {
			t.Errorf("link %d: %v %v", i, changed, err)
		}
	}
	if err := os.Symlink(dir, filepath.Join(dir, "d")); err != nil {
		t.Fatal(err)
	}
	if _, err := directory(filepath.Join(dir, "d"), 0o700, 0, 0); err == nil {
		t.Error("took a link for a directory")
	}
}

// TestToldVersionsAreNotAskedForAgain counts how often tools are run.
func TestToldVersionsAreNotAskedForAgain(t *testing.T) {
	dir := t.TempDir()
	l := layout.At(dir)
	bin := l.Path("/usr/local/bin")
	for _, d := range []string{bin, l.Home()} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	tools := []tool{{"one", "--version"}, {"two", "--version"}, {"executor", "--version"}, {"gone", "--version"}}
	for _, name := range []string{"one", "two", "executor"} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\necho run >>"+dir+"/"+name+".runs\necho 1.2.3\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	service := surroundings(l)[0]
	service.command = func(script, _ string, _ time.Duration) []string {
		return []string{"/bin/sh", "-c", "PATH=" + bin + ":$PATH\n" + script}
	}
	found := probeOnce(t.Context(), l, service, tools, map[string]string{"one": "1.2.3", "gone": "1.2.3"},
		func(_ context.Context, tool string) bool { return tool == "executor" }, io.Discard)
	for name, want := range map[string]finding{
		"one": {path: bin + "/one", version: "1.2.3"}, "two": {path: bin + "/two", version: "1.2.3"}, "gone": {exit: 127},
		"executor": {path: bin + "/executor"},
	} {
		if got := found[name]; got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
	for name, want := range map[string]int{"one": 0, "two": 1, "executor": 0} {
		runs, _ := os.ReadFile(filepath.Join(dir, name+".runs")) // none when it was not run
		if got := strings.Count(string(runs), "run"); got != want {
			t.Errorf("%s was run %d times, want %d", name, got, want)
		}
	}
}

// Where the agent may put anything, root waits for no pipe and follows no link.
func TestManifestThatIsNoFile(t *testing.T) {
	l := fakeBox(t)
	path := l.RuntimeManifest()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	m := wire.RuntimeManifest{HB: "1.2.3", Tools: []wire.ToolVersion{}}
	for name, put := range map[string]func() error{
		"a pipe": func() error { return syscall.Mkfifo(path, 0o600) },
		"a link": func() error { return os.Symlink("/dev/zero", path) },
	} {
		if err := put(); err != nil {
			t.Fatal(err)
		}
		if err := PublishManifest(t.Context(), l, m); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		fi, err := os.Lstat(path)
		if err != nil || !fi.Mode().IsRegular() {
			t.Errorf("%s: %v, %v", name, fi, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}
