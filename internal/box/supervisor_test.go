//go:build linux

package box

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/wire"
)

// An hb that never answers as it should is not waited for in silence, and one
// that only a repair can mend not for long.
func TestAwaitSupervisor(t *testing.T) {
	const patience = 5 * time.Minute
	for _, tt := range []struct {
		name, note, err, hint string
		hello                 answer
		short                 bool
	}{
		{name: "it always fails", hello: answer{code: 1, stderr: "hb: no space left\x1b[2J"}, note: `supervisor in the box: hb hello: no space left\x1b[2J`, err: "no space left"},
		{name: "unreachable", hello: answer{err: errors.New("unreachable")}, note: "unreachable", err: "unreachable"},
		{name: "no supervisor", hello: answer{stdout: `{"protocol":1,"version":"1"}`}, note: "supervisor in the box", err: "too long"},
		{name: "missing", hello: answer{code: 127, stderr: "not found"}, short: true, err: "hb in the box cannot be run: hb hello: not found", hint: "box repair alpha"},
		{name: "damaged", hello: answer{code: 126}, short: true, err: "cannot be run", hint: "box repair alpha"},
		{name: "newer", hello: answer{stdout: `{"protocol":2,"version":"9"}`}, short: true, err: "hb in the box speaks protocol 2, and this box protocol 1", hint: "box repair alpha"},
		{name: "older", hello: answer{stdout: `{"protocol":0,"version":"0"}`}, short: true, err: "hb in the box speaks protocol 0, and this box protocol 1", hint: "box repair alpha"},
		{name: "another handshake", hello: answer{stdout: `{"protocol":1,"version":"9","surprise":1}`}, short: true, err: "hb's handshake is not of this version", hint: "box repair alpha"},
		{name: "stopped", hello: answer{err: vm.ErrNotRunning}, short: true, err: "not running"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				report := &silent{}
				m := &Manager{opts: Options{Report: report}}
				g := guest{drv: guestDriver{answers: map[string]answer{"hello": tt.hello}}, name: "alpha"}
				ctx, cancel := context.WithTimeoutCause(t.Context(), patience, errors.New("it took too long"))
				defer cancel()
				began := time.Now() // of a clock that only this test moves
				err := m.awaitSupervisor(ctx, g)
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("%v", err)
				}
				if took := time.Since(began); tt.short && took > 30*time.Second || !tt.short && took != patience {
					t.Errorf("given up after %s", took)
				}
				notes := strings.Join(report.lines, "\n")
				if tt.note == "" && notes != "" || !strings.Contains(notes, tt.note) || len(report.lines) > 1 {
					t.Errorf("it said %q", notes)
				}
				var unfit *unfitError
				if errors.As(err, &unfit) != (tt.hint != "") || unfit != nil && unfit.Hint() != tt.hint {
					t.Errorf("the hint of %v is not %q", err, tt.hint)
				}
			})
		})
	}
}

// sleeper is a virtual machine whose host slept: its clock is behind until it
// is set.
type sleeper struct {
	guestDriver
	mu      sync.Mutex
	running bool
	behind  time.Duration
	calls   []string
}

func (d *sleeper) Name() string { return "sleeper" }

func (d *sleeper) Inspect(context.Context, string) (vm.Machine, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := vm.Machine{Name: "alpha", OwnerID: "owner", State: vm.Stopped, Isolation: vm.IsolationEmulated}
	if d.running {
		m.State = vm.Running
	}
	return m, nil
}

func (d *sleeper) Start(context.Context, string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running = true
	return nil
}

func (d *sleeper) Stop(context.Context, string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running = false
	return nil
}

func (d *sleeper) Exec(ctx context.Context, name string, c vm.Command) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, strings.Join(c.Argv[1:], " "))
	switch c.Argv[1] {
	case "clock":
		d.behind = 0
	case "hello":
		line := fmt.Sprintf(`{"protocol":%d,"version":"1","supervised":true,"unix_time":%d}`, wire.Protocol, time.Now().Add(-d.behind).Unix())
		d.answers = map[string]answer{"hello": {stdout: line}}
	}
	return d.guestDriver.Exec(ctx, name, c)
}

// Whoever comes to a machine after its host slept sets its clock; the doctor,
// which changes nothing, tells.
func TestClockAfterSleep(t *testing.T) {
	for _, tt := range []struct {
		name    string
		running bool
		do      func(*Manager) error // what it comes to is not the question
		keeps   bool
	}{
		{"start", false, func(m *Manager) error { return m.Start(t.Context(), "alpha") }, false},
		{"start of a running box", true, func(m *Manager) error { return m.Start(t.Context(), "alpha") }, false},
		{"enter", true, func(m *Manager) error { _, err := m.Running(t.Context(), "alpha"); return err }, false},
		{"enter of a stopped box", false, func(m *Manager) error { _, err := m.Running(t.Context(), "alpha"); return err }, false},
		{"save", true, func(m *Manager) error {
			_, err := m.Save(t.Context(), "alpha", SaveOptions{Path: t.TempDir() + "/a"})
			return err
		}, false},
		{"repair", true, func(m *Manager) error { _, err := m.Repair(t.Context(), "alpha"); return err }, false},
		{"doctor", true, func(m *Manager) error { _, err := m.Doctor(t.Context(), "alpha"); return err }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, _ := testManager(t, 1, 2)
			drv := &sleeper{running: tt.running, behind: 45 * time.Minute}
			m.opts.Driver = func(context.Context, string) (vm.Driver, error) { return drv, nil }
			if err := m.registry.put(Record{Name: "alpha", OwnerID: "owner", Driver: "sleeper", Phase: Ready}); err != nil {
				t.Fatal(err)
			}
			err := tt.do(m)
			set := slices.ContainsFunc(drv.calls, func(c string) bool { return strings.HasPrefix(c, "clock ") })
			if set == tt.keeps || tt.keeps != (drv.behind != 0) {
				t.Errorf("%v; the clock is %s behind after %q", err, drv.behind, drv.calls)
			}
			if first := slices.Index(drv.calls, "pack --plan"); first >= 0 && !strings.HasPrefix(strings.Join(drv.calls[:first], "\n")+"\n", "hello\nhello\nclock ") {
				t.Errorf("the state was looked at with a wrong clock: %q", drv.calls)
			}
		})
	}
	report, err := func() (wire.Report, error) {
		m, _ := testManager(t, 1, 2)
		drv := &sleeper{running: true, behind: 45 * time.Minute}
		m.opts.Driver = func(context.Context, string) (vm.Driver, error) { return drv, nil }
		if err := m.registry.put(Record{Name: "alpha", OwnerID: "owner", Driver: "sleeper", Phase: Ready}); err != nil {
			t.Fatal(err)
		}
		return m.Doctor(t.Context(), "alpha")
	}()
	i := slices.IndexFunc(report.Checks, func(c wire.Check) bool { return c.ID == "clock" })
	if i < 0 || report.Checks[i].Status != wire.Fail || report.Checks[i].Fix != "box start alpha" || !errors.Is(err, ErrUnhealthy) {
		t.Errorf("the doctor says %+v, %v", report.Checks, err)
	}
}
