//go:build e2e && linux

package e2e

import (
	"strings"
	"testing"
)

// TestFork streams a state that is in use from container to container, whose
// system is that of the first box's template.
func TestFork(t *testing.T) {
	h := newHome(t, nil)
	alpha := h.create("alpha")
	h.fill(alpha)
	h.storeCredential(alpha)
	h.rows = atoi(t, h.in(alpha, "tail -1 /tmp/rows"))

	beta := h.name("beta")
	h.wants(0, []string{
		"starting from the system of an earlier box",
		"the logins of claude, codex are the same as in " + alpha,
	}, "fork", alpha, beta)
	h.itself(alpha, beta)
	h.checkState(beta)
	h.useCredential(beta)
	h.useCredential(alpha)
	for _, name := range []string{alpha, beta} {
		h.wants(0, []string{"state.lineage", "healthy"}, "doctor", name)
	}

	// A stopped source, and no logins.
	h.must("stop", alpha)
	gamma := h.name("gamma")
	h.wants(0, []string{"left out: /data/home/agent/.codex/auth.json"}, "fork", alpha, gamma, "--fresh-logins")
	h.wants(0, []string{alpha + " ", "stopped"}, "ls")
	h.must("start", alpha)
	h.itself(alpha, gamma)
	if own, out := h.templates(); own != 1 {
		t.Errorf("one template is expected:\n%s", out)
	}
	h.must("cache", "prune") // nothing of it is of no use
	if own, out := h.templates(); own != 1 {
		t.Errorf("one template is expected after prune:\n%s", out)
	}
	h.doctor(alpha, 0)
}

// templates counts those of this home: the engine may have others.
func (h *home) templates() (own int, listing string) {
	h.t.Helper()
	listing = h.must("cache", "ls")
	for line := range strings.Lines(listing) {
		if strings.HasPrefix(line, "template") && !strings.Contains(line, "of another home") {
			own++
		}
	}
	return own, listing
}

// itself fails when a box goes by anything of another one's.
func (h *home) itself(origin, name string) {
	h.t.Helper()
	for what, script := range map[string]string{
		"Claude's configuration": "md5sum <~/.claude.json", "machine id": "cat /etc/machine-id", "host name": "hostname",
		"agent token":    "sudo sh -c 'md5sum </data/.hermes-box/agent-token'",
		"operator token": "sudo sh -c 'md5sum </data/.hermes-box/operator-token'",
	} {
		if a, b := h.in(origin, script), h.in(name, script); a == b {
			h.t.Errorf("%s has the %s of %s: %s", name, what, origin, a)
		}
	}
	if h.in(name, "grep -c '"+origin+"' /etc/hosts /etc/hostname | grep -v ':0$' || :") != "" {
		h.t.Errorf("%s still has the name of %s", name, origin)
	}
	if a, b := h.record(origin).HostPort, h.record(name).HostPort; a == b {
		h.t.Errorf("%s has the port of %s: %d", name, origin, a)
	}
}

// fork clones a running machine; neither sees what the other does next, and
// the origin can be removed first.
func (v *machines) fork(t *testing.T, name string) {
	v.in(name, "echo before >~/workspace/forked; echo system | sudo tee /opt/forked >/dev/null")
	other := v.name("fork")
	v.must("fork", name, other)
	v.itself(name, other)
	if got := v.in(other, "cat ~/workspace/forked /opt/forked"); got != "before\nsystem" {
		t.Errorf("the fork has %q", got)
	}
	v.in(other, "echo there >~/workspace/forked")
	v.in(name, "echo here >~/workspace/forked; sync")
	if a, b := v.in(name, "cat ~/workspace/forked"), v.in(other, "cat ~/workspace/forked"); a != "here" || b != "there" {
		t.Errorf("after the fork: %q and %q", a, b)
	}
	v.must("rm", other, "--force")
	v.gone(t, other)
}
