package box

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// keptTranscripts bounds the evidence of failed commands, in files;
// maxTranscript bounds each, in bytes.
const (
	keptTranscripts = 20
	maxTranscript   = 4 << 20
)

// transcript is the evidence of one mutation: steps, events and the output of
// everything that ran in the guest. It stays when the mutation fails.
type transcript struct {
	mu      sync.Mutex
	file    *os.File
	written int
	also    io.Writer // sees the guest's output too; nil: nobody
}

func (h Home) newTranscript(name, verb string, now time.Time, also io.Writer) (*transcript, error) {
	if err := h.pruneTranscripts(); err != nil {
		return nil, err
	}
	path := filepath.Join(h.transcripts(), fmt.Sprintf("%s-%s-%s.log", name, verb, now.UTC().Format("20060102-150405.000")))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("keep a transcript: %w", err)
	}
	return &transcript{file: f, also: also}, nil
}

// pruneTranscripts removes the oldest, so that the new one fits.
func (h Home) pruneTranscripts() error {
	entries, err := os.ReadDir(h.transcripts())
	if err != nil {
		return err
	}
	type aged struct {
		path string
		time time.Time
	}
	var logs []aged
	for _, e := range entries {
		if info, err := e.Info(); err == nil && strings.HasSuffix(e.Name(), ".log") {
			logs = append(logs, aged{filepath.Join(h.transcripts(), e.Name()), info.ModTime()})
		}
	}
	slices.SortFunc(logs, func(a, b aged) int { return a.time.Compare(b.time) })
	for len(logs) >= keptTranscripts {
		if err := os.Remove(logs[0].path); err != nil && !os.IsNotExist(err) {
			return err
		}
		logs = logs[1:]
	}
	return nil
}

// Write adds output of the guest.
func (t *transcript) Write(p []byte) (int, error) {
	if t.also != nil {
		_, _ = t.also.Write(p) // showing it is a courtesy
	}
	t.append(p)
	return len(p), nil
}

// append keeps p; past the bound the rest is dropped, and what a full disk does
// not take: evidence is no reason to end what it is of.
func (t *transcript) append(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if room := maxTranscript - t.written; room > 0 {
		n, _ := t.file.Write(p[:min(len(p), room)])
		t.written += n
		if t.written >= maxTranscript {
			_, _ = t.file.WriteString("\n[the rest was dropped]\n")
		}
	}
}

func (t *transcript) line(format string, args ...any) {
	t.append(fmt.Appendf(nil, time.Now().UTC().Format("15:04:05.000 ")+format+"\n", args...))
}

// close keeps the transcript when keep is set, and returns its path then.
func (t *transcript) close(keep bool) string {
	path := t.file.Name()
	_ = t.file.Close()
	if !keep {
		_ = os.Remove(path)
		return ""
	}
	return path
}
