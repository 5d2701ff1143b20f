package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"hermes-box-lite/internal/archive"
)

// gnupg is the real program with a home of its own.
type gnupg struct {
	t       *testing.T
	home    string
	program string
}

// newGPG skips where there is no gpg, but not in CI (scripts/host-packages
// installs it there).
func newGPG(t *testing.T) gnupg {
	t.Helper()
	program, err := exec.LookPath("gpg")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("gpg is not installed: ", err)
		}
		t.Skip("gpg is not installed: ", err)
	}
	// Not below the test's own directory: the agent's socket needs a short path.
	home, err := os.MkdirTemp("", "gpg") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The agent of this home ends with it; what it cannot remove is not ours.
		kill := exec.Command("gpgconf", "--homedir", home, "--kill", "all")
		_ = kill.Run()
		_ = os.RemoveAll(home)
	})
	return gnupg{t, home, program}
}

func (g gnupg) run(word string, args ...string) (string, error) {
	g.t.Helper()
	secret := filepath.Join(g.home, "passphrase")
	if err := os.WriteFile(secret, []byte(word+"\n"), 0o600); err != nil {
		g.t.Fatal(err)
	}
	cmd := exec.Command(g.program, append([]string{
		"--homedir", g.home, "--batch", "--no-tty", "--yes", "--no-symkey-cache",
		"--pinentry-mode", "loopback", "--passphrase-file", secret,
	}, args...)...)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// TestReadByGPG: our files, by `gpg -d`.
func TestReadByGPG(t *testing.T) {
	g := newGPG(t)
	// Larger than the packets' buffers, and small.
	for name, stream := range map[string][]byte{
		"small": gzipped(t, plainTar(t, state())),
		"large": gzipped(t, plainTar(t, []file{{"data/", ""}, {"data/a", noise(3<<20 + 1)}})),
	} {
		dir := t.TempDir()
		o := options(t, filepath.Join(dir, "a"))
		o.cost, o.Source = 0, sourceOf(stream)
		if _, err := Save(context.Background(), o); err != nil {
			t.Fatal(err)
		}
		out := filepath.Join(dir, "out")
		if text, err := g.run(word, "-o", out, "-d", o.Path); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, text)
		} else if strings.Contains(text, "WARNING") {
			t.Errorf("%s: gpg is not content: %s", name, text)
		}
		if data, err := os.ReadFile(out); err != nil || !bytes.Equal(data, stream) {
			t.Errorf("%s: other bytes, %v", name, err)
		}
		if err := os.Remove(out); err != nil {
			t.Fatal(err)
		}
		if text, err := g.run("not it", "-o", out, "-d", o.Path); err == nil {
			t.Errorf("%s: with a wrong passphrase: %s", name, text)
		}
	}
}

// TestMadeByGPG: files of gpg's, with a key that is the passphrase's own.
func TestMadeByGPG(t *testing.T) {
	g := newGPG(t)
	stream := gzipped(t, plainTar(t, []file{{"data/", ""}, {"data/a", noise(300 << 10)}}))
	plain := onDisk(t, stream)
	dir := t.TempDir()
	for _, c := range []struct {
		args []string
		want error
	}{
		{nil, nil}, // compressed
		{[]string{"--compress-algo", "none"}, nil},
		{[]string{"--compress-algo", "zip"}, nil},
		{[]string{"--compress-algo", "zlib"}, nil},
		{[]string{"--compress-algo", "bzip2"}, nil},
		{[]string{"--cipher-algo", "AES256", "-z", "0"}, nil},
		{[]string{"--cipher-algo", "AES", "--s2k-digest-algo", "SHA512"}, nil},
		{[]string{"--set-filename", "a name"}, nil},
		{[]string{"--armor"}, ErrAuth},
		{[]string{"--s2k-mode", "1"}, ErrAuth}, // salted only: costs a guess nothing
		{[]string{"--rfc2440"}, ErrAuth},
	} {
		path := filepath.Join(dir, strings.Join(append([]string{"a"}, c.args...), ""))
		args := append([]string{"--s2k-count", "65536"}, c.args...)
		if text, err := g.run(word, append(args, "-o", path, "-c", plain)...); err != nil {
			t.Fatalf("%v: %v\n%s", c.args, err, text)
		}
		a := opened(t, path, word)
		_, err := a.Verify(context.Background(), nil)
		if c.want == nil && err != nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%v: %v", c.args, err)
		}
		if err != nil {
			continue
		}
		var out bytes.Buffer
		if err := a.Stream(context.Background(), &out, nil); err != nil || !bytes.Equal(out.Bytes(), stream) {
			t.Errorf("%v: streamed: %v", c.args, err)
		}
		// Without a key of the session, one guess in about sixty releases some
		// garbage (measured). None may count.
		for n := range 60 {
			a.passphrase = passphrase(t, fmt.Sprint("wrong", n))
			_, err := a.Verify(context.Background(), nil)
			if !errors.Is(err, ErrAuth) || errors.Is(err, archive.ErrUnsafe) {
				t.Errorf("%v: wrong passphrase: %v", c.args, err)
			}
		}
	}
}
