package mcp

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

const testToken = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// good is a server that speaks Executor 1.5.9's contract; the fields bend it.
type good struct {
	mu        sync.Mutex
	protocol  string
	name      string
	tools     string
	session   string
	sse       bool
	public    bool        // no token needed
	noToken   http.Header // nil: Executor's own challenge
	after     int         // status of everything in a session; 0 = right
	listBody  string      // instead of the list of tools
	initBody  string      // instead of the initialize result
	deleted   int
	sawSecret bool // the token arrived
}

func newGood() *good {
	return &good{protocol: "2025-06-18", name: "executor", tools: `{"name":"execute"},{"name":"resume"}`, session: "s-1"}
}

func (g *good) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	authorized := r.Header.Get("Authorization") == "Bearer "+testToken
	g.sawSecret = g.sawSecret || authorized
	if !authorized && !g.public {
		w.Header().Set("WWW-Authenticate", `Bearer realm="executor", Basic realm="executor"`)
		w.Header().Set("Content-Type", "text/plain")
		for k, v := range g.noToken {
			w.Header()[k] = v
		}
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, "Unauthorized")
		return
	}
	if r.Method == http.MethodDelete {
		g.deleted++
		return
	}
	body, _ := io.ReadAll(r.Body)
	if strings.Contains(string(body), `"initialize"`) {
		if g.session != "" {
			w.Header().Set("Mcp-Session-Id", g.session)
		}
		if g.initBody != "" {
			g.answer(w, g.initBody)
			return
		}
		g.answer(w, fmt.Sprintf(`{"result":{"protocolVersion":%q,"capabilities":{"tools":{"listChanged":true}},"serverInfo":{"name":%q,"version":"1.0.0"}},"jsonrpc":"2.0","id":1}`, g.protocol, g.name))
		return
	}
	if g.after != 0 {
		w.WriteHeader(g.after)
		return
	}
	if r.Header.Get("Mcp-Session-Id") != g.session || r.Header.Get("MCP-Protocol-Version") != g.protocol {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	if strings.Contains(string(body), "notifications/initialized") {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	list := g.listBody
	if list == "" {
		list = `{"jsonrpc":"2.0","id":2,"result":{"tools":[` + g.tools + `]}}`
	}
	g.answer(w, list)
}

func (g *good) answer(w http.ResponseWriter, message string) {
	if !g.sse {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		_, _ = io.WriteString(w, message)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = fmt.Fprintf(w, ": hello\r\n\r\nevent: message\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/x\"}\n\nid: 7\ndata: %s\n\n", message)
}

func bend(change func(*good)) http.Handler {
	g := newGood()
	change(g)
	return g
}

// authThen answers 401 rightly without a token and by h with one.
func authThen(h http.HandlerFunc) http.Handler {
	g := newGood()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "" {
			g.ServeHTTP(w, r)
			return
		}
		h(w, r)
	})
}

func status(code int, contentType, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

// endless writes for as long as anybody reads.
func endless(contentType, beginning string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		_, err := io.WriteString(w, beginning)
		for chunk := strings.Repeat("a", 32<<10); err == nil; {
			_, err = io.WriteString(w, chunk)
		}
	}
}

func TestVerdicts(t *testing.T) {
	html := "<html>hello</html>"
	tests := []struct {
		name    string
		handler http.Handler
		want    Verdict
		summary string // a part of it
	}{
		{"executor", newGood(), Healthy, "MCP 2025-06-18"},
		{"event streams", bend(func(g *good) { g.sse = true }), Healthy, ""},
		{"older protocol", bend(func(g *good) { g.protocol = "2024-11-05" }), Healthy, "2024-11-05"},
		{"more tools", bend(func(g *good) { g.tools += `,{"name":"new"}` }), Healthy, ""},

		{"no auth", bend(func(g *good) { g.public = true }), AuthNotEnforced, ""},
		{"html 200", status(200, "text/html", html), NotExecutor, ""},
		{"html 401", bend(func(g *good) {
			g.noToken = http.Header{"Www-Authenticate": nil, "Content-Type": {"text/html"}}
		}), NotExecutor, "without Executor's realm"},
		{"other realm", bend(func(g *good) {
			g.noToken = http.Header{"Www-Authenticate": {`Bearer realm="other"`}}
		}), NotExecutor, ""},
		{"405", status(405, "text/plain", "Method Not Allowed"), HTTPError, "status 405"},
		{"500", status(500, "text/plain", "oh\x1b[31m no"), HTTPError, `oh\x1b[31m no`},
		{"redirect", http.RedirectHandler("file:///etc/passwd", http.StatusFound), NotExecutor, "redirect"},
		{"redirect with the token", authThen(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "http://192.0.2.1/")
			w.WriteHeader(http.StatusTemporaryRedirect)
		}), NotExecutor, "redirect"},

		{"token rejected", authThen(status(401, "text/plain", "Unauthorized")), TokenRejected, ""},
		{"paused door", authThen(status(503, "text/plain", "Executor is paused (hb up resumes it)\n")), HTTPError, "Executor is paused"},
		{"token echoed", authThen(status(500, "text/plain", "bad "+testToken)), HTTPError, "bad [redacted]"},
		{"html with the token", authThen(status(200, "text/html", html)), Malformed, "text/html"},
		{"no content type", authThen(func(w http.ResponseWriter, _ *http.Request) { w.Header()["Content-Type"] = nil }), Malformed, ""},
		{"not JSON", authThen(status(200, "application/json", "{")), Malformed, ""},
		{"JSON-RPC error", authThen(status(200, "application/json", `{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"no"}}`)), Malformed, "-32000"},
		{"another id", authThen(status(200, "application/json", `{"jsonrpc":"2.0","id":"1","result":{}}`)), Malformed, "another request"},
		{"JSON-RPC 1", authThen(status(200, "application/json", `{"id":1,"result":{}}`)), Malformed, ""},
		{"another server", bend(func(g *good) { g.name = "files" }), NotExecutor, "files"},
		{"no tools capability", bend(func(g *good) {
			g.initBody = `{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-06-18","capabilities":{},"serverInfo":{"name":"executor"}}}`
		}), Malformed, "no tools"},
		{"wrong protocol version", bend(func(g *good) { g.protocol = "1999-01-01" }), Malformed, "1999-01-01"},
		{"no session id", bend(func(g *good) { g.session = "" }), Malformed, "session id"},
		{"huge session id", bend(func(g *good) { g.session = strings.Repeat("s", 300) }), Malformed, "session id"},
		{"404 after init", bend(func(g *good) { g.after = 404 }), RouteBroken, "/mcp notifications/initialized: status 404"},
		{"500 after init", bend(func(g *good) { g.after = 500 }), RouteBroken, "status 500"},
		{"no execute", bend(func(g *good) { g.tools = `{"name":"resume"}` }), NotExecutor, "execute"},
		{"list is not a list", bend(func(g *good) { g.listBody = `{"jsonrpc":"2.0","id":2,"result":{"tools":7}}` }), Malformed, ""},

		{"huge JSON", authThen(endless("application/json", `{"a":"`)), Malformed, "1 MiB"},
		{"huge event", authThen(endless("text/event-stream", "data: ")), Malformed, "1 MiB"},
		{"huge text", authThen(func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(500)
			endless("text/plain", "")(w, r)
		}), HTTPError, "500"},
		{"huge header", authThen(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Long", strings.Repeat("x", 1<<20))
		}), Malformed, ""},
		{"gzip bomb", authThen(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = z.Write(make([]byte, 32<<20))
			_ = z.Close()
		}), Malformed, "compressed"},
		{"stream without the response", authThen(status(200, "text/event-stream", "data: {\"method\":\"x\"}\n\n")), Malformed, "ended"},
		{"event cut", authThen(status(200, "text/event-stream", `data: {"jsonrpc":"2.0","id":1,"result":{}}`)), Malformed, "ended"},

		{"silent", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		}), Timeout, ""},
		{"slow drip", authThen(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			ticker := time.NewTicker(10 * time.Millisecond)
			defer ticker.Stop()
			for {
				if _, err := io.WriteString(w, " "); err != nil || r.Context().Err() != nil {
					return
				}
				_ = http.NewResponseController(w).Flush()
				select {
				case <-ticker.C:
				case <-r.Context().Done():
					return
				}
			}
		}), Timeout, ""},
		{"hangs up", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_ = conn.Close()
			}
		}), Unreachable, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			srv := httptest.NewServer(tt.handler)
			defer srv.Close()
			target := Target{URL: srv.URL + "/mcp", Token: testToken}
			if tt.want == Timeout {
				target.RequestTimeout = 200 * time.Millisecond
			}
			res, err := Probe(t.Context(), target)
			if err != nil {
				t.Fatal(err)
			}
			if res.Verdict != tt.want || !strings.Contains(res.Summary, tt.summary) || res.Summary == "" {
				t.Errorf("%s: %s; want %s: …%s…", res.Verdict, res.Summary, tt.want, tt.summary)
			}
			if strings.Contains(res.Summary, testToken) {
				t.Error("the token is in the summary")
			}
			if g, ok := tt.handler.(*good); ok {
				g.mu.Lock()
				defer g.mu.Unlock()
				if tt.want == Healthy && g.deleted != 1 {
					t.Errorf("the session was closed %d times", g.deleted)
				}
				if g.sawSecret && (g.public || g.noToken != nil) {
					t.Error("the token was sent to a server that had not refused rightly")
				}
			}
		})
	}
}

func TestNobodyListens(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	res, err := Probe(t.Context(), Target{URL: "http://" + addr + "/mcp", Token: testToken})
	if err != nil || res.Verdict != Unreachable || !strings.Contains(res.Summary, "refused") {
		t.Errorf("%+v, %v", res, err)
	}
}

// The total deadline ends a server that is slow at every step.
func TestTotalTimeout(t *testing.T) {
	g := newGood()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(100 * time.Millisecond):
		case <-r.Context().Done():
		}
		g.ServeHTTP(w, r)
	}))
	defer srv.Close()
	res, err := Probe(t.Context(), Target{URL: srv.URL + "/mcp", Token: testToken, TotalTimeout: 250 * time.Millisecond})
	if err != nil || res.Verdict != Timeout {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestTargetsThatAreNotProbed(t *testing.T) {
	for _, target := range []Target{
		{URL: "http://localhost:1/mcp", Token: testToken},
		{URL: "http://192.0.2.1:80/mcp", Token: testToken},
		{URL: "https://127.0.0.1:1/mcp", Token: testToken},
		{URL: "http://127.0.0.1/mcp", Token: testToken},
		{URL: "http://u:p@127.0.0.1:1/mcp", Token: testToken},
		{URL: "file:///etc/passwd", Token: testToken},
		{URL: "http://127.0.0.1:1/mcp", Token: ""},
		{URL: "http://127.0.0.1:1/mcp", Token: "a\r\nb"},
	} {
		if res, err := Probe(t.Context(), target); err == nil {
			t.Errorf("%s was probed: %+v", target.URL, res)
		}
	}
}

func TestCancelIsNoVerdict(t *testing.T) {
	srv := httptest.NewServer(newGood())
	defer srv.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Probe(ctx, Target{URL: srv.URL + "/mcp", Token: testToken}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

func TestProveDoor(t *testing.T) {
	var authorization, nonces []string
	answer := func(w http.ResponseWriter, nonce string) {
		_, _ = fmt.Fprintf(w, `{"mac":%q}`, DoorMAC(testToken, nonce))
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		authorization = append(authorization, r.Header["Authorization"]...)
		nonces = append(nonces, r.URL.Query().Get("nonce"))
		answer(w, r.URL.Query().Get("nonce"))
	}))
	defer srv.Close()
	for range 2 {
		if err := ProveDoor(t.Context(), srv.URL, testToken); err != nil {
			t.Fatal(err)
		}
	}
	if len(nonces[0]) != 64 || nonces[0] == nonces[1] || len(authorization) > 0 {
		t.Errorf("nonces %v, authorization sent: %v", nonces, len(authorization) > 0)
	}
	first := nonces[0]
	for name, bad := range map[string]func(http.ResponseWriter, string){
		"another token": func(w http.ResponseWriter, n string) {
			_, _ = fmt.Fprintf(w, `{"mac":%q}`, DoorMAC(strings.Repeat("0", 64), n))
		},
		"replay":  func(w http.ResponseWriter, _ string) { _, _ = fmt.Fprintf(w, `{"mac":%q}`, DoorMAC(testToken, first)) },
		"no mac":  func(w http.ResponseWriter, _ string) { _, _ = io.WriteString(w, `{}`) },
		"html":    func(w http.ResponseWriter, _ string) { _, _ = io.WriteString(w, `<html>`) },
		"endless": func(w http.ResponseWriter, _ string) { endless("application/json", `{"mac":"`)(w, nil) },
		"401":     func(w http.ResponseWriter, _ string) { w.WriteHeader(401) },
	} {
		answer = bad
		if err := ProveDoor(t.Context(), srv.URL, testToken); !errors.Is(err, ErrDoorUnproven) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzReadMessage(f *testing.F) {
	f.Add("application/json", []byte(`{"jsonrpc":"2.0","id":1,"result":{"a":1}}`))
	f.Add("text/event-stream", []byte("data: {\"jsonrpc\":\"2.0\",\ndata: \"id\":1,\"result\":{}}\n\n"))
	f.Add("text/event-stream", []byte(": x\r\n\r\ndata: {\"method\":\"y\",\"id\":1}\n\ndata:{}\n\n"))
	f.Add("application/json", []byte(`{"jsonrpc":"2.0","id":1,"error":{"code":1}}`))
	f.Fuzz(func(t *testing.T, contentType string, body []byte) {
		result, err := readMessage(contentType, &boundedReader{r: strings.NewReader(string(body)), left: MaxBody}, 1)
		if err != nil {
			if result != nil {
				t.Error("a result beside an error")
			}
			return
		}
		if len(result) == 0 || result[0] != '{' {
			t.Errorf("the result is no object: %q", result)
		}
		if mt := mediaType(contentType); mt != "application/json" && mt != "text/event-stream" {
			t.Errorf("accepted %q", contentType)
		}
	})
}
