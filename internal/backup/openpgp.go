package backup

import (
	"bufio"
	"crypto"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/ProtonMail/go-crypto/openpgp/s2k"
)

// s2kCount is the largest count that OpenPGP can express (RFC 4880, section
// 3.7.1.3): the passphrase is all that protects a stolen archive, and it costs
// a tenth of a second (measured).
const s2kCount = 65011712

// messageConfig is AES-256 with integrity protection (SEIPD version 1), which
// GnuPG 2.2 reads; AEAD and Argon2 it does not.
func messageConfig(cost int) *packet.Config {
	return &packet.Config{
		DefaultCipher: packet.CipherAES256,
		S2KConfig:     &s2k.Config{S2KMode: s2k.IteratedSaltedS2K, Hash: crypto.SHA256, S2KCount: cost},
	}
}

// encrypt returns a writer whose plaintext arrives at w as an OpenPGP
// message. Close completes the message and leaves w open.
func encrypt(w io.Writer, p Passphrase, cost int) (io.WriteCloser, error) {
	secret, err := p.bytes()
	if err != nil {
		return nil, err
	}
	cfg := messageConfig(cost)
	key, err := packet.SerializeSymmetricKeyEncrypted(w, secret, cfg)
	if err != nil {
		return nil, fmt.Errorf("encrypt: %w", err)
	}
	body, err := packet.SerializeSymmetricallyEncrypted(w, cfg.Cipher(), false, packet.CipherSuite{}, key, cfg)
	if err != nil {
		return nil, fmt.Errorf("encrypt: %w", err)
	}
	literal, err := packet.SerializeLiteral(body, true, "", 0)
	if err != nil {
		return nil, fmt.Errorf("encrypt: %w", err)
	}
	return literal, nil
}

// message is an OpenPGP message that is being decrypted. Nothing it releases
// may be trusted before finish has returned nil: under SEIPD version 1 the
// integrity of the whole is known at its end only.
type message struct {
	source  *bufio.Reader
	body    io.ReadCloser   // the encrypted packet's plaintext
	layers  []*bufio.Reader // of packets, outermost first; the first reads body
	literal io.Reader
	ended   bool
	extra   bool // something follows the literal packet
}

// The packets that an archive consists of (RFC 4880, section 4.3).
const (
	tagKey        = 3
	tagCompressed = 8
	tagLiteral    = 11
	tagSealed     = 18
)

// decrypt opens a message of exactly one form: one key derived from a
// passphrase, one integrity-protected packet, in it at most one layer of
// compression (gpg's default) and one literal packet. Errors of the message are
// all ErrAuth: before its end no cause can be told from another.
//
// Each packet's tag is looked at before the packet is parsed. The library's own
// way to the next packet skips some kinds, and holds others in memory as a
// whole, which garbage, the plaintext of a wrong passphrase, may happen to be.
func decrypt(source *bufio.Reader, p Passphrase) (*message, error) {
	secret, err := p.bytes()
	if err != nil {
		return nil, err
	}
	// Before anything costs memory or time: version 4 and the iterated
	// derivation, whose cost is bounded. Argon2's is not. A length of one octet
	// keeps version and derivation where they are looked for.
	const v4, iterated, oneOctet = 4, byte(s2k.IteratedSaltedS2K), 192
	head, err := source.Peek(5)
	if err != nil || (head[0] != 0xc0|tagKey && head[0] != 0x80|tagKey<<2) || head[1] >= oneOctet || head[2] != v4 || head[4] != iterated {
		return nil, fmt.Errorf("%w: it does not begin as an archive does", ErrAuth)
	}
	key, err := next[*packet.SymmetricKeyEncrypted](source, tagKey)
	if err != nil {
		return nil, err
	}
	sealed, err := next[*packet.SymmetricallyEncrypted](source, tagSealed)
	if err != nil {
		return nil, err
	}
	if !sealed.IntegrityProtected || sealed.Version != 1 {
		return nil, fmt.Errorf("%w: the message is not protected in the way that archives are", ErrAuth)
	}
	session, cipher, err := key.Decrypt(secret)
	if err != nil {
		return nil, ErrAuth
	}
	body, err := sealed.Decrypt(cipher, session)
	if err != nil {
		return nil, ErrAuth
	}
	inner := bufio.NewReaderSize(body, plainBuffer)
	m := &message{source: source, body: body, layers: []*bufio.Reader{inner}}
	if compressed, err := next[*packet.Compressed](inner, tagCompressed); err == nil {
		inner = bufio.NewReaderSize(compressed.Body, plainBuffer)
		m.layers = append(m.layers, inner)
	}
	literal, err := next[*packet.LiteralData](inner, tagLiteral)
	if err != nil {
		return nil, err
	}
	m.literal = literal.Body
	return m, nil
}

// plainBuffer is the size of the buffers between the layers, bytes.
const plainBuffer = 32 << 10

// next parses the next packet if it has that tag; otherwise it reads nothing.
func next[P packet.Packet](r *bufio.Reader, tag byte) (none P, _ error) {
	head, err := r.Peek(1)
	if err != nil {
		return none, ErrAuth
	}
	found := head[0] & 0x3f // the new format
	switch {
	case head[0]&0x80 == 0:
		return none, ErrAuth
	case head[0]&0x40 == 0:
		found >>= 2 // the old one
	}
	if found != tag {
		return none, ErrAuth
	}
	p, err := packet.Read(r)
	parsed, ok := p.(P)
	if err != nil || !ok {
		return none, ErrAuth
	}
	return parsed, nil
}

// Read releases plaintext that is not authenticated yet.
func (m *message) Read(p []byte) (int, error) {
	n, err := m.literal.Read(p)
	if err != nil && err != io.EOF {
		return n, fmt.Errorf("%w (%w)", ErrAuth, err)
	}
	if err == io.EOF && !m.ended {
		m.ended = true
		for _, layer := range slices.Backward(m.layers) {
			if _, err := layer.Peek(1); err != io.EOF {
				m.extra = true
			}
		}
	}
	return n, err
}

// errExtra is what an authenticated message may not hold.
var errExtra = errors.New("the message holds more than one file")

// finish reads what is left and authenticates the whole.
func (m *message) finish() error {
	if _, err := io.Copy(io.Discard, m.layers[0]); err != nil {
		return fmt.Errorf("%w (%w)", ErrAuth, err)
	}
	if err := m.body.Close(); err != nil {
		return ErrAuth
	}
	if _, err := m.source.Peek(1); err != io.EOF {
		return fmt.Errorf("%w: something follows the message", ErrAuth)
	}
	if m.extra {
		return errExtra
	}
	return nil
}
