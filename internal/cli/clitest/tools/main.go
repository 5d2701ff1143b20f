// Command tools stands for claude and codex in a box of the tests, by the name
// that it is called by. It speaks the parts on which hb relies, as measured with
// Claude Code 2.1.332 and Codex 0.171.0; their versions are told without it:
//
//   - `claude mcp list` connects to the servers of ~/.claude.json and exits
//     with 0 whether or not they answer;
//   - `codex app-server` speaks JSON lines; mcpServerStatus/list connects to
//     the servers of ~/.codex/config.toml.
//
// "Connects" is the real handshake of package mcp. What it does not stand for:
// logins, sessions, and every other subcommand.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"hermes-box-lite/internal/mcp"
)

func main() { os.Exit(run(filepath.Base(os.Args[0]), os.Args[1:])) }

func run(name string, args []string) int {
	switch line := strings.Join(args, " "); {
	case name == "claude" && line == "mcp list":
		return claudeList()
	case name == "codex" && line == "app-server":
		return codexServer()
	}
	fmt.Fprintf(os.Stderr, "stub %s: %q is not part of it\n", name, args)
	return 1
}

// probe connects as a tool would, with the header of its configuration.
func probe(url, authorization string) (mcp.Result, bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	res, err := mcp.Probe(ctx, mcp.Target{URL: url, Token: strings.TrimPrefix(authorization, "Bearer ")})
	return res, err == nil && res.Healthy()
}

func claudeList() int {
	var config struct {
		MCPServers map[string]struct {
			URL     string            `json:"url"`
			Headers map[string]string `json:"headers"`
		} `json:"mcpServers"`
	}
	data, err := os.ReadFile(filepath.Join(os.Getenv("HOME"), ".claude.json"))
	if err == nil {
		err = json.Unmarshal(data, &config)
	}
	if err != nil || len(config.MCPServers) == 0 {
		fmt.Println("No MCP servers configured. Use `claude mcp add` to add a server.")
		return 0
	}
	fmt.Print("Checking MCP server health...\n\n")
	for name, s := range config.MCPServers {
		state := "✗ Failed to connect"
		if _, ok := probe(s.URL, s.Headers["Authorization"]); ok {
			state = "✔ Connected"
		}
		fmt.Printf("%s: %s (HTTP) - %s\n", name, s.URL, state)
	}
	return 0
}

func codexServer() int {
	lines := bufio.NewScanner(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var request struct {
			ID     *int   `json:"id"`
			Method string `json:"method"`
		}
		if json.Unmarshal(lines.Bytes(), &request) != nil || request.ID == nil {
			continue
		}
		var result any = map[string]any{"userAgent": "stub"}
		if request.Method == "mcpServerStatus/list" {
			result = map[string]any{"data": codexStatus()}
		}
		if err := out.Encode(map[string]any{"id": request.ID, "result": result}); err != nil {
			return 1
		}
	}
	return 0
}

func codexStatus() []any {
	var config struct {
		Servers map[string]struct {
			URL     string            `toml:"url"`
			Headers map[string]string `toml:"http_headers"`
		} `toml:"mcp_servers"`
	}
	data, err := os.ReadFile(filepath.Join(os.Getenv("HOME"), ".codex/config.toml"))
	if err != nil || toml.Unmarshal(data, &config) != nil {
		return []any{}
	}
	status := []any{}
	for name, s := range config.Servers {
		res, ok := probe(s.URL, s.Headers["Authorization"])
		if !ok {
			status = append(status, map[string]any{"name": name, "tools": map[string]any{}, "toolsError": res.Summary})
			continue
		}
		tools := map[string]any{}
		for _, tool := range res.Tools {
			tools[tool] = map[string]any{}
		}
		status = append(status, map[string]any{"name": name, "serverInfo": map[string]any{"name": "executor"}, "tools": tools})
	}
	return status
}
