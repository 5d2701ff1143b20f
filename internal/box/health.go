package box

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"hermes-box-lite/internal/mcp"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// Doctor examines a box from inside and outside. It starts nothing and
// changes nothing; ErrNotRunning says that there is nothing to examine.
func (m *Manager) Doctor(ctx context.Context, name string) (wire.Report, error) {
	rec, err := m.Lookup(name)
	if err != nil {
		return wire.Report{}, err
	}
	drv, err := m.usable(ctx, rec)
	if err != nil {
		return wire.Report{}, err
	}
	report, _, err := m.examine(ctx, drv, rec, "", nil)
	if err == nil && !report.Healthy {
		err = ErrUnhealthy
	}
	return report, err
}

// examine collects the guest's report, or the part of it that was not made
// before, and the host's own checks. It also returns what the engine says of the
// running machine.
func (m *Manager) examine(ctx context.Context, drv vm.Driver, rec Record, part string, before []wire.Check) (wire.Report, vm.Machine, error) {
	machine, err := drv.Inspect(ctx, rec.Name)
	if err != nil {
		return wire.Report{}, machine, err
	}
	if machine.State != vm.Running {
		return wire.Report{}, machine, fmt.Errorf("doctor %s: %w (%s)", rec.Name, ErrNotRunning, machine.State)
	}
	checks := []wire.Check{isolationCheck(machine)}
	for _, note := range machine.Notes {
		checks = append(checks, wire.Check{ID: "network", Status: wire.Info, Summary: note, Evidence: "the driver " + drv.Name()})
	}
	// The look from outside goes on beside hb's own checks, which take longest.
	// Those of an hb that cannot be worked with do not count.
	g := m.guest(drv, rec.Name, nil)
	insideCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	inside := make(chan []wire.Check, 1)
	go func() { inside <- append(before, m.guestChecks(insideCtx, g, part)...) }()
	greeting, hello, err := m.greet(ctx, g)
	if err != nil {
		cancel()
	}
	door := m.examineDoor(ctx, drv, rec, hello.Paused)
	found := <-inside
	if door.Status == wire.Fail && err == nil {
		// Of an Executor that was starting: hb's checks have waited for it.
		door = m.examineDoor(ctx, drv, rec, hello.Paused)
	}
	checks = append(checks, greeting...)
	if err == nil {
		checks = append(checks, found...)
	}
	checks = append(append(checks, door), m.lineageCheck(rec)...)
	return wire.NewReport(rec.Name, checks), machine, nil
}

func isolationCheck(machine vm.Machine) wire.Check {
	c := wire.Check{ID: "isolation", Status: wire.Pass, Summary: string(machine.Isolation), Evidence: "the engine's machine " + machine.EngineID}
	if machine.Isolation == vm.IsolationContainer || machine.Isolation == vm.IsolationNone {
		c.Status = wire.Info
		c.Summary += ": weaker than a virtual machine; a fault of the host's kernel is a way out of the box"
	}
	return c
}

// greet judges hb by its handshake; with an error there is no more to ask.
func (m *Manager) greet(ctx context.Context, g guest) ([]wire.Check, wire.Hello, error) {
	repair := "box repair " + g.name
	skew, hello, err := m.clockSkew(ctx, g)
	if err != nil {
		return []wire.Check{{ID: "hb", Status: wire.Fail, Summary: "hb in the box does not answer as it should", Evidence: wire.Printable(err.Error()), Fix: repair}}, wire.Hello{}, err
	}
	c := wire.Check{ID: "hb", Status: wire.Pass, Summary: "hb " + wire.Printable(hello.Version), Evidence: fmt.Sprintf("protocol %d, %s", hello.Protocol, wire.Printable(hello.Arch))}
	if hello.Version != m.opts.Version {
		c.Status, c.Summary, c.Fix = wire.Info, fmt.Sprintf("hb is version %s, box is %s", wire.Printable(hello.Version), m.opts.Version), repair
	}
	return []wire.Check{c, clockCheck(g.name, skew)}, hello, nil
}

// guestChecks are those of the doctor inside the box, or a part of them.
func (m *Manager) guestChecks(ctx context.Context, g guest, part string) []wire.Check {
	ctx, cancel := context.WithTimeout(ctx, m.opts.Deadlines.guest(doctorLimit))
	defer cancel()
	args := []string{"doctor", "--json"}
	if part != "" {
		args = append(args, "--part", part)
	}
	code, out, err := g.call(ctx, nil, args...)
	var report wire.Report
	if err == nil || code == 3 {
		err = wire.DecodeStrict(out, &report)
	}
	if err != nil {
		return []wire.Check{{ID: "guest", Status: wire.Fail, Summary: "the doctor inside the box gave no report", Evidence: wire.Printable(err.Error()), Fix: "box repair " + g.name}}
	}
	checks := make([]wire.Check, 0, len(report.Checks))
	for _, in := range report.Checks {
		checks = append(checks, sanitize(g.name, in))
	}
	return checks
}

// sanitize makes a guest's check safe to show. A status that is none of ours
// is a fault.
func sanitize(name string, c wire.Check) wire.Check {
	switch c.Status {
	case wire.Pass, wire.Fail, wire.Skip, wire.Info:
	default:
		c.Summary = fmt.Sprintf("status %q: %s", c.Status, c.Summary)
		c.Status = wire.Fail
	}
	return wire.Check{
		ID: wire.Printable(c.ID), Status: c.Status, Summary: wire.Printable(c.Summary),
		Evidence: wire.Printable(c.Evidence), Fix: adviceText(name, c.Fix),
	}
}

// doctorLimit is a little more than hb's own.
const doctorLimit = 16 * time.Minute

// hostCheck is the check of the forwarded endpoint.
const hostCheck = "mcp.host"

func (m *Manager) examineDoor(ctx context.Context, drv vm.Driver, rec Record, paused bool) wire.Check {
	switch {
	case rec.HostPort == 0:
		return wire.Check{ID: hostCheck, Status: wire.Skip, Summary: "the box has no port on this host", Evidence: "EXPOSE_EXECUTOR_WEB was off when it was made"}
	case paused:
		return wire.Check{ID: hostCheck, Status: wire.Info, Summary: "Executor is deliberately down", Evidence: "`hb down` was run in the box", Fix: "box enter " + rec.Name + " -- hb up"}
	}
	evidence, err := m.probeDoor(ctx, drv, rec)
	if err != nil {
		return wire.Check{ID: hostCheck, Status: wire.Fail, Summary: "the forwarded endpoint is not healthy", Evidence: wire.Printable(err.Error()), Fix: "box repair " + rec.Name}
	}
	return wire.Check{ID: hostCheck, Status: wire.Pass, Summary: "the forwarded endpoint answers the whole MCP handshake", Evidence: evidence}
}

// doorAddr is the host's end of the forwarded port. An address, not a name:
// a name may resolve to ::1, which is not forwarded.
func doorAddr(rec Record) string {
	return "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(rec.HostPort))
}

// probeDoor speaks with the box's door through the host's port. The door
// proves that it is this box's before it is given a credential.
func (m *Manager) probeDoor(ctx context.Context, drv vm.Driver, rec Record) (string, error) {
	token, err := m.guest(drv, rec.Name, nil).secret(ctx, "token", "agent")
	if err != nil {
		return "", err
	}
	if err := mcp.ProveDoor(ctx, doorAddr(rec), token); err != nil {
		return "", err
	}
	result, err := mcp.Probe(ctx, mcp.Target{URL: doorAddr(rec) + "/mcp", Token: token})
	if err != nil {
		return "", err
	}
	if !result.Healthy() {
		return "", errors.New(result.Summary)
	}
	return fmt.Sprintf("127.0.0.1:%d: %s", rec.HostPort, result.Summary), nil
}

// OpenURL waits until the box's UI can be reached and returns an address that
// logs a browser in once, within a minute. It is a secret.
func (m *Manager) OpenURL(ctx context.Context, rec Record, host string) (string, error) {
	if rec.HostPort == 0 {
		return "", errors.New("the box has no port on this host (EXPOSE_EXECUTOR_WEB was off when it was made)")
	}
	drv, err := m.usable(ctx, rec)
	if err != nil {
		return "", err
	}
	g := m.guest(drv, rec.Name, nil)
	hello, err := g.hello(ctx)
	if err != nil {
		return "", err
	}
	if hello.Paused {
		return "", &GuestError{Text: "Executor is deliberately down", Fix: "box enter " + rec.Name + " -- hb up"}
	}
	if _, err := g.ready(ctx); err != nil {
		return "", err
	}
	if _, err := m.probeDoor(ctx, drv, rec); err != nil {
		return "", err
	}
	ticket, err := g.secret(ctx, "ticket")
	if err != nil {
		return "", err
	}
	return "http://" + net.JoinHostPort(host, strconv.Itoa(rec.HostPort)) + "/?_token=" + ticket, nil
}

// Exec runs a command in a running box. See vm.Driver.
func (m *Manager) Exec(ctx context.Context, rec Record, cmd vm.Command) (int, error) {
	drv, err := m.usable(ctx, rec)
	if err != nil {
		return 0, err
	}
	return drv.Exec(ctx, rec.Name, cmd)
}

// Running makes sure that the box runs, locking it only when it has to be
// started.
func (m *Manager) Running(ctx context.Context, name string) (Record, error) {
	for {
		rec, err := m.Lookup(name)
		if err != nil {
			return Record{}, err
		}
		drv, machine, err := m.inspect(ctx, rec)
		if err != nil {
			return Record{}, err
		}
		var locked *LockedError
		starting := false
		held, err := m.home.locked(name)
		if err == nil && held {
			starting = m.home.holder(name).Verb == "start"
		}
		// It may run for a save only, which stops it in the end; one that was
		// killed leaves that to the next one, unless the box is started.
		toStop := rec.Operation != nil && rec.Operation.Stop
		if toStop && held {
			m.opts.Report.Note(fmt.Sprintf("%s runs for a %s only, which stops it when it ends", name, rec.Operation.Verb))
		}
		if machine.OwnerID == rec.OwnerID && machine.State == vm.Running && !starting && (held || !toStop) {
			// A wrong clock is no reason to keep anybody out; the doctor tells.
			_ = m.syncClock(ctx, m.guest(drv, name, nil), machine.Isolation)
			return rec, nil
		}
		// Somebody else may be starting it: that is what is wanted here, too.
		if err := m.Start(ctx, name); !errors.As(err, &locked) || locked.Holder.Verb != "start" && locked.Holder.PID != 0 {
			return rec, err
		}
	}
}
