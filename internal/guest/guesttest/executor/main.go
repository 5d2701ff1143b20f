// Command executor stands for the real Executor in tests. It speaks the part
// of the contract of Executor 1.5.9 on which hb relies, as measured with the
// real program:
//
//   - `daemon run --foreground --port N --hostname H --auth-token=T`, and
//     `daemon run --help`, whose --auth-password tells its generation;
//   - /mcp with sessions, 401 with its realm, 406, 404 for unknown sessions;
//   - server-control/server.json, which it leaves behind and which, when its
//     pid is alive, makes the next start refuse;
//   - a taken port makes it print a line and hang; TERM makes it exit 130.
//
// The environment variable STUB_EXECUTOR selects other behaviour (several
// words, separated by commas):
//
//	new        the generation from 1.5.12: no --auth-password and no token
//	           argument needed, the token comes from server-control/auth.json
//	crash      it exits with 1 at once
//	deaf       it listens but never answers
//	slow-stop  it ignores TERM
//
// Two traces in ~/.executor prove what a supervisor did: stub-starts has one
// line per start (its pid), and stub-double exists if two ever ran at once.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	os.Exit(run(os.Args[1:], strings.Split(os.Getenv("STUB_EXECUTOR"), ",")))
}

const unclaimed = 2 * time.Second // grace for a listener that goes away

func run(args, modes []string) int {
	isNew := slices.Contains(modes, "new")
	if len(args) == 1 && args[0] == "--version" {
		fmt.Println("executor v1.5.9")
		return 0
	}
	if len(args) < 2 || args[0] != "daemon" || args[1] != "run" {
		fmt.Fprintln(os.Stderr, "stub executor: only `daemon run` and `--version` exist")
		return 1
	}
	fs := flag.NewFlagSet("daemon run", flag.ContinueOnError)
	fs.Bool("foreground", false, "stay in the foreground")
	port := fs.Int("port", 4788, "port")
	host := fs.String("hostname", "127.0.0.1", "address")
	token := fs.String("auth-token", "", "bearer token")
	if !isNew {
		fs.String("auth-password", "", "password")
	}
	if slices.Contains(args, "--help") {
		fs.SetOutput(os.Stdout)
		fs.VisitAll(func(f *flag.Flag) { fmt.Printf("  --%s  %s\n", f.Name, f.Usage) })
		return 0
	}
	if err := fs.Parse(args[2:]); err != nil {
		return 1
	}
	dir := filepath.Join(os.Getenv("HOME"), ".executor")
	control := filepath.Join(dir, "server-control")
	if err := os.MkdirAll(control, 0o777); err != nil { // the umask decides, as in the original
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if isNew && *token == "" {
		var auth struct{ Token string }
		data, err := os.ReadFile(filepath.Join(control, "auth.json"))
		if err != nil || json.Unmarshal(data, &auth) != nil || auth.Token == "" {
			fmt.Fprintln(os.Stderr, "no token")
			return 1
		}
		*token = auth.Token
	}
	if slices.Contains(modes, "crash") {
		fmt.Fprintln(os.Stderr, "crashing as asked")
		return 1
	}
	if refuse := staleServer(control); refuse != "" {
		fmt.Fprintln(os.Stderr, refuse)
		return 1
	}
	lock := leaveTraces(dir)
	defer func() { _ = lock.Close() }()

	sig := make(chan os.Signal, 1)
	signal.Notify(sig, syscall.SIGTERM, syscall.SIGINT)
	ln, err := net.Listen("tcp4", net.JoinHostPort(*host, strconv.Itoa(*port)))
	if err != nil {
		fmt.Printf("Failed to start server. Is port %d in use?\n", *port)
		<-sig
		return 130
	}
	server, err := json.Marshal(map[string]any{"pid": os.Getpid(), "port": *port, "token": *token})
	if err == nil {
		err = os.WriteFile(filepath.Join(control, "server.json"), server, 0o644) //nolint:gosec // as loose as the original
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if !slices.Contains(modes, "deaf") {
		e := &executor{token: *token, sessions: map[string]bool{}, public: isNew}
		go func() { _ = (&http.Server{Handler: e, ReadHeaderTimeout: unclaimed}).Serve(ln) }()
	}
	fmt.Printf("Daemon ready on http://localhost:%d\nToken authentication is enabled.\n", *port)
	fmt.Printf("base url %s\n", os.Getenv("EXECUTOR_WEB_BASE_URL"))
	for {
		<-sig
		if !slices.Contains(modes, "slow-stop") {
			return 130
		}
	}
}

// staleServer is what the original says when a recorded pid is alive.
func staleServer(control string) string {
	var server struct{ PID int }
	data, err := os.ReadFile(filepath.Join(control, "server.json"))
	if err != nil || json.Unmarshal(data, &server) != nil || syscall.Kill(server.PID, 0) != nil {
		return ""
	}
	return fmt.Sprintf("pid %d is registered but is not reachable. Refusing to start another local server", server.PID)
}

// leaveTraces counts this start and tells whether another one is alive. The
// lock, which the caller keeps open, ends with the process.
func leaveTraces(dir string) *os.File {
	lock, err := os.OpenFile(filepath.Join(dir, "stub-lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil && errors.Is(syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB), syscall.EWOULDBLOCK) {
		_ = os.WriteFile(filepath.Join(dir, "stub-double"), nil, 0o600)
	}
	starts, err := os.OpenFile(filepath.Join(dir, "stub-starts"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		_, _ = fmt.Fprintln(starts, os.Getpid())
		_ = starts.Close()
	}
	return lock
}

type executor struct {
	token    string
	public   bool // the pages need no token
	mu       sync.Mutex
	sessions map[string]bool
	count    int
}

func (e *executor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if e.public && r.URL.Path == "/api/health" {
		_, _ = fmt.Fprint(w, "ok")
		return
	}
	open := e.public && r.URL.Path == "/"
	if !open && r.Header.Get("Authorization") != "Bearer "+e.token {
		realm := `Bearer realm="executor", Basic realm="executor"`
		if e.public {
			realm = `Bearer realm="executor"`
		}
		w.Header().Set("WWW-Authenticate", realm)
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = fmt.Fprint(w, "Unauthorized")
		return
	}
	if origin := r.Header.Get("Origin"); origin != "" {
		w.Header().Set("Access-Control-Allow-Origin", origin)
		w.Header().Set("Access-Control-Allow-Credentials", "true")
	}
	switch {
	case r.URL.Path == "/mcp":
		e.mcp(w, r)
	case strings.HasPrefix(r.URL.Path, "/api/"):
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"path": r.URL.Path, "header": r.Header, "host": r.Host})
	default:
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprint(w, "<!doctype html><title>Executor</title>")
	}
}

func (e *executor) mcp(w http.ResponseWriter, r *http.Request) {
	session := r.Header.Get("Mcp-Session-Id")
	e.mu.Lock()
	known := e.sessions[session]
	e.mu.Unlock()
	if r.Method == http.MethodPost && !strings.Contains(r.Header.Get("Accept"), "text/event-stream") {
		rpcError(w, http.StatusNotAcceptable, -32000, "Not Acceptable: Client must accept both application/json and text/event-stream")
		return
	}
	if r.Method == http.MethodDelete || r.Method == http.MethodGet {
		if !known {
			rpcError(w, http.StatusNotFound, -32001, "Session not found")
			return
		}
		if r.Method == http.MethodDelete {
			e.mu.Lock()
			delete(e.sessions, session)
			e.mu.Unlock()
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		w.WriteHeader(http.StatusOK)
		_, _ = fmt.Fprint(w, ": open\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		return
	}
	var m struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
		Params struct {
			ProtocolVersion string `json:"protocolVersion"`
		} `json:"params"`
	}
	if json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&m) != nil {
		rpcError(w, http.StatusBadRequest, -32700, "Parse error")
		return
	}
	if m.Method != "initialize" && !known {
		if session == "" {
			rpcError(w, http.StatusBadRequest, -32000, "Bad Request: Server not initialized")
		} else {
			rpcError(w, http.StatusNotFound, -32001, "Session not found")
		}
		return
	}
	var result any
	switch m.Method {
	case "initialize":
		e.mu.Lock()
		e.count++
		session = fmt.Sprintf("session-%d-%d", os.Getpid(), e.count)
		e.sessions[session] = true
		e.mu.Unlock()
		w.Header().Set("Mcp-Session-Id", session)
		result = map[string]any{
			"protocolVersion": m.Params.ProtocolVersion,
			"capabilities":    map[string]any{"tools": map[string]any{"listChanged": true}},
			"serverInfo":      map[string]any{"name": "executor", "version": "1.0.0"},
		}
	case "notifications/initialized":
		w.WriteHeader(http.StatusAccepted)
		return
	case "tools/list":
		schema := map[string]any{"type": "object"}
		result = map[string]any{"tools": []any{
			map[string]any{"name": "execute", "inputSchema": schema}, map[string]any{"name": "resume", "inputSchema": schema},
		}}
	default:
		result = map[string]any{}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": result})
}

func rpcError(w http.ResponseWriter, status, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"jsonrpc": "2.0", "id": nil, "error": map[string]any{"code": code, "message": message}})
}
