package archive

import (
	"bytes"
	"errors"
	"testing"
)

// fuzzLimits keep a fuzzer's findings small.
func fuzzLimits() Limits { return Limits{Entries: 200, File: 1 << 20, Total: 4 << 20, Names: 64 << 10} }

func addCorpus(f *testing.F) {
	for _, c := range corpus() {
		b := begin(f)
		c.make(b)
		if b.Len() < 64<<10 {
			f.Add(b.Bytes())
		}
	}
}

// FuzzRead: whatever comes, an answer of the two kinds; and what is accepted
// and not legacy can be written again with the same digest.
func FuzzRead(f *testing.F) {
	addCorpus(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		var seen recorder
		sum, err := Read(bytes.NewReader(in), fuzzLimits(), &seen)
		if err != nil {
			if !errors.Is(err, ErrUnsafe) {
				t.Fatalf("neither good nor unsafe: %v", err)
			}
			if msg := err.Error(); msg != printable(msg) {
				t.Fatalf("not escaped: %q", msg)
			}
			return
		}
		if sum.Legacy {
			return
		}
		var b bytes.Buffer
		w, err := NewWriter(&b, sum.Manifest, fuzzLimits())
		if err != nil {
			t.Fatalf("the manifest was read: %v", err)
		}
		for _, n := range seen.nodes {
			if err := put(w, n); err != nil {
				t.Fatalf("the entry was read: %v", err)
			}
		}
		end, err := w.Close()
		if err != nil || end.Digest != sum.Digest {
			t.Fatalf("written again: %+v, %v; read %+v", end, err, sum)
		}
	})
}

// FuzzExtract: the extractor's verdict is the validator's, and nothing appears
// outside of its directory.
func FuzzExtract(f *testing.F) {
	addCorpus(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		_, want := Read(bytes.NewReader(in), fuzzLimits(), nil)
		got := newCanary(t).extract(bytes.NewReader(in), fuzzLimits(), ExtractOptions{})
		if ruleOf(got) != ruleOf(want) {
			t.Fatalf("extractor %v, validator %v", got, want)
		}
	})
}
