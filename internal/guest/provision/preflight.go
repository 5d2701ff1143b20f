package provision

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"unicode/utf8"

	"hermes-box-lite/internal/wire"
)

const (
	maxEnvFile = 256 << 10
	maxProxy   = 4096 // of one proxy setting
)

var (
	semver       = whenNeeded(`^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})(-[0-9A-Za-z][0-9A-Za-z.-]{0,63})?(\+[0-9A-Za-z.-]{1,64})?$`)
	boxName      = whenNeeded(`^[a-z][a-z0-9-]{0,38}$`)
	noProxyWords = regexp.MustCompile(`^[A-Za-z0-9.,:*/_\[\] -]*$`)
	proxyChars   = regexp.MustCompile(`^[A-Za-z0-9._~:/@%!$&*+,;=\[\]-]+$`)
)

// whenNeeded compiles a costly pattern at its first use: only provisioning
// needs it, and every start of hb would pay for it.
func whenNeeded(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}

// preflight refuses what the other steps could not work with.
func preflight(_ context.Context, r *run) error {
	if err := validate(r.req); err != nil {
		return fmt.Errorf("request: %w", err)
	}
	const rdonly = 1 // ST_RDONLY, statfs(2)
	var st syscall.Statfs_t
	if err := syscall.Statfs(r.l.Data(), &st); err == nil && st.Flags&rdonly != 0 {
		// Executor could not start, and that would be waited for.
		if exists(r.l.DamageNote()) {
			return fmt.Errorf("the disk of %s is damaged; the doctor tells how to mend it", r.l.Data())
		}
		return &hintedError{fmt.Errorf("%s is a read-only file system", r.l.Data()), "sudo mount -o remount,rw " + r.l.Data()}
	}
	if !r.l.Real() {
		return nil
	}
	if os.Geteuid() != 0 {
		return errors.New("must run as root")
	}
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return fmt.Errorf("architecture %s is not supported (amd64 and arm64 are)", runtime.GOARCH)
	}
	distro, err := readOSRelease("/etc/os-release")
	if err != nil {
		return err
	}
	if _, err := os.Stat("/usr/bin/apt-get"); err != nil {
		return &hintedError{
			fmt.Errorf("%q has no apt-get", distro.pretty),
			"choose a Debian or Ubuntu image as BASE_IMAGE in box.env",
		}
	}
	if !distro.debianLike() {
		return &hintedError{
			fmt.Errorf("%q is neither Debian nor Ubuntu", distro.pretty),
			"choose a Debian or Ubuntu image as BASE_IMAGE in box.env",
		}
	}
	r.note("%s, %s", distro.pretty, runtime.GOARCH)
	return nil
}

// validate checks every field against its grammar: the values end up in files,
// URLs and arguments.
func validate(req wire.ProvisionRequest) error {
	if req.Protocol != wire.Protocol {
		return fmt.Errorf("protocol %d instead of %d", req.Protocol, wire.Protocol)
	}
	if !boxName().MatchString(req.BoxName) {
		return fmt.Errorf("%q is not a box name", req.BoxName)
	}
	if req.HostPort < 0 || req.HostPort > 65535 {
		return fmt.Errorf("host port %d is out of range", req.HostPort)
	}
	if req.NodeMajor < 18 || req.NodeMajor > 99 {
		return fmt.Errorf("NODE_MAJOR %d is not between 18 and 99", req.NodeMajor)
	}
	if len(req.EnvFile) > maxEnvFile || strings.ContainsRune(req.EnvFile, 0) || !utf8.ValidString(req.EnvFile) {
		return errors.New("box.env is too long or not text")
	}
	for name, v := range map[string]string{
		"CLAUDE_VERSION": req.Versions.Claude, "CODEX_VERSION": req.Versions.Codex,
		"EXECUTOR_VERSION": req.Versions.Executor, "HERMES_VERSION": req.Versions.Hermes,
	} {
		if v != "" && !semver().MatchString(v) {
			return fmt.Errorf("%s %q is not a version like 1.2.3", name, v)
		}
	}
	for name, v := range map[string]string{"HTTP_PROXY": req.HTTPProxy, "HTTPS_PROXY": req.HTTPSProxy} {
		if v == "" {
			continue
		}
		// The value may hold a password: it is never quoted.
		u, err := url.Parse(v)
		if err != nil || len(v) > maxProxy || !proxyChars.MatchString(v) || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return fmt.Errorf("%s is not an address like http://proxy:3128", name)
		}
	}
	if len(req.NoProxy) > maxProxy || !noProxyWords.MatchString(req.NoProxy) {
		return errors.New("NO_PROXY is not a list of host names")
	}
	if req.Timezone != "" && !timezoneName().MatchString(req.Timezone) {
		return fmt.Errorf("%q is not the name of a time zone", req.Timezone)
	}
	if err := validInstaller(req.HermesInstaller); err != nil {
		return err
	}
	_, err := parseBundle(req.CABundle)
	return err
}

func validInstaller(s string) error {
	if s == "" {
		return nil
	}
	for _, c := range s {
		if c <= ' ' || c == 0x7f {
			return errors.New("the address of Hermes' installer has blanks or control characters")
		}
	}
	if filepath.IsAbs(s) {
		return nil
	}
	if u, err := url.Parse(s); err != nil || u.Host == "" || u.User != nil || u.Scheme != "http" && u.Scheme != "https" {
		return errors.New("the address of Hermes' installer is neither an http(s) URL nor an absolute path")
	}
	return nil
}

// osRelease is what os-release(5) says.
type osRelease struct{ id, like, codename, pretty string }

func (o osRelease) debianLike() bool {
	for _, id := range append([]string{o.id}, strings.Fields(o.like)...) {
		if id == "debian" || id == "ubuntu" {
			return true
		}
	}
	return false
}

func readOSRelease(path string) (osRelease, error) {
	f, err := os.Open(path)
	if err != nil {
		return osRelease{}, err
	}
	defer func() { _ = f.Close() }()
	var o osRelease
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		key, value, _ := strings.Cut(sc.Text(), "=")
		value = strings.Trim(value, `"'`)
		switch key {
		case "ID":
			o.id = value
		case "ID_LIKE":
			o.like = value
		case "VERSION_CODENAME":
			o.codename = value
		case "PRETTY_NAME":
			o.pretty = value
		}
	}
	return o, sc.Err()
}
