package smolvm

import (
	"bytes"
	"io"
	"strconv"
	"sync"
)

// marks takes the two marks of a command out of a stream and passes on what is
// between them. What smolvm itself says comes before or after.
type marks struct {
	to      io.Writer // may be nil
	id      string
	onBegin func()

	mu      sync.Mutex
	began   bool
	ended   bool
	code    int
	pending []byte // not yet told apart from a mark
	words   tail   // what is outside of the marks
}

func newMarks(to io.Writer, id string, onBegin func()) *marks {
	return &marks{to: to, id: id, onBegin: onBegin, words: tail{max: maxWords}}
}

func (m *marks) Write(p []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pending = append(m.pending, p...)
	if !m.began {
		m.lookForBegin()
	}
	if m.began && !m.ended {
		if err := m.pass(); err != nil {
			return 0, err
		}
	}
	if m.ended {
		_, _ = m.words.Write(m.pending) // never fails
		m.pending = m.pending[:0]
	}
	return len(p), nil
}

func (m *marks) lookForBegin() {
	mark := []byte("\x1ehbx-begin " + m.id)
	i := bytes.Index(m.pending, mark)
	if i >= 0 {
		if end := bytes.IndexByte(m.pending[i:], '\n'); end >= 0 {
			_, _ = m.words.Write(m.pending[:i])
			m.pending = append(m.pending[:0], m.pending[i+end+1:]...)
			m.began = true
			if m.onBegin != nil {
				m.onBegin()
			}
			return
		}
	}
	if over := len(m.pending) - maxWords; over > 0 {
		_, _ = m.words.Write(m.pending[:over])
		m.pending = append(m.pending[:0], m.pending[over:]...)
	}
}

// pass hands on all that cannot be, or become, the second mark.
func (m *marks) pass() error {
	mark := []byte("\x1ehbx-end " + m.id + " ")
	for len(m.pending) > 0 {
		i := bytes.IndexByte(m.pending, '\x1e')
		if i < 0 {
			return m.emit(len(m.pending))
		}
		if err := m.emit(i); err != nil {
			return err
		}
		rest := m.pending
		if len(rest) < len(mark) {
			if bytes.HasPrefix(mark, rest) {
				return nil
			}
		} else if bytes.HasPrefix(rest, mark) {
			code, size, whole := exitCode(rest[len(mark):])
			if !whole {
				return nil
			}
			if size > 0 {
				m.ended, m.code = true, code
				m.pending = append(m.pending[:0], rest[len(mark)+size:]...)
				return nil
			}
		}
		if err := m.emit(1); err != nil {
			return err
		}
	}
	return nil
}

// exitCode reads "N\n", also as a terminal changes it. A size of 0 means that
// it is something else.
func exitCode(p []byte) (code, size int, whole bool) {
	end := bytes.IndexByte(p, '\n')
	if end < 0 {
		return 0, 0, len(p) > 6
	}
	code, err := strconv.Atoi(string(bytes.TrimSuffix(p[:end], []byte("\r"))))
	if err != nil || code < 0 || code > 255 {
		return 0, 0, true
	}
	return code, end + 1, true
}

func (m *marks) emit(n int) error {
	if n == 0 {
		return nil
	}
	var err error
	if m.to != nil {
		_, err = m.to.Write(m.pending[:n])
	}
	m.pending = append(m.pending[:0], m.pending[n:]...)
	return err
}

// verdict is what was seen so far; to be asked when the stream has ended.
func (m *marks) verdict() (began, ended bool, code int, words string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	said := m.words.buf
	if !m.began {
		said = append(bytes.Clone(said), m.pending...)
	}
	return m.began, m.ended, m.code, lastWords(said)
}
