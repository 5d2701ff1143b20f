//go:build linux

package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/hbbin"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/container"
	"hermes-box-lite/internal/vm/qemu"
)

// boxes measures the lives of boxes on one driver, with the real box program
// and the real tools of a base.
type boxes struct {
	home, program, driver, base string
	self                        string // this program
	runs                        int
	digest                      string // of the base
	results                     []figure
}

// many is how many boxes the longer `ls` lists.
const many = 200

// stateSize is what is saved and loaded, bytes: little, for an emulated machine
// takes minutes for it.
const stateSize = 192 << 20

func (b *boxes) measure(ctx context.Context) error {
	if err := os.MkdirAll(b.home, 0o700); err != nil {
		return err
	}
	settings := fmt.Sprintf("BOX_DRIVER=%s\nBASE_IMAGE='%s'\nINSTALL_HERMES=false\nBOX_CPUS=2\nBOX_MEM_MIB=2048\n"+
		"EXECUTOR_PORT_LO=5100\nEXECUTOR_PORT_HI=5499\n", b.driver, b.base)
	if err := os.WriteFile(filepath.Join(b.home, "box.env"), []byte(settings), 0o600); err != nil {
		return err
	}
	var err error
	if b.digest, err = digestOf(b.base); err != nil {
		return err
	}
	if err := b.raw(ctx); err != nil { // once, so that the base is converted
		return err
	}
	b.results = nil
	defer b.removeAll(ctx)
	tree := filepath.Join(b.home, "tree")
	if err := copies(filepath.Join(tree, "data/home/agent/workspace"), stateSize, goSource(), ".go", ".s", ".txt", ".md"); err != nil {
		return err
	}
	for run := range b.runs {
		for _, part := range []func(context.Context) error{
			b.raw,
			func(ctx context.Context) error { return b.life(ctx, run) },
			func(ctx context.Context) error { return b.archives(ctx, tree) },
		} {
			if err := part(ctx); err != nil {
				return err
			}
		}
	}
	return b.listing(ctx)
}

// machines are what a driver does without box, in processes of their own: one's
// memory is counted with that of the programs it starts.
type machines struct{ driver, home, base, digest string }

// args are the command line of a process that does it.
func (b *boxes) args(verb string) []string {
	return []string{b.self, verb, b.driver, b.home, b.base, b.digest}
}

func machinesOf(args []string) (machines, error) {
	if len(args) != 4 {
		return machines{}, errors.New("wanted: driver, home, base and digest")
	}
	return machines{args[0], args[1], args[2], args[3]}, nil
}

func (m machines) engine() (vm.Driver, error) {
	switch m.driver {
	case "qemu":
		return qemu.New(qemu.Options{
			Dir: filepath.Join(m.home, ".box/machines/qemu"), HB: func() ([]byte, error) { return hbbin.Binary(runtime.GOARCH) },
		}), nil
	case "container":
		return container.New(""), nil
	}
	return nil, fmt.Errorf("no figures are made on the driver %q", m.driver)
}

func digestOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}

func (b *boxes) raw(ctx context.Context) error { return b.run(ctx, "raw boot", b.args("boot")...) }

// boot makes and boots a machine without anything of ours in it, to a shell,
// and prints the seconds of that.
func (m machines) boot(ctx context.Context) (err error) {
	engine, err := m.engine()
	if err != nil {
		return err
	}
	spec := vm.Spec{
		Name: "benchraw", OwnerID: strings.Repeat("b", 32), Base: vm.Base{Digest: m.digest, Tar: m.base},
		CPUs: 2, MemoryMiB: 2048, SystemGiB: 64,
	}
	if m.driver == "container" {
		spec.Workload = []string{"/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.1; done"}
	}
	defer func() { err = errors.Join(err, engine.Delete(context.WithoutCancel(ctx), spec.Name, spec.OwnerID)) }()
	begin := time.Now()
	if _, err := engine.Create(ctx, spec); err != nil {
		return err
	}
	if err := engine.Start(ctx, spec.Name); err != nil {
		return err
	}
	if code, err := engine.Exec(ctx, spec.Name, vm.Command{Argv: []string{"/bin/sh", "-c", "true"}}); err != nil || code != 0 {
		return fmt.Errorf("a shell in the raw machine: exit %d, %w", code, err)
	}
	fmt.Println(time.Since(begin).Seconds())
	return nil
}

// stock makes machines that stand beside that of one box, and their records.
func (m machines) stock(ctx context.Context) error {
	engine, err := m.engine()
	if err != nil {
		return err
	}
	records := filepath.Join(m.home, ".box/boxes")
	data, err := os.ReadFile(filepath.Join(records, "warm.json"))
	if err != nil {
		return err
	}
	var record map[string]any
	if err := json.Unmarshal(data, &record); err != nil {
		return err
	}
	for i := range many - 1 {
		name, owner := stocked(i)
		spec := vm.Spec{
			Name: name, OwnerID: owner, Base: vm.Base{Digest: m.digest, Tar: m.base}, CPUs: 1, MemoryMiB: 512, StorageGiB: 1,
		}
		if _, err := engine.Create(ctx, spec); err != nil {
			return err
		}
		record["name"], record["owner_id"] = name, owner
		data, err := json.Marshal(record)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(records, name+".json"), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func stocked(i int) (name, owner string) { return fmt.Sprintf("many%d", i), fmt.Sprintf("%032x", i) }

// clear removes what stock made.
func (m machines) clear(ctx context.Context) error {
	engine, err := m.engine()
	if err != nil {
		return err
	}
	for i := range many - 1 {
		name, owner := stocked(i)
		_ = engine.Delete(ctx, name, owner) // most runs have none
	}
	return nil
}

// life takes boxes through what people wait for.
func (b *boxes) life(ctx context.Context, run int) error {
	if run > 0 {
		b.removeBoxes(ctx)
	}
	for _, step := range []struct {
		name string
		args []string
	}{
		{"new cold", []string{"new", "cold"}},
		{"new warm", []string{"new", "warm"}},
		{"fork", []string{"fork", "warm", "fork"}},
		{"enter -- true", []string{"enter", "warm", "--", "true"}},
		{"doctor", []string{"doctor", "warm"}},
	} {
		if step.name == "new cold" {
			if err := b.box(ctx, "", "cache", "prune"); err != nil {
				return err
			}
			if run > 0 {
				step.args = append(step.args, "--fresh")
			}
		}
		if err := b.box(ctx, step.name, step.args...); err != nil {
			return err
		}
	}
	return nil
}

// archives saves and loads one state, of a box and of a directory of the host.
func (b *boxes) archives(ctx context.Context, tree string) error {
	path := func(name string) string { return filepath.Join(b.home, name) }
	workspace := filepath.Join(tree, "data/home/agent/workspace")
	if err := b.sh(ctx, "tar cz -C "+workspace+" . | BOX_HOME="+b.home+" "+b.program+" enter warm -- tar xz"); err != nil {
		return err
	}
	for _, old := range []string{"box.gpg", "directory.gpg", "restored"} {
		if err := os.RemoveAll(path(old)); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(path("restored/data"), 0o755); err != nil {
		return err
	}
	b.removeBoxes(ctx, "cold", "fork") // for the memory of their machines
	if err := b.box(ctx, "save of a box", "save", "warm", path("box.gpg")); err != nil {
		return err
	}
	if err := b.run(ctx, "save", b.self, "save", tree, path("directory.gpg")); err != nil {
		return err
	}
	b.removeBoxes(ctx, "warm")
	if err := b.box(ctx, "load into a box", "load", path("box.gpg"), "loaded"); err != nil {
		return err
	}
	b.removeBoxes(ctx, "loaded")
	return b.run(ctx, "load's stream", b.self, "unpack", path("directory.gpg"), path("restored"))
}

func (b *boxes) sh(ctx context.Context, script string) error {
	return b.run(ctx, "", "bash", "-o", "pipefail", "-ec", script)
}

// run runs a program and notes how long it took, or how long it says that it
// took; figure "" notes nothing.
func (b *boxes) run(ctx context.Context, figure string, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	begin := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	took := time.Since(begin)
	if said, err := time.ParseDuration(strings.TrimSpace(string(out)) + "s"); err == nil {
		took = said
	}
	if figure != "" {
		b.note(figure, took, cmd.ProcessState)
	}
	return nil
}

// listing compares `ls` of one box and of many, which stand on real machines.
func (b *boxes) listing(ctx context.Context) error {
	for range 5 * b.runs {
		if err := b.box(ctx, "version", "--version"); err != nil {
			return err
		}
	}
	if b.driver != "qemu" {
		return nil // two hundred containers say more of the engine
	}
	if err := b.box(ctx, "", "new", "warm"); err != nil {
		return err
	}
	for range 5 * b.runs {
		if err := b.box(ctx, "ls of 1", "ls"); err != nil {
			return err
		}
	}
	if err := b.run(ctx, "", b.args("stock")...); err != nil {
		return err
	}
	for range 5 * b.runs {
		if err := b.box(ctx, fmt.Sprintf("ls of %d", many), "ls"); err != nil {
			return err
		}
	}
	return nil
}

// box runs the program and notes how long it took, in all and until its
// machine answered, for load from then on until the state was in; figure ""
// notes nothing.
func (b *boxes) box(ctx context.Context, figure string, args ...string) error {
	cmd := exec.CommandContext(ctx, b.program, args...)
	cmd.Env = append(os.Environ(), "BOX_HOME="+b.home, "BOX_PASSPHRASE="+passphrase)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return err
	}
	var said strings.Builder
	var up time.Time
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		step := lines.Text()
		said.WriteString(step + "\n")
		switch {
		case figure == "":
		case up.IsZero() && (step == "provision" || step == "restore"):
			up = time.Now()
			b.note(figure+": machine", up.Sub(begin), nil)
		case args[0] == "load" && step == "provision":
			b.note(figure+": stream", time.Since(up), nil)
		}
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("box %s: %w\n%s", strings.Join(args, " "), err, said.String())
	}
	if figure != "" {
		b.note(figure, time.Since(begin), cmd.ProcessState)
	}
	return nil
}

// note adds a time to a figure, and the memory of the process that took it.
func (b *boxes) note(name string, took time.Duration, process *os.ProcessState) {
	fmt.Fprintf(os.Stderr, "%s, %s: %.2f s\n", b.driver, name, took.Seconds())
	i := slices.IndexFunc(b.results, func(f figure) bool { return f.Contender == name })
	if i < 0 {
		i = len(b.results)
		b.results = append(b.results, figure{Tree: b.driver, Contender: name})
	}
	f := &b.results[i]
	f.Seconds = append(f.Seconds, took.Seconds())
	if process == nil {
		return
	}
	if usage, ok := process.SysUsage().(*syscall.Rusage); ok {
		f.MaxRSS = max(f.MaxRSS, usage.Maxrss)
	}
}

func (b *boxes) removeBoxes(ctx context.Context, names ...string) {
	if len(names) == 0 {
		names = []string{"cold", "warm", "fork", "loaded"}
	}
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(b.home, ".box/boxes", name+".json")); err == nil {
			_ = b.box(ctx, "", "rm", name, "--force") // the next new tells
		}
	}
}

func (b *boxes) removeAll(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	b.removeBoxes(ctx)
	_ = b.run(ctx, "", b.args("clear")...) // the next new tells
}
