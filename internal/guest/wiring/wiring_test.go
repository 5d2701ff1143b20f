package wiring

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

func testEndpoint() Endpoint {
	return Endpoint{URL: "http://127.0.0.1:4788/mcp", Token: strings.Repeat("ab", 32)}
}

// splices are the three editors by the name of their corpus.
func splices() map[string]func([]byte, Endpoint) ([]byte, error) {
	return map[string]func([]byte, Endpoint) ([]byte, error){
		"claude": spliceClaude, "codex": spliceCodex, "hermes": spliceHermes,
	}
}

func noPause() {}

// TestSplice runs every file of testdata. UPDATE_GOLDEN=1 rewrites the results.
func TestSplice(t *testing.T) {
	for tool, splice := range splices() {
		befores, err := filepath.Glob("testdata/" + tool + "/*.before")
		if err != nil || len(befores) < 20 {
			t.Fatalf("%s: %d cases, %v", tool, len(befores), err)
		}
		for _, before := range befores {
			base := strings.TrimSuffix(before, ".before")
			t.Run(tool+"/"+filepath.Base(base), func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "config")
				old, err := os.ReadFile(before)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, old, 0o644); err != nil {
					t.Fatal(err)
				}
				edit := func(text []byte) ([]byte, error) { return splice(text, testEndpoint()) }
				changed, err := editFile(path, noPause, edit)
				got, readErr := os.ReadFile(path)
				if readErr != nil {
					t.Fatal(readErr)
				}
				if want, errText := os.ReadFile(base + ".error"); errText == nil {
					if err == nil || !strings.Contains(err.Error(), strings.TrimSpace(string(want))) {
						t.Errorf("error %v, want one with %q", err, want)
					}
					if changed || !bytes.Equal(got, old) {
						t.Errorf("a file that cannot be edited was changed")
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if strings.HasSuffix(base, "/right") && !bytes.Equal(got, old) {
					t.Error("a file that was right was edited")
				}
				golden := base + ".after"
				if os.Getenv("UPDATE_GOLDEN") != "" {
					if err := os.WriteFile(golden, got, 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(golden)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(want), string(got)); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
					t.Errorf("mode %v, %v", fi.Mode(), err)
				}
				if again, err := editFile(path, noPause, edit); again || err != nil {
					t.Errorf("a second edit: changed %v, %v", again, err)
				}
			})
		}
	}
}

func TestDotenv(t *testing.T) {
	ours := "MCP_EXECUTOR_API_KEY=" + testEndpoint().Token
	for _, c := range []struct{ name, old, want string }{
		{"missing", "", ours + "\n"},
		{"others", "# keys\nA=1\nB='x y'\n", "# keys\nA=1\nB='x y'\n" + ours + "\n"},
		{"no final newline", "A=1", "A=1\n" + ours + "\n"},
		{"old", "A=1\nMCP_EXECUTOR_API_KEY=old\nB=2\n", "A=1\n" + ours + "\nB=2\n"},
		{"exported and quoted", "export MCP_EXECUTOR_API_KEY = \"old\"\nB=2\n", ours + "\nB=2\n"},
		{"twice", "MCP_EXECUTOR_API_KEY=a\nA=1\nMCP_EXECUTOR_API_KEY=b\n", ours + "\nA=1\n"},
		{"right", "A=1\r\n" + ours + "\r\n", "A=1\r\n" + ours + "\r\n"},
		{"crlf", "A=1\r\n", "A=1\r\n" + ours + "\r\n"},
		{"a longer name", "MCP_EXECUTOR_API_KEY_2=x\nMY_MCP_EXECUTOR_API_KEY=y\n", "MCP_EXECUTOR_API_KEY_2=x\nMY_MCP_EXECUTOR_API_KEY=y\n" + ours + "\n"},
		{"commented", "#MCP_EXECUTOR_API_KEY=x\n", "#MCP_EXECUTOR_API_KEY=x\n" + ours + "\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := spliceDotenv([]byte(c.old), testEndpoint())
			if diff := cmp.Diff(c.want, string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if token := dotenvToken(got); token != testEndpoint().Token {
				t.Errorf("token reads back as %q", token)
			}
		})
	}
}

// box makes a layout of its own with launchers for tools.
func box(t *testing.T, launchers map[string]string) layout.Layout {
	t.Helper()
	l := layout.At(t.TempDir())
	for _, dir := range []string{l.Home(), l.Path("/usr/local/bin")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range launchers {
		if err := os.WriteFile(l.Path("/usr/local/bin/"+name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func TestApply(t *testing.T) {
	ctx := context.Background()
	t.Run("only installed tools", func(t *testing.T) {
		l := box(t, map[string]string{"codex": ""})
		changed, err := Apply(ctx, l, testEndpoint())
		if diff := cmp.Diff([]string{"codex"}, changed); diff != "" || err != nil {
			t.Fatalf("%s %v", diff, err)
		}
		if _, err := os.Stat(claudeConfig(l.Home())); err == nil {
			t.Error("wrote a configuration for a tool that is not there")
		}
		if changed, err := Apply(ctx, l, testEndpoint()); len(changed) != 0 || err != nil {
			t.Errorf("again: %v %v", changed, err)
		}
	})
	t.Run("a corrupt file stops only its own tool", func(t *testing.T) {
		l := box(t, map[string]string{"claude": "", "codex": "", "hermes": ""})
		broken := []byte(`{"mcpServers": {"executor": {"headers": {"Authorization": "Bearer ` + strings.Repeat("0", 64) + `"`)
		if err := os.WriteFile(claudeConfig(l.Home()), broken, 0o600); err != nil {
			t.Fatal(err)
		}
		changed, err := Apply(ctx, l, testEndpoint())
		if diff := cmp.Diff([]string{"codex", "hermes"}, changed); diff != "" {
			t.Error(diff)
		}
		if err == nil || !strings.Contains(err.Error(), ".claude.json") || !strings.Contains(err.Error(), "hb wire-mcp") {
			t.Errorf("error %v does not name the file and the fix", err)
		}
		if got, _ := os.ReadFile(claudeConfig(l.Home())); !bytes.Equal(got, broken) {
			t.Error("the corrupt file was changed")
		}
	})
	t.Run("links stay", func(t *testing.T) {
		l := box(t, map[string]string{"claude": ""})
		real := filepath.Join(l.Home(), "dotfiles.json")
		if err := os.WriteFile(real, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(real, claudeConfig(l.Home())); err != nil {
			t.Fatal(err)
		}
		if _, err := Apply(ctx, l, testEndpoint()); err != nil {
			t.Fatal(err)
		}
		if target, err := os.Readlink(claudeConfig(l.Home())); err != nil || target != real {
			t.Errorf("link %q, %v", target, err)
		}
		if st := claudeState(l.Home(), testEndpoint()); !st.ok {
			t.Errorf("%+v", st)
		}
	})
	t.Run("a directory in the way", func(t *testing.T) {
		l := box(t, map[string]string{"claude": ""})
		if err := os.Mkdir(claudeConfig(l.Home()), 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := Apply(ctx, l, testEndpoint()); err == nil || !strings.Contains(err.Error(), "is not a file") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("bad endpoints", func(t *testing.T) {
		l := box(t, map[string]string{"claude": ""})
		for _, ep := range []Endpoint{
			{},
			{URL: testEndpoint().URL, Token: "short"},
			{URL: testEndpoint().URL, Token: strings.Repeat("AB", 32)},
			{URL: "http://127.0.0.1:1/m\"cp", Token: testEndpoint().Token},
			{URL: "file:///mcp", Token: testEndpoint().Token},
			{URL: "http://u:p@127.0.0.1/mcp", Token: testEndpoint().Token},
			{URL: "http://127.0.0.1/mcp\n", Token: testEndpoint().Token},
		} {
			_, err := Apply(ctx, l, ep)
			if err == nil {
				t.Errorf("accepted %s", ep.URL)
			} else if ep.Token != "" && strings.Contains(err.Error(), ep.Token) {
				t.Errorf("error quotes the token: %v", err)
			}
		}
	})
}

func TestApplyAsAgent(t *testing.T) {
	l := box(t, map[string]string{"claude": "", "codex": ""})
	request, err := json.Marshal(testEndpoint())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := ApplyAsAgent(bytes.NewReader(request), &out, l); err != nil {
		t.Fatal(err)
	}
	var a answer
	if err := wire.DecodeStrict(out.Bytes(), &a); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"claude", "codex"}, a.Changed); diff != "" || len(a.Errors) != 0 {
		t.Errorf("%s %v", diff, a.Errors)
	}
	err = ApplyAsAgent(strings.NewReader(`{"url":"x","token":"`+testEndpoint().Token+`","more":1}`), io.Discard, l)
	if err == nil || strings.Contains(err.Error(), testEndpoint().Token) {
		t.Errorf("error %v", err)
	}
}

// codexScript answers as Codex' app-server does; status is the server's entry.
func codexScript(status string) string {
	return `read -r a; echo '{"id":1,"result":{"userAgent":"x"}}'; echo '{"method":"noise","params":{}}'
read -r b; read -r c; echo '{"id":2,"result":{"data":[{"name":"other"},` + status + `]}}'; sleep 60`
}

func TestChecks(t *testing.T) {
	const connected = `echo "Checking MCP server health..."; echo; echo "executor: http://127.0.0.1:4788/mcp (HTTP) - ✔ Connected"`
	const codexUp = `{"name":"executor","serverInfo":{"name":"executor"},"tools":{"execute":{},"resume":{}}}`
	good := testEndpoint()
	old := Endpoint{URL: good.URL, Token: strings.Repeat("0", 64)}
	elsewhere := Endpoint{URL: "http://127.0.0.1:4790/mcp", Token: good.Token}
	for _, c := range []struct {
		name      string
		launchers map[string]string
		wired     *Endpoint
		want      map[string]wire.Status
		say       string // in the summary or evidence of a failure
	}{
		{"nothing installed", nil, nil, map[string]wire.Status{"claude": wire.Skip, "codex": wire.Skip, "hermes": wire.Skip}, ""},
		{
			"all well",
			map[string]string{"claude": connected, "codex": codexScript(codexUp), "hermes": ""},
			&good,
			map[string]wire.Status{"claude": wire.Pass, "codex": wire.Pass, "hermes": wire.Pass},
			"",
		},
		{
			"never wired",
			map[string]string{"claude": connected, "codex": codexScript(codexUp), "hermes": ""},
			nil,
			map[string]wire.Status{"claude": wire.Fail, "codex": wire.Fail, "hermes": wire.Fail},
			"not wired",
		},
		{
			"old token",
			map[string]string{"claude": connected, "codex": codexScript(codexUp), "hermes": ""},
			&old,
			map[string]wire.Status{"claude": wire.Fail, "codex": wire.Fail, "hermes": wire.Fail},
			"old token",
		},
		{
			"old address",
			map[string]string{"claude": connected, "codex": codexScript(codexUp), "hermes": ""},
			&elsewhere,
			map[string]wire.Status{"claude": wire.Fail, "codex": wire.Fail, "hermes": wire.Fail},
			"another address",
		},
		{
			"claude fails with exit code 0",
			map[string]string{"claude": `echo "executor: http://127.0.0.1:4788/mcp (HTTP) - ✘ Failed to connect — Bearer abc ` + good.Token + `"`},
			&good,
			map[string]wire.Status{"claude": wire.Fail},
			"Failed to connect",
		},
		{
			"another server is connected",
			map[string]string{"claude": `echo "my executor: x - ✔ Connected"`},
			&good,
			map[string]wire.Status{"claude": wire.Fail},
			"does not name",
		},
		{"claude crashes", map[string]string{"claude": `exit 3`}, &good, map[string]wire.Status{"claude": wire.Fail}, "exit status 3"},
		{
			"codex rejected",
			map[string]string{"codex": codexScript(`{"name":"executor","toolsError":"MCP startup failed: Auth required","tools":{}}`)},
			&good,
			map[string]wire.Status{"codex": wire.Fail},
			"Auth required",
		},
		{
			"codex finds a stranger",
			map[string]string{"codex": codexScript(`{"name":"executor","serverInfo":{"name":"nginx"},"tools":{"execute":{}}}`)},
			&good,
			map[string]wire.Status{"codex": wire.Fail},
			"nginx",
		},
		{
			"codex lacks execute",
			map[string]string{"codex": codexScript(`{"name":"executor","serverInfo":{"name":"executor"},"tools":{}}`)},
			&good,
			map[string]wire.Status{"codex": wire.Fail},
			"no tool called execute",
		},
		{
			"codex ends at once",
			map[string]string{"codex": `echo "bad config" >&2; exit 1`},
			&good,
			map[string]wire.Status{"codex": wire.Fail},
			"bad config",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := box(t, c.launchers)
			if c.wired != nil {
				if a := apply(l, *c.wired); a.err() != nil {
					t.Fatal(a.err())
				}
			}
			for _, check := range Checks(context.Background(), l, good) {
				want, ok := c.want[strings.TrimPrefix(check.ID, "mcp.")]
				if !ok {
					want = wire.Skip
				}
				text := check.Summary + " / " + check.Evidence
				if check.Status != want {
					t.Errorf("%s: %s, want %s: %s", check.ID, check.Status, want, text)
				}
				if check.Status == wire.Fail && (!strings.Contains(text, c.say) || check.Fix != "hb wire-mcp") {
					t.Errorf("%s: %q (fix %q) does not say %q", check.ID, text, check.Fix, c.say)
				}
				if strings.Contains(text, good.Token) || strings.Contains(text, old.Token) {
					t.Errorf("%s shows a token: %s", check.ID, text)
				}
			}
		})
	}
}

// TestEditRace: a tool that rewrites its file in the middle of an edit loses
// nothing.
func TestEditRace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.json")
	if err := os.WriteFile(path, []byte(`{"a":1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	n := 0
	_, err := editFile(path, noPause, func(old []byte) ([]byte, error) {
		if n++; n == 1 {
			if err := os.WriteFile(path, []byte(`{"a":2}`), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return spliceClaude(old, testEndpoint())
	})
	got, readErr := os.ReadFile(path)
	if err != nil || readErr != nil || !bytes.Contains(got, []byte(`"a":2`)) || !bytes.Contains(got, []byte("executor")) {
		t.Errorf("%s %v %v", got, err, readErr)
	}
	_, err = editFile(path, noPause, func(old []byte) ([]byte, error) {
		n++
		return append(slices.Clone(old), ' '), os.WriteFile(path, []byte(strings.Repeat(" ", n)), 0o600)
	})
	if err == nil || !strings.Contains(err.Error(), "keeps changing") {
		t.Errorf("error %v", err)
	}
}

// TestEditAmidWriting: a program that has truncated its file and not yet written
// it loses nothing, and is waited for.
func TestEditAmidWriting(t *testing.T) {
	const missing = "missing"
	for _, tt := range []struct {
		name, half, whole string
		splice            func([]byte, Endpoint) ([]byte, error)
	}{
		{"empty JSON", "", `{"users":"own"}`, spliceClaude},
		{"cut JSON", `{"users":`, `{"users":"own"}`, spliceClaude},
		{"new JSON", missing, `{"users":"own"}`, spliceClaude},
		{"empty TOML", "", "users = \"own\"\n", spliceCodex},
		{"cut TOML", "other = 1\n", "other = 1\nusers = \"own\"\n", spliceCodex},
		{"empty YAML", "", "users: own\n", spliceHermes},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config")
			write := func(text string) {
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Error(err)
				}
			}
			if tt.half != missing {
				write(tt.half)
			}
			await := func() { write(tt.whole) }
			_, err := editFile(path, func() { await(); await = noPause }, func(old []byte) ([]byte, error) {
				if old == nil { // the program begins only now
					write("")
				}
				return tt.splice(old, testEndpoint())
			})
			got, readErr := os.ReadFile(path)
			if err != nil || readErr != nil || !bytes.Contains(got, []byte("own")) || !bytes.Contains(got, []byte("executor")) {
				t.Errorf("%q, %v, %v", got, err, readErr)
			}
		})
	}
}

func corpus(f *testing.F, tool string) {
	f.Helper()
	paths, err := filepath.Glob("testdata/" + tool + "/*.before")
	if err != nil {
		f.Fatal(err)
	}
	for _, p := range paths {
		data, err := os.ReadFile(p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
}

// fuzzSplice: an edit succeeds or leaves everything; what it makes is right
// and stays as it is.
func fuzzSplice(t *testing.T, splice func([]byte, Endpoint) ([]byte, error), data []byte, state func(string, Endpoint) state, place func(string) string) {
	if len(data) > 1<<16 {
		return
	}
	out, err := splice(data, testEndpoint())
	if err != nil {
		return
	}
	again, err := splice(out, testEndpoint())
	if err != nil || !bytes.Equal(out, again) {
		t.Fatalf("not idempotent: %v\n%q\n%q\n%q", err, data, out, again)
	}
	home := t.TempDir()
	if err := os.MkdirAll(filepath.Dir(place(home)), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(place(home), out, 0o600); err != nil {
		t.Fatal(err)
	}
	if st := state(home, testEndpoint()); !st.ok {
		t.Fatalf("%+v\n%q\n%q", st, data, out)
	}
}

func FuzzClaude(f *testing.F) {
	corpus(f, "claude")
	f.Fuzz(func(t *testing.T, data []byte) { fuzzSplice(t, spliceClaude, data, claudeState, claudeConfig) })
}

func FuzzCodex(f *testing.F) {
	corpus(f, "codex")
	f.Fuzz(func(t *testing.T, data []byte) { fuzzSplice(t, spliceCodex, data, codexState, codexConfig) })
}

func FuzzHermes(f *testing.F) {
	corpus(f, "hermes")
	f.Fuzz(func(t *testing.T, data []byte) {
		withEnv := func(home string, ep Endpoint) state {
			if err := os.WriteFile(hermesEnv(home), spliceDotenv(nil, ep), 0o600); err != nil {
				t.Fatal(err)
			}
			return hermesState(home, ep)
		}
		fuzzSplice(t, spliceHermes, data, withEnv, hermesConfig)
	})
}
