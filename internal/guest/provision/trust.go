package provision

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/guest/layout"
	"hermes-box-lite/internal/wire"
)

const (
	maxBundle  = 2 << 20
	maxCerts   = 1000
	bundlePath = "/etc/ssl/certs/ca-certificates.crt"
	caDir      = "/usr/local/share/ca-certificates/hermes-box"
	aptProxy   = "/etc/apt/apt.conf.d/95hermes-box-proxy"
)

// trust makes the additional CAs known to the system and the proxies known to
// apt, both before the first download.
func trust(ctx context.Context, r *run) error {
	certs, err := parseBundle(r.req.CABundle)
	if err != nil {
		return err
	}
	stale, added, err := syncCertificates(r.l.Path(caDir), certs)
	if err != nil {
		return err
	}
	if stale > 0 {
		// Only the system's own tool knows whether one of the removed
		// certificates is also one of the distribution's.
		if tool := "/usr/sbin/update-ca-certificates"; exists(tool) {
			if err := r.loud(r.command(ctx, tool)); err != nil {
				return err
			}
		} else if err := os.Remove(r.l.Path(bundlePath)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	appended, err := appendMissing(r.l.Path(bundlePath), certs)
	if err != nil {
		return err
	}
	switch {
	case len(certs) == 0 && stale == 0:
		r.note("no additional CAs")
	case stale == 0 && added == 0 && appended == 0:
		r.note("already there: %d additional CAs", len(certs))
	default:
		r.note("additional CAs: %d added, %d removed, %d now", added, stale, len(certs))
	}
	return r.aptProxies()
}

// aptProxies tells apt of the proxies, or takes back what it was told. The
// file may hold a password, so that only root and the agent can read it.
func (r *run) aptProxies() error {
	path := r.l.Path(aptProxy)
	if r.req.HTTPProxy == "" && r.req.HTTPSProxy == "" {
		err := os.Remove(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			r.note("removed apt's proxy setting")
		}
		return err
	}
	var b strings.Builder
	b.WriteString("# Written by Hermes Box from box.env; changes are lost.\n")
	if p := r.req.HTTPProxy; p != "" {
		fmt.Fprintf(&b, "Acquire::http::Proxy \"%s\";\n", p)
	}
	if p := r.req.HTTPSProxy; p != "" {
		fmt.Fprintf(&b, "Acquire::https::Proxy \"%s\";\n", p)
	}
	for host := range strings.SplitSeq(r.req.NoProxy, ",") {
		if host = strings.TrimSpace(host); aptHost(host) {
			fmt.Fprintf(&b, "Acquire::http::Proxy::%s \"DIRECT\";\nAcquire::https::Proxy::%s \"DIRECT\";\n", host, host)
		}
	}
	changed, err := writeOwned(path, []byte(b.String()), 0o640, 0, layout.AgentGID)
	if changed {
		r.note("told apt of the proxies")
	}
	return err
}

// aptHost reports whether apt can be given host as an exception: it knows
// names only, no suffixes, patterns or networks.
func aptHost(host string) bool {
	return host != "" && !strings.HasPrefix(host, ".") && !strings.ContainsAny(host, "*/:[] ")
}

// networkEnvironment is what programs must know to reach the network: the
// proxies, in both spellings that are in use, and, only when there are
// additional CAs, where to find them. Without additional CAs every program's
// own default is right already.
func networkEnvironment(req wire.ProvisionRequest) []string {
	noProxy := req.NoProxy
	if req.HTTPProxy != "" || req.HTTPSProxy != "" {
		noProxy = withLoopback(noProxy)
	}
	var env []string
	for _, v := range []struct{ name, value string }{
		{"HTTP_PROXY", req.HTTPProxy}, {"HTTPS_PROXY", req.HTTPSProxy}, {"NO_PROXY", noProxy},
	} {
		if v.value != "" {
			env = append(env, v.name+"="+v.value, strings.ToLower(v.name)+"="+v.value)
		}
	}
	if strings.TrimSpace(req.CABundle) != "" {
		for _, name := range caVariables() {
			env = append(env, name+"="+bundlePath)
		}
	}
	return env
}

// withLoopback adds the box itself to a list of exceptions. Claude Code 2.1 and
// Codex 0.171 would ask the proxy for the door's address too (seen).
func withLoopback(noProxy string) string {
	hosts := []string{}
	for host := range strings.SplitSeq(noProxy, ",") {
		if host = strings.TrimSpace(host); host != "" {
			hosts = append(hosts, host)
		}
	}
	for _, host := range []string{"127.0.0.1", "localhost", "::1"} {
		if !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	return strings.Join(hosts, ",")
}

// caVariables are read by node and bun; OpenSSL; curl; git; and Python's
// requests, in this order.
func caVariables() []string {
	return []string{"NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "REQUESTS_CA_BUNDLE"}
}

// parseBundle returns the certificates of a PEM file, in DER form, without
// duplicates. It refuses everything else that PEM can carry: a private key
// that ended up in the file must not be copied into a box.
func parseBundle(text string) ([][]byte, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	if len(text) > maxBundle {
		return nil, fmt.Errorf("CA bundle: more than %d bytes", maxBundle)
	}
	var certs [][]byte
	seen := map[string]bool{}
	rest := []byte(text)
	for {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		if block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("CA bundle: holds a %q, only certificates are allowed", wire.Printable(block.Type))
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return nil, fmt.Errorf("CA bundle: certificate %d: %w", len(certs)+1, err)
		}
		if !seen[string(block.Bytes)] {
			seen[string(block.Bytes)] = true
			certs = append(certs, block.Bytes)
		}
		if len(certs) > maxCerts {
			return nil, fmt.Errorf("CA bundle: more than %d certificates", maxCerts)
		}
	}
	if len(certs) == 0 || bytes.Contains(rest, []byte("-----BEGIN")) {
		return nil, errors.New("CA bundle: not a list of PEM certificates")
	}
	return certs, nil
}

// syncCertificates makes dir hold exactly certs, one file each: that is what
// update-ca-certificates picks up, also when a package triggers it later.
func syncCertificates(dir string, certs [][]byte) (stale, added int, err error) {
	want := map[string][]byte{}
	for _, der := range certs {
		sum := sha256.Sum256(der)
		want[hex.EncodeToString(sum[:8])+".crt"] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, 0, err
	}
	for _, e := range entries {
		if _, ok := want[e.Name()]; !ok {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return stale, added, err
			}
			stale++
		}
	}
	if len(want) == 0 {
		return stale, added, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return stale, added, err
	}
	for name, data := range want {
		changed, err := writeIfDiffers(filepath.Join(dir, name), data, 0o644)
		if err != nil {
			return stale, added, err
		}
		if changed {
			added++
		}
	}
	return stale, added, nil
}

// appendMissing adds to the system's bundle the certificates it lacks.
// update-ca-certificates would do the same, but takes minutes in an emulated
// machine.
func appendMissing(path string, certs [][]byte) (int, error) {
	if len(certs) == 0 {
		return 0, nil
	}
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	have := map[string]bool{}
	for rest := data; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		have[string(block.Bytes)] = true
	}
	n := 0
	for _, der := range certs {
		if !have[string(der)] {
			if len(data) > 0 && data[len(data)-1] != '\n' {
				data = append(data, '\n')
			}
			data = append(data, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
			n++
		}
	}
	if n == 0 {
		return 0, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return 0, err
	}
	return n, atomicfile.Write(path, data, 0o644)
}
