// Package e2e holds the end-to-end tests: each is a scenario that drives the
// real ./box as a user would, on real containers, with the real tools. They
// need a podman that works, bases (BOX_BASE, BOX_BARE_BASE) and Chromium, all
// of which scripts/e2e sets up; that script is the way to run them:
//
//	scripts/e2e [--full]
//
// The build tag e2e keeps them out of `go test ./...`.
//
// One program is not the real one: Hermes' official installer needs servers
// that a test must not depend on, so testdata/hermes-install.sh stands for it.
// It installs a program called hermes where the official one would.
//
// All boxes have names with a random prefix of the run and live in homes of
// their own; TestMain fails the run when an object of that prefix is left in
// the engine. While the scenarios run, the command lines and environments of
// all processes of the host are sampled, and no secret may be among them.
package e2e
