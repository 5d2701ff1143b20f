package secrets

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"hermes-box-lite/internal/guest/layout"
)

func TestTokensAreMadeOnce(t *testing.T) {
	l := layout.At(t.TempDir())
	var wg sync.WaitGroup
	got := make([]Tokens, 8)
	for i := range got {
		wg.Go(func() {
			var err error
			if got[i], err = Ensure(l); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, tokens := range got {
		if tokens != got[0] {
			t.Fatal("two callers got different tokens")
		}
	}
	if !ValidToken(got[0].Agent) || !ValidToken(got[0].Operator) || got[0].Agent == got[0].Operator {
		t.Error("not two tokens")
	}
	for path, mode := range map[string]os.FileMode{l.Data(): 0o755, l.Secrets(): 0o700, filepath.Join(l.Secrets(), agentFile): 0o600} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
}

func TestDamagedTokensAreReplaced(t *testing.T) {
	good := strings.Repeat("a", 64)
	for name, tt := range map[string]struct {
		make func(path string) error
		kept bool
	}{
		"good":          {func(p string) error { return os.WriteFile(p, []byte(good+"\n"), 0o600) }, true},
		"open to all":   {func(p string) error { return os.WriteFile(p, []byte(good), 0o644) }, true},
		"empty":         {func(p string) error { return os.WriteFile(p, nil, 0o600) }, false},
		"capitals":      {func(p string) error { return os.WriteFile(p, []byte(strings.ToUpper(good)), 0o600) }, false},
		"longer":        {func(p string) error { return os.WriteFile(p, []byte(good+"a"), 0o600) }, false},
		"two lines":     {func(p string) error { return os.WriteFile(p, []byte(good+"\n\n"), 0o600) }, false},
		"symbolic link": {func(p string) error { return os.Symlink("/etc/passwd", p) }, false},
		"directory":     {func(p string) error { return os.Mkdir(p, 0o700) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := layout.At(t.TempDir())
			if err := os.MkdirAll(l.Secrets(), 0o777); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(l.Secrets(), agentFile)
			if err := tt.make(path); err != nil {
				t.Fatal(err)
			}
			tokens, err := Ensure(l)
			if err != nil {
				t.Fatal(err)
			}
			if kept := tokens.Agent == good; kept != tt.kept || !ValidToken(tokens.Agent) {
				t.Errorf("kept: %v", kept)
			}
			again, err := ReadAgentToken(l)
			if err != nil || again != tokens.Agent {
				t.Errorf("read again: %v", err)
			}
			info, err := os.Lstat(path)
			if err != nil || info.Mode() != 0o600 {
				t.Errorf("%v, %v", info.Mode(), err)
			}
		})
	}
}

func TestPause(t *testing.T) {
	l := layout.At(t.TempDir())
	for _, want := range []bool{false, true, true, false, false} {
		if err := SetPaused(l, want); err != nil {
			t.Fatal(err)
		}
		if got, err := Paused(l); got != want || err != nil {
			t.Fatalf("%v, %v; want %v", got, err, want)
		}
	}
}
