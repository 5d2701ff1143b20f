// Package config reads box.env: plain assignments, parsed and never executed.
// Whatever it does not understand it refuses, with the file and the line.
package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxFile bounds box.env, in bytes.
const maxFile = 64 << 10

// Config is box.env with its defaults filled in.
type Config struct {
	BaseImage       string // OCI reference, OCI layout, docker archive, rootfs tar or directory
	NodeMajor       int
	InstallHermes   bool
	InstallExecutor bool
	ExposeExecutor  bool // EXPOSE_EXECUTOR_WEB
	PortLo, PortHi  int  // EXECUTOR_PORT_LO, EXECUTOR_PORT_HI, inclusive
	WireMCP         bool // WIRE_EXECUTOR_MCP
	Driver          string
	ContainerEngine string
	CPUs            int
	MemoryMiB       int
	OverlayGiB      int // system disk
	StorageGiB      int // disk of /data where it is one of its own; 0 = the driver's default
	ClaudeVersion   string
	CodexVersion    string
	ExecutorVersion string
	HermesVersion   string
	HermesInstaller string // HERMES_INSTALLER: address or guest path of another installer
	ExtraCAFile     string // absolute; "" = the host's own additional CAs
	HTTPProxy       string
	HTTPSProxy      string
	NoProxy         string
	Kernel          string // BOX_KERNEL: absolute; "" = the base's own, else the host's package client brings one

	// File is where the values came from; "" when there was no file.
	File string
	set  map[string]string // the assignments as written
}

// Error is a fault in the file; it names file and line.
type Error struct {
	File string
	Line int
	Msg  string
}

func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Msg) }

// Hint says where the keys are described.
func (e *Error) Hint() string { return "box help config" }

// Machine is what the defaults for sizes depend on.
type Machine struct{ Cores, MemoryMiB int }

// ThisMachine measures the host. Memory is 0 where it is not known.
func ThisMachine() Machine {
	return Machine{Cores: runtime.NumCPU(), MemoryMiB: memoryMiB()}
}

func defaults(m Machine) Config {
	memory := 8192
	if m.MemoryMiB > 0 {
		memory = max(512, min(memory, m.MemoryMiB/2))
	}
	return Config{
		BaseImage: "ubuntu:24.04", NodeMajor: 22,
		InstallHermes: true, InstallExecutor: true, ExposeExecutor: true, WireMCP: true,
		PortLo: 4790, PortHi: 4999, Driver: "auto", ContainerEngine: "podman",
		CPUs: max(1, min(4, m.Cores)), MemoryMiB: memory, OverlayGiB: 64,
		set: map[string]string{},
	}
}

// Load reads the file; one that does not exist yields the defaults.
func Load(file string, m Machine) (Config, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return defaults(m), nil
	}
	if err != nil {
		return Config{}, err
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return Config{}, fmt.Errorf("read %s: %w", file, err)
	}
	if len(data) > maxFile {
		return Config{}, fmt.Errorf("%s is larger than %d bytes", file, maxFile)
	}
	c, err := Parse(file, data, m)
	if err != nil {
		return Config{}, err
	}
	c.File = file
	return c, nil
}

var assignment = regexp.MustCompile(`^(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$`)

// Parse reads the content of a box.env; name is used in errors. Values may be
// bare, single-quoted or double-quoted (with \" \\ \$ \` escapes). A byte
// order mark and CRLF line ends are accepted, shell expansions are not.
func Parse(name string, data []byte, m Machine) (Config, error) {
	c := defaults(m)
	text := strings.TrimPrefix(string(data), "\ufeff")
	lineNo := 0
	for line := range strings.Lines(text) {
		lineNo++
		fail := func(format string, args ...any) error {
			return &Error{name, lineNo, fmt.Sprintf(format, args...)}
		}
		line = strings.TrimRight(line, "\r\n")
		if !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			return Config{}, fail("control bytes or invalid UTF-8")
		}
		trimmed := strings.TrimSpace(line)
		if trimmed == "" || strings.HasPrefix(trimmed, "#") {
			continue
		}
		match := assignment.FindStringSubmatch(trimmed)
		if match == nil {
			before, _, _ := strings.Cut(trimmed, "=") // what follows may hold a password
			return Config{}, fail("%q is not KEY=VALUE", before)
		}
		key := match[1]
		value, err := unquote(match[2])
		if err != nil {
			return Config{}, fail("%s: %v", key, err)
		}
		if _, dup := c.set[key]; dup {
			return Config{}, fail("%s is set twice", key)
		}
		set, known := keys[key]
		if !known {
			return Config{}, fail("unknown key %s%s", key, nearest(key))
		}
		if err := set(&c, value); err != nil {
			return Config{}, fail("%s: %v", key, err)
		}
		c.set[key] = value
	}
	if c.PortLo > c.PortHi {
		return Config{}, &Error{name, lineNo, fmt.Sprintf("EXECUTOR_PORT_LO (%d) is above EXECUTOR_PORT_HI (%d)", c.PortLo, c.PortHi)}
	}
	return c, nil
}

func unquote(raw string) (string, error) {
	raw = strings.TrimSpace(raw)
	if raw == "" {
		return "", nil
	}
	var b strings.Builder
	switch q := raw[0]; q {
	case '\'', '"':
		rest := raw[1:]
		for i := 0; ; i++ {
			if i >= len(rest) {
				return "", errors.New("the quote is not closed")
			}
			switch ch := rest[i]; {
			case ch == q:
				if tail := strings.TrimSpace(rest[i+1:]); tail != "" && !strings.HasPrefix(tail, "#") {
					return "", errors.New("unexpected text after the closing quote")
				}
				return b.String(), nil
			case q == '"' && ch == '\\' && i+1 < len(rest) && strings.IndexByte("\"\\$`", rest[i+1]) >= 0:
				i++
				b.WriteByte(rest[i])
			case q == '"' && (ch == '$' || ch == '`'):
				return "", errors.New("expansions are not supported; write the value itself")
			default:
				b.WriteByte(ch)
			}
		}
	}
	if i := strings.Index(raw, " #"); i >= 0 {
		raw = strings.TrimSpace(raw[:i])
	}
	if strings.ContainsAny(raw, "$`") {
		return "", errors.New("expansions are not supported; write the value itself")
	}
	if strings.ContainsAny(raw, " \t'\"\\;&|<>()") {
		return "", errors.New("a value with spaces or shell characters needs quotes")
	}
	return raw, nil
}

type setter func(c *Config, value string) error

var keys = map[string]setter{
	"BASE_IMAGE":           text(func(c *Config) *string { return &c.BaseImage }, required),
	"NODE_MAJOR":           number(func(c *Config) *int { return &c.NodeMajor }, 18, 99),
	"INSTALL_HERMES":       boolean(func(c *Config) *bool { return &c.InstallHermes }),
	"INSTALL_EXECUTOR":     boolean(func(c *Config) *bool { return &c.InstallExecutor }),
	"EXPOSE_EXECUTOR_WEB":  boolean(func(c *Config) *bool { return &c.ExposeExecutor }),
	"EXECUTOR_PORT_LO":     number(func(c *Config) *int { return &c.PortLo }, 1024, 65535),
	"EXECUTOR_PORT_HI":     number(func(c *Config) *int { return &c.PortHi }, 1024, 65535),
	"WIRE_EXECUTOR_MCP":    boolean(func(c *Config) *bool { return &c.WireMCP }),
	"BOX_DRIVER":           text(func(c *Config) *string { return &c.Driver }, oneOf("auto", "smolvm", "qemu", "container")),
	"BOX_CONTAINER_ENGINE": text(func(c *Config) *string { return &c.ContainerEngine }, required),
	"BOX_CPUS":             number(func(c *Config) *int { return &c.CPUs }, 1, 512),
	"BOX_MEM_MIB":          number(func(c *Config) *int { return &c.MemoryMiB }, 512, 8<<20),
	"BOX_OVERLAY_GIB":      number(func(c *Config) *int { return &c.OverlayGiB }, 4, 64<<10),
	"BOX_STORAGE_GIB":      optionalNumber(func(c *Config) *int { return &c.StorageGiB }, 1, 64<<10),
	"CLAUDE_VERSION":       text(func(c *Config) *string { return &c.ClaudeVersion }, semver),
	"CODEX_VERSION":        text(func(c *Config) *string { return &c.CodexVersion }, semver),
	"EXECUTOR_VERSION":     text(func(c *Config) *string { return &c.ExecutorVersion }, semver),
	"HERMES_VERSION":       text(func(c *Config) *string { return &c.HermesVersion }, hermesVersion),
	"HERMES_INSTALLER":     text(func(c *Config) *string { return &c.HermesInstaller }, anything),
	"EXTRA_CA_FILE":        text(func(c *Config) *string { return &c.ExtraCAFile }, absolute),
	"HTTP_PROXY":           text(func(c *Config) *string { return &c.HTTPProxy }, proxy),
	"HTTPS_PROXY":          text(func(c *Config) *string { return &c.HTTPSProxy }, proxy),
	"NO_PROXY":             text(func(c *Config) *string { return &c.NoProxy }, anything),
	"BOX_KERNEL":           text(func(c *Config) *string { return &c.Kernel }, absolute),
}

// Keys returns the known keys, sorted.
func Keys() []string {
	names := make([]string, 0, len(keys))
	for k := range keys {
		names = append(names, k)
	}
	slices.Sort(names)
	return names
}

func boolean(field func(*Config) *bool) setter {
	return func(c *Config, v string) error {
		switch strings.ToLower(v) {
		case "true", "1":
			*field(c) = true
		case "false", "0":
			*field(c) = false
		default:
			return fmt.Errorf("%q is not true, false, 1 or 0", v)
		}
		return nil
	}
}

func number(field func(*Config) *int, lo, hi int) setter {
	return func(c *Config, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < lo || n > hi {
			return fmt.Errorf("%q is not a whole number from %d to %d", v, lo, hi)
		}
		*field(c) = n
		return nil
	}
}

func optionalNumber(field func(*Config) *int, lo, hi int) setter {
	set := number(field, lo, hi)
	return func(c *Config, v string) error {
		if v == "" {
			return nil
		}
		return set(c, v)
	}
}

func text(field func(*Config) *string, check func(string) error) setter {
	return func(c *Config, v string) error {
		if err := check(v); err != nil {
			return err
		}
		*field(c) = v
		return nil
	}
}

func anything(string) error { return nil }

func required(v string) error {
	if v == "" {
		return errors.New("must not be empty")
	}
	return nil
}

func oneOf(values ...string) func(string) error {
	return func(v string) error {
		if !slices.Contains(values, v) {
			return fmt.Errorf("%q is not one of %s", v, strings.Join(values, ", "))
		}
		return nil
	}
}

var (
	semverRE = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`)
	// Hermes is pinned by release tag or commit.
	hermesRE = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z._-]{0,63}$`)
)

func semver(v string) error {
	if v != "" && !semverRE.MatchString(v) {
		return fmt.Errorf("%q is not a version like 1.2.3", v)
	}
	return nil
}

func hermesVersion(v string) error {
	if v != "" && !hermesRE.MatchString(v) {
		return fmt.Errorf("%q is not a version, tag or commit", v)
	}
	return nil
}

func absolute(v string) error {
	if v != "" && !filepath.IsAbs(v) {
		return fmt.Errorf("%q is not an absolute path", v)
	}
	return nil
}

func proxy(v string) error {
	if v == "" {
		return nil
	}
	u, err := url.Parse(v)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "socks5" {
		return errors.New("not a proxy address like http://host:port") // the value may hold a password
	}
	return nil
}

// nearest suggests a known key for a mistyped one.
func nearest(key string) string {
	for _, k := range Keys() {
		if strings.EqualFold(k, key) || strings.Contains(k, strings.ToUpper(key)) && len(key) > 4 {
			return " (did you mean " + k + "?)"
		}
	}
	return ""
}

// Given reports whether the file has a key, so that its value is no default.
func (c Config) Given(key string) bool { _, ok := c.set[key]; return ok }

// GuestFile renders the assignments for the root-owned copy inside a box.
// Proxy addresses may hold passwords and are left out.
func (c Config) GuestFile() string {
	var b strings.Builder
	b.WriteString("# Settings of this box, from the host's box.env. Refreshed by box repair.\n")
	for _, k := range Keys() {
		v, ok := c.set[k]
		if !ok || k == "HTTP_PROXY" || k == "HTTPS_PROXY" {
			continue
		}
		fmt.Fprintf(&b, "%s='%s'\n", k, strings.ReplaceAll(v, "'", `'\''`))
	}
	return b.String()
}
