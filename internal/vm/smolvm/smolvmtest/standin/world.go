//go:build linux

package main

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/process"
)

// world is the state of this stand-in, in the directories that smolvm uses.
type world struct {
	cache    string
	db       string
	settings string
	engine   engine
}

// record is what the database keeps of a machine.
type record struct {
	Name      string
	State     string
	CPUs      int
	MemoryMiB int
	CreatedAt int64
	Labels    map[string]string
	Ports     []string
	Command   []string
	Image     string  // of an archive: the path of the copy in the cache
	Pack      *packed // where it was made from one
	Process   process.ID
	Started   bool
}

// answer is the shape of ls and status.
type answer struct {
	Name       string            `json:"name"`
	State      string            `json:"state"`
	CPUs       int               `json:"cpus"`
	MemoryMiB  int               `json:"memory_mib"`
	PID        *int              `json:"pid"`
	Mounts     int               `json:"mounts"`
	Ports      int               `json:"ports"`
	CreatedAt  int64             `json:"created_at"`
	StorageGB  *int              `json:"storage_gb"`
	OverlayGB  *int              `json:"overlay_gb"`
	Image      *string           `json:"image"`
	Entrypoint []string          `json:"entrypoint"`
	Cmd        []string          `json:"cmd"`
	Ephemeral  bool              `json:"ephemeral"`
	GPU        bool              `json:"gpu"`
	Forkable   bool              `json:"forkable"`
	Labels     map[string]string `json:"labels"`
	Restart    string            `json:"restart_policy"`
	Network    bool              `json:"network"`
}

// packed is a .smolmachine.
type packed struct {
	CPUs      int
	MemoryMiB int
	Content   string // the engine's
}

func readPack(path string) (packed, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return packed{}, err
	}
	var p packed
	return p, json.Unmarshal(data, &p)
}

func writePack(path string, p packed) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}

func openWorld() (*world, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return nil, err
	}
	xdg := func(name, fallback string) string {
		if dir := os.Getenv(name); filepath.IsAbs(dir) {
			return dir
		}
		return filepath.Join(home, fallback)
	}
	data := xdg("XDG_DATA_HOME", ".local/share")
	w := &world{
		cache: xdg("XDG_CACHE_HOME", ".cache"), db: filepath.Join(data, "smolvm/server/smolvm.db"),
		settings: filepath.Join(data, "smolvm/standin"),
	}
	for _, dir := range []string{filepath.Dir(w.db), w.settings, filepath.Join(w.cache, "smolvm/vms")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	switch name := os.Getenv("SMOLVM_STANDIN_ENGINE"); name {
	case "none":
		w.engine = local{w}
	case "":
		w.engine = podman{w, "podman"}
	default:
		w.engine = podman{w, name}
	}
	return w, nil
}

// setting is what a test has put into a file, "" where it has not.
func (w *world) setting(name string) string {
	data, _ := os.ReadFile(filepath.Join(w.settings, name))
	return strings.TrimSpace(string(data))
}

func (w *world) set(name, value string) {
	_ = os.WriteFile(filepath.Join(w.settings, name), []byte(value), 0o600) // read by the next call only
}

// dir is a machine's directory.
func (w *world) dir(name string) string {
	sum := sha256.Sum256([]byte(name))
	return filepath.Join(w.cache, "smolvm/vms", hex.EncodeToString(sum[:8]))
}

func (w *world) makeDir(name string) string {
	dir := w.dir(name)
	if os.MkdirAll(dir, 0o700) == nil {
		_ = os.WriteFile(filepath.Join(dir, "name"), []byte(name), 0o600) // as good as it goes
		if f, err := os.OpenFile(filepath.Join(dir, "storage.raw"), os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
			_ = errors.Join(f.Truncate(20<<30), f.Close()) // sparse
		}
	}
	return dir
}

// locked runs a transaction of the database.
func (w *world) locked(change func(map[string]record) bool) error {
	f, err := os.OpenFile(w.db+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	all := map[string]record{}
	data, err := os.ReadFile(w.db)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if len(data) > 0 {
		if err := json.Unmarshal(data, &all); err != nil {
			return fmt.Errorf("database not available: open database: %w", err)
		}
	}
	if !change(all) && err == nil {
		return nil
	}
	if data, err = json.Marshal(all); err != nil {
		return err
	}
	return atomicfile.Write(w.db, data, 0o600)
}

func (w *world) all() (map[string]record, error) {
	var found map[string]record
	err := w.locked(func(all map[string]record) bool { found = all; return false })
	return found, err
}

func (w *world) get(name string) (record, bool, error) {
	all, err := w.all()
	r, ok := all[name]
	return r, ok, err
}

func (w *world) put(r record) error {
	return w.locked(func(all map[string]record) bool { all[r.Name] = r; return true })
}

func (w *world) drop(name string) error {
	return w.locked(func(all map[string]record) bool { delete(all, name); return true })
}

// reserve keeps a name for its creator.
func (w *world) reserve(name string) (release func(), err error) {
	f, err := os.OpenFile(w.db+".reserved-"+name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// resolve is smolvm's idea of a state: one that is written down as anything but
// running is believed.
func (w *world) resolve(r record) string {
	switch {
	case r.State != "running":
		return r.State
	case !r.Process.Alive():
		return "stopped"
	}
	release, err := w.connect(r)
	if err != nil {
		return "unreachable"
	}
	release()
	return "running"
}

func (w *world) describe(r record) answer {
	a := answer{
		Name: r.Name, State: w.resolve(r), CPUs: r.CPUs, MemoryMiB: r.MemoryMiB, Ports: len(r.Ports), CreatedAt: r.CreatedAt,
		Entrypoint: []string{}, Cmd: r.Command, Labels: r.Labels, Restart: "never", Network: true,
	}
	if r.Process.PID != 0 {
		a.PID = &r.Process.PID
	}
	if r.Image != "" {
		image := "local:" + filepath.Base(filepath.Dir(r.Image))
		a.Image = &image
	}
	return a
}

// connections is how many the guest's agent serves at once.
const connections = 8

// connect takes a connection to the agent, and gives up after smolvm's three
// seconds, or what the setting "ping" says.
func (w *world) connect(r record) (release func(), err error) {
	patience := 3 * time.Second
	if d, err := time.ParseDuration(w.setting("ping")); err == nil {
		patience = d
	}
	dir := filepath.Join(w.dir(r.Name), "connections")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		for i := 0; i < connections && w.setting("deaf-"+r.Name) == ""; i++ {
			f, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(i)), os.O_CREATE|os.O_RDWR, 0o600)
			if err != nil {
				return nil, err
			}
			if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
				return func() { _ = f.Close() }, nil
			}
			_ = f.Close()
		}
		if time.Now().After(deadline) {
			return nil, errors.New("no answer")
		}
	}
}

// attach is connect as exec does it: a failure is written down.
func (w *world) attach(name string) (record, func(), error) {
	r, ok, err := w.get(name)
	if err != nil {
		return r, nil, err
	}
	if !ok {
		w.makeDir(name)
		return r, nil, notFound(name)
	}
	gone := fmt.Errorf("agent operation failed: connect: machine '%s' is not running. Use 'smolvm machine start --name %s' first.", name, name) //nolint:staticcheck // its own words
	if r.State != "running" && r.State != "unreachable" || !r.Process.Alive() {
		return r, nil, gone
	}
	release, err := w.connect(r)
	if err != nil {
		// The whole record goes back, whatever has become of it meanwhile.
		r.State = "unreachable"
		return r, nil, errors.Join(gone, w.put(r))
	}
	return r, release, nil
}

func (w *world) portsAreFree(r record) error {
	all, err := w.all()
	if err != nil {
		return err
	}
	for _, p := range r.Ports {
		host, _, _ := strings.Cut(p, ":")
		for _, other := range all {
			if other.Name == r.Name || other.State != "running" || !other.Process.Alive() {
				continue
			}
			for _, theirs := range other.Ports {
				if taken, _, _ := strings.Cut(theirs, ":"); taken == host {
					return fmt.Errorf("host port %s is already in use by running machine '%s'", host, other.Name)
				}
			}
		}
		l, err := net.Listen("tcp", "127.0.0.1:"+host)
		if err != nil {
			return fmt.Errorf("configure virtio-net: bind 127.0.0.1:%s: Address already in use (os error 98)", host)
		}
		_ = l.Close()
	}
	return nil
}

// stage keeps a link to an archive in the cache, by its content, or a copy of
// it where that cannot be linked.
func (w *world) stage(image string) (string, error) {
	if !strings.HasPrefix(image, "/") && !strings.HasPrefix(image, "./") && !strings.HasSuffix(image, ".tar") {
		return "", fmt.Errorf("config operation failed: --image: %s must be pulled from a registry, which this stand-in does not", image)
	}
	f, err := os.Open(image)
	if err != nil {
		return "", fmt.Errorf("config operation failed: --image: cannot read archive %s: %w", image, err)
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	target := filepath.Join(w.cache, "smolvm-image-archives", hex.EncodeToString(sum.Sum(nil)), "archive.tar")
	if _, err := os.Stat(target); err == nil {
		return target, nil
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
		return "", err
	}
	if err := os.Link(image, target); err == nil || errors.Is(err, fs.ErrExist) {
		return target, nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	out, err := os.Create(target)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(out, f)
	return target, errors.Join(err, out.Close())
}

// configOf is the digest of an archive's image, from its manifest.json.
func configOf(archive string) (string, error) {
	f, err := os.Open(archive)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	tr := tar.NewReader(f)
	for {
		h, err := tr.Next()
		if err != nil {
			return "", fmt.Errorf("manifest.json not found in tar: %w", err)
		}
		if h.Name != "manifest.json" {
			continue
		}
		var manifest []struct{ Config string }
		if err := json.NewDecoder(tr).Decode(&manifest); err != nil || len(manifest) != 1 {
			return "", fmt.Errorf("manifest.json: %d images, %w", len(manifest), err)
		}
		return strings.TrimSuffix(manifest[0].Config, ".json"), nil
	}
}
