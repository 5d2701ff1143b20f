package smolvm

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"syscall"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/partial"
	"hermes-box-lite/internal/vm"
)

var baseDigest = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

func (d *Driver) imageDir() string { return filepath.Join(d.opts.Dir, "images") }

// source are the arguments that say what a machine is made from.
func (d *Driver) source(ctx context.Context, spec vm.Spec) ([]string, error) {
	if spec.Template != "" {
		pack, err := d.newestPack(spec.Template)
		return []string{"--from", pack}, err
	}
	path, size, err := d.image(ctx, spec.Base)
	if err != nil {
		return nil, fmt.Errorf("make an image of the base: %w", err)
	}
	args := []string{"--image", path}
	// smolvm refuses archives of more than 8 GiB unless told otherwise.
	if gib := size>>30 + 1; gib >= 8 {
		args = append(args, "--max-image-size", strconv.FormatInt(gib, 10)+"GiB")
	}
	return args, nil
}

// image returns the archive of a base, in the form of `docker save`, which is
// what smolvm takes from a file. It is made once per digest and never written
// to again: smolvm keeps a hard link to it as a copy of its own
// (src/data/image_source.rs).
func (d *Driver) image(ctx context.Context, base vm.Base) (string, int64, error) {
	if !baseDigest.MatchString(base.Digest) {
		return "", 0, fmt.Errorf("base digest %q is not sha256:hex", base.Digest)
	}
	path := filepath.Join(d.imageDir(), base.Digest[len("sha256:"):]+".tar")
	if info, err := os.Stat(path); err == nil {
		return path, info.Size(), nil
	}
	if err := os.MkdirAll(d.imageDir(), 0o700); err != nil {
		return "", 0, err
	}
	root, err := os.Open(base.Tar)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = root.Close() }()
	info, err := root.Stat()
	if err != nil {
		return "", 0, err
	}
	const prefix = ".image."
	partial.RemoveStale(d.imageDir(), prefix)
	tmp, err := partial.Create(d.imageDir(), prefix)
	if err != nil {
		return "", 0, err
	}
	defer func() { _, _ = os.Remove(tmp.Name()), tmp.Close() }() // its name is gone already when it was renamed
	err = archiveOf(contextWriter{ctx, tmp}, root, info.Size(), "hermes-box-smolvm:"+base.Digest[len("sha256:"):][:32])
	if err = errors.Join(err, tmp.Sync()); err != nil {
		return "", 0, err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return "", 0, err
	}
	info, err = os.Stat(path)
	if err != nil {
		return "", 0, err
	}
	return path, info.Size(), atomicfile.SyncDir(d.imageDir())
}

// archiveOf writes a docker archive of one layer (the image specification of
// docker, v1.2, and the manifest.json of `docker save`). The layer goes first,
// so that it is read once.
func archiveOf(w io.Writer, root io.Reader, size int64, tag string) error {
	tw := tar.NewWriter(w)
	sum := sha256.New()
	if err := tw.WriteHeader(&tar.Header{Name: "layer.tar", Mode: 0o644, Size: size, Typeflag: tar.TypeReg, Format: tar.FormatPAX}); err != nil {
		return err
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{tw}, io.TeeReader(io.LimitReader(root, size), sum), make([]byte, 1<<20)); err != nil {
		return err
	}
	type rootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	}
	config, err := json.Marshal(struct {
		Architecture string   `json:"architecture"`
		OS           string   `json:"os"`
		Config       struct{} `json:"config"`
		RootFS       rootFS   `json:"rootfs"`
	}{runtime.GOARCH, "linux", struct{}{}, rootFS{"layers", []string{"sha256:" + hex.EncodeToString(sum.Sum(nil))}}})
	if err != nil {
		return err
	}
	configSum := sha256.Sum256(config)
	configName := hex.EncodeToString(configSum[:]) + ".json"
	manifest, err := json.Marshal([]struct {
		Config   string
		RepoTags []string
		Layers   []string
	}{{configName, []string{tag}, []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	for _, file := range []struct {
		name string
		data []byte
	}{{configName, config}, {"manifest.json", manifest}} {
		if err := tw.WriteHeader(&tar.Header{Name: file.name, Mode: 0o644, Size: int64(len(file.data)), Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		if _, err := io.Copy(tw, bytes.NewReader(file.data)); err != nil {
			return err
		}
	}
	return tw.Close()
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

// allocated is what a file takes on disk.
func allocated(info fs.FileInfo) int64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Blocks * 512
	}
	return info.Size()
}
