//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestArchive saves a box with months of work in it and loads it as another.
func TestArchive(t *testing.T) {
	h := newHome(t, nil)
	alpha := h.create("alpha")
	h.fill(alpha)
	h.storeCredential(alpha)
	file := h.save(alpha)
	sound(t, h.doctor(alpha, 0), allChecks, "mcp.hermes")

	beta := h.name("beta")
	h.wants(0, []string{"the logins of claude, codex are the same as in " + alpha}, "load", "--pinned", file, beta)
	h.token(beta, "agent")
	h.token(beta, "operator")
	h.checkState(beta)
	h.useCredential(beta)
	h.useCredential(alpha)
	h.wants(0, []string{"state.lineage"}, "doctor", beta)
	if a, b := h.in(alpha, "md5sum <~/.claude.json"), h.in(beta, "md5sum <~/.claude.json"); a == b {
		t.Error("the loaded box has the token of the saved one in Claude's configuration")
	}

	// Plain gpg and tar read it; a wrong passphrase is found before anything
	// is made.
	h.within(t, "gpg and tar", func(t *testing.T) { h.plainTools(t, file) })
	h.setenv("BOX_PASSPHRASE", "another passphrase")
	gamma := h.name("gamma")
	h.wants(6, []string{"wrong passphrase or damaged file"}, "load", file, gamma)
	h.noTraces(gamma)
}

// TestArchiveAcrossDrivers takes a state from a container into a virtual
// machine and back: it travels as an archive and in no engine's form.
func TestArchiveAcrossDrivers(t *testing.T) {
	h := newHome(t, map[string]string{"BOX_CPUS": "2", "BOX_MEM_MIB": "2048"})
	alpha := h.create("here")
	h.fill(alpha)
	h.storeCredential(alpha)
	first := h.save(alpha)
	h.must("stop", alpha)

	h.set("BOX_DRIVER", "qemu")
	beta := h.name("there")
	h.must("load", first, beta)
	h.checkState(beta)
	h.useCredential(beta)
	// Signals to a save from a machine end what runs in it, too.
	cut := filepath.Join(h.dir, "cut.tar.gz.gpg")
	for step, signal := range map[string]syscall.Signal{"look at the state": syscall.SIGINT, "save: pack Executor's data": syscall.SIGTERM, "save: pack the state": syscall.SIGKILL} {
		h.cut(step, signal, "save", beta, cut)
		if _, err := os.Lstat(cut); err == nil {
			t.Errorf("%v at %q: there is a file under the final name", signal, step)
		}
	}
	second := h.save(beta)
	h.must("rm", beta, "--force")

	h.set("BOX_DRIVER", "container")
	gamma := h.name("back")
	h.must("load", second, gamma)
	h.checkState(gamma)
	h.useCredential(gamma)
	h.doctor(gamma, 0)
}

// set changes one setting of box.env.
func (h *home) set(key, value string) {
	h.t.Helper()
	path := filepath.Join(h.dir, "box.env")
	data, err := os.ReadFile(path)
	if err != nil {
		h.t.Fatal(err)
	}
	var out strings.Builder
	for line := range strings.Lines(string(data)) {
		if !strings.HasPrefix(line, key+"=") {
			out.WriteString(line)
		}
	}
	fmt.Fprintf(&out, "%s='%s'\n", key, value)
	if err := os.WriteFile(path, []byte(out.String()), 0o600); err != nil {
		h.t.Fatal(err)
	}
}

// put copies a file of testdata/state into the box's /tmp.
func (h *home) put(name, file string) string {
	h.t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata/state", file))
	if err != nil {
		h.t.Fatal(err)
	}
	place := "/tmp/" + file
	if r := h.pipe(bytes.NewReader(data), "enter", name, "--", "sh", "-c", "cat >"+place); r.code != 0 {
		h.t.Fatal(r)
	}
	return place
}

// fill puts work into a box and starts a writer of Hermes' database.
func (h *home) fill(name string) {
	h.t.Helper()
	h.in(name, "sh "+h.put(name, "fill.sh"))
	writer := h.put(name, "writer.js")
	h.in(name, "setsid node --no-warnings "+writer+" ~/.hermes/state.db >/tmp/rows 2>&1 </dev/null & until [ -s /tmp/rows ]; do sleep 0.1; done")
}

// save saves a box whose database is being written and remembers how far that
// was when the save began.
func (h *home) save(name string) string {
	h.t.Helper()
	rows := "0"
	if out := h.in(name, "tail -1 /tmp/rows 2>/dev/null || true"); out != "" {
		rows = out
	}
	r := h.wants(0, []string{"Executor was paused for"}, "save", name)
	for line := range strings.Lines(r.stderr) {
		if strings.Contains(line, "Executor was paused for") {
			h.t.Log(strings.TrimSpace(line))
		}
	}
	file := strings.TrimSpace(r.stdout)
	h.rows = max(h.rows, atoi(h.t, rows))
	return file
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// checkState looks at a loaded box's state.
func (h *home) checkState(name string) {
	h.t.Helper()
	if wrong := h.in(name, "sh "+h.put(name, "check.sh")); wrong != "" {
		h.t.Error(wrong)
	}
	got := h.in(name, `node --no-warnings -e '
		const { DatabaseSync } = require("node:sqlite");
		const db = new DatabaseSync(process.env.HOME + "/.hermes/state.db");
		console.log(db.prepare("PRAGMA integrity_check").get().integrity_check, db.prepare("SELECT count(*) n FROM memory").get().n)'`)
	var verdict string
	var rows int
	if _, err := fmt.Sscan(got, &verdict, &rows); err != nil || verdict != "ok" || rows < h.rows {
		h.t.Errorf("the database: %q, and %d rows were acknowledged before the save", got, h.rows)
	}
}

const credential = "s3cret-of-an-upstream"

// storeCredential adds an API to Executor, with a credential for it.
func (h *home) storeCredential(name string) {
	h.t.Helper()
	script := h.put(name, "executor.js")
	const add = `const spec = JSON.stringify({openapi: "3.0.0", info: {title: "mini", version: "1"}, servers: [{url: "http://127.0.0.1:9797"}],
		components: {securitySchemes: {bearer: {type: "http", scheme: "bearer"}}}, security: [{bearer: []}],
		paths: {"/who": {get: {operationId: "who", responses: {"200": {description: "ok", content: {"application/json": {schema: {type: "object"}}}}}}}}});
		return (await tools.executor.openapi.addSpec({spec: {kind: "blob", value: spec}, slug: "mini", baseUrl: "http://127.0.0.1:9797"})).ok`
	if out := strings.TrimSpace(h.must("enter", name, "--", "node", script, add)); out != "true" {
		h.t.Fatalf("add an API to Executor: %s", out)
	}
	body, err := json.Marshal(map[string]string{"owner": "user", "name": "main", "integration": "mini", "template": "apikey-0", "value": credential})
	if err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:"+strconv.Itoa(h.record(name).HostPort)+"/api/connections", bytes.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+h.token(name, "operator"))
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if answer, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
		h.t.Fatalf("store a credential: %s: %s", resp.Status, answer)
	}
}

// useCredential calls the API through Executor and looks at what it was called
// with.
func (h *home) useCredential(name string) {
	h.t.Helper()
	script, upstream := h.put(name, "executor.js"), h.put(name, "upstream.js")
	h.in(name, "setsid node "+upstream+" >/tmp/upstream 2>&1 </dev/null & until [ -s /tmp/upstream ]; do sleep 0.1; done")
	const who = `const found = await tools.search({query: "who", namespace: "mini"});
		return (await tools[found.items[0].path]({})).data.auth`
	if out := strings.TrimSpace(h.must("enter", name, "--", "node", script, who)); out != `"Bearer `+credential+`"` {
		h.t.Errorf("the API of %s was called with %s", name, out)
	}
}

// plainTools reads an archive without us.
func (h *home) plainTools(t *testing.T, file string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	gnupg := t.TempDir()
	passphrase := ""
	for _, entry := range h.env {
		if value, ok := strings.CutPrefix(entry, "BOX_PASSPHRASE="); ok {
			passphrase = value
		}
	}
	gpg := exec.CommandContext(ctx, "gpg", "--batch", "--quiet", "--homedir", gnupg, "--pinentry-mode", "loopback", "--passphrase-fd", "0", "--decrypt", file)
	gpg.Stdin = strings.NewReader(passphrase + "\n")
	plain, err := gpg.Output()
	if err != nil {
		t.Fatal(err)
	}
	tar := exec.CommandContext(ctx, "tar", "tz")
	tar.Stdin = bytes.NewReader(plain)
	list, err := tar.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"manifest\n", "\ndata/home/agent/.local/share/executor/auth.json\n", "\ndata/home/agent/workspace/tree/file\n", "\nend\n"} {
		if !strings.Contains("\n"+string(list), name) {
			t.Errorf("tar does not list %q", name)
		}
	}
	if strings.Contains(string(list), "data/.hermes-box") || strings.Contains(string(list), "data.db-wal") {
		t.Error("the archive holds what must not travel")
	}
}
