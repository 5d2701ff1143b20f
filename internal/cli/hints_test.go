//go:build linux

package cli_test

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// advised returns the pieces of advice in the source below the directories, by
// the place of the first one: what is fixed of each, and * for the rest.
func advised(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			files := token.NewFileSet()
			file, err := parser.ParseFile(files, path, nil, 0)
			if err != nil {
				return err
			}
			for _, decl := range file.Decls {
				where := filepath.Base(filepath.Dir(path))
				if f, ok := decl.(*ast.FuncDecl); ok {
					where += "." + f.Name.Name
				}
				ast.Inspect(decl, func(n ast.Node) bool {
					for _, expr := range adviceIn(n) {
						if text := outline(expr); strings.Trim(text, "* ") != "" {
							found[where+": "+text] = files.Position(expr.Pos()).String()
						}
					}
					return true
				})
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// adviceIn returns what is advice in a piece of the source: the field Fix of
// whatever has one, and what methods called Hint return.
func adviceIn(n ast.Node) []ast.Expr {
	switch n := n.(type) {
	case *ast.CompositeLit:
		name, _ := n.Type.(*ast.Ident)
		if name != nil && (name.Name == "hinted" || name.Name == "hintedError") && len(n.Elts) == 2 {
			return n.Elts[1:]
		}
		for _, e := range n.Elts {
			if kv, ok := e.(*ast.KeyValueExpr); ok {
				if key, ok := kv.Key.(*ast.Ident); ok && (key.Name == "Fix" || key.Name == "fix") {
					return []ast.Expr{kv.Value}
				}
			}
		}
	case *ast.AssignStmt:
		for i, left := range n.Lhs {
			sel, isField := left.(*ast.SelectorExpr)
			name, isName := left.(*ast.Ident)
			if len(n.Rhs) == len(n.Lhs) && (isField && sel.Sel.Name == "Fix" || isName && (name.Name == "repair" || name.Name == "hints")) {
				return appended(n.Rhs[i])
			}
		}
	case *ast.ValueSpec:
		if strings.HasPrefix(n.Names[0].Name, "fix") {
			return n.Values
		}
	case *ast.FuncDecl:
		var returned []ast.Expr
		if n.Name.Name == "Hint" || n.Name.Name == "finisher" {
			ast.Inspect(n, func(n ast.Node) bool {
				if r, ok := n.(*ast.ReturnStmt); ok {
					returned = append(returned, r.Results...)
				}
				return true
			})
		}
		return returned
	}
	return nil
}

// appended returns what a call of append adds, and anything else as it is.
func appended(e ast.Expr) []ast.Expr {
	if call, ok := e.(*ast.CallExpr); ok {
		if f, ok := call.Fun.(*ast.Ident); ok && f.Name == "append" {
			return call.Args[1:]
		}
	}
	return []ast.Expr{e}
}

// outline is an expression's fixed text, with * for what is not fixed.
func outline(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if text, err := strconv.Unquote(e.Value); err == nil {
			return text
		}
	case *ast.BinaryExpr:
		return strings.ReplaceAll(outline(e.X)+outline(e.Y), "**", "*")
	}
	return "*"
}

// hintsDir has the situations in which advice is given, as scripts.
const hintsDir = "testdata/hints"

// situations say where each piece of advice is printed in its situation: in a
// script of hintsDir, which follows it, or in a test of its own, by file and
// name. What is no command, or needs a host that tests do not have, is text:
// the test shows that it is given.
func situations() map[string]string {
	const (
		provision = "internal/guest/provision/provision_test.go "
		guest     = "internal/guest/guest_test.go "
		trouble   = "internal/cli/trouble_test.go "
		qemu      = "internal/vm/qemu/unit_test.go "
		checked   = "internal/cli/hints_test.go TestEveryHint" // it is looked at, but has no situation here
	)
	return map[string]string{
		"box.Hint: box ls":                               "settings",
		"box.Hint: box repair *":                         "hb",
		"box.Hint: box rm *":                             "gone",
		"box.OpenURL: box enter * -- hb up":              "paused",
		"box.clockCheck: box start *":                    "internal/box/supervisor_test.go TestClockAfterSleep", // and TestVM, on a machine
		"box.examineDoor: box enter * -- hb up":          "paused",
		"box.examineDoor: box repair *":                  "hb",
		"box.greet: box repair *":                        "hb",
		"box.guestChecks: box repair *":                  "hb",
		"box.finisher: box fork * *":                     "fork",
		"box.finisher: box load * *":                     "never_finished",
		"box.finisher: box repair *":                     "never_finished",
		"cli.Hint: * --help":                             "names",
		"cli.confirm: box rm * --force":                  "gone",
		"cli.doctorCommand: box repair *":                "unhealthy",
		"cli.doctorCommand: box start *":                 "stopped",
		"cli.driver: box help config":                    "settings",
		"cli.enter: box enter * -- true":                 "names",
		"cli.headless: box enter * -- hb executor-token": "names",
		"cli.hintsOf: box doctor *":                      "unhealthy",
		"cli.hintsOf: box ls":                            "names",
		"cli.hintsOf: box ls --all":                      "gone",
		"cli.hintsOf: box repair *":                      "never_finished",
		"cli.hintsOf: box rm *":                          "gone",
		"cli.hintsOf: less *":                            "gone",
		"config.Hint: box help config":                   "settings",
		"guest.checks: box repair *":                     "unhealthy",
		"guest.checks: box repair NAME":                  "never_finished",
		"guest.executorCheck: hb down":                   guest + "TestExecutorCheck", // for moments only
		"guest.executorCheck: hb status":                 "supervisor",
		"guest.executorCheck: hb up":                     "shut_down",
		"guest.executorChecks: sudo ss -ltnp # end the program that holds the port; Executor returns by itself":               trouble + "TestTakenExecutorPort",
		"guest.mountedCheck: box stop NAME && box start NAME":                                                                 checked, // a disk that only a machine has
		"guest.spaceCheck: du -xh --max-depth=3 * | sort -h | tail # then remove what is not needed":                          trouble + "TestFullState",
		"guest.stateChecks: sudo chown *: *":                                                                                  trouble + "TestForeignLoginFile",
		"guest.stateChecks: sudo mount -o remount,rw *":                                                                       trouble + "TestReadOnlyState",
		"guest.stateChecks: sudo touch * # save the box first; then stop and start it: e2fsck mends the disk, by guesses too": trouble + "TestReadOnlyState",
		"guest.summarizeSQLite: box load BACKUP NEWNAME # restores a backup into a new box":                                   guest + "TestDatabases",
		"guest.supervisorCheck: box stop * && box start *":                                                                    "supervisor",
		"guest.supervisorCheck: sudo ss -ltnp # end the program that holds the port; the door returns by itself":              "internal/guest/supervise_test.go TestTakenPortIsReported",

		"provision.parseProbe: bash -lc 'type *' # shows it; remove it from ~/.profile, or from what that reads":              provision + "TestShadowedTool",
		"provision: bash -lxc true # shows where ~/.profile, or what it reads, waits; let it wait in interactive shells only": provision + "TestSlowStartUpFiles",
		"provision.Checks: box repair NAME":                                                               provision + "TestChecksUnprovisioned",
		"provision.baseConflict: choose another BASE_IMAGE in box.env":                                    provision + "TestClaim",
		"provision.explain: check the network; behind a proxy set HTTP_PROXY and HTTPS_PROXY in box.env*": provision + "TestCommandErrors",
		"provision.explain: set EXTRA_CA_FILE in box.env to the CA certificates of your network*":         provision + "TestCommandErrors",
		"provision.hermes: the transcript has the installer's whole output*":                              "e2e/failures_test.go TestBadInstaller",
		"provision.preflight: choose a Debian or Ubuntu image as BASE_IMAGE in box.env":                   checked,
		"provision.preflight: sudo mount -o remount,rw *":                                                 trouble + "TestReadOnlyState",
		"container.missing: sudo apt-get install podman":                                                  "e2e/failures_test.go TestUnusableEngine",
		"qemu.fetchKernel: box help config":                                                               checked,
		"qemu.fetchKernel: sudo apt-get update":                                                           checked,
		"qemu.makeDisk: sudo apt-get install fakeroot":                                                    checked,
		"qemu.requireTools: sudo apt-get install *":                                                       qemu + "TestMissingTools",
		"rootfs.Hint: make base":                                                                          "internal/rootfs/rootfs_test.go TestUnreachableRegistry",
		"smolvm.hypervisor: sudo modprobe kvm_intel || sudo modprobe kvm_amd":                             checked,
		`smolvm.hypervisor: sudo usermod -aG kvm "$(id -un)"`:                                             checked,
		"wiring: hb wire-mcp":                                                                             "unhealthy",
	}
}

// followed are the commands that scripts have followed, by script.
type followed struct {
	mu       sync.Mutex
	commands map[string][]string
}

// follow runs, in their order, all commands that the last one has advised on
// standard error or, as the doctor, on standard output. Each must succeed.
func (f *followed) follow(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) > 0 {
		ts.Fatalf("usage: follow")
	}
	script := strings.TrimPrefix(filepath.Base(ts.Getenv("WORK")), "script-")
	var commands []string
	for line := range strings.Lines(ts.ReadFile("stdout") + ts.ReadFile("stderr")) {
		line = strings.TrimSpace(line)
		for _, mark := range []string{"hint: ", "fix: "} {
			if command, ok := strings.CutPrefix(line, mark); ok && !slices.Contains(commands, command) {
				commands = append(commands, command)
			}
		}
	}
	if len(commands) == 0 {
		ts.Fatalf("nothing was advised")
	}
	for _, command := range commands {
		f.mu.Lock()
		f.commands[script] = append(f.commands[script], command)
		f.mu.Unlock()
		if path, ok := strings.CutPrefix(command, "less "); ok {
			ts.ReadFile(path)
			continue
		}
		// A person is asked for the name, and types it.
		confirmed := regexp.MustCompile(`^box rm [a-z]+$`).ReplaceAllString(command, "$0 --force")
		if err := ts.Exec("sh", "-c", confirmed); err != nil {
			ts.Fatalf("%s: %v", command, err)
		}
	}
}

// TestEveryHint follows all advice where it is given, and fails for advice in
// the source that no test brings about.
func TestEveryHint(t *testing.T) {
	t.Parallel()
	done := &followed{commands: map[string][]string{}}
	t.Run("situations", func(t *testing.T) {
		testscript.Run(t, testscript.Params{
			Dir: hintsDir, RequireExplicitExec: true, Setup: setUp,
			Cmds: map[string]func(*testscript.TestScript, bool, []string){
				"fault": cmdFault, "exit": cmdExit, "eventually": cmdEventually, "settings": cmdSettings, "follow": done.follow,
			},
		})
	})
	if run := flag.Lookup("test.run").Value.String(); t.Failed() || strings.Contains(run, "/") {
		return // not all of them were brought about
	}
	known := situations()
	for advice, position := range advised(t, "..") {
		place, ok := known[advice]
		if !ok {
			t.Errorf("%s: no test brings this advice about: %q", position, advice)
			continue
		}
		delete(known, advice)
		file, test, isTest := strings.Cut(place, " ")
		if isTest {
			data, err := os.ReadFile(filepath.Join("../..", file))
			if err != nil || !strings.Contains(string(data), "\nfunc "+test+"(") {
				t.Errorf("%s has no test %s: %v", file, test, err)
			}
			continue
		}
		_, text, _ := strings.Cut(advice, ": ")
		if !slices.ContainsFunc(done.commands[place], printedAs(text).MatchString) {
			t.Errorf("%s: the script %s does not follow %q, but %q", position, place, text, done.commands[place])
		}
	}
	for advice := range known {
		t.Errorf("nothing in the source advises %q any more", advice)
	}
}

// printedAs matches an outline of advice as a person sees it.
func printedAs(outline string) *regexp.Regexp {
	pattern := strings.ReplaceAll(regexp.QuoteMeta(strings.ReplaceAll(outline, "NAME", "*")), `\*`, ".+")
	if strings.HasPrefix(outline, "hb ") {
		pattern = "box enter .+ -- " + pattern
	}
	return regexp.MustCompile("^" + pattern + "$")
}
