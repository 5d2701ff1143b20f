package backup

import (
	"bufio"
	"crypto"
	"errors"
	"fmt"
	"io"

	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/ProtonMail/go-crypto/openpgp/s2k"
)

// s2kCount is the largest count that OpenPGP can express (RFC 4880, section
// 3.7.1.3): the passphrase is all that protects a stolen archive, and it costs
// a tenth of a second (measured).
const s2kCount = 65011712

// messageConfig is AES-256 with integrity protection (SEIPD version 1), which
// GnuPG 2.2 reads; AEAD and Argon2 it does not.
func messageConfig() *packet.Config {
	return &packet.Config{
		DefaultCipher: packet.CipherAES256,
		S2KConfig:     &s2k.Config{S2KMode: s2k.IteratedSaltedS2K, Hash: crypto.SHA256, S2KCount: s2kCount},
	}
}

// encrypt returns a writer whose plaintext arrives at w as an OpenPGP
// message. Close completes the message and leaves w open.
func encrypt(w io.Writer, p Passphrase) (io.WriteCloser, error) {
	cfg := messageConfig()
	key, err := packet.SerializeSymmetricKeyEncrypted(w, p.secret, cfg)
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
	body    io.ReadCloser // the encrypted packet's plaintext
	packets []*packet.Reader
	literal io.Reader
	extra   bool // something follows the literal packet
}

// decrypt opens a message of exactly one form: one key derived from a
// passphrase, one integrity-protected packet, in it at most one layer of
// compression (gpg's default) and one literal packet. Errors are all ErrAuth:
// before its end no cause can be told from another.
func decrypt(source *bufio.Reader, p Passphrase) (*message, error) {
	// Before anything costs memory or time: version 4 and the iterated
	// derivation, whose cost is bounded. Argon2's is not. The first octet is
	// tag 3 with a one-octet length, in the new or the old format.
	const v4, iterated = 4, byte(s2k.IteratedSaltedS2K)
	head, err := source.Peek(5)
	if err != nil || (head[0] != 0xc3 && head[0] != 0x8c) || head[2] != v4 || head[4] != iterated {
		return nil, fmt.Errorf("%w: it does not begin as an archive does", ErrAuth)
	}
	outer := packet.NewReader(source)
	key, err := next[*packet.SymmetricKeyEncrypted](outer)
	if err != nil {
		return nil, err
	}
	sealed, err := next[*packet.SymmetricallyEncrypted](outer)
	if err != nil {
		return nil, err
	}
	if !sealed.IntegrityProtected || sealed.Version != 1 {
		return nil, fmt.Errorf("%w: the message is not protected in the way that archives are", ErrAuth)
	}
	secret, cipher, err := key.Decrypt(p.secret)
	if err != nil {
		return nil, ErrAuth
	}
	body, err := sealed.Decrypt(cipher, secret)
	if err != nil {
		return nil, ErrAuth
	}
	m := &message{source: source, body: body}
	inner := packet.NewReader(body)
	m.packets = []*packet.Reader{inner}
	content, err := inner.Next()
	if err != nil {
		return nil, ErrAuth
	}
	if compressed, ok := content.(*packet.Compressed); ok {
		within := packet.NewReader(compressed.Body)
		m.packets = []*packet.Reader{within, inner}
		if content, err = within.Next(); err != nil {
			return nil, ErrAuth
		}
	}
	literal, ok := content.(*packet.LiteralData)
	if !ok {
		return nil, ErrAuth
	}
	m.literal = literal.Body
	return m, nil
}

func next[P packet.Packet](r *packet.Reader) (P, error) {
	p, err := r.Next()
	found, ok := p.(P)
	if err != nil || !ok {
		return found, ErrAuth
	}
	return found, nil
}

// Read releases plaintext that is not authenticated yet.
func (m *message) Read(p []byte) (int, error) {
	n, err := m.literal.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		return n, fmt.Errorf("%w (%w)", ErrAuth, err)
	}
	if err == io.EOF {
		for _, r := range m.packets {
			if _, err := r.Next(); err != io.EOF {
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
	if _, err := io.Copy(io.Discard, m.body); err != nil {
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
