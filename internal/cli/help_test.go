package cli

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/vm"
)

// commands returns all commands that do something, and all flags.
func commands(t *testing.T) (all []*cobra.Command, flags []string) {
	t.Helper()
	a := &app{term: newTerminal(nil, &bytes.Buffer{}, &bytes.Buffer{})}
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Runnable() && !cmd.Hidden {
			all = append(all, cmd)
		}
		if path := strings.Fields(cmd.CommandPath()); len(path) < 2 || path[1] != "completion" && path[1] != "help" {
			cmd.Flags().VisitAll(func(f *pflag.Flag) { flags = append(flags, "--"+f.Name) })
			cmd.PersistentFlags().VisitAll(func(f *pflag.Flag) { flags = append(flags, "--"+f.Name) })
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(a.rootCommand())
	return all, flags
}

func TestEveryCommandExplainsItself(t *testing.T) {
	all, _ := commands(t)
	if len(all) < 12 {
		t.Fatalf("only %d commands were found", len(all))
	}
	for _, cmd := range all {
		if cmd.Name() == "help" {
			continue // cobra's own
		}
		if cmd.Long == "" || cmd.Short == "" || cmd.Example == "" {
			t.Errorf("%s: Short, Long or Example is missing", cmd.CommandPath())
		}
		if cmd.Args == nil && cmd.Name() != "completion" {
			t.Errorf("%s accepts whatever arguments it is given", cmd.CommandPath())
		}
		for line := range strings.Lines(cmd.Example) {
			if !strings.Contains(line, "box ") {
				t.Errorf("%s: the example %q is not a command of box", cmd.CommandPath(), line)
			}
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s --%s has no description", cmd.CommandPath(), f.Name)
			}
		})
	}
}

// TestGuideIsComplete keeps docs/guide.md and the command line together, in
// both directions.
func TestGuideIsComplete(t *testing.T) {
	data, err := os.ReadFile("../../docs/guide.md")
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("docs/guide.md is not there yet")
	}
	if err != nil {
		t.Fatal(err)
	}
	all, flags := commands(t)
	code := codeIn(string(data))
	var known []string
	for _, cmd := range all {
		path := strings.Fields(cmd.CommandPath())
		if len(path) < 2 {
			continue
		}
		known = append(known, path[1])
		if len(path) > 2 && path[1] == "completion" || path[1] == "help" {
			continue
		}
		if !regexp.MustCompile(`(?m)(\./)?\bbox ` + strings.Join(path[1:], " ") + `\b`).MatchString(code) {
			t.Errorf("docs/guide.md does not show %s", cmd.CommandPath())
		}
	}
	for _, flag := range flags {
		if !regexp.MustCompile(regexp.QuoteMeta(flag) + `\b`).MatchString(code) {
			t.Errorf("docs/guide.md does not show %s", flag)
		}
	}
	known = append(known, "config", "exit-codes", "help")
	for _, m := range regexp.MustCompile(`(?m)(?:^|[\s(;|&])(?:\./)?box ([a-z][a-z-]*)\b`).FindAllStringSubmatch(code, -1) {
		if !slices.Contains(known, m[1]) {
			t.Errorf("docs/guide.md shows `box %s`, which does not exist", m[1])
		}
	}
}

// codeIn returns what a Markdown text has in backticks, a piece a line.
func codeIn(text string) string {
	var b strings.Builder
	fence := regexp.MustCompile("(?ms)^```.*?^```")
	for _, block := range fence.FindAllString(text, -1) {
		b.WriteString(block + "\n")
	}
	for _, m := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		b.WriteString(m[1] + "\n")
	}
	return b.String()
}

func TestCodeIn(t *testing.T) {
	got := codeIn("box no\n```sh\n./box new a\n```\nrun `box rm NAME`, not box gone, `--force`\n")
	want := "```sh\n./box new a\n```\nbox rm NAME\n--force\n"
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestExitCodes(t *testing.T) {
	a := &app{term: newTerminal(nil, &bytes.Buffer{}, &bytes.Buffer{})}
	for _, tt := range []struct {
		name string
		err  error
		want int
	}{
		{"nothing", nil, 0},
		{"anything", errors.New("x"), 1},
		{"a name", &box.NameError{Name: "-"}, 2},
		{"usage", &usageError{errors.New("x"), "box new"}, 2},
		{"unhealthy", &box.StepError{Err: box.ErrUnhealthy}, 3},
		{"stopped", box.ErrNotRunning, 3},
		{"no box", box.ErrNotFound, 4},
		{"no machine", &box.StepError{Err: &box.GoneError{Name: "a", Driver: "fake"}}, 4},
		{"locked", &box.LockedError{Name: "a"}, 5},
		{"left over", errors.Join(box.ErrUnhealthy, &box.CleanupError{Name: "a", Err: vm.ErrNotOwner}), 8},
		{"foreign", vm.ErrNotOwner, 8},
		{"said already", exitError{77}, 77},
	} {
		if got := a.conclude(t.Context(), tt.err); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
}

func TestErrorsAreEscaped(t *testing.T) {
	var out bytes.Buffer
	term := newTerminal(nil, &out, &out)
	term.fail(errors.New("first \x1b]52;c;aGk=\a\nsecond \u202e"), []string{"box ls", "box ls", "box rm a"})
	want := "box: first \\x1b]52;c;aGk=\\a\nbox: second \\u202e\nhint: box ls\nhint: box rm a\n"
	if out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestTermName(t *testing.T) {
	for in, want := range map[string]string{
		"xterm-ghostty": "xterm-ghostty", "xterm-kitty": "xterm-kitty", "dumb": "dumb", "": "xterm-256color",
		"$(id)": "xterm-256color", strings.Repeat("x", 500): "xterm-256color", "a b": "xterm-256color", "../x": "xterm-256color",
	} {
		if got := termName(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
