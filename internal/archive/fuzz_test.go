package archive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"
)

// fuzzLimits keep a fuzzer's findings small.
func fuzzLimits() Limits { return Limits{Entries: 200, File: 1 << 20, Total: 4 << 20, Names: 64 << 10} }

func addCorpus(f *testing.F) {
	for _, c := range corpus() {
		b := begin(f)
		c.make(b)
		if b.Len() < 32<<10 {
			f.Add(squeezed(b.Bytes()))
		}
	}
}

// squeezed is an archive without the zeros that fill its blocks: three quarters
// of most, in which a fuzzer would look for something.
func squeezed(archive []byte) []byte {
	var out []byte
	for len(archive) >= blockSize {
		block := bytes.TrimRight(archive[:blockSize], "\x00")
		out = binary.LittleEndian.AppendUint16(out, uint16(len(block)))
		out = append(out, block...)
		archive = archive[blockSize:]
	}
	if len(archive) > 0 {
		out = append(out, 0xff, 0xff)
	}
	return append(out, archive...)
}

// unsqueezed is the archive again, with the check sums that its headers should
// have: or else a fuzzer never gets beyond the first header it touched.
func unsqueezed(in []byte) []byte {
	var out []byte
	for len(in) >= 2 {
		n := int(binary.LittleEndian.Uint16(in))
		in = in[2:]
		if n > blockSize {
			return append(out, in...)
		}
		n = min(n, len(in))
		block := make([]byte, blockSize)
		copy(block, in[:n])
		if in = in[n:]; string(block[257:262]) == "ustar" {
			checksummed(block)
		}
		out = append(out, block...)
	}
	return out
}

// FuzzRead: whatever comes, an answer of the two kinds; and every entry that
// was handed on can be written again, in the end with the same digest.
func FuzzRead(f *testing.F) {
	addCorpus(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		in = unsqueezed(in)
		var seen recorder
		sum, err := Read(bytes.NewReader(in), fuzzLimits(), &seen)
		if err != nil {
			if !errors.Is(err, ErrUnsafe) {
				t.Fatalf("neither good nor unsafe: %v", err)
			}
			if msg := err.Error(); msg != printable(msg) {
				t.Fatalf("not escaped: %q", msg)
			}
		}
		m := sum.Manifest
		if err != nil || sum.Legacy {
			m = testManifest()
		}
		w, werr := NewWriter(io.Discard, m, fuzzLimits())
		if werr != nil {
			t.Fatalf("the manifest was read: %v", werr)
		}
		for _, n := range seen.nodes {
			if err := put(w, n); err != nil {
				t.Fatalf("the entry was read: %v", err)
			}
		}
		end, werr := w.Close()
		if werr != nil || err == nil && end.Digest != sum.Digest {
			t.Fatalf("written again: %+v, %v; read %+v", end, werr, sum)
		}
	})
}

// FuzzExtract: the extractor's verdict is the validator's, and nothing appears
// outside of its directory.
func FuzzExtract(f *testing.F) {
	addCorpus(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		in = unsqueezed(in)
		_, want := Read(bytes.NewReader(in), fuzzLimits(), nil)
		got := newCanary(t).extract(bytes.NewReader(in), fuzzLimits(), ExtractOptions{})
		if ruleOf(got) != ruleOf(want) {
			t.Fatalf("extractor %v, validator %v", got, want)
		}
	})
}
