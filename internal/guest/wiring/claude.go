package wiring

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
)

// Claude Code reads user-wide MCP servers from ~/.claude.json only; the same
// key in its settings files is ignored (anthropics/claude-code#27373).
func claudeConfig(home string) string { return filepath.Join(home, ".claude.json") }

func applyClaude(home string, ep Endpoint) (bool, error) {
	return editFile(claudeConfig(home), pause, func(old []byte) ([]byte, error) { return spliceClaude(old, ep) })
}

// claudeServer is an entry of mcpServers, as far as we look at it.
type claudeServer struct {
	Type    string            `json:"type"`
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers"`
	Command *string           `json:"command"`
	Args    []string          `json:"args"`
}

// readClaudeServer decodes an entry. Unlike encoding/json's own matching of
// fields, Claude's distinguishes upper and lower case.
func readClaudeServer(raw []byte) (claudeServer, bool) {
	var s claudeServer
	var exact map[string]json.RawMessage
	if json.Unmarshal(raw, &exact) != nil || exact == nil {
		return s, false
	}
	maps.DeleteFunc(exact, func(key string, _ json.RawMessage) bool { return key != strings.ToLower(key) })
	lower, err := json.Marshal(exact)
	if err != nil {
		return s, false
	}
	return s, json.Unmarshal(lower, &s) == nil
}

// claudeOurs are the keys of our entry that we decide; others, such as a
// timeout, are the user's and stay.
func claudeOurs(key string) bool {
	return slices.Contains([]string{"type", "url", "headers", "command", "args", "env", "headersHelper", "oauth"}, key)
}

func (s claudeServer) right(ep Endpoint) bool {
	return s.Type == "http" && s.URL == ep.URL && s.Command == nil && len(s.Headers) == 1 && s.Headers["Authorization"] == ep.bearer()
}

// stale reports whether an entry in the scope of a project is an earlier
// wiring of a box. It would take precedence over the user's scope.
func (s claudeServer) stale(ep Endpoint) bool {
	if s.Command != nil {
		return filepath.Base(*s.Command) == "executor" && len(s.Args) > 0 && s.Args[0] == "mcp"
	}
	u, err := url.Parse(s.URL)
	if err != nil {
		return false
	}
	local := u.Hostname() == "127.0.0.1" || u.Hostname() == "localhost"
	return local && u.Path == "/mcp" && (s.URL != ep.URL || s.Headers["Authorization"] != ep.bearer())
}

// spliceClaude returns the text of ~/.claude.json with our entry in it. A file
// that is there and empty has lost what was the user's, or is about to get it.
func spliceClaude(old []byte, ep Endpoint) ([]byte, error) {
	if old == nil {
		old = []byte("{}\n")
	}
	before, err := decodeJSON(old)
	if err != nil {
		return nil, corrupt("JSON", err)
	}
	text, err := dropStaleProjects(old, ep)
	if err != nil {
		return nil, err
	}
	if text, err = setClaudeServer(text, ep); err != nil {
		return nil, err
	}
	if bytes.Equal(text, old) {
		return old, nil
	}
	after, err := decodeJSON(text)
	if err != nil {
		return nil, errors.Join(errChangedMeaning, err)
	}
	if !reflect.DeepEqual(withoutOurs(before, ep), withoutOurs(after, ep)) {
		return nil, errChangedMeaning
	}
	return text, nil
}

// decodeJSON decodes one object, with numbers as they are written.
func decodeJSON(data []byte) (map[string]any, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var v map[string]any
	if err := dec.Decode(&v); err == io.EOF {
		return nil, errors.New("empty")
	} else if err != nil {
		return nil, err
	}
	if v == nil {
		return nil, errors.New("not an object")
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("data after the object")
	}
	return v, nil
}

// withoutOurs takes our entries out of a decoded configuration.
func withoutOurs(doc map[string]any, ep Endpoint) map[string]any {
	doc = maps.Clone(doc)
	if servers, ok := doc["mcpServers"].(map[string]any); ok {
		servers = maps.Clone(servers)
		delete(servers, serverName)
		doc["mcpServers"] = servers
		if len(servers) == 0 {
			delete(doc, "mcpServers")
		}
	} else if doc["mcpServers"] == nil {
		delete(doc, "mcpServers")
	}
	projects, ok := doc["projects"].(map[string]any)
	if !ok {
		return doc
	}
	projects = maps.Clone(projects)
	for name, v := range projects {
		project, ok := v.(map[string]any)
		if !ok {
			continue
		}
		servers, ok := project["mcpServers"].(map[string]any)
		if !ok {
			continue
		}
		raw, err := json.Marshal(servers[serverName])
		if s, ok := readClaudeServer(raw); err != nil || !ok || !s.stale(ep) {
			continue
		}
		servers = maps.Clone(servers)
		delete(servers, serverName)
		project = maps.Clone(project)
		project["mcpServers"] = servers
		projects[name] = project
	}
	doc["projects"] = projects
	return doc
}

func setClaudeServer(text []byte, ep Endpoint) ([]byte, error) {
	top, err := parseObject(text, 0)
	if err != nil {
		return nil, err
	}
	servers := top.last("mcpServers")
	if servers == nil {
		return top.insert(text, "mcpServers", object(member{key: serverName, raw: claudeEntry(nil, ep)})), nil
	}
	raw := text[servers.start:servers.end]
	if string(raw) == "null" {
		return replace(text, servers.start, servers.end, reindent(object(member{key: serverName, raw: claudeEntry(nil, ep)}), top.indent(text))), nil
	}
	if raw[0] != '{' {
		return nil, errors.New("mcpServers in it is not an object: mend it, then run `hb wire-mcp`")
	}
	inner, err := parseObject(text, servers.start)
	if err != nil {
		return nil, err
	}
	entry := inner.last(serverName)
	if entry == nil {
		return inner.insert(text, serverName, claudeEntry(nil, ep)), nil
	}
	have := text[entry.start:entry.end]
	if s, ok := readClaudeServer(have); ok && s.right(ep) {
		return text, nil
	}
	var kept []member
	if have[0] == '{' {
		o, err := parseObject(text, entry.start)
		if err != nil {
			return nil, err
		}
		for _, m := range o.members {
			if !claudeOurs(m.key) {
				kept = append(kept, member{key: m.key, raw: text[m.start:m.end]})
			}
		}
	}
	return replace(text, entry.start, entry.end, reindent(claudeEntry(kept, ep), inner.indent(text))), nil
}

func claudeEntry(kept []member, ep Endpoint) []byte {
	quote := func(s string) []byte {
		out, _ := json.Marshal(s) // a string always can be
		return out
	}
	return object(append([]member{
		{key: "type", raw: quote("http")},
		{key: "url", raw: quote(ep.URL)},
		{key: "headers", raw: object(member{key: "Authorization", raw: quote(ep.bearer())})},
	}, kept...)...)
}

func dropStaleProjects(text []byte, ep Endpoint) ([]byte, error) {
	// Offsets change with every removal: start again after each.
	for {
		span, err := staleProject(text, ep)
		if err != nil || span == nil {
			return text, err
		}
		text = replace(text, span[0], span[1], nil)
	}
}

// staleProject finds one stale entry in the scope of a project.
func staleProject(text []byte, ep Endpoint) (*[2]int, error) {
	top, err := parseObject(text, 0)
	if err != nil {
		return nil, err
	}
	projects := top.last("projects")
	if projects == nil || text[projects.start] != '{' {
		return nil, nil
	}
	all, err := parseObject(text, projects.start)
	if err != nil {
		return nil, err
	}
	for _, p := range all.members {
		if text[p.start] != '{' || !bytes.Contains(text[p.start:p.end], []byte(`"`+serverName+`"`)) {
			continue
		}
		project, err := parseObject(text, p.start)
		if err != nil {
			return nil, err
		}
		servers := project.last("mcpServers")
		if servers == nil || text[servers.start] != '{' {
			continue
		}
		inner, err := parseObject(text, servers.start)
		if err != nil {
			return nil, err
		}
		for i, m := range inner.members {
			if m.key != serverName {
				continue
			}
			if s, ok := readClaudeServer(text[m.start:m.end]); ok && s.stale(ep) {
				span := inner.span(i)
				return &span, nil
			}
		}
	}
	return nil, nil
}

// member is one key of an object and where its value is in the text. raw is
// only used for members that are to be written.
type member struct {
	key        string
	keyStart   int
	start, end int
	raw        []byte
}

// objectText is an object in a text.
type objectText struct {
	open, close int // the positions of its braces
	members     []member
}

// parseObject finds the members of the object that begins at or after offset.
func parseObject(text []byte, offset int) (objectText, error) {
	dec := json.NewDecoder(bytes.NewReader(text[offset:]))
	at := func() int { return offset + int(dec.InputOffset()) }
	tok, err := dec.Token()
	if err != nil {
		return objectText{}, err
	}
	if tok != json.Delim('{') {
		return objectText{}, errors.New("not an object")
	}
	o := objectText{open: at() - 1}
	for dec.More() {
		before := at()
		tok, err := dec.Token()
		if err != nil {
			return objectText{}, err
		}
		key, ok := tok.(string)
		if !ok {
			return objectText{}, fmt.Errorf("a key is %T", tok)
		}
		m := member{key: key, keyStart: before + bytes.IndexByte(text[before:], '"')}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return objectText{}, err
		}
		m.end = at()
		m.start = m.end - len(raw)
		o.members = append(o.members, m)
	}
	if _, err := dec.Token(); err != nil {
		return objectText{}, err
	}
	o.close = at() - 1
	return o, nil
}

// last returns the member that counts when a key is there twice.
func (o objectText) last(key string) *member {
	for i := len(o.members) - 1; i >= 0; i-- {
		if o.members[i].key == key {
			return &o.members[i]
		}
	}
	return nil
}

// span is what to cut out to remove a member together with its comma.
func (o objectText) span(i int) [2]int {
	m := o.members[i]
	switch {
	case i > 0:
		return [2]int{o.members[i-1].end, m.end}
	case len(o.members) > 1:
		return [2]int{m.keyStart, o.members[1].keyStart}
	}
	return [2]int{o.open + 1, o.close}
}

// indent is the white space before the object's members, or "" when it is
// written on one line.
func (o objectText) indent(text []byte) string {
	if len(o.members) == 0 {
		// Two more than the line of the brace.
		line := text[bytes.LastIndexByte(text[:o.open], '\n')+1 : o.open]
		if o.open > 0 && bytes.IndexByte(text[:o.open], '\n') < 0 {
			return ""
		}
		blank := line[:len(line)-len(bytes.TrimLeft(line, " \t"))]
		return string(blank) + "  "
	}
	gap := text[o.open+1 : o.members[0].keyStart]
	if i := bytes.LastIndexByte(gap, '\n'); i >= 0 {
		return string(gap[i+1:])
	}
	return ""
}

// insert adds a member at the end of the object.
func (o objectText) insert(text []byte, key string, value []byte) []byte {
	indent := o.indent(text)
	value = reindent(value, indent)
	name, _ := json.Marshal(key) // a string always can be
	eol := lineEnd(text)
	var b bytes.Buffer
	if len(o.members) > 0 {
		b.WriteByte(',')
	}
	if indent != "" {
		b.WriteString(eol + indent)
	}
	b.Write(name)
	b.WriteByte(':')
	if indent != "" {
		b.WriteByte(' ')
	}
	b.Write(value)
	at := o.open + 1
	if n := len(o.members); n > 0 {
		at = o.members[n-1].end
	} else if indent != "" {
		b.WriteString(eol + strings.TrimSuffix(indent, "  "))
		return replace(text, at, o.close, b.Bytes())
	}
	return replace(text, at, at, b.Bytes())
}

// object writes members on one line.
func object(members ...member) []byte {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range members {
		if i > 0 {
			b.WriteByte(',')
		}
		key, _ := json.Marshal(m.key) // a string always can be
		b.Write(key)
		b.WriteByte(':')
		b.Write(m.raw)
	}
	b.WriteByte('}')
	return b.Bytes()
}

// reindent spreads a value over lines as its surroundings do; "" keeps it on
// one.
func reindent(value []byte, indent string) []byte {
	var b bytes.Buffer
	unit := "  "
	if strings.HasPrefix(indent, "\t") {
		unit = "\t"
	}
	if indent == "" || json.Indent(&b, value, indent, unit) != nil {
		return value
	}
	return b.Bytes()
}

func replace(text []byte, from, to int, with []byte) []byte {
	return slices.Concat(text[:from], with, text[to:])
}

// lineEnd is how the text ends its lines.
func lineEnd(text []byte) string {
	if i := bytes.IndexByte(text, '\n'); i > 0 && text[i-1] == '\r' {
		return "\r\n"
	}
	return "\n"
}

func claudeState(home string, ep Endpoint) state {
	path := claudeConfig(home)
	data, err := readConfig(path)
	if err != nil || data == nil {
		return compare(path, err, false, "", "", ep)
	}
	data = bytes.TrimPrefix(data, []byte(utf8Mark))
	doc, err := decodeJSON(data)
	if err != nil {
		return compare(path, corrupt("JSON", err), false, "", "", ep)
	}
	servers, _ := doc["mcpServers"].(map[string]any)
	raw, err := json.Marshal(servers[serverName])
	if err != nil {
		return compare(path, err, false, "", "", ep)
	}
	s, found := readClaudeServer(raw)
	return compare(path, nil, found && s.Type == "http", s.URL, s.Headers["Authorization"], ep)
}
