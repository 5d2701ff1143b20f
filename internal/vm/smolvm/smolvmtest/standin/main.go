//go:build linux

// Command standin stands for smolvm where smolvm cannot run. It is NOT smolvm:
// it was written from a description of smolvm 1.9.3's command line, has no
// virtual machines, and proves only that the driver copes with what is
// described. Package smolvmtest says what is modelled and what can be set.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// version is what the program says unless the setting "version" says other.
const version = "1.9.3"

func main() {
	// A child that is to die with us dies with the thread that made it.
	runtime.LockOSThread()
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		if code == 0 {
			code = 1
		}
	}
	os.Exit(code)
}

// arguments are what clap would make of a command line.
type arguments struct {
	values map[string][]string // by flag, without dashes
	rest   []string            // after --
}

func (a arguments) has(flag string) bool { return len(a.values[flag]) > 0 }

func (a arguments) get(flag string) string {
	if v := a.values[flag]; len(v) > 0 {
		return v[len(v)-1]
	}
	return ""
}

func (a arguments) number(flag string, builtIn int) int {
	if n, err := strconv.Atoi(a.get(flag)); err == nil {
		return n
	}
	return builtIn
}

var errUsage = errors.New("usage")

// parse knows flags that take a value and flags that do not; anything else is
// clap's exit code 2.
func parse(args []string, valued, plain string) (arguments, error) {
	a := arguments{values: map[string][]string{}}
	for i := 0; i < len(args); i++ {
		flag := args[i]
		switch {
		case flag == "--":
			a.rest = args[i+1:]
			return a, nil
		case strings.Contains(" "+valued+" ", " "+flag+" ") && i+1 < len(args):
			i++
			key := strings.TrimLeft(flag, "-")
			a.values[key] = append(a.values[key], args[i])
		case strings.Contains(" "+plain+" ", " "+flag+" "):
			key := strings.TrimLeft(flag, "-")
			a.values[key] = append(a.values[key], "true")
		default:
			return a, fmt.Errorf("%w: unexpected argument '%s' found", errUsage, flag)
		}
	}
	return a, nil
}

func run(args []string) (int, error) {
	w, err := openWorld()
	if err != nil {
		return 1, err
	}
	w.log(args)
	if len(args) == 1 && args[0] == "--version" {
		v := w.setting("version")
		if v == "" {
			v = version
		}
		fmt.Println("smolvm " + v)
		return 0, nil
	}
	if len(args) < 2 {
		return 2, errUsage
	}
	verbs := map[string]struct {
		valued, plain string
		do            func(arguments) (int, error)
	}{
		"machine ls":     {"", "--json", w.ls},
		"machine status": {"--name", "--json", w.status},
		"machine create": {"--name --label --image --from --max-image-size --net-backend --cpus --mem --storage --overlay -p -e", "--net", w.create},
		"machine start":  {"--name", "", w.start},
		"machine stop":   {"--name", "", w.stop},
		"machine delete": {"--name", "-f --force", w.remove},
		"machine exec":   {"--name -e -w", "-i -t", w.exec},
		"machine fork":   {"--golden -n", "", w.fork},
		"pack create":    {"--from-vm -o --staging-dir --cpus --mem", "", w.pack},
	}
	verb, ok := verbs[args[0]+" "+args[1]]
	if !ok {
		return 2, fmt.Errorf("%w: unrecognized subcommand '%s'", errUsage, args[1])
	}
	a, err := parse(args[2:], verb.valued, verb.plain)
	if err != nil {
		return 2, err
	}
	return verb.do(a)
}

// call is one line of the log of calls, for tests.
type call struct {
	Args    []string `json:"args"`
	Group   int      `json:"group"`
	Stdin   string   `json:"stdin"`
	Floor   string   `json:"floor"`
	Publish string   `json:"publish"`
}

func (w *world) log(args []string) {
	stdin, _ := os.Readlink("/proc/self/fd/0") // "" is told too
	line, err := json.Marshal(call{args, syscall.Getpgrp(), stdin, os.Getenv("SMOLVM_EGRESS_FLOOR"), os.Getenv("SMOLVM_PUBLISH_ADDR")})
	if err != nil {
		return
	}
	f, err := os.OpenFile(filepath.Join(w.settings, "calls"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return
	}
	_, _ = f.Write(append(line, '\n')) // one write, so that lines stay whole
	_ = f.Close()
}

// ls answers in random order: it walks a map.
func (w *world) ls(a arguments) (int, error) {
	if said := w.setting("ls-fails"); said != "" {
		return 1, errors.New(said)
	}
	if said := w.setting("ls-says"); said != "" {
		fmt.Println(said)
		return 0, nil
	}
	var answers []answer
	all, err := w.all()
	if err != nil {
		return 1, err
	}
	for _, r := range all {
		answers = append(answers, w.describe(r))
	}
	if !a.has("json") {
		for _, one := range answers {
			fmt.Println(one.Name, one.State)
		}
		return 0, nil
	}
	if answers == nil {
		answers = []answer{}
	}
	return 0, print(answers)
}

func print(v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err == nil {
		fmt.Println(string(data))
	}
	return err
}

func (w *world) status(a arguments) (int, error) {
	name := a.get("name")
	r, ok, err := w.get(name)
	switch {
	case err != nil:
		return 1, err
	case !ok && a.has("json"):
		return 1, fmt.Errorf("config operation failed: machine status: machine '%s' not found", name)
	case !ok:
		w.makeDir(name) // even a question makes one
		return 1, fmt.Errorf("vm not found: %s", name)
	}
	return 0, print(w.describe(r))
}

func (w *world) create(a arguments) (int, error) {
	name := a.get("name")
	r := record{
		Name: name, State: "created", CPUs: a.number("cpus", 4), MemoryMiB: a.number("mem", 8192), CreatedAt: time.Now().Unix(),
		Labels: map[string]string{}, Ports: a.values["p"], Command: a.rest,
	}
	for _, l := range a.values["label"] {
		key, value, ok := strings.Cut(l, "=")
		if !ok {
			return 1, fmt.Errorf("config operation failed: label '%s'", l)
		}
		r.Labels[key] = value
	}
	if from := a.get("from"); from != "" {
		p, err := readPack(from)
		if err != nil {
			return 1, err
		}
		r.Pack = &p
		if r.CPUs == 4 {
			r.CPUs = p.CPUs
		}
		if r.MemoryMiB == 8192 {
			r.MemoryMiB = p.MemoryMiB
		}
	}
	// The reservation: two creators of one name do not both go on.
	taken := fmt.Errorf("config operation failed: create machine: machine '%s' already exists or is being created", name)
	release, err := w.reserve(name)
	if err != nil {
		return 1, taken
	}
	defer release()
	if _, ok, err := w.get(name); err != nil || ok {
		return 1, errors.Join(taken, err)
	}
	w.makeDir(name)
	if said := w.setting("create-fails-" + name); said != "" {
		// What a failed creation leaves, the next machine of that name gets.
		if err := w.engine.soil(w.dir(name)); err != nil {
			return 1, err
		}
		return 1, errors.New(said)
	}
	if image := a.get("image"); image != "" {
		if r.Image, err = w.stage(image); err != nil {
			return 1, err
		}
	}
	if err := w.put(r); err != nil {
		return 1, err
	}
	fmt.Println("Created machine:", name)
	return 0, nil
}

func notFound(name string) error { return fmt.Errorf("vm not found: %s", name) }

func (w *world) start(a arguments) (int, error) {
	name := a.get("name")
	r, ok, err := w.get(name)
	if err != nil || !ok {
		return 1, errors.Join(notFound(name), err)
	}
	dir := w.makeDir(name)
	switch w.resolve(r) {
	case "running":
		fmt.Printf("Machine '%s' already running (PID: %d)\n", name, r.Process.PID)
		return 0, nil
	case "frozen":
		return 1, fmt.Errorf("agent operation failed: start: '%s' is frozen because it is the fork base for 1 live clone(s)", name)
	case "unreachable":
		// Whatever runs in it is killed, whether it was lost or not.
		fmt.Printf("Machine '%s' is unreachable (PID %d alive but agent unresponsive); cleaning up.\n", name, r.Process.PID)
		if err := w.engine.halt(dir); err != nil {
			return 1, err
		}
	default:
		// What another start has booted so far is taken for an orphan.
		if err := w.engine.halt(dir); err != nil {
			return 1, err
		}
	}
	if n, _ := strconv.Atoi(w.setting("boot-fails-" + name)); n > 0 {
		w.set("boot-fails-"+name, strconv.Itoa(n-1))
		return 1, errors.New("agent operation failed: start machine: agent operation failed: wait for ready: agent did not become ready within 30 seconds")
	}
	fmt.Fprintf(os.Stderr, "Starting machine '%s'...\n", name)
	if !r.Started {
		fmt.Fprintf(os.Stderr, "Pulling %s...\n", r.Image)
		if r.Image == "" && r.Pack == nil {
			return 1, errors.New("agent operation failed: pull: no image")
		}
	}
	mine := strconv.Itoa(os.Getpid())
	boot := filepath.Join(dir, "agent.pid")
	if err := os.WriteFile(boot, []byte(mine), 0o600); err != nil {
		return 1, err
	}
	wait, _ := time.ParseDuration(w.setting("start-takes"))
	time.Sleep(wait)
	if err := w.portsAreFree(r); err != nil {
		return 1, fmt.Errorf("agent operation failed: start machine: %w", err)
	}
	// A second start or a stop has killed the machine meanwhile.
	if data, err := os.ReadFile(boot); err != nil || string(data) != mine {
		return 1, errors.New("agent operation failed: start machine: agent operation failed: monitor agent: the process exited early")
	}
	process, err := w.engine.boot(r, dir)
	if err != nil {
		return 1, fmt.Errorf("agent operation failed: start machine: %w", err)
	}
	if err := os.Remove(boot); err != nil {
		return 1, errors.Join(errors.New("agent operation failed: start machine: agent operation failed: monitor agent: the process exited early"), w.engine.halt(dir))
	}
	if w.setting("start-dies-"+name) != "" {
		return 137, errors.New("killed")
	}
	r.State, r.Process, r.Started = "running", process, true
	if err := w.put(r); err != nil {
		return 1, err
	}
	fmt.Printf("Machine '%s' running (PID: %d)\n", name, process.PID)
	return 0, nil
}

func (w *world) stop(a arguments) (int, error) {
	name := a.get("name")
	r, ok, err := w.get(name)
	if err != nil || !ok {
		if err == nil {
			w.makeDir(name)
		}
		return 1, errors.Join(notFound(name), err)
	}
	dir := w.makeDir(name)
	switch state := w.resolve(r); state {
	case "running", "unreachable":
	case "frozen":
		return 1, fmt.Errorf("agent operation failed: stop: machine '%s' is the fork base for 1 live clone(s)", name)
	default:
		// What a start has booted so far, or has left, is killed.
		_ = os.Remove(filepath.Join(dir, "agent.pid"))
		if err := w.engine.halt(dir); err != nil {
			return 1, err
		}
		fmt.Printf("Machine '%s' is not running (state: %s)\n", name, state)
		return 0, nil
	}
	fmt.Printf("Stopping machine '%s'...\n", name)
	syscall.Sync()
	if err := w.engine.halt(dir); err != nil {
		return 1, err
	}
	// The whole record goes back, whatever has become of it meanwhile.
	r.State = "stopped"
	if err := w.put(r); err != nil {
		return 1, err
	}
	fmt.Println("Stopped machine:", name)
	return 0, nil
}

func (w *world) remove(a arguments) (int, error) {
	name := a.get("name")
	r, ok, err := w.get(name)
	if err != nil || !ok {
		return 1, errors.Join(notFound(name), err)
	}
	if !a.has("f") && !a.has("force") {
		if r.State == "frozen" {
			return 1, fmt.Errorf("agent operation failed: delete: '%s' is the fork base for 1 clone(s)", name)
		}
		fmt.Printf("Delete machine '%s'? [y/N] ", name)
		line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
		if strings.TrimSpace(line) != "y" {
			fmt.Println("Cancelled")
			return 0, nil
		}
	}
	if w.setting("delete-lies-"+name) != "" {
		fmt.Println("Cancelled")
		return 0, nil
	}
	// A process that the record does not know is not looked for.
	if r.State == "running" || r.State == "unreachable" {
		if err := w.engine.halt(w.dir(name)); err != nil {
			return 1, err
		}
	}
	if err := w.engine.remove(w.dir(name)); err != nil {
		return 1, err
	}
	if err := w.drop(name); err != nil {
		return 1, err
	}
	if err := os.RemoveAll(w.dir(name)); err != nil {
		return 1, err
	}
	if w.setting("ghost-"+name) != "" {
		// As if a command that could not connect had written the record back.
		w.set("ghost-"+name, "")
		r.State = "stopped"
		if err := w.put(r); err != nil {
			return 1, err
		}
	}
	fmt.Println("Deleted machine:", name)
	return 0, nil
}

// fork copies the whole record; there is no running clone here.
func (w *world) fork(a arguments) (int, error) {
	golden, ok, err := w.get(a.get("golden"))
	if err != nil || !ok {
		return 1, errors.Join(notFound(a.get("golden")), err)
	}
	clone := golden
	clone.Name, clone.State = a.get("n"), "stopped"
	w.makeDir(clone.Name)
	if w.setting("fork-leaves-golden") == "" {
		golden.State = "frozen"
	}
	return 0, errors.Join(w.put(clone), w.put(golden))
}

func (w *world) pack(a arguments) (int, error) {
	name, out := a.get("from-vm"), a.get("o")
	r, ok, err := w.get(name)
	switch {
	case err != nil || !ok:
		return 1, errors.Join(fmt.Errorf("agent operation failed: pack from VM: VM '%s' not found", name), err)
	case w.resolve(r) == "running":
		return 1, fmt.Errorf("agent operation failed: pack from VM: VM '%s' is running. Stop it first with: smolvm machine stop --name %s", name, name)
	case !r.Started:
		return 1, fmt.Errorf("agent operation failed: collect storage: machine '%s' has no storage disk yet", name)
	}
	fmt.Printf("Packing VM '%s' snapshot...\n", name)
	p := packed{CPUs: a.number("cpus", 4), MemoryMiB: a.number("mem", 8192)}
	if p.Content, err = w.engine.pack(w.dir(name), out+".content"); err != nil {
		return 1, err
	}
	if err := os.WriteFile(out, []byte("#!/bin/sh\n"), 0o755); err != nil {
		return 1, err
	}
	return 0, writePack(out+".smolmachine", p)
}
