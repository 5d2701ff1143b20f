//go:build e2e && linux

package e2e

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"hermes-box-lite/internal/wire"
)

// plaintext fails when a file of the host, or a temporary one of a box, holds
// what only the box's state may hold.
func (h *home) plaintext(marker, box string) {
	h.t.Helper()
	_ = filepath.WalkDir(filepath.Dir(h.dir), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil //nolint:nilerr // it is gone
		}
		if data, err := os.ReadFile(path); err == nil && bytes.Contains(data, []byte(marker)) {
			h.t.Errorf("%s on the host holds plaintext of the state", path)
		}
		return nil
	})
	if found := h.in(box, "sudo grep -rlsF "+marker+" /var/tmp /tmp /run /opt /root 2>/dev/null || true"); found != "" {
		h.t.Errorf("in the box: %s holds a copy of the state", found)
	}
}

// TestCutArchive ends save and load by signals at their steps.
func TestCutArchive(t *testing.T) {
	h := newHome(t, nil)
	alpha := h.create("cut")
	// Enough that steps take a while, and a text that must not get out.
	marker := "marker-" + randomHex(t, 12)
	h.in(alpha, "head -c 300000000 /dev/urandom >random; for i in $(seq 1000); do echo "+marker+"; done >marker")
	h.in(alpha, `node --no-warnings -e 'const { DatabaseSync } = require("node:sqlite"); const db = new DatabaseSync("memory.db");
		db.exec("CREATE TABLE m(t TEXT)"); for (let i = 0; i < 1000; i++) db.prepare("INSERT INTO m VALUES(?)").run("`+marker+`")'`)
	file := filepath.Join(h.dir, "a.tar.gz.gpg")
	for i, c := range []struct {
		step   string
		signal syscall.Signal
	}{
		{"look at the state", syscall.SIGTERM},
		{"save: pack Executor's data", syscall.SIGKILL},
		{"save: pack the state", syscall.SIGINT},
		{"save: pack the state", syscall.SIGKILL},
		{"save: verify", syscall.SIGHUP},
		{"save: verify", syscall.SIGKILL},
	} {
		h.within(t, fmt.Sprintf("save %d %v at %s", i, c.signal, c.step), func(t *testing.T) {
			_, inTime := h.signalled(c.step, 0, c.signal, "save", alpha, file)
			_, err := os.Lstat(file)
			if given := err == nil; !inTime || given && c.signal == syscall.SIGKILL { // that ends it after the name, too
				h.quicker(c.step, file)
				return
			} else if given {
				t.Error("there is a file under the final name")
			}
			partial, err := filepath.Glob(filepath.Join(h.dir, ".hermes-box-*"))
			if err != nil || c.signal != syscall.SIGKILL && len(partial) > 0 {
				t.Errorf("left: %q (%v)", partial, err)
			}
			h.plaintext(marker, alpha)
			eventually(t, time.Minute, "Executor as before", func() error {
				r := h.box("doctor", alpha, "--json")
				if r.code != 0 {
					return fmt.Errorf("%s", r)
				}
				var report wire.Report
				if err := wire.DecodeStrict([]byte(r.stdout), &report); err != nil {
					return fmt.Errorf("%w: %s", err, r)
				}
				if c := check(t, report, "executor.process"); c.Status != wire.Pass {
					return fmt.Errorf("%+v", c)
				}
				return nil
			})
			h.wants(0, []string{"interrupted while `box save`"}, "ls")
		})
	}
	h.in(alpha, "hb down") // a pause stays one
	h.must("save", alpha, file)
	if c := check(t, h.doctor(alpha, 0), "executor.process"); c.Status != wire.Info {
		t.Errorf("the pause was lost: %+v", c)
	}
	h.in(alpha, "hb up")
	if left, err := filepath.Glob(filepath.Join(h.dir, ".hermes-box-*")); err != nil || len(left) > 0 {
		t.Errorf("partial files of killed saves are left: %q (%v)", left, err)
	}

	for i, c := range []struct {
		step   string
		signal syscall.Signal
	}{
		{"verify the archive", syscall.SIGINT},
		{"install hb", syscall.SIGTERM},
		{"restore", syscall.SIGHUP},
		{"restore", syscall.SIGKILL},
	} {
		h.within(t, fmt.Sprintf("load %d %v at %s", i, c.signal, c.step), func(t *testing.T) {
			beta := h.name(fmt.Sprintf("cut%d", i))
			h.cut(c.step, c.signal, "load", file, beta)
			if c.signal != syscall.SIGKILL {
				h.noTraces(beta)
				return
			}
			h.wants(0, []string{"interrupted while `box load`"}, "ls")
			h.must("load", file, beta)
			h.doctor(beta, 0)
			h.plaintext(marker, beta)
			h.must("rm", beta, "--force")
		})
	}
	h.within(t, "load after the state is in", func(t *testing.T) {
		beta := h.name("stays")
		r := h.cut("start Executor", syscall.SIGINT, "load", file, beta)
		if !strings.Contains(r.stderr, "hint: box repair "+beta) {
			t.Errorf("no hint: %s", r)
		}
		h.must("repair", beta)
		if got := h.in(beta, "head -1 marker"); got != marker {
			t.Errorf("the state: %q", got)
		}
	})
	h.plaintext(marker, alpha)
}
