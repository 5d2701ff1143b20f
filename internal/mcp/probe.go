package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Verdict is what a probe found. The set is closed.
type Verdict string

// Verdicts.
const (
	// Healthy: the whole handshake succeeded.
	Healthy Verdict = "healthy"
	// Unreachable: no connection, or it was cut before an answer.
	Unreachable Verdict = "unreachable"
	// Timeout: connected, but no complete answer before the deadline.
	Timeout Verdict = "timeout"
	// AuthNotEnforced: an MCP server opened a session without a token.
	AuthNotEnforced Verdict = "auth-not-enforced"
	// TokenRejected: it is Executor, and it refuses this token.
	TokenRejected Verdict = "token-rejected"
	// NotExecutor: something else answers at this address.
	NotExecutor Verdict = "not-executor"
	// Malformed: the answer breaks HTTP, MCP or our bounds.
	Malformed Verdict = "malformed"
	// HTTPError: an unexpected status before a session was opened.
	HTTPError Verdict = "http-error"
	// RouteBroken: the session was opened, and then the route did not serve it.
	RouteBroken Verdict = "route-broken"
)

// Defaults and bounds of a probe.
const (
	DefaultRequestTimeout = 10 * time.Second
	DefaultTotalTimeout   = 15 * time.Second
	MaxBody               = 1 << 20
	maxHeader             = 64 << 10
)

// Target is the endpoint to probe.
type Target struct {
	URL            string        // http://127.0.0.1:PORT/mcp: a loopback address, no name
	Token          string        // the bearer token
	RequestTimeout time.Duration // per request; 0 = DefaultRequestTimeout
	TotalTimeout   time.Duration // of the whole probe; 0 = DefaultTotalTimeout
}

// Result of a probe.
type Result struct {
	Verdict  Verdict
	Summary  string        // one line for people; printable, without the token
	Protocol string        // negotiated protocol version
	Tools    []string      // names of the tools
	Elapsed  time.Duration // of the whole probe
}

// Healthy reports whether the whole handshake succeeded.
func (r Result) Healthy() bool { return r.Verdict == Healthy }

// requestedProtocol is what we ask for; Executor 1.5.9 echoes it.
const requestedProtocol = "2025-06-18"

// knownProtocols are the published revisions of the MCP specification
// (modelcontextprotocol.io/specification) that carry what a probe uses. A
// server may answer with another one than was asked for.
func knownProtocol(v string) bool {
	return slices.Contains([]string{"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"}, v)
}

// finding ends a probe with a verdict other than Healthy.
type finding struct {
	verdict Verdict
	summary string
}

func (f *finding) Error() string { return f.summary }

func found(v Verdict, format string, args ...any) error {
	return &finding{v, fmt.Sprintf(format, args...)}
}

// Probe runs the handshake. The error is only about the call itself (a target
// that must not be probed, a context that was cancelled); whatever the server
// does is a verdict.
func Probe(ctx context.Context, t Target) (Result, error) {
	start := time.Now()
	if err := checkURL(t.URL); err != nil {
		return Result{}, err
	}
	if t.Token == "" || strings.ContainsFunc(t.Token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return Result{}, errors.New("probe: the token is empty or not printable")
	}
	if t.RequestTimeout <= 0 {
		t.RequestTimeout = DefaultRequestTimeout
	}
	if t.TotalTimeout <= 0 {
		t.TotalTimeout = DefaultTotalTimeout
	}
	total, cancel := context.WithTimeout(ctx, t.TotalTimeout)
	defer cancel()
	c := newClient(t)
	defer c.http.CloseIdleConnections()

	var res Result
	err := c.handshake(total, &res)
	if ctx.Err() != nil && err != nil {
		return Result{}, fmt.Errorf("probe: %w", context.Cause(ctx))
	}
	res.Elapsed = time.Since(start)
	if f := (*finding)(nil); errors.As(err, &f) {
		res.Verdict, res.Summary = f.verdict, f.summary
	} else if err != nil {
		return Result{}, fmt.Errorf("probe: %w", err)
	} else {
		res.Verdict = Healthy
		res.Summary = "healthy, MCP " + res.Protocol
	}
	res.Summary = strings.ReplaceAll(res.Summary, t.Token, "[redacted]")
	return res, nil
}

// checkURL accepts plain HTTP to a loopback address. A name is refused:
// localhost may mean ::1 for one program and 127.0.0.1 for another.
func checkURL(raw string) error {
	u, err := url.Parse(raw)
	if err != nil {
		return errors.New("probe: the URL cannot be parsed")
	}
	addr, err := netip.ParseAddr(u.Hostname())
	if u.Scheme != "http" || u.User != nil || u.Port() == "" || err != nil || !addr.IsLoopback() {
		return errors.New("probe: the URL is not http://127.0.0.1:PORT/…")
	}
	return nil
}

type client struct {
	http           *http.Client
	url, token     string
	requestTimeout time.Duration
}

func newClient(t Target) *client {
	return &client{newHTTPClient(), t.URL, t.Token, t.RequestTimeout}
}

func newHTTPClient() *http.Client {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &http.Client{
		Transport: &http.Transport{
			Proxy:                  nil, // never HTTP_PROXY: it would see the token
			DialContext:            (&net.Dialer{}).DialContext,
			DisableCompression:     true,
			MaxResponseHeaderBytes: maxHeader,
			MaxConnsPerHost:        2,
			Protocols:              protocols,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func (c *client) handshake(ctx context.Context, res *Result) error {
	// 1. Without a token it must refuse, in Executor's words. This catches an
	// unauthenticated daemon and a stranger on the port, and the token is not
	// sent to either.
	if err := c.mustRefuse(ctx); err != nil {
		return err
	}
	// 2. The session opens with the token.
	session, protocol, err := c.initialize(ctx)
	if err != nil {
		return err
	}
	res.Protocol = protocol
	// 5. The session closes whatever happens in between: Executor keeps
	// sessions in memory. Best effort.
	defer c.closeSession(ctx, session, protocol)

	// 3. and 4. The same route must now serve the session.
	if err := c.notifyInitialized(ctx, session, protocol); err != nil {
		return err
	}
	tools, err := c.listTools(ctx, session, protocol)
	if err != nil {
		return err
	}
	res.Tools = tools
	if !slices.Contains(tools, "execute") {
		return found(NotExecutor, "the tool execute is not among the %d listed", len(tools))
	}
	return nil
}

const initializeBody = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"` + requestedProtocol +
	`","capabilities":{},"clientInfo":{"name":"hermes-box","version":"1"}}}`

func (c *client) mustRefuse(ctx context.Context) error {
	a, err := c.send(ctx, http.MethodPost, initializeBody, nil, 1)
	if err != nil {
		return err
	}
	switch a.status {
	case http.StatusUnauthorized:
		if !strings.HasPrefix(a.header.Get("WWW-Authenticate"), `Bearer realm="executor"`) {
			return found(NotExecutor, "status 401 without Executor's realm: something else answers here")
		}
		return nil
	case http.StatusOK:
		var init initializeResult
		if a.parseErr == nil && json.Unmarshal(a.result, &init) == nil && init.ProtocolVersion != "" {
			return found(AuthNotEnforced, "a request without a token was accepted: authentication is not enforced")
		}
		return found(NotExecutor, "status 200 without a token and no MCP answer: something else answers here")
	default:
		return c.unexpected(HTTPError, "a request without a token", a)
	}
}

type initializeResult struct {
	ProtocolVersion string                     `json:"protocolVersion"`
	Capabilities    map[string]json.RawMessage `json:"capabilities"`
	ServerInfo      struct {
		Name string `json:"name"`
	} `json:"serverInfo"`
}

func (c *client) initialize(ctx context.Context) (session, protocol string, err error) {
	a, err := c.send(ctx, http.MethodPost, initializeBody, c.auth("", ""), 1)
	if err != nil {
		return "", "", err
	}
	switch {
	case a.status == http.StatusUnauthorized || a.status == http.StatusForbidden:
		return "", "", found(TokenRejected, "the token was rejected (status %d)", a.status)
	case a.status != http.StatusOK:
		return "", "", c.unexpected(HTTPError, "initialize", a)
	case a.parseErr != nil:
		return "", "", found(Malformed, "initialize: %s", clip(a.parseErr.Error()))
	}
	var init initializeResult
	if err := json.Unmarshal(a.result, &init); err != nil {
		return "", "", found(Malformed, "initialize: the result is not an initialize result")
	}
	if init.ServerInfo.Name != "executor" {
		return "", "", found(NotExecutor, "the server calls itself %s", clip(init.ServerInfo.Name))
	}
	if caps, ok := init.Capabilities["tools"]; !ok || string(caps) == "null" {
		return "", "", found(Malformed, "initialize: the server offers no tools")
	}
	if !knownProtocol(init.ProtocolVersion) {
		return "", "", found(Malformed, "initialize: unknown protocol version %s", clip(init.ProtocolVersion))
	}
	session = a.header.Get("Mcp-Session-Id")
	if !validSession(session) {
		return "", "", found(Malformed, "initialize: no usable session id")
	}
	return session, init.ProtocolVersion, nil
}

// validSession holds the session id to the specification's grammar (visible
// ASCII) and to a length that is no burden.
func validSession(s string) bool {
	return s != "" && len(s) <= 256 && !strings.ContainsFunc(s, func(r rune) bool { return r < '!' || r > '~' })
}

func (c *client) notifyInitialized(ctx context.Context, session, protocol string) error {
	a, err := c.send(ctx, http.MethodPost, `{"jsonrpc":"2.0","method":"notifications/initialized"}`, c.auth(session, protocol), 0)
	if err != nil {
		return err
	}
	if a.status != http.StatusAccepted {
		return c.unexpected(RouteBroken, "notifications/initialized", a)
	}
	return nil
}

func (c *client) listTools(ctx context.Context, session, protocol string) ([]string, error) {
	a, err := c.send(ctx, http.MethodPost, `{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{}}`, c.auth(session, protocol), 2)
	if err != nil {
		return nil, err
	}
	if a.status != http.StatusOK {
		return nil, c.unexpected(RouteBroken, "tools/list", a)
	}
	if a.parseErr != nil {
		return nil, found(Malformed, "tools/list: %s", clip(a.parseErr.Error()))
	}
	var list struct {
		Tools []struct {
			Name string `json:"name"`
		} `json:"tools"`
	}
	if err := json.Unmarshal(a.result, &list); err != nil {
		return nil, found(Malformed, "tools/list: the result is not a list of tools")
	}
	names := make([]string, 0, len(list.Tools))
	for _, tool := range list.Tools {
		names = append(names, tool.Name)
	}
	return names, nil
}

func (c *client) closeSession(ctx context.Context, session, protocol string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(2*time.Second, c.requestTimeout))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodDelete, c.url, nil)
	if err != nil {
		return
	}
	for k, v := range c.auth(session, protocol) {
		req.Header.Set(k, v)
	}
	if resp, err := c.http.Do(req); err == nil {
		_ = resp.Body.Close() // its content does not matter
	}
}

func (c *client) auth(session, protocol string) map[string]string {
	h := map[string]string{"Authorization": "Bearer " + c.token}
	if session != "" {
		h["Mcp-Session-Id"] = session
		h["MCP-Protocol-Version"] = protocol
	}
	return h
}

// answer is one response, read to its end or to the message asked for.
type answer struct {
	status   int
	header   http.Header
	result   json.RawMessage // of the JSON-RPC response, when parseErr is nil
	parseErr error
	text     []byte // beginning of a plain text body
}

// send makes one request. With id > 0 and status 200 the JSON-RPC response to
// that id is parsed; other bodies are read only as far as needed for text.
func (c *client) send(ctx context.Context, method, body string, header map[string]string, id int) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, c.requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.url, strings.NewReader(body))
	if err != nil {
		return answer{}, fmt.Errorf("make a request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	// Executor answers 406 unless both are accepted.
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Accept-Encoding", "identity")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, transportFinding(ctx, err)
	}
	defer func() { _ = resp.Body.Close() }()
	a := answer{status: resp.StatusCode, header: resp.Header}
	if ce := resp.Header.Get("Content-Encoding"); ce != "" && ce != "identity" {
		// Nothing is decompressed, so a bomb stays a few bytes.
		return answer{}, found(Malformed, "a compressed body although none was accepted")
	}
	limited := &boundedReader{r: resp.Body, left: MaxBody}
	if id > 0 && resp.StatusCode == http.StatusOK {
		a.result, a.parseErr = readMessage(resp.Header.Get("Content-Type"), limited, id)
		if ctx.Err() != nil && a.parseErr != nil {
			return answer{}, transportFinding(ctx, ctx.Err())
		}
		return a, nil
	}
	a.text = readText(resp.Header.Get("Content-Type"), limited)
	return a, nil
}

// transportFinding tells a deadline from a connection that failed.
func transportFinding(ctx context.Context, err error) error {
	var netErr net.Error
	if ctx.Err() != nil || errors.As(err, &netErr) && netErr.Timeout() {
		return found(Timeout, "no complete answer before the deadline")
	}
	var opErr *net.OpError
	if errors.As(err, &opErr) {
		return found(Unreachable, "%s: %s", opErr.Op, clip(rootCause(opErr.Err).Error()))
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return found(Unreachable, "the connection was closed without an answer")
	}
	return found(Malformed, "not a valid HTTP answer")
}

func rootCause(err error) error {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err
		}
		err = next
	}
}

// unexpected describes a status that the step did not allow.
func (c *client) unexpected(v Verdict, step string, a answer) error {
	if a.status >= 300 && a.status < 400 {
		return found(NotExecutor, "%s: a redirect (status %d), which is not followed", step, a.status)
	}
	detail := ""
	if text := strings.TrimSpace(string(a.text)); text != "" {
		detail = ": " + clip(text)
	}
	if v == RouteBroken {
		u, _ := url.Parse(c.url) // checked by Probe
		return found(v, "%s %s: status %d%s", u.EscapedPath(), step, a.status, detail)
	}
	return found(v, "%s: status %d%s", step, a.status, detail)
}

// readText returns the beginning of a plain text body, nil for others.
func readText(contentType string, r io.Reader) []byte {
	if mediaType(contentType) != "text/plain" {
		return nil
	}
	head, err := io.ReadAll(io.LimitReader(r, 512))
	if err != nil {
		return nil // only decoration
	}
	head, _, _ = bytes.Cut(bytes.TrimSpace(head), []byte("\n"))
	return head
}

// clip makes foreign text short and printable.
func clip(s string) string {
	const most = 160
	if len(s) > most {
		s = s[:most] + "…"
	}
	q := strconv.QuoteToGraphic(s)
	return q[1 : len(q)-1]
}
