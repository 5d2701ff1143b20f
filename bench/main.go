//go:build linux

// Bench compares saving and reading archives with what people would use
// otherwise: tar, gzip, gpg and restic, on the same trees, in the same run.
// What it prints are ratios of medians; absolute times say more of the machine
// than of the program. docs/proven.md explains the figures.
//
//	bench [-runs 5] [-size 1024] [-dir DIR] [-json FILE] [-boxes DRIVER -box PROGRAM -base TAR]
//
// With -boxes it measures the lives of boxes on a driver instead.
//
// Every contender is a process of its own, so that its peak memory is known.
// Our own are this program again, which packs a directory as hb packs /data and
// writes the archive as box does.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/backup"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/guest/pack"
	"hermes-box-lite/internal/wire"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

const passphrase = "bench"

func run(args []string) error {
	if len(args) > 0 {
		switch args[0] {
		case "save":
			return save(args[1], args[2])
		case "verify":
			return verify(args[1])
		case "unpack":
			return unpack(args[1], args[2])
		case "boot", "stock", "clear":
			m, err := machinesOf(args[1:])
			if err != nil {
				return err
			}
			do := map[string]func(context.Context) error{"boot": m.boot, "stock": m.stock, "clear": m.clear}[args[0]]
			return do(context.Background())
		}
	}
	set := flag.NewFlagSet("bench", flag.ContinueOnError)
	runs := set.Int("runs", 5, "runs of each contender")
	size := set.Int64("size", 1024, "MiB of each tree")
	dir := set.String("dir", "", "where to work (a temporary directory)")
	out := set.String("json", "", "write the figures there")
	driver := set.String("boxes", "", "measure boxes on this driver: qemu or container")
	program := set.String("box", "./box", "the program that makes them")
	base := set.String("base", "", "a root filesystem with the tools")
	if err := set.Parse(args); err != nil {
		return err
	}
	if *dir == "" {
		made, err := os.MkdirTemp("", "bench-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(made) }()
		*dir = made
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	b := &bench{dir: *dir, self: self, runs: *runs, size: *size << 20}
	if *driver != "" {
		lives := &boxes{home: filepath.Join(*dir, "boxes"), self: self, program: *program, driver: *driver, base: *base, runs: *runs}
		if err := lives.measure(context.Background()); err != nil {
			return err
		}
		b.results = lives.results
	} else {
		for _, t := range b.trees() {
			if err := b.tree(t); err != nil {
				return err
			}
		}
	}
	if err := b.print(os.Stdout); err != nil {
		return err
	}
	if *out == "" {
		return nil
	}
	data, err := json.MarshalIndent(b.results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(*out, append(data, '\n'), 0o644)
}

// layoutOf takes a tree for the state of a box.
func layoutOf(tree string) layout.Layout { return layout.At(tree) }

func save(tree, file string) error {
	p, err := backup.NewPassphrase(passphrase)
	if err != nil {
		return err
	}
	request := wire.PackRequest{Protocol: wire.Protocol, Box: "bench", Time: time.Now().UTC(), Lineage: strings.Repeat("0", 32)}
	hold := func(context.Context) (func() error, error) { return func() error { return nil }, nil }
	_, err = backup.Save(context.Background(), backup.SaveOptions{
		Path: file, Box: "bench", Passphrase: p, Limits: archive.DefaultLimits(),
		Source: func(ctx context.Context, w io.Writer) error {
			_, err := pack.Pack(ctx, layoutOf(tree), request, hold, w, wire.NewEmitter(io.Discard))
			return err
		},
		Accept: func(backup.Report) error { return nil },
	})
	return err
}

func open(file string) (*backup.Archive, backup.Report, error) {
	p, err := backup.NewPassphrase(passphrase)
	if err != nil {
		return nil, backup.Report{}, err
	}
	a, err := backup.Open(file, p, archive.DefaultLimits())
	if err != nil {
		return nil, backup.Report{}, err
	}
	report, err := a.Verify(context.Background(), nil)
	return a, report, err
}

func verify(file string) error {
	a, _, err := open(file)
	if err != nil {
		return err
	}
	return a.Close()
}

// unpack is the second half of load: the stream of a verified archive into a
// new state. The first half is verify; so it prints the seconds of its own.
func unpack(file, tree string) error {
	a, report, err := open(file)
	if err != nil {
		return err
	}
	began := time.Now()
	pr, pw := io.Pipe()
	go func() { _ = pw.CloseWithError(a.Stream(context.Background(), pw, nil)) }()
	_, err = pack.Unpack(context.Background(), layoutOf(tree), report.Bytes, false, pr)
	if err := errors.Join(err, a.Close()); err != nil {
		return err
	}
	fmt.Println(time.Since(began).Seconds())
	return nil
}

// tree is what is saved.
type tree struct {
	name string
	make func(dir string, size int64) error
}

func (b *bench) trees() []tree {
	return []tree{
		{"source code", func(dir string, size int64) error { return copies(dir, size, goSource(), ".go", ".s", ".txt", ".md") }},
		{"node_modules", func(dir string, size int64) error { return copies(dir, size, nodeModules()) }},
		{"random", func(dir string, size int64) error {
			for n := int64(0); n < size; n += 8 << 20 {
				if _, err := copyTo(filepath.Join(dir, fmt.Sprint(n)), io.LimitReader(rand.Reader, min(8<<20, size-n))); err != nil {
					return err
				}
			}
			return nil
		}},
	}
}

func goSource() string {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "/usr/local/go/src"
	}
	return filepath.Join(strings.TrimSpace(string(out)), "src")
}

func nodeModules() string {
	out, err := exec.Command("npm", "root", "-g").Output()
	if err != nil {
		return "/usr/lib/node_modules"
	}
	return strings.TrimSpace(string(out))
}

// copies fills dir with copies of a tree's files until size is reached.
func copies(dir string, size int64, from string, suffixes ...string) error {
	var done int64
	for i := 0; done < size; i++ {
		before := done
		err := filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() || done >= size {
				return err
			}
			if len(suffixes) > 0 && !slices.Contains(suffixes, filepath.Ext(path)) {
				return nil
			}
			rel, err := filepath.Rel(from, path)
			if err != nil {
				return err
			}
			to := filepath.Join(dir, fmt.Sprint(i), rel)
			if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
				return err
			}
			source, err := os.Open(path)
			if err != nil {
				return err
			}
			defer func() { _ = source.Close() }()
			n, err := copyTo(to, source)
			done += n
			return err
		})
		if err != nil {
			return err
		}
		if done == before {
			return fmt.Errorf("%s holds nothing to copy", from)
		}
	}
	return nil
}

// copyTo makes a file. Piece by piece: this program's memory is counted with
// that of the programs it starts.
func copyTo(path string, r io.Reader) (n int64, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return io.Copy(f, r)
}

// figure is what one contender took on one tree.
type figure struct {
	Tree      string    `json:"tree"`
	Contender string    `json:"contender"`
	Seconds   []float64 `json:"seconds"`
	MaxRSS    int64     `json:"max_rss_kib"` // of its own process; of a pipeline: of its largest
	Size      int64     `json:"size"`        // of what it wrote, bytes; 0: nothing that counts
}

func (f figure) median() float64 {
	s := slices.Sorted(slices.Values(f.Seconds))
	return s[len(s)/2]
}

type bench struct {
	dir, self string
	runs      int
	size      int64
	results   []figure
}

// contender is one way to do a task. before prepares a run.
type contender struct {
	name   string
	before func() error
	argv   []string
	reads  string
	wrote  string
}

func (b *bench) tree(t tree) (err error) {
	state := filepath.Join(b.dir, "state")
	if err := os.RemoveAll(state); err != nil {
		return err
	}
	work := filepath.Join(state, "data/home/agent/workspace")
	if err := os.MkdirAll(work, 0o755); err != nil {
		return err
	}
	if err := t.make(work, b.size); err != nil {
		return err
	}
	path := func(name string) string { return filepath.Join(b.dir, name) }
	restored := path("restored")
	data := filepath.Join(state, "data")
	gone := func(paths ...string) func() error {
		return func() error {
			for _, p := range paths {
				if err := os.RemoveAll(p); err != nil {
					return err
				}
			}
			return nil
		}
	}
	// ext4 is slow to use what was freed within the last minutes, and the first
	// to write would pay for it: nothing is removed before the end.
	old := path("old")
	defer func() { err = errors.Join(err, os.RemoveAll(old), os.RemoveAll(restored)) }()
	empty := func() error {
		moved, err := os.MkdirTemp(old, "")
		if err != nil {
			return err
		}
		if err := os.Rename(restored, filepath.Join(moved, "restored")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return os.MkdirAll(filepath.Join(restored, "data"), 0o755)
	}
	gnupg := path("gnupg")
	if err := errors.Join(os.MkdirAll(gnupg, 0o700), os.MkdirAll(old, 0o700)); err != nil {
		return err
	}
	gpg := "gpg --homedir " + gnupg + " --batch --quiet --yes --pinentry-mode loopback --passphrase " + passphrase
	sh := func(script string) []string { return []string{"bash", "-o", "pipefail", "-ec", script} }
	list := []contender{
		{"save", gone(path("ours")), []string{b.self, "save", state, path("ours")}, data, path("ours")},
		{"tar|gzip -6|gpg", gone(path("six")), sh("tar c -C " + data + " . | gzip -6 | " + gpg + " -c -o " + path("six")), data, path("six")},
		{"tar|gzip -3|gpg none", gone(path("three")), sh("tar c -C " + data + " . | gzip -3 | " + gpg + " -c --compress-algo none -o " + path("three")), data, path("three")},
	}
	if _, err := exec.LookPath("restic"); err == nil {
		repo := path("restic")
		list = append(list, contender{
			"restic", func() error {
				if err := gone(repo)(); err != nil {
					return err
				}
				return command(sh("RESTIC_PASSWORD=" + passphrase + " restic init -q -r " + repo)).Run()
			},
			sh("RESTIC_PASSWORD=" + passphrase + " restic backup -q --no-cache -r " + repo + " " + data), data, "",
		})
	}
	list = append(list,
		contender{"verify", nil, []string{b.self, "verify", path("ours")}, path("ours"), ""},
		contender{"gpg -d|tar tz", nil, sh(gpg + " -d " + path("ours") + " | tar tz >/dev/null"), path("ours"), ""},
		contender{"gpg -d|gunzip", nil, sh(gpg + " -d " + path("ours") + " | gunzip >/dev/null"), path("ours"), ""},
		contender{"load's stream", empty, []string{b.self, "unpack", path("ours"), restored}, path("ours"), ""},
		contender{"gpg -d|tar x", empty, sh(gpg + " -d " + path("ours") + " | tar xz -C " + restored), path("ours"), ""},
		// As load does: what is restored is on the disk.
		contender{"gpg -d|tar x, synced", empty, sh(gpg + " -d " + path("ours") + " | tar xz -C " + restored + "; sync -f " + restored), path("ours"), ""},
	)
	figures := make([]figure, len(list))
	for run := range b.runs {
		for k := range list { // in turns, so that all see the same weather
			i := k
			if run%2 == 1 { // and none always comes after the same other
				i = len(list) - 1 - k
			}
			c := list[i]
			if c.before != nil {
				if err := c.before(); err != nil {
					return fmt.Errorf("%s: %w", c.name, err)
				}
			}
			syscall.Sync()
			// What was written meanwhile may have put it out of memory.
			if err := read(c.reads); err != nil {
				return err
			}
			cmd := command(c.argv)
			var out strings.Builder
			cmd.Stdout = &out
			began := time.Now()
			err := cmd.Run()
			if err != nil {
				return fmt.Errorf("%s: %w: %s", c.name, err, cmd.Stderr)
			}
			f := &figures[i]
			f.Tree, f.Contender = t.name, c.name
			seconds := time.Since(began).Seconds()
			if said := strings.TrimSpace(out.String()); said != "" {
				if seconds, err = strconv.ParseFloat(said, 64); err != nil {
					return fmt.Errorf("%s: %w", c.name, err)
				}
			}
			f.Seconds = append(f.Seconds, seconds)
			if usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
				f.MaxRSS = max(f.MaxRSS, usage.Maxrss)
			}
			if info, err := os.Stat(c.wrote); err == nil {
				f.Size = info.Size()
			}
			fmt.Fprintf(os.Stderr, "%s, run %d, %s: %.2f s\n", t.name, run+1, c.name, f.Seconds[run])
		}
	}
	b.results = append(b.results, figures...)
	return nil
}

// read reads all files at and below a path.
func read(path string) error {
	return filepath.WalkDir(path, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		_, err = io.Copy(io.Discard, f)
		return err
	})
}

func command(argv []string) *exec.Cmd {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stderr = &bytes.Buffer{}
	return cmd
}

// ratios are the comparisons that are promised, with their goals.
func ratios() []struct {
	ours, theirs string
	goals        map[string]float64 // by tree
} {
	return []struct {
		ours, theirs string
		goals        map[string]float64
	}{
		{"save", "tar|gzip -6|gpg", map[string]float64{"source code": 0.18, "random": 0.30}},
		{"save", "tar|gzip -3|gpg none", nil},
		{"save", "restic", map[string]float64{"source code": 1.5, "node_modules": 1.5}},
		{"verify", "gpg -d|tar tz", map[string]float64{"source code": 0.7, "node_modules": 0.7, "random": 0.7}},
		{"verify", "gpg -d|gunzip", nil},
		{"load's stream", "gpg -d|tar x, synced", nil},
		{"load's stream", "gpg -d|tar x", map[string]float64{"source code": 0.6, "node_modules": 0.6, "random": 0.6}},
		{"new cold", "raw boot", nil},
		{"new warm: machine", "raw boot", nil},
		{"new warm", "raw boot", nil},
		{"fork: machine", "raw boot", nil},
		{"fork", "raw boot", nil},
		{"new warm", "new cold", nil},
		{"doctor", "raw boot", nil},
		{"enter -- true", "raw boot", nil},
		{"save of a box", "save", nil},
		{"load into a box: stream", "load's stream", nil},
		{fmt.Sprintf("ls of %d", many), "ls of 1", map[string]float64{"qemu": 2}},
		{"version", "ls of 1", nil},
	}
}

func (b *bench) print(w io.Writer) error {
	// In the form that benchstat reads.
	for _, f := range b.results {
		name := strings.NewReplacer(" ", "_", "|", ":", "'", "").Replace(f.Tree + "/" + f.Contender)
		for _, s := range f.Seconds {
			if _, err := fmt.Fprintf(w, "Benchmark/%s 1 %.0f ns/op %d max-rss-KiB %d bytes\n", name, s*1e9, f.MaxRSS, f.Size); err != nil {
				return err
			}
		}
	}
	find := func(tree, contender string) (figure, bool) {
		i := slices.IndexFunc(b.results, func(f figure) bool { return f.Tree == tree && f.Contender == contender })
		if i < 0 {
			return figure{}, false
		}
		return b.results[i], true
	}
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "\nON\tOURS\tSECONDS\tMAX RSS\tAGAINST\tSECONDS\tRATIO\tGOAL")
	var names []string
	for _, f := range b.results {
		if !slices.Contains(names, f.Tree) {
			names = append(names, f.Tree)
		}
	}
	for _, name := range names {
		for _, r := range ratios() {
			ours, ok := find(name, r.ours)
			theirs, other := find(name, r.theirs)
			if !ok || !other {
				continue
			}
			goal := "-"
			if g, ok := r.goals[name]; ok {
				goal = fmt.Sprintf("%.2f", g)
			}
			_, _ = fmt.Fprintf(table, "%s\t%s\t%.2f\t%d MiB\t%s\t%.2f\t%.2f\t%s\n",
				name, r.ours, ours.median(), ours.MaxRSS>>10, r.theirs, theirs.median(), ours.median()/theirs.median(), goal)
		}
	}
	return table.Flush()
}
