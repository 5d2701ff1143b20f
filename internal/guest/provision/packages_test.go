package provision

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// aptBox is a directory with programs that behave like dpkg, apt-get and npm
// and write down how they were called.
type aptBox struct {
	t   *testing.T
	dir string
	r   *run
}

func newAptBox(t *testing.T, programs map[string]string) *aptBox {
	t.Helper()
	b := &aptBox{t, t.TempDir(), nil}
	b.r = &run{l: layout.At(b.dir), req: goodRequest(), emit: wire.NewEmitter(io.Discard), log: io.Discard, settled: true}
	for _, dir := range []string{"bin", "usr/local", "data/home/agent", "var/lib/dpkg/updates"} {
		if err := os.MkdirAll(filepath.Join(b.dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../../bin", filepath.Join(b.dir, "usr/local/bin")); err != nil {
		t.Fatal(err)
	}
	b.put("trace", "")
	b.put("status", "installed bash\n")
	for name, script := range programs {
		b.put("bin/"+name, "#!/bin/bash\nset -eu; cd "+b.dir+"\n"+script+"\n")
	}
	t.Setenv("PATH", filepath.Join(b.dir, "bin")+":"+os.Getenv("PATH"))
	return b
}

func (b *aptBox) put(name, content string) {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.dir, name), []byte(content), 0o755); err != nil {
		b.t.Fatal(err)
	}
}

// trace is what was called, without the options.
func (b *aptBox) trace() []string {
	b.t.Helper()
	data, err := os.ReadFile(filepath.Join(b.dir, "trace"))
	if err != nil {
		b.t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

// What apt-get says of an interrupted dpkg is dpkg's to mend, or its own when
// something has to be fetched.
const (
	dpkgScript = `echo dpkg "${@: -2}" >>trace
rm -f var/lib/dpkg/updates/*
if ! grep -q '^half-installed' status; then sed -i 's/^[^ ]*/installed/' status; else exit 1; fi`
	aptScript = `what=clean
for a; do case $a in update|install|--fix-broken) what=$a; break;; esac; done
echo apt-get $what >>trace
case $what in
--fix-broken) sed -i 's/^[^ ]*/installed/' status;;
install)
	if [ -n "$(ls var/lib/dpkg/updates)" ]; then echo "E: dpkg was interrupted" >&2; exit 100; fi
	if grep -qvE '^(installed|config-files)' status; then echo "E: Unmet dependencies" >&2; exit 100; fi;;
esac`
)

func TestInterruptedInstallationIsFinished(t *testing.T) {
	usual := []string{"apt-get update", "apt-get install", "apt-get clean"}
	for _, tt := range []struct {
		name, journal, status string
		want                  []string
	}{
		{"nothing to do", "", "installed bash\nconfig-files old\n", nil},
		{"journal", "0003", "installed bash\n", []string{"dpkg --configure -a"}},
		{"not the journal's", "tmp.i", "installed bash\n", nil},
		{"half configured", "", "half-configured curl\n", []string{"dpkg --configure -a"}},
		{
			"half installed", "0001", "half-installed nodejs\n",
			[]string{"dpkg --configure -a", "apt-get update", "apt-get --fix-broken", "apt-get clean"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAptBox(t, map[string]string{"dpkg-query": "cat status", "dpkg": dpkgScript, "apt-get": aptScript})
			b.put("status", tt.status)
			if tt.journal != "" {
				b.put("var/lib/dpkg/updates/"+tt.journal, "")
			}
			if tt.journal == "tmp.i" {
				b.put("bin/apt-get", "#!/bin/bash\ncd "+b.dir+"; rm -f var/lib/dpkg/updates/*\n"+aptScript)
			}
			if err := b.r.aptInstall(t.Context(), []string{"curl"}); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(append(tt.want, usual...), b.trace()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A dpkg that cannot be mended says nothing about where node may come from.
func TestUnfinishedDpkgIsNoReasonToMoveNode(t *testing.T) {
	b := newAptBox(t, map[string]string{
		"dpkg-query": "cat status", "dpkg": "exit 1", "apt-get": "case \"$*\" in *install*) echo broken >&2; exit 100;; esac",
		"curl": "echo curl >>trace; echo asked; exit 1",
	})
	b.put("status", "half-configured broken\n")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	b.r.log = writerFunc(func(p []byte) {
		if bytes.Contains(p, []byte("asked")) {
			cancel() // so that nothing further is tried
		}
	})
	err := b.r.installNode(ctx)
	if err == nil || !strings.Contains(err.Error(), "broken") || strings.Contains(strings.Join(b.trace(), " "), "curl") {
		t.Errorf("%v after %q", err, b.trace())
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) { f(p); return len(p), nil }

// An apt-get that is cancelled may let dpkg finish, and npm put back what it has
// moved; what they have begun for it is not told.
func TestCancelledInstallersFinish(t *testing.T) {
	const script = `trap 'echo told >&2' %s
bin/step & child=$!
echo up >&2
until wait $child; do :; done`
	for _, tt := range []struct {
		program, signal string
		run             func(context.Context, *run) error
	}{
		{"apt-get", "INT", func(ctx context.Context, r *run) error { return r.apt(ctx, "install") }},
		{"npm", "TERM", func(ctx context.Context, r *run) error {
			_, err := r.npm(ctx, r.l.Home(), "install")
			return err
		}},
	} {
		t.Run(tt.program, func(t *testing.T) {
			b := newAptBox(t, map[string]string{
				tt.program: strings.Replace(script, "%s", tt.signal, 1),
				"step":     `read -r _ <go; echo finished >>trace`,
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			said := make(chan string, 10)
			b.r.log = writerFunc(func(p []byte) { said <- string(p) })
			if err := syscall.Mkfifo(filepath.Join(b.dir, "go"), 0o600); err != nil {
				t.Fatal(err)
			}
			fifo, err := os.OpenFile(filepath.Join(b.dir, "go"), os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = fifo.Close() }()
			done := make(chan error, 1)
			go func() { done <- tt.run(ctx, b.r) }()
			hear := func(want string) {
				t.Helper()
				select {
				case got := <-said:
					if !strings.Contains(got, want) {
						t.Fatalf("%q, want %q", got, want)
					}
				case err := <-done:
					t.Fatalf("ended without %q: %v", want, err)
				}
			}
			hear("up")
			cancel()
			hear("told")
			if _, err := fifo.WriteString("\n"); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err == nil {
				t.Error("no error")
			}
			if diff := cmp.Diff([]string{"finished"}, b.trace()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// npmScript moves the old package aside as npm 10 does, and fails as it does
// where the place is taken.
const npmScript = `d=opt/hermes-box/npm/lib/node_modules/@scope
if ! mv -T $d/executor $d/.executor-Ab1Cd2Ef; then echo "npm error code ENOTEMPTY" >&2; exit 190; fi
mkdir -p $d/executor opt/hermes-box/npm/bin
echo '{"version":"1.2.3"}' >$d/executor/package.json
printf '#!/bin/sh\necho 1.2.3\n' >opt/hermes-box/npm/bin/executor
chmod +x opt/hermes-box/npm/bin/executor
rm -r $d/.executor-Ab1Cd2Ef`

func TestKilledNpmIsFinished(t *testing.T) {
	b := newAptBox(t, map[string]string{"npm": npmScript})
	scope := filepath.Join(b.r.npmPrefix(), "lib/node_modules/@scope")
	for _, dir := range []string{scope + "/executor", scope + "/.executor-Ab1Cd2Ef/lib", scope + "/.other-Ab1Cd2Ef", b.dir + "/elsewhere/.executor-x"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(scope+"/executor/package.json", []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(b.dir+"/elsewhere", scope+"/.executor-link"); err != nil {
		t.Fatal(err)
	}
	got, err := b.r.installTool(t.Context(), npmTool{name: "executor", pkg: "@scope/executor"}, scope+"/executor", t.TempDir())
	if err != nil || got != "1.2.3" {
		t.Errorf("%q, %v", got, err)
	}
	// What is not npm's, or not in its place, is left alone.
	if err := os.Symlink(b.dir+"/elsewhere", b.dir+"/link"); err != nil {
		t.Fatal(err)
	}
	if err := dropRetired(b.dir + "/link/executor"); err != nil {
		t.Error(err)
	}
	for _, kept := range []string{scope + "/.other-Ab1Cd2Ef", scope + "/.executor-link", b.dir + "/elsewhere/.executor-x"} {
		if !exists(kept) {
			t.Errorf("%s is gone", kept)
		}
	}
}
