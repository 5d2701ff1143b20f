// Package provision installs the tools of a box and refreshes our own assets.
package provision

import (
	"context"
	"errors"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// Run brings the box to what req asks for and reports every step through emit.
func Run(ctx context.Context, l layout.Layout, req wire.ProvisionRequest, emit *wire.Emitter) error {
	return errors.New("not implemented")
}

// Checks asks every required tool for its version, by name, as the agent, in
// login, non-login, tmux and service environments.
func Checks(ctx context.Context, l layout.Layout) []wire.Check { return nil }

// Versions collects the versions of the tools.
func Versions(ctx context.Context, l layout.Layout) (wire.RuntimeManifest, error) {
	return wire.RuntimeManifest{}, errors.New("not implemented")
}

// PublishManifest writes m to the runtime manifest, 0600, owned by the agent.
func PublishManifest(ctx context.Context, l layout.Layout, m wire.RuntimeManifest) error {
	return errors.New("not implemented")
}
