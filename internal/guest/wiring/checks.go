package wiring

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"
	"time"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

const (
	fixWire = "hb wire-mcp"
	// probeLimit bounds what one tool may take to connect. On real hardware
	// it takes one or two seconds; in an emulated machine ten times that (13 s,
	// measured), and several times more on a host that is busy with others.
	probeLimit = 3 * time.Minute
	maxAnswer  = 4 << 20
)

// Checks has every installed tool really connect, where it can. A tool whose
// configuration is wrong is not asked to: its answer would only repeat that.
func Checks(ctx context.Context, l layout.Layout, ep Endpoint) []wire.Check {
	all := clients()
	checks := make([]wire.Check, len(all))
	var wg sync.WaitGroup
	for i, c := range all {
		wg.Go(func() { checks[i] = c.check(ctx, l, ep) })
	}
	wg.Wait()
	return checks
}

func (c client) check(ctx context.Context, l layout.Layout, ep Endpoint) wire.Check {
	out := wire.Check{ID: "mcp." + c.name, Status: wire.Fail, Fix: fixWire}
	if !c.installed(l) {
		out.Status, out.Fix, out.Summary = wire.Skip, "", c.title+" is not installed"
		return out
	}
	st := c.state(l.Home(), ep)
	out.Summary, out.Evidence = c.title+": "+st.summary, wire.Printable(st.evidence)
	if !st.ok {
		return out
	}
	if c.probe == nil {
		// `hermes mcp test` cannot be trusted: it did not expand the variable
		// in the header (NousResearch/hermes-agent#37792).
		out.Status, out.Fix, out.Summary = wire.Pass, "", c.title+" is wired to Executor"
		return out
	}
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	ok, evidence := c.probe(ctx, l)
	out.Evidence = wire.Printable(redact(evidence))
	if !ok {
		out.Summary = c.title + " cannot connect to Executor"
		return out
	}
	out.Status, out.Fix, out.Summary = wire.Pass, "", c.title+" connects to Executor"
	return out
}

// probeClaude has Claude connect to its servers. The exit code of the command
// is 0 also when none of them answers, so that only the words count.
func probeClaude(ctx context.Context, l layout.Layout) (bool, string) {
	cmd := l.AgentCommand(ctx, "claude", "mcp", "list")
	// Claude gives a server 30 s otherwise. That was not enough for two boxes
	// that came up at once on an emulated host: slow is not broken.
	cmd.Env = append(cmd.Env, fmt.Sprintf("MCP_TIMEOUT=%d", (probeLimit-20*time.Second).Milliseconds()))
	out := &bounded{max: 256 << 10}
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	if ok, line := claudeListed(out.String()); line != "" {
		return ok, line
	}
	if ctx.Err() != nil {
		return false, fmt.Sprintf("claude mcp list gave no answer within %s", probeLimit)
	}
	return false, fmt.Sprintf("claude mcp list does not name the server (%v)", errText(err))
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;?]*[A-Za-z]")

// claudeListed finds our server's line in the output of `claude mcp list`:
//
//	executor: http://127.0.0.1:4788/mcp (HTTP) - ✔ Connected
func claudeListed(out string) (bool, string) {
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(escapes.ReplaceAllString(line, ""))
		rest, ok := strings.CutPrefix(line, serverName+": ")
		if !ok {
			continue
		}
		i := strings.LastIndex(rest, " - ")
		return i >= 0 && regexp.MustCompile(`^[✔✓] Connected$`).MatchString(rest[i+3:]), truncate(line)
	}
	return false, ""
}

func truncate(s string) string {
	if len(s) > 400 {
		return s[:400] + "…"
	}
	return s
}

func errText(err error) string {
	if err == nil {
		return "exit code 0"
	}
	return err.Error()
}

// probeCodex asks Codex' own server which of its MCP servers are up. The
// `codex mcp` commands never contact a server.
func probeCodex(ctx context.Context, l layout.Layout) (bool, string) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := l.AgentCommand(ctx, "codex", "app-server")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return false, err.Error()
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return false, err.Error()
	}
	stderr := &bounded{max: 4096}
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		return false, err.Error()
	}
	ok, evidence := askCodex(stdin, stdout)
	cancel() // ends the whole process group
	_ = cmd.Wait()
	if evidence == "" {
		evidence = "codex app-server gave no answer: " + truncate(strings.TrimSpace(stderr.String()))
	}
	return ok, evidence
}

// codexAnswer is a line from Codex' server; only what we look at.
type codexAnswer struct {
	ID     *int             `json:"id"`
	Error  *json.RawMessage `json:"error"`
	Result struct {
		Data []struct {
			Name       string                     `json:"name"`
			ServerInfo struct{ Name string }      `json:"serverInfo"`
			Tools      map[string]json.RawMessage `json:"tools"`
			ToolsError string                     `json:"toolsError"`
		} `json:"data"`
	} `json:"result"`
}

// askCodex speaks JSON-RPC lines until the answer that counts. An empty
// evidence means that there was none.
func askCodex(w io.Writer, r io.Reader) (bool, string) {
	lines := bufio.NewScanner(io.LimitReader(r, maxAnswer))
	lines.Buffer(make([]byte, 64<<10), maxAnswer)
	await := func(id int) (codexAnswer, error) {
		for lines.Scan() {
			var a codexAnswer
			if json.Unmarshal(lines.Bytes(), &a) == nil && a.ID != nil && *a.ID == id {
				return a, nil
			}
		}
		return codexAnswer{}, errors.Join(io.ErrUnexpectedEOF, lines.Err())
	}
	send := func(s string) error {
		_, err := io.WriteString(w, s+"\n")
		return err
	}
	if send(`{"method":"initialize","id":1,"params":{"clientInfo":{"name":"hermes-box","title":"Hermes Box","version":"1"}}}`) != nil {
		return false, ""
	}
	if a, err := await(1); err != nil {
		return false, ""
	} else if a.Error != nil {
		return false, "codex app-server refuses to initialize: " + truncate(string(*a.Error))
	}
	if send(`{"method":"initialized"}`) != nil || send(`{"method":"mcpServerStatus/list","id":2,"params":{}}`) != nil {
		return false, ""
	}
	a, err := await(2)
	if err != nil {
		return false, ""
	}
	if a.Error != nil {
		return false, "codex app-server: " + truncate(string(*a.Error))
	}
	for _, s := range a.Result.Data {
		if s.Name != serverName {
			continue
		}
		_, execute := s.Tools["execute"]
		switch {
		case s.ToolsError != "":
			return false, "codex app-server: " + truncate(s.ToolsError)
		case s.ServerInfo.Name != "executor":
			return false, fmt.Sprintf("codex app-server: the server calls itself %q", truncate(s.ServerInfo.Name))
		case !execute:
			return false, "codex app-server: the server has no tool called execute"
		}
		return true, fmt.Sprintf("codex app-server: connected, %d tools", len(s.Tools))
	}
	return false, "codex app-server does not know the server"
}
