// Package rootfs turns BASE_IMAGE, in every form it may have, into one
// uncompressed tar of a root filesystem with a content digest. Images are
// read through go-containerregistry; nothing of them is executed.
//
// Forms: an OCI reference (ubuntu:24.04), and, as a path that begins with /,
// ./ or ../: an OCI layout, a directory with a root filesystem, a docker
// archive, a tar of a root filesystem (plain or gzip).
package rootfs

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"hermes-box-lite/internal/partial"
	"hermes-box-lite/internal/vm"
)

// Store keeps prepared bases in a directory, by digest.
type Store struct {
	dir         string
	dialTimeout time.Duration
	silence     time.Duration // of a registry, that is endured
}

// NewStore returns a store in dir, which is created when first needed.
func NewStore(dir string) *Store {
	return &Store{dir: dir, dialTimeout: 5 * time.Second, silence: 2 * time.Minute}
}

// UnreachableError says that an image's registry could not be reached.
type UnreachableError struct {
	Ref, Registry string
	Err           error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("base image %s: the registry %s cannot be reached: %v (a base can be made here instead: set BASE_IMAGE in box.env to the path that make base prints)", e.Ref, e.Registry, e.Err)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

// Hint names the way without a registry.
func (e *UnreachableError) Hint() string {
	return "make base"
}

// Prepare returns the base for ref. Relative paths are relative to home. What
// it does is told to note, a line at a time.
func (s *Store) Prepare(ctx context.Context, ref, home string, note func(string)) (vm.Base, error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return vm.Base{}, fmt.Errorf("prepare the base cache: %w", err)
	}
	base, err := s.prepare(ctx, ref, home, note)
	var unreachable *UnreachableError
	if err != nil && !errors.As(err, &unreachable) {
		err = fmt.Errorf("base image %s: %w", ref, err)
	}
	return base, err
}

func (s *Store) prepare(ctx context.Context, ref, home string, note func(string)) (vm.Base, error) {
	if !IsPath(ref) {
		img, err := s.pull(ctx, ref, note)
		if err != nil {
			return vm.Base{}, err
		}
		return s.flatten(ctx, img, note)
	}
	path := ref
	if !filepath.IsAbs(path) {
		path = filepath.Join(home, path)
	}
	info, err := os.Stat(path)
	if err != nil {
		return vm.Base{}, err
	}
	if info.IsDir() {
		if _, err := os.Stat(filepath.Join(path, "oci-layout")); err == nil {
			img, err := fromLayout(path)
			if err != nil {
				return vm.Base{}, err
			}
			return s.flatten(ctx, img, note)
		}
		return s.packDirectory(ctx, path, note)
	}
	return s.fromFile(ctx, path, info, note)
}

// IsPath reports whether a BASE_IMAGE is a path and not a reference.
func IsPath(ref string) bool {
	return strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "../")
}

func platform() v1.Platform { return v1.Platform{OS: "linux", Architecture: runtime.GOARCH} }

func (s *Store) pull(ctx context.Context, ref string, note func(string)) (v1.Image, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{Timeout: s.dialTimeout}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return patientConn{conn, s.silence}, nil
	}
	transport.TLSHandshakeTimeout = s.dialTimeout
	transport.ResponseHeaderTimeout = 20 * time.Second
	note("asking " + parsed.Context().RegistryStr() + " for " + ref)
	img, err := remote.Image(parsed, remote.WithContext(ctx), remote.WithTransport(transport),
		remote.WithPlatform(platform()), remote.WithRetryBackoff(remote.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Steps: 2}))
	if err != nil {
		var netErr net.Error
		var opErr *net.OpError
		if ctx.Err() == nil && (errors.As(err, &netErr) || errors.As(err, &opErr)) {
			return nil, &UnreachableError{Ref: ref, Registry: parsed.Context().RegistryStr(), Err: err}
		}
		return nil, err
	}
	return img, nil
}

// patientConn ends with an error when nothing has come for a while: a registry
// that keeps the connection and sends nothing would be waited for for ever.
type patientConn struct {
	net.Conn
	silence time.Duration
}

func (c patientConn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.silence)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func fromLayout(path string) (v1.Image, error) {
	index, err := layout.ImageIndexFromPath(path)
	if err != nil {
		return nil, err
	}
	img, err := pick(index)
	if err != nil {
		return nil, fmt.Errorf("OCI layout: %w", err)
	}
	return img, nil
}

// pick finds this platform's image in an index, which may hold indexes.
func pick(index v1.ImageIndex) (v1.Image, error) {
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	want := platform()
	for _, desc := range manifest.Manifests {
		switch {
		case desc.MediaType.IsIndex():
			nested, err := index.ImageIndex(desc.Digest)
			if err != nil {
				return nil, err
			}
			if img, err := pick(nested); err == nil {
				return img, nil
			}
		case desc.MediaType.IsImage():
			if desc.Platform == nil || desc.Platform.Satisfies(want) {
				return index.Image(desc.Digest)
			}
		}
	}
	return nil, fmt.Errorf("no image for %s", want.String())
}

// flatten writes the image's root filesystem, once per image digest.
func (s *Store) flatten(ctx context.Context, img v1.Image, note func(string)) (vm.Base, error) {
	if cfg, err := img.ConfigFile(); err != nil {
		return vm.Base{}, err
	} else if cfg.Architecture != "" && cfg.Architecture != runtime.GOARCH {
		return vm.Base{}, fmt.Errorf("it is for %s, this host is %s", cfg.Architecture, runtime.GOARCH)
	}
	digest, err := img.Digest()
	if err != nil {
		return vm.Base{}, err
	}
	path := s.tarPath(digest.Hex)
	if _, err := os.Stat(path); err == nil {
		return vm.Base{Digest: digest.String(), Tar: path}, nil
	}
	note("unpacking " + digest.String())
	root := mutate.Extract(img)
	err = s.publish(ctx, path, root)
	return vm.Base{Digest: digest.String(), Tar: path}, errors.Join(err, root.Close())
}

// packDirectory makes a tar of a directory; its digest is the tar's.
func (s *Store) packDirectory(ctx context.Context, dir string, note func(string)) (vm.Base, error) {
	if _, err := os.Stat(filepath.Join(dir, "etc")); err != nil {
		return vm.Base{}, errors.New("the directory is neither an OCI layout (no oci-layout file) nor a root filesystem (no etc)")
	}
	note("packing " + dir)
	sum := sha256.New()
	tmp, err := s.partial()
	if err != nil {
		return vm.Base{}, err
	}
	defer func() { _, _ = os.Remove(tmp.Name()), tmp.Close() }() // its name is gone already when it was renamed
	out := bufio.NewWriterSize(contextWriter{ctx, io.MultiWriter(tmp, sum)}, 1<<20)
	tw := tar.NewWriter(out)
	err = errors.Join(tw.AddFS(os.DirFS(dir)), tw.Close(), out.Flush(), tmp.Sync())
	if err != nil {
		return vm.Base{}, err
	}
	digest := hex.EncodeToString(sum.Sum(nil))
	path := s.tarPath(digest)
	return vm.Base{Digest: "sha256:" + digest, Tar: path}, os.Rename(tmp.Name(), path)
}

// fromFile tells the kinds of archive apart by their content.
func (s *Store) fromFile(ctx context.Context, path string, info fs.FileInfo, note func(string)) (vm.Base, error) {
	kind, err := sniff(path)
	if err != nil {
		return vm.Base{}, err
	}
	if kind == dockerArchive {
		img, err := tarball.ImageFromPath(path, nil)
		if err != nil {
			return vm.Base{}, err
		}
		return s.flatten(ctx, img, note)
	}
	digest, err := s.fileDigest(ctx, path, info)
	if err != nil {
		return vm.Base{}, err
	}
	if kind == plainTar {
		return vm.Base{Digest: "sha256:" + digest, Tar: path}, nil
	}
	unpacked := s.tarPath(digest)
	base := vm.Base{Digest: "sha256:" + digest, Tar: unpacked}
	if _, err := os.Stat(unpacked); err == nil {
		return base, nil
	}
	note("unpacking " + path)
	f, err := os.Open(path)
	if err != nil {
		return vm.Base{}, err
	}
	defer func() { _ = f.Close() }()
	zr, err := gzip.NewReader(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		return vm.Base{}, err
	}
	return base, s.publish(ctx, unpacked, zr)
}

type fileKind int

const (
	plainTar fileKind = iota
	gzipTar
	dockerArchive
)

// sniff looks at the first entries: a docker archive has a manifest.json or
// an oci-layout beside its blobs, a root filesystem has neither.
func sniff(path string) (fileKind, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	br := bufio.NewReader(f)
	kind, r := plainTar, io.Reader(br)
	if magic, _ := br.Peek(2); string(magic) == "\x1f\x8b" {
		zr, err := gzip.NewReader(br)
		if err != nil {
			return 0, err
		}
		kind, r = gzipTar, zr
	}
	tr := tar.NewReader(r)
	looksLikeRoot := false
	for range 4096 {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return 0, fmt.Errorf("it is neither a docker archive nor a tar of a root filesystem: %w", err)
		}
		switch first, _, _ := strings.Cut(strings.TrimPrefix(h.Name, "./"), "/"); first {
		case "manifest.json", "oci-layout":
			if kind == gzipTar {
				return 0, errors.New("a docker archive must not be compressed as a whole; gunzip it first")
			}
			return dockerArchive, nil
		case "etc", "usr", "bin":
			looksLikeRoot = true
		}
		if looksLikeRoot {
			break
		}
	}
	if !looksLikeRoot {
		return 0, errors.New("it is neither a docker archive nor a tar of a root filesystem")
	}
	return kind, nil
}

// fileDigest hashes a file, and remembers the result by path, size and time
// of change: a base of a gigabyte is not read again for every box.
func (s *Store) fileDigest(ctx context.Context, path string, info fs.FileInfo) (string, error) {
	key := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%d", path, info.Size(), info.ModTime().UnixNano()))
	memo := filepath.Join(s.dir, "digest-"+hex.EncodeToString(key[:8]))
	if data, err := os.ReadFile(memo); err == nil && hexDigest.Match(data) {
		return string(data), nil
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, contextReader{ctx, f}); err != nil {
		return "", err
	}
	digest := hex.EncodeToString(sum.Sum(nil))
	return digest, os.WriteFile(memo, []byte(digest), 0o600)
}

var hexDigest = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (s *Store) tarPath(hexDigest string) string { return filepath.Join(s.dir, hexDigest+".tar") }

// partial makes a file that becomes a base when it is whole, and removes what
// killed calls left of theirs.
func (s *Store) partial() (*os.File, error) {
	const prefix = ".base."
	partial.RemoveStale(s.dir, prefix)
	return partial.Create(s.dir, prefix)
}

// publish writes r to path, whole or not at all.
func (s *Store) publish(ctx context.Context, path string, r io.Reader) error {
	tmp, err := s.partial()
	if err != nil {
		return err
	}
	defer func() { _, _ = os.Remove(tmp.Name()), tmp.Close() }() // its name is gone already when it was renamed
	if _, err := io.Copy(tmp, contextReader{ctx, r}); err != nil {
		return err
	}
	if err := tmp.Sync(); err != nil { // its name says that it is whole, after a crash, too
		return err
	}
	return os.Rename(tmp.Name(), path)
}

type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}

type contextWriter struct {
	ctx context.Context
	w   io.Writer
}

func (c contextWriter) Write(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.w.Write(p)
}

// Cached lists the prepared bases.
func (s *Store) Cached() ([]vm.Cached, error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []vm.Cached
	for _, e := range entries {
		digest, ok := strings.CutSuffix(e.Name(), ".tar")
		if !ok || !hexDigest.MatchString(digest) {
			continue
		}
		info, err := e.Info()
		if err != nil {
			continue // removed meanwhile
		}
		all = append(all, vm.Cached{ID: digest, Made: info.ModTime().UTC(), Bytes: info.Size()})
	}
	return all, nil
}

// Evict removes a prepared base. Whoever reads it at this moment goes on.
func (s *Store) Evict(digest string) error {
	if !hexDigest.MatchString(digest) {
		return fmt.Errorf("%q is not a digest", digest)
	}
	err := os.Remove(s.tarPath(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("base %s: %w", digest, vm.ErrNoTemplate)
	}
	return err
}
