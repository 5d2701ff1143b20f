package rootfs

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func rootTar(t *testing.T) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, h := range []tar.Header{
		{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "etc/os-release", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3},
		{Name: "bin", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"},
	} {
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			_, _ = tw.Write([]byte("ID\n"))
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func testImage(t *testing.T, arch string) v1.Image {
	t.Helper()
	data := rootTar(t)
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	cfg, _ := img.ConfigFile()
	cfg.OS, cfg.Architecture = "linux", arch
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

func entries(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var names []string
	tr := tar.NewReader(f)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return strings.Join(names, " ")
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, strings.Trim(h.Name, "./")+map[bool]string{true: "->" + h.Linkname}[h.Linkname != ""])
	}
}

// Every form of BASE_IMAGE yields the same root filesystem, and a second
// Prepare finds it in the cache.
func TestForms(t *testing.T) {
	dir := t.TempDir()
	img := testImage(t, runtime.GOARCH)

	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/os:1"
	parsed, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(parsed, img); err != nil {
		t.Fatal(err)
	}
	ociDir := filepath.Join(dir, "oci")
	if p, err := layout.Write(ociDir, empty.Index); err != nil {
		t.Fatal(err)
	} else if err := p.AppendImage(img, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: runtime.GOARCH})); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(dir, "image.tar")
	tag, _ := name.NewTag("os:1")
	if err := tarball.WriteToFile(archive, tag, img); err != nil {
		t.Fatal(err)
	}
	plain := filepath.Join(dir, "root.tar")
	must(t, os.WriteFile(plain, rootTar(t), 0o600))
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	_, _ = zw.Write(rootTar(t))
	must(t, zw.Close())
	must(t, os.WriteFile(filepath.Join(dir, "root.tar.gz"), zipped.Bytes(), 0o600))
	root := filepath.Join(dir, "root")
	must(t, os.MkdirAll(filepath.Join(root, "etc"), 0o755))
	must(t, os.WriteFile(filepath.Join(root, "etc/os-release"), []byte("ID\n"), 0o644))
	must(t, os.Symlink("usr/bin", filepath.Join(root, "bin")))

	store := NewStore(filepath.Join(dir, "cache"))
	for _, form := range []string{ref, ociDir, archive, plain, "./root.tar", "./root.tar.gz", "./root"} {
		t.Run(filepath.Base(form), func(t *testing.T) {
			var notes []string
			note := func(s string) { notes = append(notes, s) }
			base, err := store.Prepare(t.Context(), form, dir, note)
			if err != nil {
				t.Fatal(err)
			}
			got := entries(t, base.Tar)
			for _, want := range []string{"etc", "etc/os-release", "bin->usr/bin"} {
				if !strings.Contains(" "+got+" ", " "+want+" ") {
					t.Errorf("entries %q lack %q", got, want)
				}
			}
			again, err := store.Prepare(t.Context(), form, dir, note)
			if err != nil || again != base {
				t.Errorf("second Prepare: %+v, %v; first %+v", again, err, base)
			}
		})
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "cache", ".partial-*")); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "empty"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "text"), []byte(strings.Repeat("hello ", 400)), 0o600))
	other := "arm64"
	if runtime.GOARCH == other {
		other = "amd64"
	}
	tag, _ := name.NewTag("os:1")
	must(t, tarball.WriteToFile(filepath.Join(dir, "foreign.tar"), tag, testImage(t, other)))
	for ref, want := range map[string]string{
		"./missing":     "no such file",
		"./empty":       "neither an OCI layout",
		"./text":        "neither a docker archive",
		"./foreign.tar": "it is for " + other,
		"UPPER CASE":    "could not parse reference",
	} {
		_, err := NewStore(filepath.Join(dir, "cache")).Prepare(t.Context(), ref, dir, func(string) {})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), ref) {
			t.Errorf("%s: error %v, want %q and the reference", ref, err, want)
		}
	}
}

// An unreachable registry is told as such, and soon.
func TestUnreachableRegistry(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	refused := l.Addr().String()
	must(t, l.Close())
	store := NewStore(t.TempDir())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err = store.Prepare(ctx, refused+"/os:1", "/", func(string) {})
	var unreachable *UnreachableError
	if !errors.As(err, &unreachable) || unreachable.Registry != refused || !strings.Contains(unreachable.Hint(), "make base") {
		t.Errorf("refused: %v", err)
	}
}

// A registry that keeps the connection and sends nothing more is given up, and
// nothing is left of what it sent.
func TestSilentRegistry(t *testing.T) {
	img := testImage(t, runtime.GOARCH)
	whole := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	var stalling atomic.Bool
	stalled := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		layers, err := img.Layers()
		must(t, err)
		digest, err := layers[0].Digest()
		must(t, err)
		if !stalling.Load() || !strings.HasSuffix(r.URL.Path, digest.String()) {
			whole.ServeHTTP(w, r)
			return
		}
		size, err := layers[0].Size()
		must(t, err)
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
		_, _ = w.Write([]byte{0x1f, 0x8b})
		_ = http.NewResponseController(w).Flush()
		<-stalled
	}))
	defer server.Close()
	defer close(stalled)
	ref := strings.TrimPrefix(server.URL, "http://") + "/os:1"
	parsed, err := name.ParseReference(ref)
	must(t, err)
	must(t, remote.Write(parsed, img))
	stalling.Store(true)
	store := NewStore(t.TempDir())
	store.silence = 300 * time.Millisecond
	_, err = store.Prepare(t.Context(), ref, "/", func(string) {})
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("error %v", err)
	}
	if left, err := os.ReadDir(store.dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v (%v)", left, err)
	}
}

func TestCancelled(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "root.tar"), rootTar(t), 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := NewStore(filepath.Join(dir, "c")).Prepare(ctx, "./root.tar", dir, func(string) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
