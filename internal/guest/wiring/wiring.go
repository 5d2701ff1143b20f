// Package wiring registers Executor's MCP endpoint with Claude Code, Codex
// and Hermes Agent.
package wiring

import (
	"context"
	"errors"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// Endpoint is what the tools are to be configured with.
type Endpoint struct {
	URL   string // http://127.0.0.1:4788/mcp
	Token string // the agent token, 64 hex
}

// Apply edits the tools' configuration, as the agent, and returns the names
// of the tools whose configuration was changed. The caller has checked that
// the endpoint is healthy.
func Apply(ctx context.Context, l layout.Layout, ep Endpoint) (changed []string, err error) {
	return nil, errors.New("not implemented")
}

// Checks has every installed tool really connect, where it can.
func Checks(ctx context.Context, l layout.Layout, ep Endpoint) []wire.Check { return nil }
