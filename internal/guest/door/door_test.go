package door

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"hermes-box-lite/internal/guest/secrets"
	"hermes-box-lite/internal/mcp"
)

const (
	agentToken    = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	operatorToken = "0000000000000000000000000000000000000000000000000000000000000000"
	innerSecret   = "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"
)

type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }

func (c *clock) advance(d time.Duration) { c.mu.Lock(); defer c.mu.Unlock(); c.now = c.now.Add(d) }

// setup is a door in front of a server; down makes it a door in front of
// nothing.
type setup struct {
	*testing.T
	door  *Door
	srv   *httptest.Server
	clock *clock
	down  string
	seen  []*http.Request // what arrived upstream
}

func newSetup(t *testing.T, upstream http.HandlerFunc) *setup {
	s := &setup{T: t, clock: &clock{now: time.Unix(1_800_000_000, 0)}}
	inner := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.seen = append(s.seen, r)
		if upstream != nil {
			upstream(w, r)
		}
	}))
	t.Cleanup(inner.Close)
	s.door = New(Config{
		Tokens:  secrets.Tokens{Agent: agentToken, Operator: operatorToken},
		BoxName: func() string { return "my-box" },
		Now:     s.clock.Now,
		Upstream: func() Upstream {
			if s.down != "" {
				return Upstream{Reason: s.down}
			}
			return Upstream{Addr: inner.Listener.Addr().String(), Secret: innerSecret}
		},
	})
	s.srv = httptest.NewUnstartedServer(nil)
	s.srv.Config = s.door.Server(nil)
	s.srv.Start()
	t.Cleanup(s.srv.Close)
	return s
}

// raw sends a request whose path is not touched by any client's cleaning.
func (s *setup) raw(method, path, host string, header ...string) *http.Response {
	s.Helper()
	conn, err := net.Dial("tcp4", s.srv.Listener.Addr().String())
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = conn.Close() })
	req := fmt.Sprintf("%s %s HTTP/1.1\r\nHost: %s\r\nContent-Length: 0\r\n", method, path, host)
	for i := 0; i < len(header); i += 2 {
		req += header[i] + ": " + header[i+1] + "\r\n"
	}
	if _, err := io.WriteString(conn, req+"\r\n"); err != nil {
		s.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		s.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	if err != nil {
		s.Fatal(err)
	}
	return resp
}

func bearer(token string) []string { return []string{"Authorization", "Bearer " + token} }

func TestWhoMayGoWhere(t *testing.T) {
	const here, name = "127.0.0.1:4790", "my-box.localhost:4790"
	agent, operator := bearer(agentToken), bearer(operatorToken)
	tests := []struct {
		what       string
		path, host string
		header     []string
		want       int
	}{
		{"nobody", "/mcp", here, nil, 401},
		{"nobody at the pages", "/", here, nil, 401},
		{"agent", "/mcp", here, agent, 200},
		{"agent below", "/mcp/toolkits/a-b", here, agent, 200},
		{"agent by name", "/mcp", name, agent, 200},
		{"agent, other case", "/mcp", "MY-BOX.localhost", agent, 200},
		{"agent with a query", "/mcp?x=1", "localhost:1", agent, 200},
		{"agent at the API", "/api/x", here, agent, 401},
		{"agent at the pages", "/", here, agent, 401},
		{"agent, longer name", "/mcpx", here, agent, 401},
		{"agent, capitals", "/MCP", here, agent, 401},
		{"agent, dots", "/mcp/../api", here, agent, 401},
		{"agent, one dot", "/mcp/./x", here, agent, 401},
		{"agent, encoded dots", "/mcp/%2e%2e/api", here, agent, 401},
		{"agent, encoded slash", "/mcp/..%2fapi", here, agent, 401},
		{"agent, twice encoded", "/mcp/%252e%252e/api", here, agent, 401},
		{"agent, backslash", `/mcp/..\api`, here, agent, 401},
		{"agent, slashes", "//mcp", here, agent, 401},
		{"agent, inner slashes", "/mcp//../api", here, agent, 401},
		{"agent, parameter", "/mcp/..;/api", here, agent, 401},
		{"agent, encoded m", "/%6dcp", here, agent, 401},
		{"agent, NUL", "/mcp/%00", here, agent, 401},
		{"operator", "/api/x", here, operator, 200},
		{"operator at MCP", "/mcp", here, operator, 200},
		{"operator, escaped value", "/api/a%20b", here, operator, 200},
		{"operator, dots", "/api/../x", here, operator, 400},
		{"a ticket's grammar as token", "/mcp", here, bearer(strings.Repeat("b", 64)), 401},
		{"half a token", "/mcp", here, bearer(agentToken[:32]), 401},
		{"no token", "/mcp", here, []string{"Authorization", "Bearer "}, 401},
		{"basic", "/mcp", here, []string{"Authorization", "Basic YTph"}, 401},
		{"inner secret", "/mcp", here, bearer(innerSecret), 401},
		{"two tokens", "/mcp", here, append(bearer(agentToken), operator...), 401},
		{"other header", "/mcp", here, []string{"X-Executor-Token", operatorToken}, 401},
		{"foreign host", "/mcp", "evil.example", operator, 401},
		{"other box's name", "/mcp", "other.localhost:4790", operator, 401},
		{"name as suffix", "/mcp", "xmy-box.localhost", operator, 401},
		{"name and more", "/mcp", "my-box.localhost.evil.example", operator, 401},
		{"bad port", "/mcp", "127.0.0.1:99999", operator, 401},
		{"user info", "/mcp", "127.0.0.1:1@evil.example", operator, 400},
		{"right origin", "/api/x", here, append(bearer(operatorToken), "Origin", "http://"+here), 200},
		{"foreign origin", "/api/x", here, append(bearer(operatorToken), "Origin", "http://evil.example"), 401},
		{"other port's origin", "/api/x", here, append(bearer(operatorToken), "Origin", "http://127.0.0.1:3000"), 401},
		{"null origin", "/api/x", here, append(bearer(operatorToken), "Origin", "null"), 401},
		{"https origin", "/api/x", here, append(bearer(operatorToken), "Origin", "https://"+here), 401},
		{"two origins", "/api/x", here, append(bearer(operatorToken), "Origin", "http://"+here, "Origin", "http://evil.example"), 401},
		{"forward proxy", "http://127.0.0.1:4790/api/x", here, operator, 401},
		{"our own corner", "/.hermes-box/other", here, operator, 404},
	}
	s := newSetup(t, nil)
	for _, tt := range tests {
		t.Run(tt.what, func(t *testing.T) {
			before := len(s.seen)
			resp := s.raw("GET", tt.path, tt.host, tt.header...)
			if resp.StatusCode != tt.want {
				t.Fatalf("status %d, want %d", resp.StatusCode, tt.want)
			}
			if reached := len(s.seen) > before; reached != (tt.want == 200) {
				t.Errorf("reached upstream: %v", reached)
			}
			if tt.want == 401 {
				body, err := io.ReadAll(resp.Body)
				if err != nil || string(body) != "Unauthorized\n" || resp.Header.Get("WWW-Authenticate") != `Bearer realm="executor"` ||
					!strings.HasPrefix(resp.Header.Get("Content-Type"), "text/plain") {
					t.Errorf("%q %v, %v", body, resp.Header, err)
				}
			}
		})
	}
}

func TestWhatPassesThrough(t *testing.T) {
	s := newSetup(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "http://evil.example")
		w.Header().Set("Access-Control-Allow-Credentials", "true")
		w.Header().Set("Set-Cookie", "a=b")
		w.Header().Set("Mcp-Session-Id", "s")
	})
	resp := s.raw("POST", "/mcp?a=b", "127.0.0.1:4790", append(bearer(agentToken),
		"Origin", "http://127.0.0.1:4790", "Cookie", "hermes_box_other=x; b=c", "X-Executor-Token", "t",
		"Referer", "http://127.0.0.1:4790/?_token=x", "X-Forwarded-For", "1.2.3.4", "Mcp-Session-Id", "s")...)
	if resp.StatusCode != 200 || resp.Header.Get("Mcp-Session-Id") != "s" {
		t.Fatalf("status %d", resp.StatusCode)
	}
	for _, name := range []string{"Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Set-Cookie"} {
		if v := resp.Header.Get(name); v != "" {
			t.Errorf("%s came back: %q", name, v)
		}
	}
	r := s.seen[0]
	for name, want := range map[string]string{
		"Authorization": "Bearer " + innerSecret, "Origin": "http://" + r.Host, "Mcp-Session-Id": "s",
		"Cookie": "", "X-Executor-Token": "", "Referer": "", "X-Forwarded-For": "",
	} {
		if got := r.Header.Get(name); got != want {
			t.Errorf("%s upstream: %q, want %q", name, got, want)
		}
	}
	if r.URL.RequestURI() != "/mcp?a=b" || !strings.HasPrefix(r.Host, "127.0.0.1:") || r.Host == "127.0.0.1:4790" {
		t.Errorf("upstream saw %s at %s", r.URL, r.Host)
	}
}

// cookieOf is the session cookie as a browser would send it back.
func cookieOf(t *testing.T, resp *http.Response) *http.Cookie {
	t.Helper()
	cookies := resp.Cookies()
	if resp.StatusCode != 303 || resp.Header.Get("Location") != "/" || len(cookies) != 1 {
		t.Fatalf("status %d, location %q, %d cookies", resp.StatusCode, resp.Header.Get("Location"), len(cookies))
	}
	return cookies[0]
}

func TestTicketsAndSessions(t *testing.T) {
	const host = "my-box.localhost:4790"
	s := newSetup(t, nil)
	ticket := s.door.NewTicket()
	c := cookieOf(t, s.raw("GET", "/?_token="+ticket, host))
	if c.Name != "hermes_box_my-box" || !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Path != "/" || c.MaxAge <= 0 || c.Domain != "" {
		t.Errorf("cookie %+v", c)
	}
	if c.Value == ticket {
		t.Error("the session is the ticket")
	}
	session := []string{"Cookie", c.Name + "=" + c.Value}
	for _, tt := range []struct {
		what   string
		method string
		header []string
		want   int
	}{
		{"session", "GET", session, 200},
		{"same origin", "POST", append([]string{"Sec-Fetch-Site", "same-origin", "Origin", "http://" + host}, session...), 200},
		{"address bar", "GET", append([]string{"Sec-Fetch-Site", "none"}, session...), 200},
		{"cross-site", "GET", append([]string{"Sec-Fetch-Site", "cross-site"}, session...), 401},
		{"other port", "GET", append([]string{"Sec-Fetch-Site", "same-site"}, session...), 401},
		{"foreign origin", "POST", append([]string{"Origin", "http://evil.example"}, session...), 401},
		{"other box's cookie", "GET", []string{"Cookie", "hermes_box_other=" + c.Value}, 401},
		{"invented", "GET", []string{"Cookie", c.Name + "=" + strings.Repeat("0", 64)}, 401},
		{"wrong bearer beside the cookie", "GET", append(bearer(innerSecret), session...), 401},
	} {
		if got := s.raw(tt.method, "/api/x", host, tt.header...).StatusCode; got != tt.want {
			t.Errorf("%s: status %d, want %d", tt.what, got, tt.want)
		}
	}

	if got := s.raw("GET", "/?_token="+ticket, host).StatusCode; got != 401 {
		t.Errorf("a used ticket: %d", got)
	}
	if got := s.raw("GET", "/?_token="+ticket, host, session...).StatusCode; got != 303 {
		t.Errorf("a reload with a session: %d", got)
	}
	if got := s.raw("GET", "/?_token="+operatorToken, host).StatusCode; got != 303 {
		t.Errorf("the operator token of a headless host: %d", got)
	}
	for _, bad := range []string{"", "x", agentToken, strings.Repeat("9", 64), s.door.NewTicket() + "&_token=" + s.door.NewTicket()} {
		if got := s.raw("GET", "/?_token="+bad, host).StatusCode; got != 401 {
			t.Errorf("ticket %q: %d", bad, got)
		}
	}
	late := s.door.NewTicket()
	s.clock.advance(TicketLife)
	if got := s.raw("GET", "/?_token="+late, host).StatusCode; got != 401 {
		t.Errorf("an expired ticket: %d", got)
	}
	intime := s.door.NewTicket()
	s.clock.advance(TicketLife - time.Second)
	cookieOf(t, s.raw("GET", "/?_token="+intime, host))
	s.clock.advance(SessionLife)
	if got := s.raw("GET", "/api/x", host, session...).StatusCode; got != 401 {
		t.Errorf("an expired session: %d", got)
	}
}

func TestOneTicketOpensOneSession(t *testing.T) {
	s := newSetup(t, nil)
	ticket := s.door.NewTicket()
	var wg sync.WaitGroup
	codes := make(chan int, 16)
	for range cap(codes) {
		wg.Go(func() {
			r := httptest.NewRequest("GET", "/?_token="+ticket, nil)
			r.Host = "127.0.0.1"
			w := httptest.NewRecorder()
			s.door.ServeHTTP(w, r)
			codes <- w.Code
		})
	}
	wg.Wait()
	close(codes)
	opened := 0
	for code := range codes {
		if code == 303 {
			opened++
		}
	}
	if opened != 1 {
		t.Errorf("%d sessions", opened)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	s := newSetup(t, nil)
	first := s.door.NewTicket()
	s.clock.advance(time.Second)
	for range 10 * maxTickets {
		s.door.NewTicket()
	}
	for range 10 * maxSessions {
		s.door.newSession()
	}
	if len(s.door.tickets) > maxTickets || len(s.door.sessions) > maxSessions {
		t.Errorf("%d tickets, %d sessions", len(s.door.tickets), len(s.door.sessions))
	}
	if s.door.useTicket(first) {
		t.Error("the oldest ticket stayed")
	}
}

func TestChallenge(t *testing.T) {
	s := newSetup(t, nil)
	if err := mcp.ProveDoor(t.Context(), s.srv.URL, agentToken); err != nil {
		t.Error(err)
	}
	if err := mcp.ProveDoor(t.Context(), s.srv.URL, operatorToken); err == nil {
		t.Error("proven with another token")
	}
	n := strings.Repeat("0", 64)
	for query, want := range map[string]int{
		"?nonce=" + n: 200, "": 400, "?nonce=": 400, "?nonce=" + n + "0": 400, "?nonce=" + strings.Repeat("A", 64): 400,
		"?nonce=" + n + "&nonce=" + n: 400,
	} {
		if got := s.raw("GET", mcp.ChallengePath+query, "127.0.0.1").StatusCode; got != want {
			t.Errorf("%q: %d, want %d", query, got, want)
		}
	}
	if got := s.raw("GET", mcp.ChallengePath+"?nonce="+n, "evil.example").StatusCode; got != 401 {
		t.Errorf("foreign host: %d", got)
	}
	if len(s.seen) != 0 {
		t.Error("a challenge went upstream")
	}
}

func TestDownSaysWhy(t *testing.T) {
	s := newSetup(t, nil)
	s.down = "Executor is paused (hb up resumes it)"
	resp := s.raw("POST", "/mcp", "127.0.0.1", bearer(agentToken)...)
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 503 || !strings.Contains(string(body), "paused") {
		t.Errorf("%d %q, %v", resp.StatusCode, body, err)
	}
	if got := s.raw("POST", "/mcp", "127.0.0.1").StatusCode; got != 401 {
		t.Errorf("a stranger learns that it is down: %d", got)
	}
}

func TestRefusedSecretIsNotTheClientsFault(t *testing.T) {
	s := newSetup(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401) })
	if got := s.raw("GET", "/mcp", "127.0.0.1", bearer(agentToken)...).StatusCode; got != 502 {
		t.Errorf("status %d", got)
	}
}

// The server sends its second event only after the client has seen the first:
// with any buffer in between this hangs.
func TestStreamsAreNotBuffered(t *testing.T) {
	seen := make(chan bool)
	s := newSetup(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-seen:
			case <-r.Context().Done():
				return
			}
		}
	})
	req, err := http.NewRequestWithContext(t.Context(), "GET", s.srv.URL+"/mcp", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+agentToken)
	resp, err := (&http.Client{Timeout: 20 * time.Second}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	sc := bufio.NewScanner(resp.Body)
	for i := range 3 {
		if !sc.Scan() || sc.Text() != fmt.Sprintf("data: %d", i) || !sc.Scan() {
			t.Fatalf("event %d: %q, %v", i, sc.Text(), sc.Err())
		}
		seen <- true
	}
}

func TestUpgradesPass(t *testing.T) {
	s := newSetup(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			w.WriteHeader(400)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_ = rw.Flush()
		_, _ = io.Copy(conn, rw) // echo
	})
	conn, err := net.Dial("tcp4", s.srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Fprintf(conn, "GET /api/ws HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", operatorToken)
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("%v, %v", resp, err)
	}
	_, _ = io.WriteString(conn, "ping")
	echo := make([]byte, 4)
	if _, err := io.ReadFull(br, echo); err != nil || string(echo) != "ping" {
		t.Errorf("%q, %v", echo, err)
	}
}

func TestOAuthComesBack(t *testing.T) {
	const host = "my-box.localhost:4790"
	s := newSetup(t, nil)
	c := cookieOf(t, s.raw("GET", "/?_token="+s.door.NewTicket(), host))
	from := []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}
	path := "/api/oauth/callback?code=a&state=" + url.QueryEscape(`"><script>`)

	// The provider's navigation: no cookie. The page sends the browser once more.
	resp := s.raw("GET", path, host, from...)
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || len(s.seen) != 0 || strings.Contains(string(body), "<script") {
		t.Fatalf("%d %q, %v", resp.StatusCode, body, err)
	}
	again := strings.Replace(path, "state", "state", 1) + bounced
	if !strings.Contains(string(body), "url="+strings.ReplaceAll(again, "&", "&amp;")+`"`) {
		t.Errorf("page %q lacks %q", body, again)
	}
	// The page's own navigation: cookie.
	if got := s.raw("GET", again, host, "Sec-Fetch-Site", "same-origin", "Sec-Fetch-Mode", "navigate", "Cookie", c.Name+"="+c.Value).StatusCode; got != 200 {
		t.Errorf("status %d", got)
	}
	if got := s.seen[0].URL.RequestURI(); got != path {
		t.Errorf("upstream saw %q", got)
	}
	// Without a session it ends there; other paths never bounce.
	if got := s.raw("GET", again, host, from...).StatusCode; got != 401 {
		t.Errorf("no session: %d", got)
	}
	if got := s.raw("GET", "/api/x?y=z", host, from...).StatusCode; got != 401 {
		t.Errorf("another path: %d", got)
	}
}

func TestChallengeIsJSON(t *testing.T) {
	s := newSetup(t, nil)
	n := strings.Repeat("1", 64)
	resp := s.raw("GET", mcp.ChallengePath+"?nonce="+n, "127.0.0.1")
	var body map[string]string
	if err := json.NewDecoder(resp.Body).Decode(&body); err != nil || body["mac"] != mcp.DoorMAC(agentToken, n) || len(body) != 1 {
		t.Errorf("%v, %v", body, err)
	}
}
