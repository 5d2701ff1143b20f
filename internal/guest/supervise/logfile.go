package supervise

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	logFileSize  = 5 << 20
	logFiles     = 3 // the current one and two older
	logLineLimit = 8 << 10
)

// rotatingLog writes whole lines with their time to a file of bounded size. A
// line is never split over two files; an endless one is cut. It never fails:
// a full disk must not stop Executor.
type rotatingLog struct {
	path    string
	maxSize int64
	gid     int // group that may read; -1 = unchanged
	now     func() time.Time

	mu   sync.Mutex
	file *os.File
	size int64
}

func (g *rotatingLog) line(s string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s = g.now().UTC().Format("2006-01-02T15:04:05.000Z") + " " + s + "\n"
	if g.file != nil && g.size+int64(len(s)) > g.maxSize {
		g.rotate()
	}
	if g.file == nil && g.open() != nil {
		return
	}
	n, err := g.file.WriteString(s)
	g.size += int64(n)
	if err != nil {
		g.closeFile() // try afresh at the next line
	}
}

func (g *rotatingLog) open() error {
	if err := os.MkdirAll(filepath.Dir(g.path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(g.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	if g.gid >= 0 {
		_ = f.Chown(-1, g.gid) // then only root can read it
	}
	_ = f.Chmod(0o640) // whatever the umask
	g.file, g.size = f, info.Size()
	return nil
}

func (g *rotatingLog) rotate() {
	g.closeFile()
	for i := logFiles - 1; i > 0; i-- {
		from := g.path
		if i > 1 {
			from = rotated(g.path, i-1)
		}
		if err := os.Rename(from, rotated(g.path, i)); err != nil && !errors.Is(err, fs.ErrNotExist) && i == 1 {
			_ = os.Truncate(g.path, 0) // bounded before complete
		}
	}
}

// rotated is the name of the i-th older file.
func rotated(path string, i int) string { return path + "." + strconv.Itoa(i) }

func (g *rotatingLog) closeFile() {
	if g.file != nil {
		_ = g.file.Close()
		g.file, g.size = nil, 0
	}
}

// lineWriter cuts a stream into lines for a rotatingLog and blacks out one
// secret, which may not reach a file that the agent reads.
type lineWriter struct {
	log     *rotatingLog
	secret  string
	pending []byte
	cut     bool // the rest of an endless line is being dropped
}

func (w *lineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		chunk, rest, ended := bytes.Cut(p, []byte("\n"))
		p = rest
		if room := logLineLimit - len(w.pending); len(chunk) > room {
			chunk, w.cut = chunk[:room], true
		}
		w.pending = append(w.pending, chunk...)
		if ended {
			w.flush()
		}
	}
	return n, nil
}

// flush writes what has come of the last line.
func (w *lineWriter) flush() {
	if len(w.pending) == 0 && !w.cut {
		return
	}
	s := strings.TrimRight(string(w.pending), "\r")
	if w.secret != "" {
		s = strings.ReplaceAll(s, w.secret, "[redacted]")
		if w.cut {
			s = dropPartialSecret(s, w.secret)
		}
	}
	if w.cut {
		s += " […]"
	}
	w.log.line(s)
	w.pending, w.cut = w.pending[:0], false
}

// dropPartialSecret removes the beginning of the secret from the end of a line
// that was cut within it.
func dropPartialSecret(s, secret string) string {
	for n := min(len(secret), len(s)); n >= 8; n-- {
		if strings.HasSuffix(s, secret[:n]) {
			return s[:len(s)-n]
		}
	}
	return s
}
