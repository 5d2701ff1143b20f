package backup

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hermes-box-lite/internal/archive"
)

// FuzzVerify: whatever comes as a file, or as the plaintext of a correct
// message, the answer is one of the two kinds, twice the same, and what is
// accepted can be streamed.
func FuzzVerify(f *testing.F) {
	tar := plainTar(f, state())
	stream := gzipped(f, tar)
	file := whole(f)
	for _, seed := range [][]byte{nil, file, file[:len(file)/2], append(bytes.Clone(file), file...), {0xc3, 13, 4, 9, 3, 8}} {
		f.Add(asFile, seed)
	}
	for _, seed := range [][]byte{nil, stream, stream[:len(stream)/2], append(bytes.Clone(stream), 0), tar} {
		f.Add(asContent, seed)
	}
	for _, seed := range [][]byte{literal(f, stream), compressed(f, literal(f, stream)), append(literal(f, stream), literal(f, stream)...), {0xb7}} {
		f.Add(asPackets, seed)
	}
	path := filepath.Join(f.TempDir(), "a")
	f.Fuzz(func(t *testing.T, as byte, data []byte) {
		want := []error{ErrAuth, archive.ErrUnsafe}
		switch as {
		case asFile:
			if len(data) > 14 {
				data[14] &= 0x3f // the cost of a guess
			}
		case asContent:
			data, want = sealed(t, data), []error{archive.ErrUnsafe}
		case asPackets:
			data = enveloped(t, data)
		default:
			return
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := Open(path, passphrase(t, word), archive.Limits{Entries: 200, File: 1 << 20, Total: 4 << 20, Names: 64 << 10})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = a.Close() }()
		_, err = a.Verify(context.Background(), nil)
		if err != nil {
			known := false
			for _, w := range want {
				known = known || errors.Is(err, w)
			}
			if !known || errors.Is(err, ErrAuth) && errors.Is(err, archive.ErrUnsafe) || strings.ContainsAny(err.Error(), "\n\x1b") {
				t.Fatalf("%q", err)
			}
			return
		}
		if err := a.Stream(context.Background(), &bytes.Buffer{}, nil); err != nil {
			t.Fatalf("verified, and then: %v", err)
		}
	})
}

const (
	asFile byte = iota
	asContent
	asPackets
)
