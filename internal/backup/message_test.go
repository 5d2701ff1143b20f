package backup

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp/armor"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/google/go-cmp/cmp"

	"hermes-box-lite/internal/archive"
)

func TestRoundTrip(t *testing.T) {
	stream := gzipped(t, plainTar(t, state()))
	path := onDisk(t, sealed(t, stream))
	a := opened(t, path, word)
	var done, total int64
	report, err := a.Verify(context.Background(), func(d, n int64) { done, total = d, n })
	if err != nil {
		t.Fatal(err)
	}
	if report.Entries != 4 || report.Bytes != int64(len("planted plaintext")) || report.Manifest.Box != "alpha" {
		t.Errorf("report %+v", report)
	}
	if done != report.Size || total != report.Size || report.Size == 0 {
		t.Errorf("progress %d of %d, size %d", done, total, report.Size)
	}
	for range 2 { // as often as one likes
		var out bytes.Buffer
		if err := a.Stream(context.Background(), &out, nil); err != nil || !bytes.Equal(out.Bytes(), stream) {
			t.Fatalf("%d bytes streamed, %v", out.Len(), err)
		}
	}
	if again, err := a.Verify(context.Background(), nil); err != nil || cmp.Diff(report, again) != "" {
		t.Errorf("verified again: %v %s", err, cmp.Diff(report, again))
	}
}

// TestRealCost: an archive costs an attacker what it shall.
func TestRealCost(t *testing.T) {
	o := options(t, filepath.Join(t.TempDir(), "a"))
	o.cost = 0
	if _, err := Save(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	// RFC 4880, sections 5.3 and 3.7.1.3: version 4, AES-256, iterated, SHA-256,
	// the salt and the coded count, of which this is the largest.
	if !bytes.Equal(data[2:6], []byte{4, 9, 3, 8}) || data[14] != 0xff {
		t.Errorf("begins with % x", data[:15])
	}
}

func TestWrongPassphrase(t *testing.T) {
	path := onDisk(t, whole(t))
	if _, err := opened(t, path, "not it").Verify(context.Background(), nil); !errors.Is(err, ErrAuth) || errors.Is(err, archive.ErrUnsafe) {
		t.Errorf("got %v", err)
	}
	none, err := Open(path, Passphrase{}, archive.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = none.Close() }()
	if _, err := none.Verify(context.Background(), nil); err == nil || errors.Is(err, ErrAuth) {
		t.Errorf("no passphrase at all: %v", err)
	}
}

// TestDamage: whatever happens to the file, it is ErrAuth, before and after it
// was verified, and Extract leaves nothing.
func TestDamage(t *testing.T) {
	good := whole(t)
	path := onDisk(t, good)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	set := func(data []byte) {
		t.Helper()
		_, err := f.WriteAt(data, 0)
		if err = errors.Join(err, f.Truncate(int64(len(data)))); err != nil {
			t.Fatal(err)
		}
	}
	a := opened(t, path, word)
	if _, err := a.Verify(context.Background(), nil); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	n := 0
	damaged := func(what string, at int, data []byte) {
		t.Helper()
		set(data)
		fresh := &Archive{file: f, passphrase: passphrase(t, word), limits: archive.DefaultLimits()}
		_, err := fresh.Verify(context.Background(), nil)
		if !errors.Is(err, ErrAuth) || errors.Is(err, archive.ErrUnsafe) || errors.Is(err, ErrChanged) {
			t.Errorf("%s at %d: %v", what, at, err)
		}
		if n++; n%9 != 0 {
			return
		}
		if err := a.Stream(context.Background(), io.Discard, nil); !errors.Is(err, ErrChanged) {
			t.Errorf("%s at %d: streamed: %v", what, at, err)
		}
		if err := a.Extract(context.Background(), filepath.Join(dir, "x"), nil); !errors.Is(err, ErrChanged) {
			t.Errorf("%s at %d: extracted: %v", what, at, err)
		}
		if left := names(t, dir); left != "[]" {
			t.Fatalf("%s at %d: %s is left", what, at, left)
		}
	}
	for i := range good {
		bits := []byte{1 << (i % 8)}
		if i < 48 { // all headers
			bits = []byte{1, 2, 4, 8, 16, 32, 64, 128}
		}
		for _, bit := range bits {
			data := bytes.Clone(good)
			data[i] ^= bit
			damaged("flip", i, data)
		}
		damaged("cut", i, good[:i])
	}
	marker := []byte{0xca, 3, 'P', 'G', 'P'}
	for _, junk := range [][]byte{{0}, {0xff}, {'\n'}, good, marker, {0xd4, 0}, {0xd3, 20}} {
		damaged("junk", len(junk), append(bytes.Clone(good), junk...))
	}
	damaged("marker first", 0, append(bytes.Clone(marker), good...))
	set(good)
	if err := a.Stream(context.Background(), io.Discard, nil); err != nil {
		t.Errorf("whole again: %v", err)
	}
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// literal is a literal packet.
func literal(t testing.TB, content []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := packet.SerializeLiteral(nopCloser{&out}, true, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write(content)
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func compressed(t testing.TB, packets []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := packet.SerializeCompressed(nopCloser{&out}, packet.CompressionZLIB, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write(packets)
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// enveloped is a correct message of these packets.
func enveloped(t testing.TB, packets []byte) []byte {
	t.Helper()
	cfg := messageConfig(cheap)
	var out bytes.Buffer
	key, err := packet.SerializeSymmetricKeyEncrypted(&out, []byte(word), cfg)
	if err != nil {
		t.Fatal(err)
	}
	w, err := packet.SerializeSymmetricallyEncrypted(&out, cfg.Cipher(), false, packet.CipherSuite{}, key, cfg)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write(packets)
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestContent: its maker knew the passphrase, and yet it is no archive.
func TestContent(t *testing.T) {
	plain := plainTar(t, state())
	good := gzipped(t, plain)
	cut := func(n int) []byte { return good[:len(good)-n] }
	patch := func(fromEnd int) []byte {
		b := bytes.Clone(good)
		b[len(b)-fromEnd] ^= 1
		return b
	}
	evil := bytes.Replace(bytes.Clone(plain), []byte("data/home/a\x00"), []byte("../../home/a"), 1)
	cases := map[string][]byte{
		"nothing":             {},
		"one byte":            {0x1f},
		"no gzip":             []byte("hello, world, this is not a gzip stream"),
		"a cut off gzip":      good[:len(good)/2],
		"no trailer":          cut(8),
		"half a trailer":      cut(3),
		"check sum":           patch(8),
		"length":              patch(1),
		"a second member":     append(bytes.Clone(good), good...),
		"an empty member":     append(bytes.Clone(good), gzipped(t, nil)...),
		"zeros after":         append(bytes.Clone(good), 0),
		"junk after":          append(bytes.Clone(good), "junk"...),
		"an empty tar":        gzipped(t, nil),
		"no tar":              gzipped(t, bytes.Repeat([]byte("no tar "), 1000)),
		"a cut off tar":       gzipped(t, plain[:len(plain)-1024]),
		"something after tar": gzipped(t, append(bytes.Clone(plain), 1)),
		"a hostile tar":       gzipped(t, evil),
		"a damaged tar":       gzipped(t, append(append(bytes.Clone(plain[:512]), 'x'), plain[513:]...)),
		"gzip twice":          gzipped(t, good),
	}
	for name, content := range cases {
		for form, packets := range map[string][]byte{"": literal(t, content), " compressed": compressed(t, literal(t, content))} {
			_, err := verify(t, enveloped(t, packets))
			if !errors.Is(err, archive.ErrUnsafe) || errors.Is(err, ErrAuth) {
				t.Errorf("%s%s: %v", name, form, err)
			}
		}
	}
}

// TestForms: only one form of message is an archive.
func TestForms(t *testing.T) {
	good := literal(t, gzipped(t, plainTar(t, state())))
	marker := []byte{0xca, 3, 'P', 'G', 'P'}
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for name, c := range map[string]struct {
		packets []byte
		want    error
	}{
		"plain":               {good, nil},
		"compressed":          {compressed(t, good), nil},
		"two files":           {join(good, good), archive.ErrUnsafe},
		"two in one":          {compressed(t, join(good, good)), archive.ErrUnsafe},
		"one in, one out":     {join(compressed(t, good), good), archive.ErrUnsafe},
		"marker before":       {join(marker, good), ErrAuth},
		"marker after":        {join(good, marker), archive.ErrUnsafe},
		"byte after":          {join(good, []byte{0}), archive.ErrUnsafe},
		"padding after":       {join(good, []byte{0xd5, 1, 0}), archive.ErrUnsafe},
		"compressed twice":    {compressed(t, compressed(t, good)), ErrAuth},
		"signed":              {join([]byte{0xc4, 13, 3, 0, 8, 1, 1, 2, 3, 4, 5, 6, 7, 8, 1}, good), ErrAuth},
		"signed the old way":  {join([]byte{0xc2, 3, 4, 0, 1}, good), ErrAuth},
		"an unknown packet":   {join([]byte{0xff, 1, 0}, good), ErrAuth},
		"a user's name":       {join([]byte{0xb7}, good), ErrAuth},
		"no packet":           {nil, ErrAuth},
		"compression unknown": {join([]byte{0xa3, 99}, good), ErrAuth},
		"compression broken":  {join([]byte{0xa3, 2}, good), ErrAuth},
	} {
		_, err := verify(t, enveloped(t, c.packets))
		if c.want == nil && err != nil || c.want != nil && !errors.Is(err, c.want) || errors.Is(err, ErrAuth) && errors.Is(err, archive.ErrUnsafe) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// TestOuterForms: what is refused before a byte of it is decrypted, and before
// memory or time is spent.
func TestOuterForms(t *testing.T) {
	good := whole(t)
	keyLen := 2 + int(good[1])
	key, body := good[:keyLen], good[keyLen:]
	argon := func(version byte) []byte {
		// Passes, lanes, and 2^18 KiB of memory (RFC 9580, section 3.7.1.4); it
		// can ask for 2^31.
		derivation := append(append([]byte{4}, make([]byte, 16)...), 1, 1, 18)
		content := append([]byte{version, 9}, derivation...)
		if version == 6 {
			// Section 5.3.2: lengths, AES-256, OCB, derivation, nonce, key, tag.
			content = append([]byte{6, byte(3 + len(derivation) + 15), 9, 2, byte(len(derivation))}, derivation...)
			content = append(content, make([]byte, 15+32+16)...)
		}
		return append([]byte{0xc3, byte(len(content))}, content...)
	}
	v2 := func() []byte {
		cfg := messageConfig(cheap)
		cfg.AEADConfig = &packet.AEADConfig{}
		var out bytes.Buffer
		session, err := packet.SerializeSymmetricKeyEncrypted(&out, []byte(word), cfg)
		if err != nil {
			t.Fatal(err)
		}
		suite := packet.CipherSuite{Cipher: packet.CipherAES256, Mode: packet.AEADModeOCB}
		w, err := packet.SerializeSymmetricallyEncrypted(&out, cfg.Cipher(), true, suite, session, cfg)
		if err != nil {
			t.Fatal(err)
		}
		_, err = w.Write(literal(t, gzipped(t, plainTar(t, state()))))
		if err = errors.Join(err, w.Close()); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}()
	armored := func() []byte {
		var out bytes.Buffer
		w, err := armor.Encode(&out, "PGP MESSAGE", nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = w.Write(good)
		if err = errors.Join(err, w.Close()); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}()
	retag := func(tag byte) []byte {
		b := bytes.Clone(body)
		b[0] = 0xc0 | tag
		return append(bytes.Clone(key), b...)
	}
	noMDC := func() []byte { // with the version octet gone too
		b := bytes.Clone(body)
		b = append(b[:2], b[3:]...)
		b[0] = 0xc9
		return append(bytes.Clone(key), b...)
	}()
	unknownCipher := bytes.Clone(key)
	unknownCipher[3] = 99
	unknownHash := bytes.Clone(key)
	unknownHash[5] = 99
	// Lengths of two and five octets move version and derivation: the octets
	// looked at say iterated, the packet says Argon2.
	moved2 := append([]byte{0xc3, 192, 4, 4, 3}, argon(4)[2:]...)
	moved5 := append([]byte{0xc3, 255, 4, 0, 3, 0}, argon(6)[2:]...)
	cases := map[string][]byte{
		"nothing":                      {},
		"a text":                       []byte("-----BEGIN CERTIFICATE-----"),
		"a tar":                        plainTar(t, state()),
		"a gzip":                       gzipped(t, plainTar(t, state())),
		"armored":                      armored,
		"a bare literal":               literal(t, gzipped(t, plainTar(t, state()))),
		"no key":                       body,
		"two keys":                     append(bytes.Clone(key), good...),
		"a key only":                   key,
		"AEAD":                         v2,
		"AEAD, LibrePGP's":             retag(20),
		"no integrity, retagged":       retag(9),
		"no integrity":                 noMDC,
		"Argon2":                       append(argon(4), body...),
		"Argon2, version 6":            append(argon(6), v2...),
		"Argon2 after unknown cipher":  append(append(unknownCipher, argon(6)...), body...),
		"Argon2 after unknown hash":    append(append(unknownHash, argon(6)...), body...),
		"Argon2 in two octets' length": append(moved2, body...),
		"Argon2 in five octets'":       append(moved5, body...),
		"Argon2 before":                append(argon(6), good...),
		"a public key's":               append([]byte{0xc1, 3, 3, 0, 0}, body...),
	}
	for name, data := range cases {
		path := onDisk(t, data)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := opened(t, path, word).Verify(context.Background(), nil)
		runtime.ReadMemStats(&after)
		if !errors.Is(err, ErrAuth) || errors.Is(err, archive.ErrUnsafe) {
			t.Errorf("%s: %v", name, err)
		}
		if spent := after.TotalAlloc - before.TotalAlloc; spent > 8<<20 {
			t.Errorf("%s: %d MiB spent", name, spent>>20)
		}
	}
}

// TestGarbageIsNotKept: the plaintext of a wrong passphrase may look like any
// packet, also like one that the library holds in memory as a whole.
func TestGarbageIsNotKept(t *testing.T) {
	const size = 8 << 20
	for _, tag := range []byte{0xb7 /* user id */, 0xc0 | 17 /* attribute */, 0x80 | 2<<2 | 3 /* signature */} {
		data := enveloped(t, append([]byte{tag}, make([]byte, size)...))
		path := onDisk(t, data)
		a := opened(t, path, word)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := a.Verify(context.Background(), nil)
		runtime.ReadMemStats(&after)
		if !errors.Is(err, ErrAuth) {
			t.Errorf("%#x: %v", tag, err)
		}
		if spent := after.TotalAlloc - before.TotalAlloc; spent > size*3/4 {
			t.Errorf("%#x: %d MiB spent", tag, spent>>20)
		}
	}
}

// TestHugeGzipHeader: nothing in a gzip header is worth much memory.
func TestHugeGzipHeader(t *testing.T) {
	head := []byte{0x1f, 0x8b, 8, 8, 0, 0, 0, 0, 0, 255} // with a name
	data := append(head, bytes.Repeat([]byte("n"), 2<<20)...)
	if _, err := verify(t, sealed(t, data)); !errors.Is(err, archive.ErrUnsafe) {
		t.Error(err)
	}
}

// TestNotAFile: a FIFO is not waited for, a directory not read.
func TestNotAFile(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, fifo, filepath.Join(dir, "none"), "/dev/null"} {
		if a, err := Open(path, passphrase(t, word), archive.DefaultLimits()); err == nil {
			t.Errorf("%s was opened", path)
			_ = a.Close()
		}
	}
}

func TestCancelledRead(t *testing.T) {
	cause := errors.New("enough")
	a := opened(t, onDisk(t, whole(t)), word)
	if _, err := a.Verify(context.Background(), nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	dir := t.TempDir()
	_, verifyErr := a.Verify(ctx, nil)
	for name, err := range map[string]error{
		"verify": verifyErr, "stream": a.Stream(ctx, io.Discard, nil), "extract": a.Extract(ctx, filepath.Join(dir, "x"), nil),
	} {
		if !errors.Is(err, cause) || errors.Is(err, ErrAuth) || errors.Is(err, ErrChanged) || errors.Is(err, archive.ErrUnsafe) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left := names(t, dir); left != "[]" {
		t.Errorf("%s is left", left)
	}
	// In the middle of a large one.
	big := sealed(t, incompressible(t, 5<<20))
	b := opened(t, onDisk(t, big), word)
	ctx, cancel = context.WithCancelCause(context.Background())
	_, err := b.Verify(ctx, func(done, total int64) {
		if done > total/3 {
			cancel(cause)
		}
	})
	if !errors.Is(err, cause) || errors.Is(err, ErrAuth) {
		t.Errorf("in the middle: %v", err)
	}
}

// TestStreamStops: what the receiver says is the result, whatever else.
func TestStreamStops(t *testing.T) {
	a := opened(t, onDisk(t, whole(t)), word)
	if err := a.Stream(context.Background(), io.Discard, nil); !errors.Is(err, errNotVerified) {
		t.Errorf("not verified: %v", err)
	}
	if err := a.Extract(context.Background(), filepath.Join(t.TempDir(), "x"), nil); !errors.Is(err, errNotVerified) {
		t.Errorf("not verified: %v", err)
	}
	if _, err := a.Verify(context.Background(), nil); err != nil {
		t.Fatal(err)
	}
	pr, pw := io.Pipe()
	broken := errors.New("broken")
	_ = pr.CloseWithError(broken)
	if err := a.Stream(context.Background(), pw, nil); !errors.Is(err, broken) || errors.Is(err, ErrChanged) {
		t.Error(err)
	}
}

// TestReplacedByAnother: a good archive, but not the one that was verified.
func TestReplacedByAnother(t *testing.T) {
	path := onDisk(t, whole(t))
	other := sealed(t, gzipped(t, plainTar(t, []file{{"data/", ""}, {"data/other", "x"}})))
	unsafe := sealed(t, []byte("no archive at all"))
	twice := enveloped(t, append(literal(t, gzipped(t, nil)), literal(t, nil)...))
	for name, data := range map[string][]byte{"another": other, "same content": whole(t), "unsafe": unsafe, "two files": twice} {
		a := opened(t, path, word)
		if err := os.WriteFile(path, whole(t), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Verify(context.Background(), nil); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil { // in place
			t.Fatal(err)
		}
		dir := t.TempDir()
		if err := a.Stream(context.Background(), io.Discard, nil); !errors.Is(err, ErrChanged) {
			t.Errorf("%s: streamed: %v", name, err)
		}
		if err := a.Extract(context.Background(), filepath.Join(dir, "x"), nil); !errors.Is(err, ErrChanged) {
			t.Errorf("%s: extracted: %v", name, err)
		}
		if left := names(t, dir); left != "[]" {
			t.Errorf("%s: %s is left", name, left)
		}
	}
	// Under its name another file: the opened one counts.
	a := opened(t, path, word)
	good := whole(t)
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Verify(context.Background(), nil); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(path), os.WriteFile(path, other, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := a.Stream(context.Background(), io.Discard, nil); err != nil {
		t.Errorf("renamed over: %v", err)
	}
}

// TestGoroutines: none is left, whatever the content.
func TestGoroutines(t *testing.T) {
	good := whole(t)
	bad := bytes.Clone(good)
	bad[len(bad)/2] ^= 1
	bomb := sealed(t, gzipped(t, append(plainTar(t, []file{{"data/", ""}}), make([]byte, 8<<20)...)))
	before := runtime.NumGoroutine()
	for _, data := range [][]byte{good, bad, bomb, sealed(t, []byte("no"))} {
		for range 5 {
			_, _ = verify(t, data)
		}
	}
	// Each call waits for its own; one that has told its end may still be there.
	for range 1000 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines before, %d after", before, runtime.NumGoroutine())
}

// incompressible is a gzip stream of that size, stored, that is not a tar.
func incompressible(t testing.TB, size int) []byte {
	t.Helper()
	data := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	out := []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255}
	for rest := data; ; {
		n := min(len(rest), 65535)
		last := byte(0)
		if n == len(rest) {
			last = 1
		}
		out = append(out, last)
		out = binary.LittleEndian.AppendUint16(out, uint16(n))
		out = binary.LittleEndian.AppendUint16(out, ^uint16(n))
		out = append(out, rest[:n]...)
		if rest = rest[n:]; last == 1 {
			break
		}
	}
	out = binary.LittleEndian.AppendUint32(out, crc32.ChecksumIEEE(data))
	return binary.LittleEndian.AppendUint32(out, uint32(len(data)))
}

func TestErrorsAreOneLine(t *testing.T) {
	_, err := verify(t, []byte("nothing of the kind"))
	if err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v", err)
	}
}
