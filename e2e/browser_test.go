//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
)

// browser is a headless Chromium with a profile of its own.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	statuses map[string]int64 // of the answers, by address without its query
}

// newBrowser starts Chromium with the network services that it has of its own
// switched off.
func newBrowser(t *testing.T, h *home) *browser {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatalf("scripts/host-packages e2e installs it: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun,
		chromedp.UserDataDir(filepath.Join(filepath.Dir(h.dir), "browser")),
		chromedp.WindowSize(1280, 800),
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true),
		chromedp.Flag("no-proxy-server", true),
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost, EXCLUDE *.localhost"),
	)
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	b := &browser{t: t, statuses: map[string]int64{}}
	b.ctx, cancel = chromedp.NewContext(ctx, chromedp.WithListener(func(event any) {
		if answer, ok := event.(*network.EventResponseReceived); ok {
			address, _, _ := strings.Cut(answer.Response.URL, "?")
			b.mu.Lock()
			defer b.mu.Unlock()
			b.statuses[address] = answer.Response.Status
		}
	}))
	t.Cleanup(cancel)
	// The first run starts the browser, which lives as long as its context.
	if err := chromedp.Do(b.ctx, chromedp.Navigate("about:blank")); err != nil {
		t.Fatalf("start Chromium: %v", err)
	}
	return b
}

func do[T any](b *browser, action chromedp.Action[T]) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	if err != nil {
		b.t.Fatal(err)
	}
	return value
}

// visit goes to an address and returns the status of the page.
func (b *browser) visit(address string) int64 {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	resp, err := chromedp.Run(ctx, chromedp.NavigateResponse(address))
	if err != nil {
		b.t.Fatal(strings.ReplaceAll(err.Error(), address, "(the address)")) // it may hold a ticket
	}
	return resp.Status
}

// shows waits until the page has the text.
func (b *browser) shows(text string) {
	b.t.Helper()
	eventually(b.t, time.Minute, fmt.Sprintf("%q on the page", text), func() error {
		ctx, cancel := context.WithTimeout(b.ctx, 20*time.Second)
		defer cancel()
		body, err := chromedp.Run(ctx, chromedp.Evaluate[string]("document.body ? document.body.innerText : ''"))
		if err == nil && !strings.Contains(body, text) {
			err = errors.New(clip(body))
		}
		return err
	})
}

// fetch asks for an address from within the page, with its cookies, and
// returns the status.
func (b *browser) fetch(path string) int {
	b.t.Helper()
	return do(b, chromedp.Evaluate[int]("fetch("+strconv.Quote(path)+").then(r => r.status)", chromedp.EvalAwaitPromise))
}

// open runs `box open` with an opener that keeps the address for the test.
func (h *home) open(name string) string {
	h.t.Helper()
	dir := h.t.TempDir()
	kept := filepath.Join(dir, "address")
	opener := filepath.Join(dir, "opener")
	script := "#!/bin/sh\numask 077\nprintf '%s\\n' \"$#\" \"$1\" >" + kept + ".new\nmv " + kept + ".new " + kept + "\n"
	if err := os.WriteFile(opener, []byte(script), 0o755); err != nil {
		h.t.Fatal(err)
	}
	h.setenv("BOX_BROWSER", opener)
	r := h.wants(0, nil, "open", name)
	var address string
	eventually(h.t, 30*time.Second, "the opener", func() error {
		data, err := os.ReadFile(kept)
		if err != nil {
			return err
		}
		number, rest, _ := strings.Cut(string(data), "\n")
		if number != "1" {
			h.t.Fatalf("the opener got %s arguments", number)
		}
		address = strings.TrimSpace(rest)
		return nil
	})
	u, err := url.Parse(address)
	if err != nil || len(u.Query().Get("_token")) != 64 {
		h.t.Fatalf("box gave its opener no address with a ticket (%v)", err)
	}
	if u.Host != name+".localhost:"+strconv.Itoa(h.record(name).HostPort) {
		h.t.Errorf("the page's host is %s", u.Host)
	}
	// The opener takes the address as an argument, it has no other way.
	if where, ok := run.watch.where(u.Query().Get("_token"), true); ok && where != "the host's process opener (cmdline)" {
		h.t.Errorf("the ticket was seen in %s", where)
	}
	if strings.Contains(r.stdout+r.stderr, u.Query().Get("_token")) || strings.Contains(r.stdout+r.stderr, "_token") {
		h.t.Error("open has printed the address")
	}
	return address
}

// TestBrowser logs a real browser in to two boxes.
func TestBrowser(t *testing.T) {
	h := newHome(t, nil)
	one, two := h.create("one"), h.create("two")
	b := newBrowser(t, h)
	// No cookie, no page.
	home1 := fmt.Sprintf("http://%s.localhost:%d", one, h.record(one).HostPort)
	home2 := fmt.Sprintf("http://%s.localhost:%d", two, h.record(two).HostPort)
	if status := b.visit(home1 + "/"); status != http.StatusUnauthorized {
		t.Errorf("a browser without a ticket: %d", status)
	}

	ticket := h.open(one)
	if status := b.visit(ticket); status != http.StatusOK {
		t.Fatalf("with the ticket: %d", status)
	}
	b.shows("Integrations")
	place := do(b, chromedp.Location())
	if strings.Contains(place, "_token") || !strings.HasPrefix(place, home1+"/") {
		t.Error("the ticket stayed in the address bar, or the page is another")
	}
	// The page is drawn before its first requests are answered.
	eventually(t, time.Minute, "an answer of Executor's API to the page", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		apis := 0
		for address, status := range b.statuses {
			if strings.HasPrefix(address, home1+"/api/") {
				apis++
				if status != http.StatusOK {
					t.Errorf("%s: %d", address, status)
				}
			}
		}
		if apis == 0 {
			return errors.New("the page has asked for nothing yet")
		}
		return nil
	})
	if status := b.fetch("/api/integrations"); status != http.StatusOK {
		t.Errorf("the page's own request: %d", status)
	}
	do(b, chromedp.Reload())
	b.shows("Integrations")
	keepPicture(b)

	// The session's cookie is out of the page's reach, and the ticket is used.
	if do(b, chromedp.Evaluate[string]("document.cookie")) != "" {
		t.Error("the page can read the session's cookie")
	}
	stranger := &http.Client{}
	resp, err := stranger.Get(strings.Replace(ticket, one+".localhost", "127.0.0.1", 1))
	if err != nil {
		t.Fatal("the used ticket could not be tried again")
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("the used ticket opens again: %d", resp.StatusCode)
	}

	// The same profile is a stranger to the other box, and stays logged in here
	// when it logs in there.
	if status := b.visit(home2 + "/"); status != http.StatusUnauthorized {
		t.Errorf("the cookie of one box opens the other: %d", status)
	}
	if status := b.visit(strings.Replace(home2, two+".localhost", one+".localhost", 1) + "/"); status != http.StatusUnauthorized {
		t.Errorf("one box's name at the other's port: %d", status)
	}
	if status := b.visit(h.open(two)); status != http.StatusOK {
		t.Errorf("the other box with its own ticket: %d", status)
	}
	b.shows("Integrations")
	if status := b.visit(home1 + "/"); status != http.StatusOK {
		t.Errorf("the first box afterwards: %d", status)
	}
	b.shows("Integrations")
	for _, box := range []string{one, two} {
		var names []string
		address := fmt.Sprintf("http://%s.localhost:%d/", box, h.record(box).HostPort)
		found := do(b, func(ctx context.Context, target *chromedp.Target) (network.GetCookiesResult, error) {
			return cdp.Call(ctx, target, network.GetCookies, network.GetCookiesParams{URLs: []string{address}})
		})
		for _, c := range found.Cookies {
			names = append(names, c.Name)
			if !c.HTTPOnly || c.SameSite != network.CookieSameSiteStrict {
				t.Errorf("cookie %s: HttpOnly %v, SameSite %s", c.Name, c.HTTPOnly, c.SameSite)
			}
		}
		if len(names) != 1 || names[0] != "hermes_box_"+box {
			t.Errorf("the cookies that %s gets: %v", box, names)
		}
	}
}

// keepPicture leaves what the browser shows with the test's results.
func keepPicture(b *browser) {
	picture := do(b, chromedp.CaptureScreenshot())
	if err := os.MkdirAll(run.outDir, 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(run.outDir, "e2e-executor.png"), picture, 0o644); err != nil {
		b.t.Fatal(err)
	}
}
