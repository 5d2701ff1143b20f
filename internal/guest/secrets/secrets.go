// Package secrets keeps what is the box's own and never travels in an
// archive: the two tokens of the door, the marker of a deliberate pause, and
// that of a new box which waits for its state.
//
// Everything lies in layout.Secrets(), a directory of root's alone. Tokens are
// made once and stay the same across restarts, because the configuration of
// Claude Code, Codex and Hermes holds one of them; a file that does not match
// the grammar is replaced. The supervisor and the plumbing verbs call it.
package secrets

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/guest/layout"
)

// Tokens are what the door accepts, 64 lower hex digits each.
type Tokens struct {
	Agent    string // opens /mcp and below
	Operator string // opens everything
}

const (
	agentFile    = "agent-token"
	operatorFile = "operator-token"
	pauseFile    = "paused"
	awaitFile    = "awaits-state"
	tokenLength  = 64
)

// ValidToken reports whether s is 64 lower hex digits.
func ValidToken(s string) bool {
	if len(s) != tokenLength {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// NewToken makes a random token.
func NewToken() string {
	var b [tokenLength / 2]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24: it ends the program instead
	return hex.EncodeToString(b[:])
}

// Ensure returns the tokens and makes those that are missing or damaged.
func Ensure(l layout.Layout) (Tokens, error) {
	dir := l.Secrets()
	if err := ensureDir(dir); err != nil {
		return Tokens{}, fmt.Errorf("secrets: %w", err)
	}
	unlock, err := lockDir(dir)
	if err != nil {
		return Tokens{}, fmt.Errorf("secrets: %w", err)
	}
	defer unlock()
	var t Tokens
	for name, token := range map[string]*string{agentFile: &t.Agent, operatorFile: &t.Operator} {
		if *token, err = ensureToken(filepath.Join(dir, name)); err != nil {
			return Tokens{}, fmt.Errorf("secrets: %s: %w", name, err)
		}
	}
	return t, nil
}

// Forget removes the tokens, so that the next Ensure makes others, and the
// markers: a copy of a box is a new box, which nobody has paused.
func Forget(l layout.Layout) error {
	dir := l.Secrets()
	if err := ensureDir(dir); err != nil {
		return fmt.Errorf("secrets: %w", err)
	}
	unlock, err := lockDir(dir)
	if err != nil {
		return fmt.Errorf("secrets: %w", err)
	}
	defer unlock()
	for _, name := range []string{agentFile, operatorFile, pauseFile, awaitFile} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("secrets: %w", err)
		}
	}
	return nil
}

func ensureDir(dir string) error {
	// The state above it is the agent's to enter.
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	// A restored or hand-made directory may be more open.
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a directory", dir)
	}
	if info.Mode().Perm() != 0o700 {
		return os.Chmod(dir, 0o700)
	}
	return nil
}

// lockDir keeps two programs from making different tokens at once.
func lockDir(dir string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), d.Close())
	}
	return func() { _ = d.Close() }, nil // closing releases the lock
}

func ensureToken(path string) (string, error) {
	token, err := readToken(path)
	if err == nil {
		// A state that is read-only still has its supervisor.
		if info, err := os.Lstat(path); err != nil || info.Mode().Perm() == 0o600 {
			return token, err
		}
		return token, os.Chmod(path, 0o600)
	}
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errDamaged) {
		return "", err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	token = NewToken()
	return token, atomicfile.Write(path, []byte(token+"\n"), 0o600)
}

var errDamaged = errors.New("not a token")

func readToken(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ELOOP) {
		return "", errDamaged
	}
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", errDamaged
	}
	data, err := io.ReadAll(io.LimitReader(f, tokenLength+2))
	if err != nil {
		return "", err
	}
	if n := len(data); n > 0 && data[n-1] == '\n' {
		data = data[:n-1]
	}
	if !ValidToken(string(data)) {
		return "", errDamaged
	}
	return string(data), nil
}

// Paused reports whether Executor is deliberately down. Only a marker that is
// certainly absent means no.
func Paused(l layout.Layout) (bool, error) { return marked(l, pauseFile) }

// SetPaused writes or removes the marker, durably.
func SetPaused(l layout.Layout, paused bool) error {
	return mark(l, pauseFile, "Executor is deliberately down; `hb up` resumes it.\n", paused)
}

// AwaitsState reports whether the box is a new one that is to be filled with
// the state of an archive. Until then nothing may use what is there.
func AwaitsState(l layout.Layout) (bool, error) { return marked(l, awaitFile) }

// SetAwaitsState writes or removes the marker, durably.
func SetAwaitsState(l layout.Layout, awaits bool) error {
	return mark(l, awaitFile, "This new box waits for the state of an archive.\n", awaits)
}

func marked(l layout.Layout, name string) (bool, error) {
	_, err := os.Lstat(filepath.Join(l.Secrets(), name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the marker %s: %w", name, err)
	}
	return true, nil
}

func mark(l layout.Layout, name, text string, set bool) error {
	dir := l.Secrets()
	path := filepath.Join(dir, name)
	err := func() error {
		if set {
			if err := ensureDir(dir); err != nil {
				return err
			}
			return atomicfile.Write(path, []byte(text), 0o600)
		}
		err := os.Remove(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return errors.Join(err, atomicfile.SyncDir(dir))
	}()
	if err != nil {
		return fmt.Errorf("change the marker %s: %w", name, err)
	}
	return nil
}

// ReadAgentToken returns the agent token and makes nothing.
func ReadAgentToken(l layout.Layout) (string, error) {
	token, err := readToken(filepath.Join(l.Secrets(), agentFile))
	if err != nil {
		return "", fmt.Errorf("secrets: %s: %w", agentFile, err)
	}
	return token, nil
}
