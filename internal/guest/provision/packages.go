package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// systemPackages are what a box needs of its distribution.
func systemPackages() []string {
	return []string{
		"bash", "ca-certificates", "curl", "git", "iproute2", "jq", "less", "locales",
		"ncurses-term", // terminfo of the terminals people use: kitty, alacritty, foot
		"neovim", "openssh-client", "procps", "ripgrep", "sudo", "tmux", "tzdata", "unzip", "xz-utils",
	}
}

var timezoneName = whenNeeded(`^[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,2}$`)

// packages installs the missing ones, or upgrades exactly these on repair.
// UTF-8 needs no generated locale: C.UTF-8 is part of the C library.
func packages(ctx context.Context, r *run) error {
	wanted := systemPackages()
	have, err := r.installed(ctx)
	if err != nil {
		return err
	}
	var missing []string
	for _, p := range wanted {
		if !have[p] {
			missing = append(missing, p)
		}
	}
	switch {
	case len(missing) > 0:
		err = r.aptInstall(ctx, wanted)
		if err == nil {
			r.note("installed: %s", strings.Join(missing, " "))
		}
	case r.req.Refresh:
		// A repair must also work without a network: what is there keeps
		// working.
		if refreshErr := r.aptInstall(ctx, wanted); refreshErr != nil {
			r.warn("the system packages were not refreshed: %v", refreshErr)
		} else {
			r.note("refreshed: %d packages", len(wanted))
		}
	default:
		r.note("already there: %d packages", len(wanted))
	}
	if err != nil {
		return err
	}
	// The certificates' package writes the bundle anew.
	certs, err := parseBundle(r.req.CABundle)
	if err != nil {
		return err
	}
	if _, err := appendMissing(bundlePath, certs); err != nil {
		return err
	}
	return r.timezone()
}

// installed returns the names of the distribution's installed packages.
func (r *run) installed(ctx context.Context) (map[string]bool, error) {
	byStatus, err := r.packageNames(ctx)
	if err != nil {
		return nil, err
	}
	have := map[string]bool{}
	for _, name := range byStatus["installed"] {
		have[name] = true
	}
	return have, nil
}

// packageNames returns the packages that dpkg knows, by their status.
func (r *run) packageNames(ctx context.Context) (map[string][]string, error) {
	out, err := r.quiet(r.command(ctx, "dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n"))
	if err != nil {
		return nil, err
	}
	byStatus := map[string][]string{}
	for line := range strings.Lines(out) {
		if status, name, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			byStatus[status] = append(byStatus[status], name)
		}
	}
	return byStatus, nil
}

// unfinished reports whether dpkg was ended amid its work, as apt judges it, or
// amid a package. While that is so, apt-get installs nothing.
func (r *run) unfinished(ctx context.Context) (bool, error) {
	journal, err := os.ReadDir(r.l.Path("/var/lib/dpkg/updates"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	for _, e := range journal {
		if strings.Trim(e.Name(), "0123456789") == "" {
			return true, nil
		}
	}
	byStatus, err := r.packageNames(ctx)
	if err != nil {
		return false, err
	}
	for status := range byStatus {
		switch status {
		case "installed", "config-files", "not-installed":
		default:
			return true, nil
		}
	}
	return false, nil
}

// finishInterrupted ends what an interrupted installation has left.
func (r *run) finishInterrupted(ctx context.Context) error {
	if unfinished, err := r.unfinished(ctx); err != nil || !unfinished {
		return err
	}
	r.note("finishing an installation that was interrupted")
	if err := r.loud(r.command(ctx, "dpkg", "--force-confdef", "--force-confold", "--configure", "-a")); err != nil {
		r.note("%v", err) // it may want packages that were not unpacked yet
	}
	if unfinished, err := r.unfinished(ctx); err != nil || !unfinished {
		return err
	}
	defer r.aptClean(context.WithoutCancel(ctx))
	if err := r.aptUpdate(ctx); err != nil {
		return err
	}
	if err := r.apt(ctx, "--fix-broken", "install"); err != nil {
		return explain(fmt.Errorf("finish an installation that was interrupted: %w", err), "the distribution's package servers", "")
	}
	return nil
}

func (r *run) apt(ctx context.Context, args ...string) error {
	options := []string{
		"-q", "-y",
		"-o", "DPkg::Lock::Timeout=120",
		"-o", "Acquire::Retries=2",
		"-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20",
		"-o", "Acquire::Languages=none",
		"-o", "Dpkg::Use-Pty=0",
		"-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold",
	}
	if !r.settled {
		// A crash during the first provisioning throws the disk away; there
		// dpkg's syncs only cost time, a lot of it in an emulated machine.
		options = append(options, "-o", "Dpkg::Options::=--force-unsafe-io")
	}
	cmd := r.command(ctx, "apt-get", append(options, args...)...)
	// Interrupted alone, apt-get lets dpkg come to its end and then stops
	// (tried with apt 2.6); a dpkg that is killed leaves packages half done.
	defer gently(cmd, syscall.SIGINT)()
	return r.loud(cmd)
}

// aptInstall installs or upgrades packages and leaves neither lists nor
// downloads behind.
func (r *run) aptInstall(ctx context.Context, names []string) error {
	if err := r.finishInterrupted(ctx); err != nil {
		return err
	}
	defer r.aptClean(context.WithoutCancel(ctx))
	if err := r.aptUpdate(ctx); err != nil {
		return err
	}
	err := r.retry(ctx, "apt-get install", func(ctx context.Context) error {
		return r.apt(ctx, append([]string{"install", "--no-install-recommends", "--"}, names...)...)
	})
	return explain(err, "the distribution's package servers", "")
}

// aptUpdate fetches the package lists. A plain `apt-get update` succeeds when
// every server is out of reach, hence the stricter mode.
func (r *run) aptUpdate(ctx context.Context) error {
	err := r.retry(ctx, "apt-get update", func(ctx context.Context) error {
		return r.apt(ctx, "-o", "APT::Update::Error-Mode=any", "update")
	})
	return explain(err, "the distribution's package servers", "")
}

func (r *run) aptClean(ctx context.Context) {
	if err := r.loud(r.command(ctx, "apt-get", "clean")); err != nil {
		r.note("%v", err)
	}
	lists, _ := filepath.Glob(r.l.Path("/var/lib/apt/lists/*")) // the pattern is sound
	for _, l := range lists {
		if base := filepath.Base(l); base != "lock" && base != "partial" {
			if err := os.RemoveAll(l); err != nil {
				r.note("%v", err)
			}
		}
	}
}

// purge removes packages that were not there before.
func (r *run) purge(ctx context.Context, before map[string]bool) error {
	now, err := r.installed(ctx)
	if err != nil {
		return err
	}
	var names []string
	for name := range now {
		if !before[name] {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	slices.Sort(names)
	return r.loud(r.command(ctx, "dpkg", append([]string{"--purge", "--force-unsafe-io"}, names...)...))
}

// timezone makes the box tell the host's time. A zone that the guest's tzdata
// does not know means UTC, and is said.
func (r *run) timezone() error {
	zone := r.req.Timezone
	if zone == "" {
		zone = "UTC"
	}
	const zones = "/usr/share/zoneinfo/"
	fi, err := os.Stat(zones + zone)
	if err != nil || !fi.Mode().IsRegular() {
		r.warn("the time zone %s is not known in the box; it uses UTC", zone)
		zone = "UTC"
		if !exists(zones + zone) {
			zone = "Etc/UTC"
		}
	}
	relinked, err := link("/etc/localtime", zones+zone)
	if err != nil {
		return err
	}
	rewritten, err := writeIfDiffers("/etc/timezone", []byte(zone+"\n"), 0o644)
	if err != nil {
		return fmt.Errorf("time zone: %w", err)
	}
	if relinked || rewritten {
		r.note("time zone: %s", zone)
	}
	return nil
}
