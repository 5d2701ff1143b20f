package pack

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

// grower makes random trees.
type grower struct {
	t     *testing.T
	r     *rand.Rand
	files []string
	dirs  []string
	odd   map[string]string // special files and special bits, by entry name: the kind of finding
	data  string
}

func (g *grower) must(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatal(err)
	}
}

func (g *grower) name() string {
	names := []string{"a", "B", "\xff\xfe", "new\nline", "esc\x1b[31m", "é", "e\u0301", "-rf", "sp ace", ".hidden", `back\slash`, "\u202egnp", strings.Repeat("l", 255), "*"}
	if g.r.IntN(2) == 0 {
		return fmt.Sprintf("n%d", g.r.IntN(1000))
	}
	return names[g.r.IntN(len(names))]
}

func (g *grower) grow(dir string, depth int) {
	for range 2 + g.r.IntN(8) {
		at := filepath.Join(dir, g.name())
		if _, err := os.Lstat(at); err == nil {
			continue
		}
		entry := strings.TrimPrefix(at, g.data)
		switch n := g.r.IntN(12); {
		case n < 3 && depth < 5:
			g.must(os.Mkdir(at, 0o700))
			g.dirs = append(g.dirs, at)
			g.grow(at, depth+1)
		case n == 4 && len(g.files) > 0:
			g.must(os.Link(g.files[g.r.IntN(len(g.files))], at))
		case n == 5:
			targets := []string{"nowhere", "/etc/passwd", "..", ".", at, "../../../../../../x", "\xff\n", filepath.Base(at), strings.Repeat("x/", 2000)}
			g.must(os.Symlink(targets[g.r.IntN(len(targets))], at))
		case n == 6:
			g.must(syscall.Mkfifo(at, 0o600))
			g.odd[entry] = "special"
		case n == 7 && len(at) < 100:
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			g.must(err)
			g.must(errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: at}), unix.Close(fd)))
			g.odd[entry] = "special"
		default:
			g.file(at)
		}
	}
}

func (g *grower) file(at string) {
	f, err := os.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	g.must(err)
	switch g.r.IntN(4) {
	case 0: // empty
	case 1: // sparse, with data at its beginning, middle or end
		size := int64(g.r.IntN(1 << 18))
		g.must(f.Truncate(size))
		if size > 10 {
			_, err = f.WriteAt([]byte("data"), g.r.Int64N(size-4))
		}
	default:
		_, err = f.WriteString(strings.Repeat(at, g.r.IntN(100)))
	}
	g.must(errors.Join(err, f.Close()))
	if g.r.IntN(3) == 0 { // a file system without any says so
		_ = unix.Setxattr(at, "user.odd \xff name", []byte("v\x00\n"), 0)
		_ = unix.Setxattr(at, "user.empty", nil, 0)
	}
	g.files = append(g.files, at)
}

// finish gives times and modes, deepest first.
func (g *grower) finish(all []string) {
	for i := len(all) - 1; i >= 0; i-- {
		mode := uint32(g.r.IntN(0o1000))
		if os.Geteuid() != 0 {
			mode |= 0o500
		}
		if g.r.IntN(6) == 0 {
			mode |= 0o1000 << g.r.IntN(3)
			g.odd[strings.TrimPrefix(all[i], g.data)] = "mode"
		}
		g.must(unix.Chmod(all[i], mode))
		seconds := []int64{0, 1, -1, 1700000000, -86400 * 365 * 30, 4000000000}
		when := unix.Timespec{Sec: seconds[g.r.IntN(len(seconds))], Nsec: int64(g.r.IntN(2)) * g.r.Int64N(1e9)}
		g.must(unix.UtimesNanoAt(unix.AT_FDCWD, all[i], []unix.Timespec{when, when}, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// TestRoundTrip: what was packed is there again, and packs to the same digest.
func TestRoundTrip(t *testing.T) {
	for seed := range uint64(6) {
		l, other := newBox(t), newBox(t)
		if seed == 0 { // a file system with inodes, attributes and times of its own
			l, other = newBoxAt(t, t.TempDir()), newBoxAt(t, t.TempDir())
		}
		g := &grower{t: t, r: rand.New(rand.NewPCG(seed, 0)), odd: map[string]string{}, data: l.Path("/")}
		for _, dir := range []string{l.Workspace(), l.Path("/data/elsewhere"), filepath.Join(l.Home(), ".executor"), filepath.Join(l.Home(), ".local/share/executor")} {
			g.must(os.MkdirAll(dir, 0o755))
			g.dirs = append(g.dirs, dir)
			g.grow(dir, 0)
		}
		g.finish(g.files)
		g.finish(g.dirs)
		first := pack(t, l)
		for name, kind := range g.odd {
			found, shown := false, printed(name)
			for _, f := range first.summary.End.Findings {
				// Hard links are found under each of their names.
				found = found || f.Kind == kind && f.Path == shown
			}
			if !found {
				t.Errorf("seed %d: %s of %q was not found", seed, kind, name)
			}
		}
		if t.Failed() {
			t.Fatalf("%+v", first.summary.End.Findings)
		}
		got := unpack(t, other, first.stream)
		if got.Digest != first.result.Digest || got.Stream != first.result.Stream || got.Entries != first.result.Entries {
			t.Errorf("seed %d: packed %+v, unpacked %+v", seed, first.result, got)
		}
		if diff := cmp.Diff(look(t, l.Data()), look(t, other.Data())); diff != "" {
			t.Fatalf("seed %d: %s", seed, diff)
		}
		if again := pack(t, other); again.result.Digest != first.result.Digest {
			t.Errorf("seed %d: packed again: %+v, first %+v", seed, again.result, first.result)
		}
	}
}

// printed is a path as findings show it, found out through a writer.
func printed(name string) string {
	w, err := archive.NewWriter(discard{}, archive.Manifest{Format: archive.Version, Box: "a", Time: time.Unix(0, 0).UTC(), Lineage: strings.Repeat("0", 32)}, archive.DefaultLimits())
	if err != nil {
		panic(err)
	}
	w.Find(archive.Finding{Path: name, Kind: "special"})
	end, err := w.Close()
	if err != nil {
		panic(err)
	}
	return end.Findings[0].Path
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// TestTable: each pattern of the table keeps something back, with all that is
// below it, and the patterns are ones.
func TestTable(t *testing.T) {
	l := newBox(t)
	for _, x := range exclusions() {
		if _, err := path.Match(x.pattern, ""); err != nil || x.why == "" {
			t.Errorf("%q: %v", x.pattern, err)
		}
		name := strings.ReplaceAll(x.pattern, "*", "X")
		if filepath.Ext(name) == "" {
			name += "/below/it"
		}
		put(t, filepath.Join(l.Home(), name), "PLANTED")
	}
	for _, name := range []string{".hermes/cache/other/x", ".hermes/cache/x", "../../.hermes-box/token", "../../lost+found/x"} {
		put(t, filepath.Join(l.Home(), name), "PLANTED")
	}
	p := pack(t, l)
	for name, content := range p.content {
		if content == "PLANTED" {
			t.Errorf("%s travels", name)
		}
	}
	for _, x := range append(exclusions(), exclusion{pattern: ".hermes/cache/other"}) {
		if name := homeEntry + "/" + strings.ReplaceAll(x.pattern, "*", "X"); p.entries[name].Name != "" {
			t.Errorf("%s travels", name)
		}
	}
	plan, err := Plan(context.Background(), l)
	if err != nil {
		t.Fatal(err)
	}
	if len(plan.LeftOut)+plan.More < len(exclusions())+3 {
		t.Errorf("the plan leaves out %d and %d more", len(plan.LeftOut), plan.More)
	}
	if plan.Entries != p.result.Entries || plan.Bytes != p.result.Bytes {
		t.Errorf("planned %d entries with %d bytes, packed %+v", plan.Entries, plan.Bytes, p.result)
	}
}

// TestNoArchiveMayHold: the plan of what every archive refuses names it and a
// way out, and so does the pack. What is left out anyway hinders neither.
func TestNoArchiveMayHold(t *testing.T) {
	large := func(path string) error {
		return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 100<<30))
	}
	deep := func(path string) error { return os.MkdirAll(path+strings.Repeat("/d", 130), 0o755) }
	for name, c := range map[string]struct {
		make func(path string) error
		want string
	}{
		"disk.img": {large, "the file is too large"},
		"deep":     {deep, "deeper than 128 directories"},
	} {
		l := newBox(t)
		put(t, filepath.Join(l.Home(), ".cache/x"), "x")
		if err := c.make(filepath.Join(l.Home(), ".cache", name)); err != nil {
			t.Fatal(err)
		}
		if _, err := Plan(context.Background(), l); err != nil {
			t.Errorf("%s in a cache: %v", name, err)
		}
		pack(t, l)
		if err := os.Rename(filepath.Join(l.Home(), ".cache", name), filepath.Join(l.Home(), name)); err != nil {
			t.Fatal(err)
		}
		_, planned := Plan(context.Background(), l)
		_, packed := packWith(l, noHold)
		for what, err := range map[string]error{"plan": planned, "pack": packed} {
			if err == nil {
				t.Errorf("%s: the %s is good", name, what)
				continue
			}
			said := err.Error()
			if !strings.Contains(said, "/"+homeEntry+"/"+name) || !strings.Contains(said, c.want+"; ") || !strings.Contains(said, "out of /data") || strings.Contains(said, "unsafe") {
				t.Errorf("%s: the %s says %q", name, what, said)
			}
		}
	}
}

// TestKept: what the tools need travels, and what only looks like a cache does.
func TestKept(t *testing.T) {
	l := newBox(t)
	kept := []string{
		".claude.json", ".claude/.credentials.json", ".claude/settings.json", ".claude/CLAUDE.md", ".claude/projects/p/s.jsonl",
		".claude/plugins/x", ".claude/skills/x", ".claude/agents/x", ".claude/commands/x", ".claude/todos/x", ".claude/history.jsonl",
		".codex/auth.json", ".codex/config.toml", ".codex/sessions/x", ".codex/state_5.sqlite", ".codex/thread_history_1.sqlite",
		".codex/skills/mine/x", ".codex/prompts/x", ".codex/AGENTS.md", ".codex/rules/x", ".codex/history.jsonl", ".codex/installation_id",
		".hermes/config.yaml", ".hermes/.env", ".hermes/auth.json", ".hermes/SOUL.md", ".hermes/memories/x", ".hermes/skills/x",
		".hermes/cron/x", ".hermes/sessions/x", ".hermes/state.db", ".hermes/profiles/x", ".hermes/hooks/x", ".hermes/plugins/x",
		".hermes/mcp-tokens/x", ".hermes/vault.key", ".hermes/vault.json.enc",
		".config/nvim/init.lua", ".local/share/nvim/x", ".local/state/nvim/shada/x", ".local/state/nvim/undo/x",
		".executor/data.db", ".local/share/executor/auth.json", ".bashrc", ".ssh/id", ".gitconfig",
		"workspace/.cache/x", "workspace/node_modules/x", "workspace/.npm/x", "workspace/x.log", "workspace/.git/objects/x",
	}
	for part := range strings.FieldsSeq(hermesCaches) {
		kept = append(kept, ".hermes/cache/"+part+"/x")
	}
	for _, name := range kept {
		put(t, filepath.Join(l.Home(), name), "{}")
	}
	p := pack(t, l)
	for _, name := range kept {
		if p.content[homeEntry+"/"+name] != "{}" {
			t.Errorf("%s does not travel", name)
		}
	}
	if want := []string{"claude", "codex", "hermes"}; !cmp.Equal(p.summary.Manifest.Logins, want) {
		t.Errorf("logins %v", p.summary.Manifest.Logins)
	}
	if len(p.summary.End.Findings) != 0 {
		t.Errorf("found %+v", p.summary.End.Findings)
	}
}

// TestHold: Executor's data first, and Executor is released before anything
// else is read.
func TestHold(t *testing.T) {
	l := newBox(t)
	late := filepath.Join(l.Home(), ".aaa")
	for _, name := range []string{".executor/data", ".executor/in/it", ".local/share/executor/auth.json", ".local/share/other", ".bbb"} {
		put(t, filepath.Join(l.Home(), name), "{}")
	}
	held := 0
	p := packHeld(t, l, func(context.Context) (func() error, error) {
		held++
		put(t, filepath.Join(l.Home(), ".executor/while"), "held")
		return func() error {
			held--
			// Whatever is read from here on sees this.
			put(t, late, "late")
			put(t, filepath.Join(l.Home(), ".bbb"), "late")
			put(t, filepath.Join(l.Home(), ".local/share/other"), "late")
			put(t, filepath.Join(l.Home(), ".executor/data"), "late")
			return nil
		}, nil
	})
	if held != 0 {
		t.Errorf("held %d times", held)
	}
	for name, want := range map[string]string{
		".aaa": "late", ".bbb": "late", ".local/share/other": "late",
		".executor/data": "{}", ".executor/in/it": "{}", ".executor/while": "held", ".local/share/executor/auth.json": "{}",
	} {
		if got := p.content[homeEntry+"/"+name]; got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	firstOther := false
	for _, name := range p.order {
		executors := strings.HasPrefix(name, homeEntry+"/.executor") || strings.HasPrefix(name, homeEntry+"/.local/share/executor")
		if p.entries[name].Type == archive.Dir && !executors {
			continue
		}
		if executors && firstOther {
			t.Errorf("%s comes late in %q", name, p.order)
		}
		firstOther = firstOther || !executors
	}
	refused := errors.New("no")
	if _, err := packWith(l, func(context.Context) (func() error, error) { return func() error { return refused }, nil }); !errors.Is(err, refused) {
		t.Errorf("a hold that was lost: %v", err)
	}
	if _, err := packWith(l, func(context.Context) (func() error, error) { return nil, refused }); !errors.Is(err, refused) {
		t.Errorf("a hold that fails: %v", err)
	}
}

// TestExecutorIsNoDirectory: what leads to Executor's data, or is it, may be a
// file or a link.
func TestExecutorIsNoDirectory(t *testing.T) {
	for name, make := range map[string]func(l layout.Layout) error{
		"a file":           func(l layout.Layout) error { return os.WriteFile(filepath.Join(l.Home(), ".executor"), nil, 0o600) },
		"a link":           func(l layout.Layout) error { return os.Symlink("workspace", filepath.Join(l.Home(), ".executor")) },
		"a FIFO":           func(l layout.Layout) error { return syscall.Mkfifo(filepath.Join(l.Home(), ".executor"), 0o600) },
		"a link before":    func(l layout.Layout) error { return os.Symlink("workspace", filepath.Join(l.Home(), ".local")) },
		"a file before":    func(l layout.Layout) error { return os.WriteFile(filepath.Join(l.Home(), ".local"), nil, 0o600) },
		"home is a link":   func(l layout.Layout) error { return errors.Join(os.Remove(l.Home()), os.Symlink("x", l.Home())) },
		"home is not":      func(l layout.Layout) error { return os.Remove(l.Home()) },
		"/data is all new": func(l layout.Layout) error { return os.RemoveAll(l.Path("/data/home")) },
	} {
		l := newBox(t)
		if err := make(l); err != nil {
			t.Fatal(err)
		}
		p, err := packWith(l, noHold)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		other := newBox(t)
		unpack(t, other, p.stream)
		if name != "a FIFO" {
			if diff := cmp.Diff(look(t, l.Data()), look(t, other.Data())); diff != "" {
				t.Errorf("%s: %s", name, diff)
			}
		}
	}
	// And may turn into something else between the two walks.
	for _, second := range []string{"file", "link", "dir"} {
		for _, first := range []string{"file", "link", "dir"} {
			l := newBox(t)
			at := filepath.Join(l.Home(), ".executor")
			make := func(kind string) {
				err := os.RemoveAll(at)
				switch kind {
				case "file":
					err = errors.Join(err, os.WriteFile(at, []byte("x"), 0o600))
				case "link":
					err = errors.Join(err, os.Symlink("/etc", at))
				default:
					err = errors.Join(err, os.MkdirAll(at+"/below", 0o700))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			make(first)
			if _, err := packWith(l, func(context.Context) (func() error, error) { return func() error { make(second); return nil }, nil }); err != nil {
				t.Errorf("%s, then %s: %v", first, second, err)
			}
		}
	}
}

// TestRaces: a state that changes all the time is packed, and no link followed.
func TestRaces(t *testing.T) {
	l := newBox(t)
	outside := put(t, l.Path("/outside"), "OUTSIDE")
	dir := l.Workspace()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		r := rand.New(rand.NewPCG(1, 2))
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			at := filepath.Join(dir, fmt.Sprint("f", r.IntN(12)))
			// Failures are part of it.
			switch r.IntN(9) {
			case 0, 1:
				_ = os.RemoveAll(at)
				_ = os.WriteFile(at, []byte(strings.Repeat("x", r.IntN(1<<16))), 0o600)
			case 2:
				_ = os.RemoveAll(at)
				_ = os.Symlink(outside, at)
			case 3:
				_ = os.RemoveAll(at)
				_ = os.MkdirAll(at+"/in/it", 0o700)
			case 4:
				_ = os.RemoveAll(at)
				_ = os.Symlink(l.Path("/"), at)
			case 5:
				_ = os.Truncate(at, int64(r.IntN(1<<17)))
			case 6:
				_ = os.Rename(at, filepath.Join(dir, fmt.Sprint("f", r.IntN(12))))
			case 7:
				_ = os.Link(at, filepath.Join(dir, fmt.Sprint("f", r.IntN(12))))
			case 8:
				_ = os.RemoveAll(at)
				_ = syscall.Mkfifo(at, 0o600)
			}
		}
	}()
	defer func() { close(stop); <-ended }()
	for n := range 60 {
		p, err := packWith(l, noHold)
		if err != nil {
			t.Fatalf("pack %d: %v", n, err)
		}
		for name, content := range p.content {
			if strings.Contains(content, "OUTSIDE") {
				t.Fatalf("pack %d: %s was followed", n, name)
			}
		}
	}
}

// TestChanging: what is read while it changes has its first size, and is found.
func TestChanging(t *testing.T) {
	l := newBox(t)
	at := put(t, filepath.Join(l.Workspace(), "f"), strings.Repeat("x", 1000))
	f, st, err := openat(unix.AT_FDCWD, at, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for name, size := range map[string]int64{"shorter": 100, "longer": 5000} {
		if err := os.Truncate(at, size); err != nil {
			t.Fatal(err)
		}
		p := newPacker(context.Background(), l)
		p.emit = wire.NewEmitter(discard{})
		if p.out, err = archive.NewWriter(discard{}, p.manifest(request()), archive.DefaultLimits()); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Seek(0, 0); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(p.out.Dir(archive.Entry{Name: "data", Mode: 0o755}), p.content(f, st, archive.Entry{Name: "data/f"})); err != nil {
			t.Fatal(err)
		}
		end, err := p.out.Close()
		if err != nil || end.Bytes != 1000 || len(end.Findings) != 1 || end.Findings[0].Kind != "changed" {
			t.Errorf("%s: %+v, %v", name, end, err)
		}
	}
}

// TestReusedInode: a new file may get the number of a removed one; it is not
// another name of that.
func TestReusedInode(t *testing.T) {
	l := newBoxAt(t, t.TempDir())
	a, b := filepath.Join(l.Home(), ".executor/a"), filepath.Join(l.Home(), ".executor/b")
	put(t, a, "old")
	if err := os.Link(a, b); err != nil {
		t.Fatal(err)
	}
	var old, now unix.Stat_t
	if err := unix.Stat(a, &old); err != nil {
		t.Fatal(err)
	}
	x, y := filepath.Join(l.Workspace(), "x"), filepath.Join(l.Workspace(), "y")
	if err := os.MkdirAll(l.Workspace(), 0o755); err != nil {
		t.Fatal(err)
	}
	p := packHeld(t, l, func(context.Context) (func() error, error) {
		return func() error {
			if err := errors.Join(os.Remove(a), os.Remove(b)); err != nil {
				t.Fatal(err)
			}
			// File systems take the lowest free one soon.
			for n := range 2000 {
				put(t, x, "new")
				if err := unix.Stat(x, &now); err != nil {
					t.Fatal(err)
				}
				if now.Ino == old.Ino {
					break
				}
				if err := os.Rename(x, filepath.Join(l.Workspace(), fmt.Sprint("n", n))); err != nil {
					t.Fatal(err)
				}
			}
			if now.Ino == old.Ino {
				if err := os.Link(x, y); err != nil {
					t.Fatal(err)
				}
			}
			return nil
		}, nil
	})
	if now.Ino != old.Ino {
		t.Skip("this file system does not use a number again")
	}
	if got := p.content[homeEntry+"/workspace/x"]; got != "new" {
		t.Errorf("x is %q, a %v of %s", got, p.entries[homeEntry+"/workspace/x"].Type, p.entries[homeEntry+"/workspace/x"].Target)
	}
	if y := p.entries[homeEntry+"/workspace/y"]; y.Type != archive.Link || y.Target != homeEntry+"/workspace/x" {
		t.Errorf("y is %+v", y)
	}
}

// TestOwners: in a real box numbers become names; in a directory that stands
// for one the place decides.
func TestOwners(t *testing.T) {
	for _, c := range []struct {
		l     layout.Layout
		uid   uint32
		gid   uint32
		name  string
		want  archive.Owner
		found int
	}{
		{layout.At(""), layout.AgentUID, layout.AgentGID, homeEntry + "/a", archive.Agent, 0},
		{layout.At(""), layout.AgentUID, layout.AgentGID, "data/a", archive.Agent, 0},
		{layout.At(""), layout.AgentUID, 33, "data/a", archive.Agent, 1},
		{layout.At(""), 0, 0, homeEntry + "/a", archive.Root, 0},
		{layout.At(""), 0, layout.AgentGID, homeEntry + "/a", archive.Root, 1},
		{layout.At(""), 33, layout.AgentGID, homeEntry + "/a", archive.Agent, 1},
		{layout.At(""), 33, 33, "data/a", archive.Root, 1},
		{layout.At(""), 33, 33, "data/home/agentx", archive.Root, 1},
		{layout.At("/nowhere"), 0, 33, homeEntry, archive.Agent, 0},
		{layout.At("/nowhere"), layout.AgentUID, 33, "data/a", archive.Root, 0},
	} {
		p := newPacker(context.Background(), c.l)
		out, err := archive.NewWriter(discard{}, archive.Manifest{Format: archive.Version, Box: "a", Time: time.Unix(0, 0).UTC(), Lineage: strings.Repeat("0", 32)}, archive.DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		p.out = out
		e := p.entry(c.name, archive.File, &unix.Stat_t{Uid: c.uid, Gid: c.gid, Mode: 0o100644})
		end, err := out.Close()
		if err != nil || e.Owner != c.want || len(end.Findings) != c.found {
			t.Errorf("%s of %d:%d: %v, %+v, %v", c.name, c.uid, c.gid, e.Owner, end.Findings, err)
		}
	}
}

// TestNoticedAttributes: access lists and capabilities do not travel, and that
// is found.
func TestNoticedAttributes(t *testing.T) {
	l := newBox(t)
	acl := "\x02\x00\x00\x00" + // version; then tag, permissions and id of each, acl(5)
		"\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x06\x00\x21\x00\x00\x00" + "\x04\x00\x04\x00\xff\xff\xff\xff" +
		"\x10\x00\x06\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff"
	capability := "\x01\x00\x00\x02\x00\x04\x00\x00" + strings.Repeat("\x00", 12) // net_bind_service, capabilities(7)
	want := map[string]string{}
	for name, c := range map[string]struct{ attr, value string }{
		"shared":  {"system.posix_acl_access", acl},
		"program": {"security.capability", capability},
		"kept":    {"user.kept", "x"},
		"label":   {"security.other", "x"},
	} {
		at := put(t, filepath.Join(l.Workspace(), name), name)
		if err := unix.Setxattr(at, c.attr, []byte(c.value), 0); err != nil {
			t.Skipf("%s: %v", c.attr, err)
		}
		if name == "shared" || name == "program" {
			want[homeEntry+"/workspace/"+name] = c.attr
		}
	}
	p := pack(t, l)
	if diff := cmp.Diff(want, p.findings("xattr")); diff != "" || len(p.summary.End.Findings) != len(want) {
		t.Errorf("%s%+v", diff, p.summary.End.Findings)
	}
}

// TestDocuments: JSON that is replaced in place is waited for; what stays broken
// travels as it is.
func TestDocuments(t *testing.T) {
	l := newBox(t)
	being := put(t, filepath.Join(l.Home(), ".claude.json"), `{"half": `)
	put(t, filepath.Join(l.Home(), ".codex/auth.json"), `{"never": `)
	whole := `{"half": "` + strings.Repeat("x", 100) + `"}`
	// The file is whole once pack has had time to see that it is not.
	timer := time.AfterFunc(documentPause/2, func() { put(t, being, whole) })
	defer timer.Stop()
	p := packHeld(t, l, func(context.Context) (func() error, error) {
		timer.Reset(documentPause / 2)
		return func() error { return nil }, nil
	})
	if got := p.content[homeEntry+"/.claude.json"]; got != whole {
		t.Errorf("%q", got)
	}
	if got := p.content[homeEntry+"/.codex/auth.json"]; got != `{"never": ` {
		t.Errorf("%q", got)
	}
	if got := p.findings("json"); len(got) != 1 || got[homeEntry+"/.codex/auth.json"] == "" {
		t.Errorf("found %v", got)
	}
}

// A pipe in the place of the runtime manifest, which somebody keeps open, is
// not waited for.
func TestPipeForTheRuntimeManifest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "manifest")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	if data, err := readSmall(path); err == nil {
		t.Errorf("%q", data)
	}
}

func TestCancelledPack(t *testing.T) {
	l := newBox(t)
	put(t, filepath.Join(l.Workspace(), "f"), "x")
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	released := false
	_, err := Pack(ctx, l, request(), func(context.Context) (func() error, error) {
		cancel(cause)
		return func() error { released = true; return nil }, nil
	}, discard{}, wire.NewEmitter(discard{}))
	if !errors.Is(err, cause) || !released {
		t.Errorf("%v, released %t", err, released)
	}
	// A reader that is gone.
	_, err = Pack(context.Background(), l, request(), noHold, brokenPipe{}, wire.NewEmitter(discard{}))
	if !errors.Is(err, syscall.EPIPE) {
		t.Errorf("%v", err)
	}
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }
