//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"hermes-box-lite/internal/wire"
)

// TestDoor speaks with the real Executor through the forwarded port, with the
// official MCP SDK as a client that shares no code with ours.
func TestDoor(t *testing.T) {
	h := newHome(t, nil)
	name := h.create("door")
	agent, operator := h.token(name, "agent"), h.token(name, "operator")
	address := "127.0.0.1:" + strconv.Itoa(h.record(name).HostPort)

	t.Run("an independent client", func(t *testing.T) { independentClient(t, address, agent) })
	t.Run("who may what", func(t *testing.T) { whoMayWhat(t, name, address, agent, operator) })
	t.Run("streams", func(t *testing.T) { streams(t, address, agent) })
	h.within(t, "Executor's own port", func(t *testing.T) {
		for _, token := range []string{agent, operator} {
			// On standard input, so that the tokens are in no command line.
			r := h.pipe(strings.NewReader("header = \"Authorization: Bearer "+token+"\"\n"), "enter", name, "--",
				"curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-K", "-", "http://127.0.0.1:4787/api/integrations")
			if r.code != 0 || r.stdout != "401" {
				t.Errorf("a token of the door at Executor itself: %s", r)
			}
		}
	})
	h.within(t, "a stranger on the port", func(t *testing.T) { strangerOnThePort(t, h, name) })
}

// bearer adds a token to every request.
type bearer struct{ token string }

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return http.DefaultTransport.RoundTrip(r)
}

func independentClient(t *testing.T, address, token string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	client := mcp.NewClient(&mcp.Implementation{Name: "e2e", Version: "1.0.0"}, nil)
	session, err := client.Connect(ctx, &mcp.StreamableClientTransport{
		Endpoint: "http://" + address + "/mcp", HTTPClient: &http.Client{Transport: bearer{token}},
		// Executor 1.5.9 itself sends the end of this stream's header with the
		// first event only (seen on the wire), and the SDK waits for it.
		DisableStandaloneSSE: true,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := session.Close(); err != nil {
			t.Errorf("close the session: %v", err)
		}
	}()
	if got := session.InitializeResult().ServerInfo.Name; got != "executor" {
		t.Errorf("the server is called %q", got)
	}
	tools, err := session.ListTools(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, tool := range tools.Tools {
		found = found || tool.Name == "execute"
	}
	if !found {
		t.Errorf("no tool execute among %d", len(tools.Tools))
	}
	answer, err := session.CallTool(ctx, &mcp.CallToolParams{Name: "execute", Arguments: map[string]any{"code": "return 6*7;"}})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, c := range answer.Content {
		if piece, ok := c.(*mcp.TextContent); ok {
			text.WriteString(piece.Text)
		}
	}
	if answer.IsError || text.String() != "42" {
		t.Errorf("execute answered %q (error: %v)", text.String(), answer.IsError)
	}
	wrong, err := client.Connect(ctx, &mcp.StreamableClientTransport{
		Endpoint: "http://" + address + "/mcp", HTTPClient: &http.Client{Transport: bearer{strings.Repeat("0", 64)}}, MaxRetries: -1, DisableStandaloneSSE: true,
	}, nil)
	if err == nil {
		_ = wrong.Close()
		t.Error("a wrong token was let in")
	}
}

func whoMayWhat(t *testing.T, name, address, agent, operator string) {
	const initialize = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"e2e","version":"1"}}}`
	_, port, _ := net.SplitHostPort(address)
	for _, c := range []struct {
		what, path, token, host, origin string
		want                            int
	}{
		{"the agent at /mcp", "/mcp", agent, "", "", 200},
		{"the agent under the box's name", "/mcp", agent, name + ".localhost:" + port, "", 200},
		{"the agent from the box's own page", "/mcp", agent, "", "http://" + address, 200},
		{"nobody at /mcp", "/mcp", "", "", "", 401},
		{"a wrong token at /mcp", "/mcp", strings.Repeat("a", 64), "", "", 401},
		{"the agent at the API", "/api/integrations", agent, "", "", 401},
		{"the agent at the page", "/", agent, "", "", 401},
		{"the agent beside /mcp", "/mcpx", agent, "", "", 401},
		{"the agent through dots", "/mcp/../api/integrations", agent, "", "", 401},
		{"the agent through escaped dots", "/mcp/%2e%2e/api/integrations", agent, "", "", 401},
		{"the operator at the API", "/api/integrations", operator, "", "", 200},
		{"the operator at the page", "/", operator, "", "", 200},
		{"another site", "/mcp", agent, "", "http://evil.example", 401},
		{"no origin at all", "/mcp", agent, "", "null", 401},
		{"another box's page", "/mcp", agent, name + ".localhost:" + port, "http://other.localhost:" + port, 401},
		{"a rebound name", "/mcp", agent, "evil.example:" + port, "", 401},
		{"another box's name", "/mcp", operator, "other.localhost:" + port, "", 401},
		{"the operator under a rebound name", "/api/integrations", operator, "evil.example", "", 401},
	} {
		t.Run(c.what, func(t *testing.T) {
			method, body := http.MethodGet, ""
			if strings.HasPrefix(c.path, "/mcp") {
				method, body = http.MethodPost, initialize
			}
			req, err := http.NewRequest(method, "http://"+address+"/", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			req.URL.Opaque = c.path // as it is, without cleaning
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Accept", "application/json, text/event-stream")
			if c.token != "" {
				req.Header.Set("Authorization", "Bearer "+c.token)
			}
			if c.host != "" {
				req.Host = c.host
			}
			if c.origin != "" {
				req.Header.Set("Origin", c.origin)
			}
			resp, err := http.DefaultTransport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = resp.Body.Close() }()
			data, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
			if resp.StatusCode != c.want {
				t.Errorf("status %d, want %d: %.200s", resp.StatusCode, c.want, data)
			}
			if c.want == 401 && !strings.HasPrefix(resp.Header.Get("WWW-Authenticate"), `Bearer realm="executor"`) {
				t.Errorf("the challenge is %q", resp.Header.Get("WWW-Authenticate"))
			}
		})
	}
}

// streams opens the server's event stream of a session. It must stay open
// beside other requests, and end, whole, when the session does. Executor 1.5.9
// sends the end of the header with the first event only, so that it is not
// expected earlier.
func streams(t *testing.T, address, token string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	do := func(ctx context.Context, method, session, body string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, method, "http://"+address+"/mcp", strings.NewReader(body))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Authorization", "Bearer "+token)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		if method == http.MethodGet {
			req.Header.Set("Accept", "text/event-stream")
		}
		if session != "" {
			req.Header.Set("Mcp-Session-Id", session)
			req.Header.Set("MCP-Protocol-Version", "2025-06-18")
		}
		return http.DefaultClient.Do(req)
	}
	must := func(want int, method, session, body string) http.Header {
		t.Helper()
		resp, err := do(ctx, method, session, body)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Fatalf("%s %s: status %d", method, body, resp.StatusCode)
		}
		return resp.Header
	}
	session := must(200, http.MethodPost, "", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"e2e","version":"1"}}}`).Get("Mcp-Session-Id")
	must(202, http.MethodPost, session, `{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	ended, sent := make(chan error, 1), make(chan struct{})
	wrote := sync.OnceFunc(func() { close(sent) })
	go func() {
		stream, err := do(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
			WroteRequest: func(httptrace.WroteRequestInfo) { wrote() },
		}), http.MethodGet, session, "")
		if err != nil {
			ended <- err
			return
		}
		defer func() { _ = stream.Body.Close() }()
		if stream.StatusCode != 200 || !strings.HasPrefix(stream.Header.Get("Content-Type"), "text/event-stream") {
			ended <- fmt.Errorf("status %d, %s", stream.StatusCode, stream.Header.Get("Content-Type"))
			return
		}
		_, err = io.Copy(io.Discard, stream.Body)
		ended <- err
	}()
	select {
	case <-sent:
	case err := <-ended:
		t.Fatalf("no stream: %v", err)
	}
	for i := range 20 {
		must(200, http.MethodPost, session, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"ping"}`, i+2))
	}
	select {
	case err := <-ended:
		t.Fatalf("the stream ended early: %v", err)
	default:
	}
	must(200, http.MethodDelete, session, "")
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the stream's end: %v", err)
		}
	case <-ctx.Done():
		t.Error("the stream outlives its session")
	}
}

// strangerOnThePort has another program answer where the box's door should be:
// it is told nothing. Then it has the box's own port while the box is stopped.
func strangerOnThePort(t *testing.T, h *home, name string) {
	var mu sync.Mutex
	var heard bytes.Buffer
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		_ = r.Write(&heard)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"mac":"`+strings.Repeat("0", 64)+`"}`)
	})}
	served := make(chan error, 2)
	serve := func(l net.Listener) int {
		go func() { served <- server.Serve(l) }()
		return l.Addr().(*net.TCPAddr).Port
	}
	elsewhere, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h.setenv("BOX_BROWSER", "/bin/true")
	path := filepath.Join(h.dir, ".box/boxes", name+".json")
	record := h.recorded(name)
	moved := strings.Replace(record, fmt.Sprintf(`"host_port": %d`, h.record(name).HostPort), fmt.Sprintf(`"host_port": %d`, serve(elsewhere)), 1)
	if err := os.WriteFile(path, []byte(moved), 0o600); err != nil || moved == record {
		t.Fatal("the record was not changed", err)
	}
	h.wants(3, nil, "doctor", name)
	if r := h.box("open", name); r.code == 0 {
		t.Errorf("open with a stranger behind the port: %s", r)
	}
	if err := os.WriteFile(path, []byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	if heard.Len() == 0 {
		t.Error("nobody has asked the stranger who it is")
	}
	for _, s := range h.secrets {
		if strings.Contains(heard.String(), s.text) {
			t.Errorf("the stranger was told %s", s.what)
		}
	}
	mu.Unlock()

	h.must("stop", name)
	serve(h.listen(h.record(name).HostPort))
	h.wants(3, nil, "doctor", name)
	r := h.box("open", name)
	if r.code == 0 || !strings.Contains(r.stderr, "used by another program") {
		t.Errorf("open with a stranger on the port: %s", r)
	}
	if r := h.box("start", name); r.code == 0 {
		t.Errorf("start with a stranger on the port: %s", r)
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}
	h.must("start", name)
	healthySoon(t, h, name)
	if c := check(t, h.doctor(name, 0), "mcp.host"); c.Status != wire.Pass {
		t.Errorf("%+v", c)
	}
}
