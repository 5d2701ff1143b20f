// Package stream puts a stage of a byte stream into a goroutine of its own, so
// that reading, compressing, encrypting and checking use more than one core:
// Ahead reads ahead of its caller, Behind writes behind it. Both keep a fixed
// number of blocks, whatever flows through.
package stream

import "io"

const (
	blockSize = 256 << 10 // bytes
	blocks    = 4
)

type block struct {
	data []byte
	buf  []byte
	err  error
}

// Reader reads ahead.
type Reader struct {
	full  chan block
	empty chan []byte
	quit  chan struct{}
	ended chan struct{}
	cur   block
}

func buffers() chan []byte {
	empty := make(chan []byte, blocks)
	for range blocks {
		empty <- make([]byte, blockSize)
	}
	return empty
}

// Ahead starts reading r. The caller must call Stop.
func Ahead(r io.Reader) *Reader {
	a := &Reader{full: make(chan block, blocks), empty: buffers(), quit: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(a.ended)
		for {
			var buf []byte
			select {
			case buf = <-a.empty:
			case <-a.quit:
				return
			}
			n, err := fill(r, buf)
			a.full <- block{data: buf[:n], buf: buf, err: err} // as many slots as buffers
			if err != nil {
				return
			}
		}
	}()
	return a
}

// fill is io.ReadFull without its own error for a short last block.
func fill(r io.Reader, buf []byte) (n int, err error) {
	for n < len(buf) && err == nil {
		var nn int
		nn, err = r.Read(buf[n:])
		n += nn
	}
	return n, err
}

// Read implements io.Reader.
func (a *Reader) Read(p []byte) (int, error) {
	for len(a.cur.data) == 0 {
		if a.cur.err != nil {
			return 0, a.cur.err
		}
		if a.cur.buf != nil {
			a.empty <- a.cur.buf
		}
		a.cur = <-a.full
	}
	n := copy(p, a.cur.data)
	a.cur.data = a.cur.data[n:]
	return n, nil
}

// Stop ends the reading ahead; when it returns the source is no longer read.
func (a *Reader) Stop() {
	close(a.quit)
	<-a.ended
}

// Writer writes behind.
type Writer struct {
	full  chan []byte
	empty chan []byte
	ended chan struct{}
	cur   []byte
	err   error // the underlying writer's; read after ended only
	done  error // of Close
	shut  bool
}

// Behind returns a writer whose data reaches w a little later. The caller must
// call Close, which waits for that and returns w's error.
func Behind(w io.Writer) *Writer {
	b := &Writer{full: make(chan []byte, blocks), empty: buffers(), ended: make(chan struct{})}
	go func() {
		defer close(b.ended)
		for data := range b.full {
			if b.err == nil {
				_, b.err = w.Write(data)
			}
			if b.err != nil {
				return
			}
			b.empty <- data[:cap(data)]
		}
	}()
	return b
}

// Write implements io.Writer. An error of the underlying writer may show some
// calls later.
func (b *Writer) Write(p []byte) (n int, err error) {
	for n < len(p) {
		if b.cur == nil {
			select {
			case buf := <-b.empty:
				b.cur = buf[:0]
			case <-b.ended:
				return n, b.failure()
			}
		}
		room := min(cap(b.cur)-len(b.cur), len(p)-n)
		b.cur = append(b.cur, p[n:n+room]...)
		n += room
		if len(b.cur) == cap(b.cur) {
			if err := b.flush(); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

func (b *Writer) flush() error {
	data := b.cur
	b.cur = nil
	if len(data) == 0 {
		return nil
	}
	select {
	case b.full <- data:
		return nil
	case <-b.ended:
		return b.failure()
	}
}

func (b *Writer) failure() error {
	if b.err == nil {
		return io.ErrClosedPipe
	}
	return b.err
}

// Close writes what is left and waits for it. It leaves the underlying writer
// open.
func (b *Writer) Close() error {
	if b.shut {
		return b.done
	}
	b.shut = true
	flushErr := b.flush()
	close(b.full)
	<-b.ended
	b.done = b.err
	if b.done == nil {
		b.done = flushErr
	}
	return b.done
}
