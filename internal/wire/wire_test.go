package wire

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

func TestEventsRoundTrip(t *testing.T) {
	sent := []Event{
		{Type: EventStep, Step: "node"},
		{Type: EventNote, Text: "already there\nand more"},
		{Type: EventProgress, Done: 3, Total: 9},
		{Type: EventResult, Error: "no", Hint: "hb up"},
	}
	var buf bytes.Buffer
	emit := NewEmitter(&buf)
	for i, ev := range sent {
		if err := emit.Emit(ev); err != nil {
			t.Fatal(err)
		}
		sent[i].V = Protocol
	}
	if lines := bytes.Count(buf.Bytes(), []byte("\n")); lines != len(sent) {
		t.Errorf("%d events in %d lines", len(sent), lines)
	}
	var got []Event
	result, err := ReadEvents(&buf, func(ev Event) { got = append(got, ev) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sent, got); diff != "" || result != sent[3] {
		t.Errorf("result %+v, difference:\n%s", result, diff)
	}
}

func TestHostileStreams(t *testing.T) {
	const ok = `{"v":1,"type":"result"}` + "\n"
	for name, c := range map[string]struct {
		in      string
		wantErr string
		other   int
	}{
		"empty":                 {"", "without a result", 0},
		"cut before the result": {`{"v":1,"type":"step","step":"x"}` + "\n" + `{"v":1,"type":"res`, "without a result", 1},
		"no newline at the end": {`{"v":1,"type":"result"}`, "", 0},
		"noise around":          {"npm WARN\n\n" + ok, "", 2},
		"another version":       {`{"v":2,"type":"result"}` + "\n", "without a result", 1},
		"unknown field":         {`{"v":1,"type":"result","x":1}` + "\n", "without a result", 1},
		"two results":           {ok + ok, "after the result", 0},
		"two documents":         {`{"v":1,"type":"result"}{"v":1,"type":"result"}` + "\n", "without a result", 1},
		"endless line":          {strings.Repeat("x", MaxLine+1), "more than", 0},
		"longest line":          {strings.Repeat("x", MaxLine-1) + "\n" + ok, "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			other := 0
			_, err := ReadEvents(strings.NewReader(c.in), nil, func(string) { other++ })
			if c.wantErr == "" && err != nil || c.wantErr != "" && (err == nil || !strings.Contains(err.Error(), c.wantErr)) {
				t.Errorf("error %v, want %q", err, c.wantErr)
			}
			if other != c.other {
				t.Errorf("%d lines that are no events, want %d", other, c.other)
			}
		})
	}
	if _, err := ReadEvents(strings.NewReader(""), nil, nil); !errors.Is(err, ErrNoResult) {
		t.Errorf("error %v, want ErrNoResult", err)
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain ü 世界\t":        "plain ü 世界\t",
		"\x1b[31mred":         `\x1b[31mred`,
		"a\nb\r":              `a\nb\r`,
		"\xff\xfe":            `\xff\xfe`,
		"\u202eevil":          `\u202eevil`,
		"zero\u200bwidth\x7f": `zero\u200bwidth\x7f`,
	} {
		if got := Printable(in); got != want {
			t.Errorf("Printable(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestArgv(t *testing.T) {
	argv := []string{"a b", "", "$(id)", "\xff\x00\n", "ü"}
	line, err := EncodeArgv(argv)
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeArgv(line)
	if err != nil || !cmp.Equal(got, argv) {
		t.Errorf("%q came back as %q, %v", argv, got, err)
	}
	for _, bad := range []string{"", "[]", "null", "ls -l", `["ls"]x`, `{"a":1}`} {
		if got, err := DecodeArgv(bad); err == nil {
			t.Errorf("%q was taken for %q", bad, got)
		}
	}
}

func FuzzReadEvents(f *testing.F) {
	f.Add([]byte(`{"v":1,"type":"note","text":"x"}` + "\n" + `{"v":1,"type":"result"}`))
	f.Add([]byte("\x00\xff\n{}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := ReadEvents(bytes.NewReader(data), func(ev Event) {
			shown := Printable(ev.Text + ev.Step + ev.Error + ev.Hint)
			if i := strings.IndexFunc(shown, func(r rune) bool { return r != '\t' && !unicode.IsPrint(r) }); i >= 0 {
				t.Fatalf("%q is not printable", shown)
			}
		}, nil)
		if err == nil && !bytes.Contains(data, []byte("result")) {
			t.Fatal("success without a result")
		}
	})
}

func TestReport(t *testing.T) {
	for _, c := range []struct {
		checks []Status
		want   bool
	}{
		{nil, false}, {[]Status{Pass, Info, Skip}, true}, {[]Status{Pass, Fail, Pass}, false},
	} {
		var checks []Check
		for i, s := range c.checks {
			checks = append(checks, Check{ID: fmt.Sprint(i), Status: s})
		}
		if got := NewReport("a", checks); got.Healthy != c.want || got.Schema != 1 {
			t.Errorf("%v: %+v", c.checks, got)
		}
	}
}
