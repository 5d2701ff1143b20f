package mcp

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// ChallengePath is where a door answers challenges.
const ChallengePath = "/.hermes-box/challenge"

// ErrDoorUnproven means that something answered which does not know the agent
// token: another program took the port, or the tokens differ.
var ErrDoorUnproven = errors.New("the port did not prove that it is the box's door")

// DoorMAC is the proof: HMAC-SHA256 in hex, keyed with the token's text, over
// the nonce's text.
func DoorMAC(token, nonce string) string {
	mac := hmac.New(sha256.New, []byte(token))
	mac.Write([]byte(nonce))
	return hex.EncodeToString(mac.Sum(nil))
}

// ProveDoor asks the door at baseURL (http://127.0.0.1:PORT) for the proof of
// a fresh nonce. The token itself is not sent.
func ProveDoor(ctx context.Context, baseURL, token string) error {
	if err := checkURL(baseURL); err != nil {
		return fmt.Errorf("prove the door: %w", err)
	}
	if token == "" {
		return errors.New("prove the door: the token is empty")
	}
	ctx, cancel := context.WithTimeout(ctx, DefaultRequestTimeout)
	defer cancel()
	var random [32]byte
	if _, err := rand.Read(random[:]); err != nil {
		return fmt.Errorf("prove the door: make a nonce: %w", err)
	}
	nonce := hex.EncodeToString(random[:])
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(baseURL, "/")+ChallengePath+"?nonce="+nonce, nil)
	if err != nil {
		return fmt.Errorf("prove the door: %w", err)
	}
	req.Header.Set("Accept-Encoding", "identity")
	c := newHTTPClient()
	defer c.CloseIdleConnections()
	resp, err := c.Do(req)
	if err != nil {
		return fmt.Errorf("prove the door: %w", transportFinding(ctx, err))
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("prove the door: status %d: %w", resp.StatusCode, ErrDoorUnproven)
	}
	data, err := io.ReadAll(&boundedReader{r: resp.Body, left: 4096})
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("prove the door: %w", transportFinding(ctx, err))
		}
		return fmt.Errorf("prove the door: unreadable answer: %w", ErrDoorUnproven)
	}
	var body struct {
		MAC string `json:"mac"`
	}
	if json.Unmarshal(data, &body) != nil || !hmac.Equal([]byte(body.MAC), []byte(DoorMAC(token, nonce))) {
		return fmt.Errorf("prove the door: wrong answer: %w", ErrDoorUnproven)
	}
	return nil
}
