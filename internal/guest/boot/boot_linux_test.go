package boot

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"hermes-box-lite/internal/wire"
)

func TestWhoIAm(t *testing.T) {
	for _, tt := range []struct {
		args          []string
		init, channel bool
	}{
		{args: []string{"/init"}}, // not process 1
		{args: []string{"/opt/hermes-box/bin/hb", "channel"}},
		{args: []string{"init", "channel"}, channel: true},
		{args: []string{"/init", "channel"}, channel: true},
		{args: []string{"init", "channel", "more"}},
		{args: []string{"init", "other"}},
		{args: []string{"channel", "init"}},
	} {
		if got := IsInit(tt.args); got != tt.init {
			t.Errorf("%q is the init: %v", tt.args, got)
		}
		if got := IsChannel(tt.args); got != tt.channel {
			t.Errorf("%q is the channel: %v", tt.args, got)
		}
	}
}

func TestWrongClock(t *testing.T) {
	const host = 1_800_000_000
	for skew, want := range map[int64]bool{
		0: false, 1: false, -2: false, -3: true, 120: false, 121: true, // a boot takes its time
		-2700: true, 86400: true,
	} {
		if got := wrong(host+skew, host); got != want {
			t.Errorf("%d s off the host is wrong: %v", skew, got)
		}
	}
	if wrong(1000, 0) {
		t.Error("a host without a clock was believed")
	}
}

func TestHasRoom(t *testing.T) {
	const gib = 1 << 30
	for _, tt := range []struct {
		filesystem, disk uint64
		want             bool
	}{
		{gib, 64 * gib, true},
		{64*gib - 2*gib, 64 * gib, false}, // its own tables
		{64 * gib, 64 * gib, false},
		{65 * gib, 64 * gib, false}, // the disk shrank
		{30 * gib, 64 * gib, true},
		{4 << 20, 8 << 20, false},
		{0, 0, false},
	} {
		if got := hasRoom(tt.filesystem, tt.disk); got != tt.want {
			t.Errorf("%d of %d: %v", tt.filesystem, tt.disk, got)
		}
	}
}

// The bytes are laid out by hand after rtnetlink(7), on a machine that counts
// from the little end as all of ours do.
func TestRouteRequest(t *testing.T) {
	const want = "24000000" + "1800" + "0504" + "01000000" + "00000000" + // length, RTM_NEWROUTE, REQUEST|CREATE|ACK, sequence, pid
		"02" + "000000" + "fe" + "03" + "00" + "01" + "00000000" + // AF_INET, lengths and tos, main, boot, universe, unicast, flags
		"0800" + "0500" + "0a000202" // RTA_GATEWAY
	if got := hex.EncodeToString(routeRequest(net.ParseIP("10.0.2.2"))); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestPlace(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(dir, "opt/bin/hb")
	if err := place(program, at); err != nil {
		t.Fatal(err)
	}
	content := func() string {
		data, err := os.ReadFile(at)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if info, err := os.Stat(at); err != nil || info.Mode().Perm()&0o111 == 0 || content() != "new" {
		t.Errorf("%v %v %q", info.Mode(), err, content())
	}
	// The box's own stays, whatever it is: repair replaces it.
	if err := os.WriteFile(at, []byte("old"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := place(program, at); err != nil || content() != "old" {
		t.Errorf("%v: %q", err, content())
	}
	if err := os.Remove(at); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/nowhere", at); err != nil {
		t.Fatal(err)
	}
	if target, err := os.Readlink(at); place(program, at) != nil || err != nil || target != "/nowhere" {
		t.Errorf("a link was replaced: %q, %v", target, err)
	}
	if err := place(filepath.Join(dir, "none"), filepath.Join(dir, "x/hb")); err == nil {
		t.Error("placed a program that is not there")
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*", "*.draft")) // the pattern is fine
	if len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A child has its input, directory and environment and no other, is started
// again when it has ended, but not at once.
func TestChild(t *testing.T) {
	var out bytes.Buffer
	logger := log.New(&out, "", 0)
	path := filepath.Join(t.TempDir(), "said")
	c := &child{
		argv:  []string{"/bin/sh", "-c", `{ cat; echo " $PWD $A"; } >>"$OUT"`},
		env:   []string{"A=b", "OUT=" + path},
		stdin: "secret",
	}
	ended := func() {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); c.pid != 0; time.Sleep(time.Millisecond) {
			reap([]*child{c})
			if time.Now().After(deadline) {
				t.Fatal("the child does not end")
			}
		}
	}
	c.start(logger)
	if c.pid == 0 {
		t.Fatalf("not started: %s", out.String())
	}
	first := c.pid
	c.start(logger)
	if c.pid != first {
		t.Error("started twice")
	}
	ended()
	if said, err := os.ReadFile(path); err != nil || string(said) != "secret / b\n" {
		t.Errorf("%q, %v", said, err)
	}
	c.start(logger)
	if c.pid != 0 {
		t.Error("started again at once")
	}
	c.due = time.Now().Add(-time.Millisecond) // a second later
	c.start(logger)
	if c.pid == 0 {
		t.Fatal("not started again")
	}
	ended()
	if said, err := os.ReadFile(path); err != nil || strings.Count(string(said), "secret") != 2 {
		t.Errorf("%q, %v", said, err)
	}
	none := &child{argv: []string{"/nowhere/at/all"}}
	none.start(logger)
	if none.pid != 0 || !strings.Contains(out.String(), "/nowhere/at/all") {
		t.Errorf("pid %d; said: %s", none.pid, out.String())
	}
}

func TestChannelRefusesABadSeed(t *testing.T) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		t.Fatal(err)
	}
	hostKey := string(pem.EncodeToMemory(block))
	for what, stdin := range map[string]string{
		"the seed":         "{",
		"the host key":     seedText(t, wire.Seed{HostKey: "x"}),
		"the client's key": seedText(t, wire.Seed{HostKey: hostKey, ClientKey: "x"}),
	} {
		err := Channel(strings.NewReader(stdin))
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
		if strings.Contains(fmt.Sprint(err), hostKey) {
			t.Errorf("%s: the error has the key", what)
		}
	}
}

func seedText(t *testing.T, s wire.Seed) string {
	t.Helper()
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestCheck has the real e2fsck look at file systems that are damaged.
func TestCheck(t *testing.T) {
	e2fsck, err := exec.LookPath("e2fsck")
	mkfs, mkfsErr := exec.LookPath("mkfs.ext4")
	debugfs, debugfsErr := exec.LookPath("debugfs")
	if err := errors.Join(err, mkfsErr, debugfsErr); err != nil {
		t.Skip(err)
	}
	run := func(program string, args ...string) string {
		t.Helper()
		out, err := exec.Command(program, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %q: %v\n%s", program, args, err, out)
		}
		return string(out)
	}
	precious := filepath.Join(t.TempDir(), "precious")
	if err := os.WriteFile(precious, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name     string
		edits    []string // of debugfs
		damaged  bool
		contents bool // mending keeps the file at its place
	}{
		{"clean", nil, false, true},
		{"not unmounted", []string{"set_super_value state 0"}, false, true},
		{"wrong counts, marked", []string{"set_super_value free_blocks_count 7", "set_super_value state 2"}, false, true},
		{"a lost root directory", []string{"clri <2>", "set_super_value state 2"}, true, false},
		{"blocks that two files claim", []string{"set_inode_field twin block[0] 1", "clri <8>", "set_super_value state 2"}, true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			disk := filepath.Join(t.TempDir(), "disk")
			if err := os.WriteFile(disk, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(disk, 16<<20); err != nil {
				t.Fatal(err)
			}
			run(mkfs, "-q", "-F", disk)
			run(debugfs, "-w", "-R", "write "+precious+" kept", disk)
			run(debugfs, "-w", "-R", "write "+precious+" twin", disk)
			for _, edit := range tt.edits {
				run(debugfs, "-w", "-R", edit, disk)
			}
			damage, err := check(e2fsck, disk, false)
			if err != nil || (damage != "") != tt.damaged || len(damage) > 300 {
				t.Fatalf("%q, %v", damage, err)
			}
			if tt.damaged {
				if damage, err := check(e2fsck, disk, true); err != nil || damage != "" {
					t.Errorf("asked to mend it: %q, %v", damage, err)
				}
			}
			run(e2fsck, "-f", "-n", disk) // nothing is left to mend
			if got := run(debugfs, "-R", "cat kept", disk); tt.contents && !strings.HasSuffix(got, "precious") {
				t.Errorf("the file holds %q", got)
			}
		})
	}
	if damage, err := check("/nowhere/e2fsck", "/nowhere", false); damage != "" || err != nil {
		t.Errorf("without a checker: %q, %v", damage, err)
	}
	if damage, err := check(e2fsck, filepath.Join(t.TempDir(), "none"), false); damage != "" || err == nil {
		t.Errorf("without a disk: %q, %v", damage, err)
	}
}
