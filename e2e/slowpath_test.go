//go:build e2e && linux

package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"hermes-box-lite/internal/wire"
)

// TestSlowPath makes a box from the smallest Debian: everything is installed
// inside, from the distribution and from npm's registry. Hermes is the
// stand-in of testdata, put into the base.
func TestSlowPath(t *testing.T) {
	if run.bare == "" {
		t.Fatal("BOX_BARE_BASE names no base; run scripts/e2e")
	}
	const installer = "/opt/stand-in/install.sh"
	h := newHome(t, map[string]string{
		"BASE_IMAGE": withFile(t, run.bare, "testdata/hermes-install.sh", installer), "INSTALL_HERMES": "true", "HERMES_INSTALLER": installer,
	})
	name := h.name("slow")
	made := h.wants(0, []string{"is ready"}, "new", name)
	agent := h.token(name, "agent")
	h.token(name, "operator")

	// Which source Node came from depends on what can be reached here; it must
	// be said when it was not the first choice.
	node := h.in(name, "readlink -f $(command -v node)")
	passedOver := strings.Contains(made.stderr, "NodeSource is no help")
	if fromRegistry := strings.HasPrefix(node, "/opt/hermes-box/node/"); fromRegistry != passedOver {
		t.Errorf("node is %s; box said that NodeSource was no help: %v", node, passedOver)
	}
	t.Logf("node is %s", node)

	report := h.doctor(name, 0)
	ids := slices.Clone(allChecks)
	ids = append(ids, "tool.hermes")
	sound(t, report, ids)
	if c := check(t, report, "mcp.hermes"); c.Status != wire.Pass {
		t.Errorf("%+v", c)
	}
	// Comments, other servers and other settings are still there.
	config := h.in(name, "cat ~/.hermes/config.yaml")
	for _, want := range []string{
		"# The user's own words stay.", "provider: nous", "http://127.0.0.1:9/mcp",
		"http://127.0.0.1:4788/mcp", "Bearer ${MCP_EXECUTOR_API_KEY}",
	} {
		if !strings.Contains(config, want) {
			t.Errorf("config.yaml lacks %q:\n%s", want, config)
		}
	}
	sum := sha256.Sum256([]byte(agent))
	if got := h.in(name, `. ~/.hermes/.env; printf %s "$MCP_EXECUTOR_API_KEY" | sha256sum | cut -d' ' -f1; stat -c %a ~/.hermes/.env`); got != hex.EncodeToString(sum[:])+"\n600" {
		t.Errorf("the token in Hermes' .env is another, or its mode: %s", got[max(0, len(got)-4):])
	}
	h.in(name, "sed -i 's/^MCP_EXECUTOR_API_KEY=.*/MCP_EXECUTOR_API_KEY=wrong/' ~/.hermes/.env")
	if c := check(t, h.doctor(name, 3), "mcp.hermes"); c.Status != wire.Fail || !strings.Contains(c.Fix, "hb wire-mcp") {
		t.Errorf("with a wrong token: %+v", c)
	}
	h.must("repair", name)
	sound(t, h.doctor(name, 0), ids)
}

// withFile returns a copy of a base with one more file in it.
func withFile(t *testing.T, base, file, guestPath string) string {
	t.Helper()
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	place := filepath.Join(root, guestPath)
	if err := os.MkdirAll(filepath.Dir(place), 0o755); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(place, data, 0o755); err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(dir, "base.tar")
	from, err := os.Open(base)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = from.Close() }()
	to, err := os.Create(copied)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(to, from); err != nil {
		t.Fatal(err)
	}
	if err := to.Close(); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("tar", "--append", "--file", copied, "--owner=0", "--group=0", "--directory", root, filepath.Dir(guestPath)[1:]).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return copied
}
