package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
)

func (a *app) openCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "open NAME",
		Short: "Open Executor's web page in the browser",
		Long: `open starts the box if it is stopped, waits until Executor answers through its
forwarded port, and opens its page in the browser, logged in. The address that
the browser is given works once and for a minute; it is never printed.

$BOX_BROWSER names another graphical opener. It gets the secret address as its
only argument, so do not use a wrapper that logs its arguments.`,
		Example: "  box open alpha\n  BOX_BROWSER=firefox box open alpha",
		Args:    exactArgs("NAME"), ValidArgsFunction: a.completeName,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			rec, err := m.Lookup(args[0])
			if err != nil {
				return err
			}
			opener, err := findOpener()
			if err != nil {
				return headless(rec, err)
			}
			if rec, err = m.Running(cmd.Context(), rec.Name); err != nil {
				return err
			}
			a.term.Step("wait for Executor")
			url, err := m.OpenURL(cmd.Context(), rec, browserHost(rec.Name))
			a.term.done()
			if err != nil {
				return fmt.Errorf("open %s: %w", rec.Name, err)
			}
			if err := launch(cmd.Context(), opener, url); err != nil {
				return fmt.Errorf("open %s: %w", rec.Name, err)
			}
			a.term.say("opened Executor of " + rec.Name)
			return nil
		},
	}
}

// browserHost keeps the logins of two boxes apart: cookies are kept by host
// name and ignore ports. Browsers on Linux resolve names under localhost by
// themselves; elsewhere the system must.
func browserHost(name string) string {
	host := name + ".localhost"
	if runtime.GOOS == "linux" {
		return host
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if addrs, err := net.DefaultResolver.LookupHost(ctx, host); err == nil && len(addrs) > 0 {
		return host
	}
	return "127.0.0.1" // the cookie's name holds the box's
}

// errHeadless: an opener would report success and nobody would see a window.
var errHeadless = errors.New("this host has no display, so nobody would see a window")

// findOpener returns the opener's command line, without the address.
func findOpener() ([]string, error) {
	if browser := os.Getenv("BOX_BROWSER"); browser != "" {
		path, err := exec.LookPath(browser)
		if err != nil {
			return nil, fmt.Errorf("BOX_BROWSER: %w", err)
		}
		return []string{path}, nil
	}
	if runtime.GOOS == "darwin" {
		return []string{"open"}, nil
	}
	if os.Getenv("DISPLAY") == "" && os.Getenv("WAYLAND_DISPLAY") == "" {
		return nil, errHeadless
	}
	for _, opener := range [][]string{{"xdg-open"}, {"gio", "open"}} {
		if path, err := exec.LookPath(opener[0]); err == nil {
			return append([]string{path}, opener[1:]...), nil
		}
	}
	return nil, errors.New("neither xdg-open nor gio is installed; set BOX_BROWSER to an opener")
}

// headless explains how to reach the page from the machine where the user
// sits.
func headless(rec box.Record, err error) error {
	if !errors.Is(err, errHeadless) || rec.HostPort == 0 {
		return fmt.Errorf("open %s: %w", rec.Name, err)
	}
	host, hostErr := os.Hostname()
	if hostErr != nil {
		host = "THIS-HOST"
	}
	return hinted{
		fmt.Errorf(`open %[1]s: %[2]w
on the machine where you sit, run: ssh -L %[3]d:127.0.0.1:%[3]d %[4]s
and open http://%[1]s.localhost:%[3]d/?_token=TOKEN there, with the token that the hint shows`, rec.Name, err, rec.HostPort, host),
		"box enter " + rec.Name + " -- hb executor-token",
	}
}

// launch starts the opener and waits a little for its failure. An opener that
// is the browser itself keeps running; it is left alone, with no stream of
// ours.
func launch(ctx context.Context, opener []string, url string) error {
	cmd := exec.Command(opener[0], append(opener[1:len(opener):len(opener)], url)...)
	if err := cmd.Start(); err != nil {
		return err
	}
	failed := make(chan error, 1)
	go func() { failed <- cmd.Wait() }()
	select {
	case err := <-failed:
		if err != nil {
			return fmt.Errorf("%s: %w", opener[0], err)
		}
	case <-time.After(3 * time.Second):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}
