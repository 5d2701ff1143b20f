package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/provision"
	"hermes-box-lite/internal/guest/secrets"
	"hermes-box-lite/internal/guest/supervise"
	"hermes-box-lite/internal/guest/wiring"
	"hermes-box-lite/internal/mcp"
	"hermes-box-lite/internal/wire"
)

// doctorLimit bounds the whole report: seconds on a real processor, minutes on
// an emulated one.
const doctorLimit = 15 * time.Minute

// startPatience is how long the doctor waits for an Executor that is starting
// already: a verdict on a box that was started a moment ago would be wrong.
const startPatience = 2 * time.Minute

func (a *app) doctorCommand() *cobra.Command {
	var asJSON bool
	var part string
	cmd := verb("doctor", "Check tools, state, Executor and MCP wiring",
		"Check the tools, the state under /data, Executor and the MCP wiring. Nothing is started or changed.\nExit code 3 means that a check failed; each such check names a command that mends it.",
		cobra.NoArgs, a.asRoot(func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, doctorLimit)
			defer cancel()
			settings, err := settingsOrZero(a.layout)
			if err != nil {
				return err
			}
			if part != "" && part != wire.DoctorTools && part != wire.DoctorRest {
				return &exitError{exitUsage, fmt.Errorf("%q is no part of the checks", part)}
			}
			checks := a.checks(ctx, part)
			if err := ctx.Err(); err != nil {
				checks = append(checks, wire.Check{ID: "doctor", Status: wire.Fail, Summary: "the checks were not done in time", Evidence: err.Error()})
			}
			report := wire.NewReport(settings.BoxName, checks)
			if asJSON {
				data, err := json.MarshalIndent(report, "", "  ")
				if err != nil {
					return err
				}
				if err := a.printf("%s\n", data); err != nil {
					return err
				}
			} else if err := a.printf("%s", renderReport(report)); err != nil {
				return err
			}
			if !report.Healthy {
				return &exitError{exitUnhealthy, nil}
			}
			return nil
		}))
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	cmd.Flags().StringVar(&part, "part", "", "check only the tools, or the rest")
	_ = cmd.Flags().MarkHidden("part") // the host's; it was just defined
	return cmd
}

// renderReport is the report for people.
func renderReport(r wire.Report) string {
	width := 0
	for _, c := range r.Checks {
		width = max(width, len(c.ID))
	}
	var b strings.Builder
	for _, c := range r.Checks {
		fmt.Fprintf(&b, "%-4s  %-*s  %s\n", c.Status, width, wire.Printable(c.ID), wire.Printable(c.Summary))
		if c.Status != wire.Fail {
			continue
		}
		if c.Evidence != "" {
			fmt.Fprintf(&b, "      seen: %s\n", wire.Printable(c.Evidence))
		}
		if c.Fix != "" {
			fmt.Fprintf(&b, "      fix: %s\n", wire.Printable(c.Fix))
		}
	}
	if r.Healthy {
		b.WriteString("healthy\n")
	} else {
		b.WriteString("unhealthy\n")
	}
	return b.String()
}

// checks are all checks, or a part of them.
func (a *app) checks(ctx context.Context, part string) []wire.Check {
	if part == wire.DoctorTools {
		return provision.Checks(ctx, a.layout, a.started)
	}
	settings, settingsErr := a.layout.ReadSettings()
	repair := "box repair NAME"
	if settings.BoxName != "" {
		repair = "box repair " + settings.BoxName
	}
	checks := []wire.Check{}
	if settingsErr != nil {
		c := wire.Check{ID: "box.provisioned", Status: wire.Fail, Summary: "provisioning has not succeeded yet", Evidence: settingsErr.Error(), Fix: repair}
		checks = append(checks, c)
	}
	// Half of the time goes to the tools' own starts, the other half to their
	// connections: side by side.
	tools := make(chan []wire.Check, 1)
	go func() {
		if part == wire.DoctorRest {
			tools <- nil
			return
		}
		tools <- provision.Checks(ctx, a.layout, nil)
	}()
	state := a.stateChecks(ctx, repair)
	executor := a.executorChecks(ctx, settings, settingsErr == nil, repair)
	return slices.Concat(checks, <-tools, state, executor)
}

// started waits for an Executor that starts: its health proves more than its
// version does, which costs half as much processor time once more.
func (a *app) started(ctx context.Context, tool string) bool {
	if tool != "executor" {
		return false
	}
	resp, err := supervise.Ask(ctx, a.layout, supervise.OpReady, upWait)
	return err == nil && resp.Status.Phase == supervise.PhaseRunning
}

// executorChecks judge Executor, its endpoint, and the tools that use it.
func (a *app) executorChecks(ctx context.Context, settings layout.Settings, provisioned bool, repair string) []wire.Check {
	status, askErr := a.settledStatus(ctx)
	checks := []wire.Check{supervisorCheck(status, askErr, settings.BoxName)}
	executor := executorCheck(status.Status, askErr, settings.Executor || !provisioned, repair)
	if executor.Status == wire.Fail && status.Status.Problem == supervise.PortTaken(supervise.PortsOf(a.layout)) {
		executor.Fix = "sudo ss -ltnp # end the program that holds the port; Executor returns by itself"
	}
	checks = append(checks, executor)
	if executor.Status != wire.Pass && executor.Status != wire.Fail {
		why := "Executor is paused"
		if status.Status.Phase != supervise.PhasePaused {
			why = executor.Summary
		}
		return append(checks, wire.Check{ID: "mcp.guest", Status: wire.Skip, Summary: why})
	}

	// Read, not made: a doctor changes nothing.
	token, err := secrets.ReadAgentToken(a.layout)
	if err != nil {
		return append(checks, wire.Check{
			ID: "mcp.guest", Status: wire.Fail, Summary: "there is no agent token", Evidence: err.Error(), Fix: repair,
		})
	}
	ep := wiring.Endpoint{URL: supervise.PortsOf(a.layout).MCPURL(), Token: token}
	res, err := mcp.Probe(ctx, mcp.Target{URL: ep.URL, Token: token})
	checks = append(checks, guestMCPCheck(ep.URL, res, err, repair))
	if !settings.WireMCP {
		return append(checks, wire.Check{ID: "mcp.wiring", Status: wire.Skip, Summary: "WIRE_EXECUTOR_MCP is off"})
	}
	if !res.Healthy() {
		return append(checks, wire.Check{ID: "mcp.wiring", Status: wire.Skip, Summary: "the endpoint itself is not healthy"})
	}
	return append(checks, wiring.Checks(ctx, a.layout, ep)...)
}

// settledStatus asks the supervisor, and again while Executor is starting.
func (a *app) settledStatus(ctx context.Context) (supervise.Response, error) {
	deadline := time.Now().Add(startPatience)
	for {
		resp, err := supervise.Ask(ctx, a.layout, supervise.OpStatus, statusWait)
		if err != nil || resp.Status.Phase != supervise.PhaseStarting || time.Now().After(deadline) {
			return resp, err
		}
		select {
		case <-ctx.Done():
			return resp, nil
		case <-time.After(readyPoll):
		}
	}
}

func supervisorCheck(resp supervise.Response, err error, box string) wire.Check {
	c := wire.Check{ID: "supervisor", Status: wire.Pass, Summary: "the supervisor answers"}
	if box == "" {
		box = "NAME"
	}
	if err != nil {
		c.Status, c.Summary, c.Evidence = wire.Fail, "the supervisor does not answer", err.Error()
		c.Fix = "box stop " + box + " && box start " + box
	} else if resp.Status.DoorError != "" {
		c.Status, c.Summary, c.Evidence = wire.Fail, "the door does not listen", resp.Status.DoorError
		c.Fix = "sudo ss -ltnp # end the program that holds the port; the door returns by itself"
	}
	return c
}

func executorCheck(s supervise.Status, err error, expected bool, repair string) wire.Check {
	c := wire.Check{ID: "executor.process", Evidence: s.Problem}
	switch {
	case !expected:
		c.Status, c.Summary = wire.Skip, "this box has no Executor (INSTALL_EXECUTOR=false)"
	case err != nil:
		c.Status, c.Summary, c.Evidence, c.Fix = wire.Fail, "unknown, since the supervisor does not answer", err.Error(), "hb status"
	case s.Phase == supervise.PhaseRunning:
		c.Status, c.Summary = wire.Pass, fmt.Sprintf("running, pid %d", s.PID)
	case s.Phase == supervise.PhasePaused:
		c.Status, c.Summary, c.Fix = wire.Info, "deliberately down (hb up resumes it)", "hb up"
	case s.Phase == supervise.PhaseHeld:
		c.Status, c.Summary = wire.Info, "kept down by another operation (backup, repair), and back after it"
	case s.Phase == supervise.PhasePausing:
		c.Status, c.Summary, c.Fix = wire.Fail, "paused, but its process is still alive", "hb down"
	case s.Phase == supervise.PhaseNotProvisioned:
		c.Status, c.Summary, c.Fix = wire.Fail, "not started: the box is not provisioned", repair
	case s.Phase == supervise.PhaseWaiting: // it fails: starting it once more is what the supervisor does
		c.Status, c.Summary, c.Fix = wire.Fail, "not up: "+string(s.Phase), repair
	default:
		c.Status, c.Summary, c.Fix = wire.Fail, "not up: "+string(s.Phase), "hb up"
	}
	return c
}

func guestMCPCheck(url string, res mcp.Result, err error, repair string) wire.Check {
	c := wire.Check{ID: "mcp.guest", Status: wire.Pass, Evidence: url}
	switch {
	case err != nil:
		c.Status, c.Summary, c.Evidence, c.Fix = wire.Fail, "the endpoint could not be probed", url+": "+err.Error(), repair
	case res.Healthy():
		c.Summary = fmt.Sprintf("%s, %d tools (%s)", res.Summary, len(res.Tools), strings.Join(res.Tools, " "))
	default:
		c.Status, c.Summary, c.Evidence, c.Fix = wire.Fail, res.Summary, url+": "+string(res.Verdict), repair
	}
	return c
}

// secretFiles hold credentials of the tools (facts measured with Claude Code
// 2.1, Codex 0.171, Executor 1.5.9; Hermes from its documentation).
func secretFiles() []string {
	return []string{
		".claude.json", ".claude/.credentials.json", ".codex/auth.json", ".codex/config.toml",
		".hermes/.env", ".hermes/auth.json", ".local/share/executor/auth.json",
	}
}

// closeSecrets takes the rights of others away from files with secrets.
func (a *app) closeSecrets(ctx context.Context, emit *wire.Emitter) error {
	note := func(path string) error {
		return emit.Emit(wire.Event{Type: wire.EventNote, Step: "secrets", Text: path + " is closed to others now"})
	}
	// The tools' are the agent's, who rearranges its home as it likes.
	out, err := a.askAgent(ctx, "check-home", "--close")
	if err != nil {
		return fmt.Errorf("close the tools' secrets: %w", err)
	}
	var home homeReport
	if err := wire.DecodeStrict(out, &home); err != nil {
		return fmt.Errorf("close the tools' secrets: %w", err)
	}
	for _, path := range home.Closed {
		if err := note(path); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(a.layout.Secrets())
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o077 == 0 {
			continue
		}
		path := filepath.Join(a.layout.Secrets(), e.Name())
		if err := errors.Join(os.Chmod(path, info.Mode().Perm()&^0o077), note(path)); err != nil {
			return err
		}
	}
	return nil
}

// ownSecrets looks at layout.Secrets() as root.
func (a *app) ownSecretsProblem() (path, problem string) {
	dir := a.layout.Secrets()
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", "" // the supervisor makes it
	}
	if err != nil {
		return dir, err.Error()
	}
	if !info.IsDir() || info.Mode().Perm() != 0o700 {
		return dir, "mode " + info.Mode().String()
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return dir, err.Error()
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue // gone in between
		}
		if info.Mode().Perm()&0o077 != 0 {
			return filepath.Join(dir, e.Name()), "mode " + info.Mode().String()
		}
	}
	return "", ""
}
