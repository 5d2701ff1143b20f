package guest_test

import (
	"bytes"
	"encoding/json"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/guest/supervise"
	"hermes-box-lite/internal/wire"
)

// pack runs hb pack and returns its result.
func (b *box) pack() wire.Event {
	b.t.Helper()
	req, err := json.Marshal(wire.PackRequest{Protocol: wire.Protocol, Box: "alpha", Time: time.Now().UTC(), Lineage: strings.Repeat("0f", 16)})
	if err != nil {
		b.t.Fatal(err)
	}
	cmd := exec.CommandContext(b.t.Context(), b.hb, "pack")
	cmd.Env = b.env
	cmd.Stdin = bytes.NewReader(req)
	cmd.Stdout = io.Discard
	var events bytes.Buffer
	cmd.Stderr = &events
	runErr := cmd.Run()
	result, err := wire.ReadEvents(&events, nil, nil)
	if err != nil || (runErr == nil) != (result.Error == "") {
		b.t.Fatalf("%v, %v: %s", runErr, err, events.String())
	}
	return result
}

// Executor outlives a worker that is killed. Whoever needs it down must not
// take the silence of the supervisor for that.
func TestPackHoldsAnExecutorWithoutAWorker(t *testing.T) {
	b := newBox(t, "").provisioned().supervise()
	b.reaches(supervise.PhaseRunning)
	// No other worker meanwhile.
	if err := b.guardian.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.guardian.Process.Signal(syscall.SIGCONT) })
	b.killWorker()
	b.eventually("silence", func() bool { _, err := b.status(); return err != nil })
	if len(b.alive()) != 1 {
		t.Fatalf("alive: %v", b.alive())
	}
	if result := b.pack(); result.Error != "" {
		t.Error(result.Error)
	}
	if alive := b.alive(); len(alive) != 0 {
		t.Errorf("packed beside the living Executor %v", alive)
	}
	if err := b.guardian.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	b.reaches(supervise.PhaseRunning)
}
