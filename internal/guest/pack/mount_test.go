package pack

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// mount mounts until the test's end, and skips the test where that is not
// allowed.
func mount(t *testing.T, at, kind, options string) {
	t.Helper()
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(kind, at, kind, unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		t.Skip("cannot mount: ", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// mountFUSE mounts what a daemon of that user would serve, who never answers.
// Once it is closed, the daemon is dead.
func mountFUSE(t *testing.T, at string, uid int) (daemon *os.File) {
	t.Helper()
	daemon, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no FUSE: ", err)
	}
	mount(t, at, "fuse", fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=0", daemon.Fd(), uid))
	t.Cleanup(func() { _ = daemon.Close() }) // it may be dead already
	return daemon
}

// TestForeign: another file system below /data is left out and found, and is
// asked for nothing: it may refuse, be dead, or never answer.
func TestForeign(t *testing.T) {
	for name, mountAt := range map[string]func(t *testing.T, at string){
		"with files": func(t *testing.T, at string) {
			mount(t, at, "tmpfs", "")
			put(t, filepath.Join(at, "below/it"), strings.Repeat("x", 1<<20))
		},
		"that refuses":         func(t *testing.T, at string) { mountFUSE(t, at, layout.AgentUID) },
		"that is dead":         func(t *testing.T, at string) { _ = mountFUSE(t, at, os.Getuid()).Close() },
		"that does not answer": func(t *testing.T, at string) { mountFUSE(t, at, os.Getuid()) },
	} {
		t.Run(name, func(t *testing.T) {
			l := newBox(t)
			put(t, filepath.Join(l.Home(), ".cache/it"), "12345")
			for _, at := range []string{"workspace/mount", ".cache/mount", ".npm"} {
				mountAt(t, filepath.Join(l.Home(), at))
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			type outcome struct {
				plan wire.StatePlan
				err  error
			}
			done := make(chan outcome, 1)
			go func() {
				plan, err := Plan(ctx, l)
				done <- outcome{plan, err}
			}()
			var plan wire.StatePlan
			select {
			case o := <-done:
				if plan = o.plan; o.err != nil {
					t.Fatal(o.err)
				}
			case <-ctx.Done():
				t.Fatal("the plan waits for it")
			}
			home := "/" + homeEntry + "/"
			if diff := cmp.Diff([]wire.LeftOut{
				{Path: home + ".cache", Why: cache, Bytes: 5},
				{Path: home + ".npm", Why: cache},
				{Path: home + "workspace/mount", Why: "another file system"},
			}, plan.LeftOut); diff != "" {
				t.Error(diff)
			}
			p, err := packUntil(ctx, l)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(map[string]string{homeEntry + "/workspace/mount": "another file system is mounted here"}, p.findings("special")); diff != "" {
				t.Error(diff)
			}
			if len(p.content) != 0 || p.result.Entries != plan.Entries || len(p.summary.End.Findings) != 1 {
				t.Errorf("planned %d entries, packed %q with %+v", plan.Entries, p.order, p.summary.End.Findings)
			}
		})
	}
}
