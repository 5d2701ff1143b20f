package provision

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/guest/layout"
)

// installed lays the files of node, npm and codex out as provisioning does.
func installed(t *testing.T) (layout.Layout, survey) {
	t.Helper()
	l := layout.At(t.TempDir())
	for path, content := range map[string]string{
		nodeDir + "/bin/node":                                   "node",
		nodeDir + "/lib/node_modules/npm/bin/npm-cli.js":        "npm",
		nodeDir + "/lib/node_modules/npm/lib/cli.js":            "more",
		npmPrefix + "/lib/node_modules/@openai/codex/codex.js":  "codex",
		npmPrefix + "/lib/node_modules/@openai/codex/v/x/codex": "native",
		"/opt/hermes-box/environment":                           "A=1\n",
		"/usr/lib/x86_64-linux-gnu/libc.so.6":                   "libc",
	} {
		path = l.Path(path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(l.Path("/usr/local/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	found := map[string]finding{}
	for name, target := range map[string]string{
		"node": nodeDir + "/bin/node", "npm": nodeDir + "/lib/node_modules/npm/bin/npm-cli.js",
		"codex": npmPrefix + "/lib/node_modules/@openai/codex/codex.js",
	} {
		if err := os.Symlink(l.Path(target), l.Path("/usr/local/bin/"+name)); err != nil {
			t.Fatal(err)
		}
		found[name] = finding{path: l.Path("/usr/local/bin/" + name), version: name + " 1.2.3"}
	}
	found["claude"] = finding{path: "/usr/local/bin/claude", exit: 1}
	found["git"] = finding{path: "/usr/bin/git", version: "git version 2"}
	return l, survey{envs: []string{"service"}, found: map[string]map[string]finding{"service": found}}
}

// A verification is believed for a while, for the tools of which nothing has
// changed since.
func TestRecall(t *testing.T) {
	all := map[string]string{"node": "node 1.2.3", "npm": "npm 1.2.3", "codex": "codex 1.2.3"}
	rewrite := func(path, content string) func(*testing.T, layout.Layout) {
		return func(t *testing.T, l layout.Layout) {
			t.Helper()
			if err := os.WriteFile(l.Path(path), []byte(content), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	edit := func(change func(*memory)) func(*testing.T, layout.Layout) {
		return func(t *testing.T, l layout.Layout) {
			t.Helper()
			var m memory
			data, err := os.ReadFile(memoryPath(l))
			if err != nil || json.Unmarshal(data, &m) != nil {
				t.Fatal(err)
			}
			change(&m)
			if data, err = json.Marshal(m); err != nil {
				t.Fatal(err)
			}
			rewrite("/run/hermes-box/verified.json", string(data))(t, l)
		}
	}
	for _, tt := range []struct {
		name   string
		change func(*testing.T, layout.Layout)
		want   map[string]string
	}{
		{"nothing changed", func(*testing.T, layout.Layout) {}, all},
		{"a native program of the same size", rewrite(npmPrefix+"/lib/node_modules/@openai/codex/v/x/codex", "broken"), map[string]string{"node": all["node"], "npm": all["npm"]}},
		{"a file more", rewrite(npmPrefix+"/lib/node_modules/@openai/codex/other", ""), map[string]string{"node": all["node"], "npm": all["npm"]}},
		{"npm's innards", rewrite(nodeDir+"/lib/node_modules/npm/lib/cli.js", "xxxx"), map[string]string{"node": all["node"], "codex": all["codex"]}},
		{"node, under which all run", rewrite(nodeDir+"/bin/node", "edon"), map[string]string{}},
		{"the environment", rewrite("/opt/hermes-box/environment", "A=2\n"), map[string]string{}},
		{"a library more", rewrite("/usr/lib/x86_64-linux-gnu/libm.so", ""), map[string]string{}},
		{"a launcher that leads elsewhere", func(t *testing.T, l layout.Layout) {
			t.Helper()
			launcher := l.Path("/usr/local/bin/codex")
			if err := os.Remove(launcher); err != nil {
				t.Fatal(err)
			}
			rewrite("/usr/local/bin/codex", "codex")(t, l)
		}, map[string]string{"node": all["node"], "npm": all["npm"]}},
		{"long ago", edit(func(m *memory) { m.At -= memoryLasts + time.Second }), nil},
		{"in the future", edit(func(m *memory) { m.At += time.Hour }), nil},
		{"another boot", edit(func(m *memory) { m.BootID = "x" }), nil},
		{"garbage", rewrite("/run/hermes-box/verified.json", "{"), nil},
		{"no memory", func(t *testing.T, l layout.Layout) {
			t.Helper()
			if err := os.Remove(memoryPath(l)); err != nil {
				t.Fatal(err)
			}
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, s := installed(t)
			if err := remember(l, s); err != nil {
				t.Fatal(err)
			}
			tt.change(t, l)
			if diff := cmp.Diff(tt.want, recall(l)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
