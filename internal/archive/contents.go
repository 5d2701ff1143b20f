package archive

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"regexp"
	"time"
)

const (
	maxFindings     = 500
	maxFindingBytes = maxJSON / 2 // of all findings: JSON may double a byte
	maxFindingPath  = 1024
	maxFindingText  = 256
	maxList         = 64 // tools, logins
)

// validate returns the rule that m is against, or nothing.
func (m *Manifest) validate() (rule string) {
	name := regexp.MustCompile(`\A[a-z][a-z0-9-]{0,38}\z`)
	version := regexp.MustCompile(`\A[ -~]{0,128}\z`) // printable ASCII
	switch {
	case m.Format != Version:
		return ruleVersion
	case !name.MatchString(m.Box):
		return ruleBox
	case !regexp.MustCompile(`\A[0-9a-f]{32}\z`).MatchString(m.Lineage):
		return ruleLineage
	case m.Time.Location() != time.UTC || m.Time.Year() < 1 || m.Time.Year() > 9999:
		return ruleUTC
	case !version.MatchString(m.HB) || len(m.Tools) > maxList:
		return ruleTools
	case len(m.Logins) > maxList:
		return ruleLogins
	}
	for _, t := range m.Tools {
		if !name.MatchString(t.Name) || !version.MatchString(t.Version) {
			return ruleTools
		}
	}
	for _, login := range m.Logins {
		if !name.MatchString(login) {
			return ruleLogins
		}
	}
	return ""
}

// validate returns the rule that e's form is against, or nothing.
func (e *End) validate() (rule string) {
	switch {
	case !regexp.MustCompile(`\A[0-9a-f]{64}\z`).MatchString(e.Digest):
		return ruleDigestShape
	case e.More < 0 || len(e.Findings) > maxFindings:
		return ruleFinding
	}
	kind := regexp.MustCompile(`\A[a-z]{1,32}\z`)
	for _, f := range e.Findings {
		if !kind.MatchString(f.Kind) || len(f.Path) > maxFindingPath || len(f.Detail) > maxFindingText ||
			f.Path != printable(f.Path) || f.Detail != printable(f.Detail) {
			return ruleFinding
		}
	}
	return ""
}

// decode reads one JSON value strictly.
func decode(r io.Reader, into any) error {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("trailing data")
	}
	return nil
}

// decodeManifest reads a manifest, and says "another version" before it says
// "an unknown field".
func decodeManifest(raw []byte) (Manifest, string) {
	var version struct {
		Format int `json:"format"`
	}
	if json.Unmarshal(raw, &version) != nil {
		return Manifest{}, ruleDecode
	}
	if version.Format != Version {
		return Manifest{}, ruleVersion
	}
	var m Manifest
	if decode(bytes.NewReader(raw), &m) != nil {
		return Manifest{}, ruleDecode
	}
	return m, m.validate()
}

func decodeEnd(raw []byte) (End, string) {
	var e End
	if decode(bytes.NewReader(raw), &e) != nil {
		return End{}, ruleDecode
	}
	return e, e.validate()
}

// encode is plain JSON and a newline, so that the entries can be read with
// tar and the eye.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}
