//go:build e2e && linux

package e2e

import (
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"
)

// TestSameName has sixteen people make a box of one name at once.
func TestSameName(t *testing.T) {
	h := newHome(t, nil)
	name := h.name("race")
	results := make([]result, 16)
	var wg sync.WaitGroup
	for i := range results {
		wg.Go(func() { results[i] = h.box("new", name) })
	}
	wg.Wait()
	codes := map[int]int{}
	for _, r := range results {
		codes[r.code]++
		if r.code != 0 && r.code != 1 && r.code != 5 {
			t.Errorf("neither made, locked nor there already: %s", r)
		}
	}
	if codes[0] != 1 {
		t.Fatalf("%d of %d made the box: %v", codes[0], len(results), codes)
	}
	t.Logf("exit codes: %v", codes)
	h.doctor(name, 0)
	h.wants(1, []string{"already exists"}, "new", name)
	h.doctor(name, 0)
}

// TestManyBoxes makes boxes of different names at once, beside a stranger who
// holds a port of the range.
func TestManyBoxes(t *testing.T) {
	h := newHome(t, map[string]string{"BOX_CPUS": "1", "BOX_MEM_MIB": "2048"})
	stranger, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(run.portLo+1))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stranger.Close() }()
	names := make([]string, 8)
	for i := range names {
		names[i] = h.name(fmt.Sprintf("many%d", i))
	}
	var wg sync.WaitGroup
	for _, name := range names {
		wg.Go(func() {
			if r := h.box("new", name); r.code != 0 {
				t.Error(r)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	ports := map[int]string{run.portLo + 1: "the stranger"}
	for _, name := range names {
		h.token(name, "agent")
		port := h.record(name).HostPort
		if other, taken := ports[port]; taken {
			t.Errorf("%s and %s both have port %d", name, other, port)
		}
		ports[port] = name
		h.doctor(name, 0)
	}
	if a, b := h.token(names[0], "agent"), h.token(names[1], "agent"); a == b {
		t.Error("two boxes have the same token")
	}
	for _, name := range names {
		wg.Go(func() {
			if r := h.box("rm", name, "--force"); r.code != 0 {
				t.Error(r)
			}
		})
	}
	wg.Wait()
	for _, name := range names {
		h.noTraces(name)
	}
}
