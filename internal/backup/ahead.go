package backup

import "io"

// aheadReader reads ahead in a goroutine of its own, so that what is below it
// (decryption) and what is above it (decompression) use two cores.
type aheadReader struct {
	full  chan block
	empty chan []byte
	quit  chan struct{}
	ended chan struct{}
	cur   block
}

type block struct {
	data []byte
	buf  []byte
	err  error
}

const (
	aheadBlock  = 256 << 10 // bytes
	aheadBlocks = 4
)

// ahead starts reading r. The caller must call stop, which returns when r is
// no longer read.
func ahead(r io.Reader) *aheadReader {
	a := &aheadReader{
		full: make(chan block, aheadBlocks), empty: make(chan []byte, aheadBlocks),
		quit: make(chan struct{}), ended: make(chan struct{}),
	}
	for range aheadBlocks {
		a.empty <- make([]byte, aheadBlock)
	}
	go func() {
		defer close(a.ended)
		for {
			var buf []byte
			select {
			case buf = <-a.empty:
			case <-a.quit:
				return
			}
			n, err := io.ReadFull(r, buf)
			if err == io.ErrUnexpectedEOF {
				err = io.EOF
			}
			a.full <- block{data: buf[:n], buf: buf, err: err} // as many slots as buffers
			if err != nil {
				return
			}
		}
	}()
	return a
}

// Read implements io.Reader.
func (a *aheadReader) Read(p []byte) (int, error) {
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

// stop ends the reading ahead.
func (a *aheadReader) stop() {
	close(a.quit)
	<-a.ended
}
