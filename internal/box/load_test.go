package box

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/wire"
)

func TestPins(t *testing.T) {
	tools := func(pairs ...string) archive.Summary {
		var s archive.Summary
		for i := 0; i < len(pairs); i += 2 {
			s.Manifest.Tools = append(s.Manifest.Tools, archive.Tool{Name: pairs[i], Version: pairs[i+1]})
		}
		return s
	}
	for name, c := range map[string]struct {
		in   archive.Summary
		want *wire.Pins
		err  string
	}{
		"all":          {tools("claude", "2.1.332", "codex", "0.171.0", "executor", "1.5.9", "hermes", "0.21.5", "git", "2.39.5"), &wire.Pins{Claude: "2.1.332", Codex: "0.171.0", Executor: "1.5.9", Hermes: "0.21.5"}, ""},
		"some":         {tools("codex", "1.0.0-beta.3"), &wire.Pins{Codex: "1.0.0-beta.3"}, ""},
		"none":         {tools(), &wire.Pins{}, ""},
		"two parts":    {tools("claude", "2.1"), nil, `version "2.1" of claude`},
		"an option":    {tools("claude", "--registry=http://evil"), nil, "of claude is none"},
		"a range":      {tools("claude", "^2.1.0"), nil, "of claude is none"},
		"an address":   {tools("executor", "1.5.9 http://evil"), nil, "of executor is none"},
		"a line break": {tools("executor", "1.5.9\n"), nil, "of executor is none"},
		"its own word": {tools("hermes", "unknown"), nil, "of hermes is none"},
		"legacy":       {archive.Summary{Legacy: true}, nil, "a legacy archive"},
	} {
		got, err := pinsOf(c.in)
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Which boxes of one lineage hold copies of one login.
func TestSharedLogins(t *testing.T) {
	m, _ := testManager(t, 4790, 4790)
	if err := m.home.ensure(); err != nil {
		t.Fatal(err)
	}
	for _, rec := range []Record{
		{Name: "origin", Lineage: "1"},
		{Name: "both", Lineage: "1", Loaded: true, Logins: []string{"claude", "codex"}},
		{Name: "codex", Lineage: "1", Loaded: true, Logins: []string{"codex"}},
		{Name: "fresh", Lineage: "1", Loaded: true},
		{Name: "other", Lineage: "2", Loaded: true, Logins: []string{"claude"}},
		{Name: "old"},
		{Name: "older"}, // from before there were lineages
	} {
		rec.OwnerID = newID()
		if err := m.registry.put(rec); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"origin": "the logins of claude, codex are the same as in both, codex,",
		"both":   "the logins of claude, codex are the same as in codex, origin,",
		"codex":  "the logins of codex are the same as in both, origin,",
		"fresh":  "", "other": "", "old": "",
	} {
		rec, err := m.registry.get(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.sharedLogins(rec); got != want && (want == "" || !strings.HasPrefix(got, want)) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
		if checks := m.lineageCheck(rec); (len(checks) == 1) != (want != "") || len(checks) == 1 && checks[0].Status != wire.Info {
			t.Errorf("%s: %+v", name, checks)
		}
	}
}
