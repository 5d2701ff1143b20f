// Package door is hb's proxy in front of Executor, the only thing in a box
// that is forwarded to the host.
//
// The agent token opens /mcp and below and nothing else; the operator token
// opens everything; a browser gets in with a single-use ticket that is turned
// into a session cookie. The Host must be one of the box's names and the
// Origin, if sent, the same; everything else is refused with Executor's own
// challenge, so that clients and health checks see one behaviour for every
// generation of Executor. Credentials and cookies end here: upstream sees only
// its own secret. Streams pass unbuffered.
//
// Cookies are the door's alone. None is passed upstream and none of upstream's
// is passed back: on 127.0.0.1 browsers send every box's cookies to every box,
// and Executor authenticates by its bearer secret. The supervisor's worker
// serves it.
package door

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"hermes-box-lite/internal/guest/secrets"
	"hermes-box-lite/internal/mcp"
)

// Lifetimes and bounds of what the door remembers.
const (
	TicketLife  = 60 * time.Second
	SessionLife = 12 * time.Hour
	maxTickets  = 32
	maxSessions = 128
)

// Upstream is where Executor listens at this moment.
type Upstream struct {
	Addr   string // 127.0.0.1:PORT; "" = it is not up
	Secret string // its bearer secret
	Reason string // with Addr "": why, for people
}

// Config is what a door needs.
type Config struct {
	Tokens   secrets.Tokens
	BoxName  func() string   // "" until the box is provisioned
	Upstream func() Upstream // asked at every request
	Now      func() time.Time
}

// Door is the http.Handler.
type Door struct {
	cfg   Config
	proxy *httputil.ReverseProxy

	mu       sync.Mutex
	tickets  map[string]time.Time // sha256 of the ticket -> expiry
	sessions map[string]time.Time
}

// New returns a door.
func New(cfg Config) *Door {
	d := &Door{cfg: cfg, tickets: map[string]time.Time{}, sessions: map[string]time.Time{}}
	d.proxy = &httputil.ReverseProxy{
		Rewrite:        rewrite,
		FlushInterval:  -1, // events must not wait in a buffer
		ModifyResponse: modifyResponse,
		ErrorHandler:   func(w http.ResponseWriter, _ *http.Request, _ error) { plain(w, 502, "Executor does not answer") },
		Transport: &http.Transport{
			Proxy:               nil,
			DisableCompression:  true, // pass bodies as they are
			MaxIdleConnsPerHost: 16,
			IdleConnTimeout:     30 * time.Second,
		},
	}
	return d
}

// NewTicket returns a ticket that opens one browser session within a minute.
func (d *Door) NewTicket() string {
	ticket := secrets.NewToken()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.remember(d.tickets, ticket, TicketLife, maxTickets)
	return ticket
}

// remember adds a secret to a bounded table, the oldest going first. Callers
// hold mu.
func (d *Door) remember(table map[string]time.Time, secret string, life time.Duration, most int) {
	now := d.cfg.Now()
	oldest, oldestExpiry := "", time.Time{}
	for key, expiry := range table {
		if !now.Before(expiry) {
			delete(table, key)
		} else if oldest == "" || expiry.Before(oldestExpiry) {
			oldest, oldestExpiry = key, expiry
		}
	}
	if len(table) >= most {
		delete(table, oldest)
	}
	table[digest(secret)] = now.Add(life)
}

// digest is the key of a table: looking up a hash leaks nothing about the
// secret through time.
func digest(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return string(sum[:])
}

type access int

const (
	nothing access = iota
	onlyMCP
	everything
)

func (d *Door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !d.rightPlace(r) {
		refuse(w)
		return
	}
	if r.URL.Path == mcp.ChallengePath {
		d.challenge(w, r)
		return
	}
	if strings.HasPrefix(r.URL.Path, "/.hermes-box/") {
		plain(w, http.StatusNotFound, "Not found")
		return
	}
	if r.Method == http.MethodGet && r.URL.Path == "/" && r.URL.Query().Has("_token") {
		d.redeem(w, r)
		return
	}
	switch d.access(r) {
	case everything:
		if !cleanPath(r.URL.Path) {
			plain(w, http.StatusBadRequest, "The path is not clean")
			return
		}
	case onlyMCP:
		if !mcpPath(r.URL) {
			refuse(w)
			return
		}
	default:
		if comesBack(r) {
			bounce(w, r)
			return
		}
		refuse(w)
		return
	}
	up := d.cfg.Upstream()
	if up.Addr == "" {
		w.Header().Set("Retry-After", "2")
		plain(w, http.StatusServiceUnavailable, up.Reason)
		return
	}
	d.proxy.ServeHTTP(w, r.WithContext(withUpstream(r.Context(), up)))
}

// rightPlace holds Host and Origin to the box's own names. A page of another
// site, also one whose name was rebound to 127.0.0.1, fails here.
func (d *Door) rightPlace(r *http.Request) bool {
	if r.URL.Scheme != "" || r.URL.Host != "" || !strings.HasPrefix(r.URL.Path, "/") {
		return false // absolute form, CONNECT, OPTIONS *: this is no forward proxy
	}
	host, ok := hostName(r.Host)
	if !ok || host != "127.0.0.1" && host != "localhost" {
		name := d.cfg.BoxName()
		if !ok || name == "" || host != name+".localhost" {
			return false
		}
	}
	switch origins := r.Header.Values("Origin"); len(origins) {
	case 0:
		return true
	case 1:
		return strings.EqualFold(origins[0], "http://"+r.Host)
	default:
		return false
	}
}

// hostName splits a Host header; any port is fine, since the forwarded one is
// the host's business.
func hostName(hostport string) (string, bool) {
	host, port, hasPort := strings.Cut(hostport, ":")
	if hasPort {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", false
		}
	}
	return strings.ToLower(host), true
}

func (d *Door) challenge(w http.ResponseWriter, r *http.Request) {
	nonces := r.URL.Query()["nonce"]
	if r.Method != http.MethodGet || len(nonces) != 1 || !secrets.ValidToken(nonces[0]) {
		plain(w, http.StatusBadRequest, "A challenge is GET with a nonce of 64 lower hex digits")
		return
	}
	body, err := json.Marshal(map[string]string{"mac": mcp.DoorMAC(d.cfg.Tokens.Agent, nonces[0])})
	if err != nil {
		plain(w, http.StatusInternalServerError, "Internal error")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(body) // the client's loss
}

// redeem turns a ticket into a session. The operator token does it too: on a
// headless host nobody can hand a ticket to a browser within its minute.
func (d *Door) redeem(w http.ResponseWriter, r *http.Request) {
	tickets := r.URL.Query()["_token"]
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Referrer-Policy", "no-referrer")
	if len(tickets) == 1 && (d.useTicket(tickets[0]) || sameSecret(tickets[0], d.cfg.Tokens.Operator)) {
		http.SetCookie(w, &http.Cookie{
			Name: d.cookieName(), Value: d.newSession(), Path: "/",
			MaxAge: int(SessionLife / time.Second), HttpOnly: true, SameSite: http.SameSiteStrictMode,
		})
	} else if !d.hasSession(r) {
		refuse(w) // used, expired or invented; a reload with a live session goes on
		return
	}
	w.Header().Set("Location", "/")
	w.WriteHeader(http.StatusSeeOther)
}

func (d *Door) useTicket(ticket string) bool {
	if !secrets.ValidToken(ticket) {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	key := digest(ticket)
	expiry, ok := d.tickets[key]
	delete(d.tickets, key)
	return ok && d.cfg.Now().Before(expiry)
}

func (d *Door) newSession() string {
	id := secrets.NewToken()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.remember(d.sessions, id, SessionLife, maxSessions)
	return id
}

// cookieName carries the box's name, because on 127.0.0.1 cookies of all
// boxes meet.
func (d *Door) cookieName() string { return "hermes_box_" + d.cfg.BoxName() }

func (d *Door) hasSession(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin":
	default:
		// Another site, or another port of this one, started the request.
		return false
	}
	name := d.cookieName()
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, c := range r.CookiesNamed(name) {
		if i == 4 {
			break
		}
		expiry, ok := d.sessions[digest(c.Value)]
		if ok && d.cfg.Now().Before(expiry) {
			return true
		}
	}
	return false
}

// access judges the credentials. A bearer token, when sent, is the only one
// that counts: a wrong one is not rescued by a cookie.
func (d *Door) access(r *http.Request) access {
	switch auths := r.Header.Values("Authorization"); {
	case len(auths) == 1:
		scheme, token, _ := strings.Cut(auths[0], " ")
		if !strings.EqualFold(scheme, "Bearer") {
			return nothing
		}
		isOperator, isAgent := sameSecret(token, d.cfg.Tokens.Operator), sameSecret(token, d.cfg.Tokens.Agent)
		if isOperator {
			return everything
		}
		if isAgent {
			return onlyMCP
		}
		return nothing
	case len(auths) > 1:
		return nothing
	}
	if d.hasSession(r) {
		return everything
	}
	return nothing
}

func sameSecret(given, want string) bool {
	return want != "" && hmac.Equal([]byte(given), []byte(want))
}

// mcpPath accepts /mcp and below in one spelling only: no escapes, no dots, no
// empty segments, so that no two readers of the path can disagree about it.
func mcpPath(u *url.URL) bool {
	p := u.EscapedPath()
	if p != "/mcp" && !strings.HasPrefix(p, "/mcp/") {
		return false
	}
	plainBytes := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("/-_.~", r)
	}
	return !strings.ContainsFunc(p, plainBytes) && p == u.Path && cleanPath(p)
}

// cleanPath refuses dot segments, empty segments and backslashes in the
// decoded path.
func cleanPath(p string) bool {
	trimmed := strings.TrimSuffix(p, "/")
	return p == "/" || trimmed == path.Clean(p) && !strings.Contains(p, `\`)
}

// bounced marks a request that the door's own page has made.
const bounced = "&_hb_bounced=1"

// comesBack recognises the browser that an OAuth provider sends back to
// Executor (/api/oauth/callback in 1.5.9). The provider's site started that
// navigation, so that the browser withholds the SameSite=Strict cookie.
func comesBack(r *http.Request) bool {
	return r.Method == http.MethodGet && r.Header.Get("Sec-Fetch-Mode") == "navigate" &&
		(r.Header.Get("Sec-Fetch-Site") == "cross-site" || r.Header.Get("Sec-Fetch-Site") == "same-site") &&
		(r.URL.Path == "/api/oauth/callback" || r.URL.Path == "/oauth/callback") &&
		r.URL.RawQuery != "" && len(r.URL.RawQuery) < 8<<10 && !strings.HasSuffix(r.URL.RawQuery, bounced)
}

// bounce has the page itself ask again, with the cookie. It gives no access:
// whoever has no session is refused then. What a foreign page gains is one GET
// of this path, which OAuth's state parameter guards.
func bounce(w http.ResponseWriter, r *http.Request) {
	again := html.EscapeString(r.URL.EscapedPath() + "?" + r.URL.RawQuery + bounced)
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	h.Set("Referrer-Policy", "no-referrer")
	// The client's loss if it does not arrive.
	_, _ = fmt.Fprintf(w, "<!doctype html><title>Executor</title><meta http-equiv=\"refresh\" content=\"0;url=%s\"><a href=\"%s\">Continue</a>\n", again, again)
}

func rewrite(pr *httputil.ProxyRequest) {
	up := upstreamOf(pr.In.Context())
	pr.Out.URL.RawQuery = strings.TrimSuffix(pr.In.URL.RawQuery, bounced)
	pr.Out.URL.Scheme, pr.Out.URL.Host = "http", up.Addr
	pr.Out.Host = up.Addr
	h := pr.Out.Header
	h.Set("Authorization", "Bearer "+up.Secret)
	// X-Executor-Token is a second way to authenticate in 1.5.9.
	for _, name := range []string{"Cookie", "X-Executor-Token", "Referer"} {
		h.Del(name)
	}
	if h.Get("Origin") != "" {
		h.Set("Origin", "http://"+up.Addr)
	}
}

func modifyResponse(resp *http.Response) error {
	if resp.StatusCode == http.StatusUnauthorized {
		// The door's credential is not the client's: to pass this on would
		// blame the wrong token.
		return fmt.Errorf("executor refused the door's secret")
	}
	for name := range resp.Header {
		if strings.HasPrefix(name, "Access-Control-") {
			delete(resp.Header, name) // 1.5.9 reflects any Origin with credentials
		}
	}
	resp.Header.Del("Set-Cookie")
	return nil
}

func refuse(w http.ResponseWriter) {
	w.Header().Set("WWW-Authenticate", `Bearer realm="executor"`)
	plain(w, http.StatusUnauthorized, "Unauthorized")
}

func plain(w http.ResponseWriter, status int, text string) {
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n") // the client's loss
}
