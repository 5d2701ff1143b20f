package backup

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"hermes-box-lite/internal/archive"
)

func TestSave(t *testing.T) {
	dir := t.TempDir()
	o := options(t, filepath.Join(dir, "a.gpg"))
	var partial string
	o.Accept = func(r Report) error {
		partial = names(t, dir)
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 {
			t.Fatalf("%s while it is accepted, %v", partial, err)
		}
		info, err := entries[0].Info()
		if err != nil || info.Mode() != 0o600 || info.Size() != r.Size {
			t.Errorf("partial file %v, %v", info, err)
		}
		return nil
	}
	report, err := Save(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(partial, "[.hermes-box-alpha.") || names(t, dir) != "[a.gpg]" {
		t.Errorf("%s, then %s", partial, names(t, dir))
	}
	info, err := os.Stat(o.Path)
	if err != nil || info.Mode() != 0o600 || info.Sys().(*syscall.Stat_t).Nlink != 1 {
		t.Errorf("%v, %v", info, err)
	}
	again, err := opened(t, o.Path, word).Verify(context.Background(), nil)
	if err != nil || fmt.Sprint(again) != fmt.Sprint(report) {
		t.Errorf("saved %+v, verified %+v, %v", report, again, err)
	}
}

// TestSaveLeavesNothing when it fails, wherever that is.
func TestSaveLeavesNothing(t *testing.T) {
	broken := errors.New("broken")
	good := gzipped(t, plainTar(t, state()))
	for name, c := range map[string]struct {
		change func(*SaveOptions)
		want   error
	}{
		"source fails at once": {func(o *SaveOptions) {
			o.Source = func(context.Context, io.Writer) error { return broken }
		}, broken},
		"source fails at its end": {func(o *SaveOptions) {
			o.Source = func(ctx context.Context, w io.Writer) error { return errors.Join(sourceOf(good)(ctx, w), broken) }
		}, broken},
		"source is cut off": {func(o *SaveOptions) { o.Source = sourceOf(good[:len(good)-1]) }, archive.ErrUnsafe},
		"source is empty":   {func(o *SaveOptions) { o.Source = sourceOf(nil) }, archive.ErrUnsafe},
		"refused":           {func(o *SaveOptions) { o.Accept = func(Report) error { return broken } }, broken},
		"too large":         {func(o *SaveOptions) { o.Limits.Total = 3 }, archive.ErrUnsafe},
		"no passphrase":     {func(o *SaveOptions) { o.Passphrase = Passphrase{} }, nil},
	} {
		dir := t.TempDir()
		o := options(t, filepath.Join(dir, "a"))
		c.change(&o)
		report, err := Save(context.Background(), o)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || report.Size != 0 {
			t.Errorf("%s: %v", name, err)
		}
		if left := names(t, dir); left != "[]" {
			t.Errorf("%s: %s is left", name, left)
		}
	}
}

// TestSaveCancelled at every point at which something can be noticed, and the
// next save works.
func TestSaveCancelled(t *testing.T) {
	cause := errors.New("enough")
	dir := t.TempDir()
	good := gzipped(t, plainTar(t, state()))
	for _, point := range []string{"before", "in the source, that says so", "in the source, that does not", "after the source", "while it is read back", "accepted"} {
		ctx, cancel := context.WithCancelCause(context.Background())
		o := options(t, filepath.Join(dir, "a"))
		here := func(p string) {
			if p == point {
				cancel(cause)
			}
		}
		here("before")
		o.Source = func(ctx context.Context, w io.Writer) error {
			_, _ = w.Write(good[:10])
			here("in the source, that says so")
			here("in the source, that does not")
			_, err := w.Write(good[10:])
			here("after the source")
			if point == "in the source, that does not" {
				return nil
			}
			return err
		}
		o.Verified = func(int64, int64) { here("while it is read back") }
		o.Accept = func(Report) error { here("accepted"); return nil }
		if _, err := Save(ctx, o); !errors.Is(err, cause) || errors.Is(err, ErrAuth) {
			t.Errorf("%s: %v", point, err)
		}
		if left := names(t, dir); left != "[]" {
			t.Errorf("%s: %s is left", point, left)
		}
	}
	if _, err := Save(context.Background(), options(t, filepath.Join(dir, "a"))); err != nil {
		t.Errorf("the next one: %v", err)
	}
}

// TestWriteError: one that the source does not care about counts too.
func TestWriteError(t *testing.T) {
	out := &sink{ctx: context.Background(), w: &failingOnce{}}
	if n, err := out.Write([]byte("x")); n != 0 || !errors.Is(err, syscall.EIO) {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := out.Write([]byte("x")); n != 0 || !errors.Is(err, syscall.EIO) {
		t.Errorf("after the gap: %d, %v", n, err)
	}
}

type failingOnce struct{ failed bool }

func (f *failingOnce) Write(p []byte) (int, error) {
	if !f.failed {
		f.failed = true
		return 0, syscall.EIO
	}
	return len(p), nil
}

func TestNeverReplaces(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "a")
	for name, make := range map[string]func() error{
		"a file":          func() error { return os.WriteFile(there, []byte("mine"), 0o600) },
		"a dangling link": func() error { return os.Symlink("nowhere", there) },
		"a directory":     func() error { return os.Mkdir(there, 0o700) },
	} {
		for _, late := range []bool{false, true} {
			o := options(t, there)
			appear := func() {
				if err := make(); err != nil {
					t.Fatal(err)
				}
			}
			o.Accept = func(Report) error {
				if late {
					appear()
				}
				return nil
			}
			if !late {
				appear()
				o.Source = func(context.Context, io.Writer) error { t.Error("asked for the stream"); return nil }
			}
			before := func() os.FileInfo { i, _ := os.Lstat(there); return i }
			_, err := Save(context.Background(), o)
			if !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), there) {
				t.Errorf("%s, late %t: %v", name, late, err)
			}
			if names(t, dir) != "[a]" || before() == nil || before().Mode().IsRegular() && before().Size() != 4 {
				t.Errorf("%s, late %t: %s", name, late, names(t, dir))
			}
			if err := os.Remove(there); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestConcurrentSaves: to one name, one wins; to different names, all do,
// though they look for each other's stale files.
func TestConcurrentSaves(t *testing.T) {
	const n = 8
	for _, same := range []bool{true, false} {
		dir := t.TempDir()
		start := make(chan struct{})
		errs := make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			path := filepath.Join(dir, "a")
			if !same {
				path += fmt.Sprint(i)
			}
			o := options(t, path)
			wg.Go(func() {
				<-start
				_, errs[i] = Save(context.Background(), o)
			})
		}
		close(start)
		wg.Wait()
		won := 0
		for _, err := range errs {
			if err == nil {
				won++
			} else if !same || !errors.Is(err, ErrExists) {
				t.Errorf("same name %t: %v", same, err)
			}
		}
		if want := map[bool]int{true: 1, false: n}[same]; won != want || strings.Contains(names(t, dir), "partial") {
			t.Errorf("same name %t: %d won, %s", same, won, names(t, dir))
		}
	}
}

func TestStalePartials(t *testing.T) {
	dir := t.TempDir()
	put := func(name string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	stale := put(".hermes-box-alpha.0123456789abcdef.partial")
	kept := []string{
		put(".hermes-box-alpha-2.0123456789abcdef.partial"), // another box
		put(".hermes-box-beta.0123456789abcdef.partial"),
		put(".hermes-box-alpha.0123456789abcdef"),
		put(".hermes-box-alpha.0123456789abcdeg.partial"),
		put(".hermes-box-alpha.0123.partial"),
		put("alpha.partial"),
	}
	live := put(".hermes-box-alpha.1111111111111111.partial")
	f, err := os.Open(live)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, ".hermes-box-alpha.2222222222222222.partial")
	if err := os.Symlink(kept[0], link); err != nil {
		t.Fatal(err)
	}
	if _, err := Save(context.Background(), options(t, filepath.Join(dir, "a"))); err != nil {
		t.Fatal(err)
	}
	for _, path := range append(kept, live, link) {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Lstat(stale); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the stale one: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Save(context.Background(), options(t, filepath.Join(dir, "b"))); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(live); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the live one, when it was dead: %v", err)
	}
}

func TestRemoveUnused(t *testing.T) {
	path := onDisk(t, whole(t))
	a := opened(t, path, word)
	if gone, err := RemoveUnused(path); gone || err != nil {
		t.Errorf("in use: %t, %v", gone, err)
	}
	if _, err := a.Verify(context.Background(), nil); err != nil {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if gone, err := RemoveUnused(path); !gone || err != nil {
		t.Errorf("unused: %t, %v", gone, err)
	}
	if _, err := RemoveUnused(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("gone: %v", err)
	}
}

func TestRenameNoReplace(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	for _, path := range []string{a, b} {
		if err := os.WriteFile(path, []byte(path), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := renameNoReplace(a, b); !errors.Is(err, fs.ErrExist) {
		t.Errorf("onto a file: %v", err)
	}
	if data, err := os.ReadFile(b); err != nil || string(data) != b {
		t.Errorf("%q, %v", data, err)
	}
	if err := renameNoReplace(a, filepath.Join(dir, "c")); err != nil || names(t, dir) != "[b c]" {
		t.Errorf("%v: %s", err, names(t, dir))
	}
	if err := publish(filepath.Join(dir, "none"), a); err == nil || errors.Is(err, ErrExists) {
		t.Errorf("nothing to publish: %v", err)
	}
}

// TestSecret: a passphrase is in nothing that can be printed.
func TestSecret(t *testing.T) {
	const secret = "sesame"
	p := passphrase(t, secret)
	path := onDisk(t, whole(t))
	a := opened(t, path, secret)
	o := SaveOptions{Passphrase: p}
	var said []string
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%o", "%c", "%U", "%t", "%p"} {
		for _, v := range []any{p, &p, a, *a, o, &o, struct{ p Passphrase }{p}, []Passphrase{p}, map[string]Passphrase{"": p}} {
			said = append(said, fmt.Sprintf(verb, v))
		}
	}
	for _, v := range []any{p, &p, a, []Passphrase{p}, map[string]any{"a": o.Passphrase}} {
		data, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		said = append(said, string(data))
	}
	_, err := a.Verify(context.Background(), nil)
	said = append(said, fmt.Sprint(err))
	for _, text := range said {
		// In clear, as numbers and as hex.
		for _, form := range []string{"%s", "%d", "%x", "%X", "%o", "%#v"} {
			shown := strings.Trim(fmt.Sprintf(form, []byte(secret)), "[]")
			if form == "%#v" {
				shown = strings.Trim(strings.TrimPrefix(shown, "[]byte{"), "byte{}]")
			}
			if strings.Contains(text, shown) {
				t.Fatalf("%s shows %s", text, shown)
			}
		}
	}
	if p.String() != "[redacted]" || fmt.Sprint(p) != "[redacted]" {
		t.Errorf("%v", p)
	}
}

func TestReadPassphrase(t *testing.T) {
	for content, want := range map[string]string{
		"one": "one", "one\n": "one", "one\r\ntwo\n": "one", " one \n": " one ", "a\x00b\xff": "a\x00b\xff",
		"": "", "\n": "", "\r\n": "", "\ntwo": "", strings.Repeat("x", 65<<10): "",
	} {
		p, err := ReadPassphrase(onDisk(t, []byte(content)))
		if want == "" {
			if err == nil {
				t.Errorf("%.10q was taken", content)
			}
			continue
		}
		got, _ := p.bytes()
		if err != nil || !bytes.Equal(got, []byte(want)) {
			t.Errorf("%.10q: %q, %v", content, got, err)
		}
	}
	if _, err := ReadPassphrase(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
