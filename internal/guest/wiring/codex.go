package wiring

import (
	"bytes"
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

func codexConfig(home string) string { return filepath.Join(home, ".codex/config.toml") }

const codexTable = "mcp_servers"

func applyCodex(home string, ep Endpoint) (bool, error) {
	return editFile(codexConfig(home), pause, func(old []byte) ([]byte, error) { return spliceCodex(old, ep) })
}

// codexOurs are the keys of our entry that we decide: the transport and its
// credentials. Others, such as time-outs and tool policies, are the user's.
// bearer_token is among them because Codex refuses to start with it, and
// bearer_token_env_var because it fails in every process without the variable
// (openai/codex#30125, #41378).
func codexOurs(key string) bool {
	return slices.Contains([]string{
		"url", "http_headers", "env_http_headers", "bearer_token", "bearer_token_env_var",
		"command", "args", "env", "env_vars", "cwd", "oauth", "scopes", "auth",
	}, key)
}

// codexRight reports whether an entry is as it should be.
func codexRight(entry map[string]any, ep Endpoint) bool {
	headers, ok := entry["http_headers"].(map[string]any)
	if !ok || len(headers) != 1 || headers["Authorization"] != ep.bearer() || entry["url"] != ep.URL {
		return false
	}
	for key := range entry {
		if codexOurs(key) && key != "url" && key != "http_headers" {
			return false
		}
	}
	return true
}

// spliceCodex returns the text of Codex' config.toml with our entry in it.
func spliceCodex(old []byte, ep Endpoint) ([]byte, error) {
	before, err := decodeTOML(old)
	if err != nil {
		return nil, corrupt("TOML", err)
	}
	servers, ok := before[codexTable].(map[string]any)
	if !ok && before[codexTable] != nil {
		return nil, errors.New("mcp_servers in it is not a table: mend it, then run `hb wire-mcp`")
	}
	entry, _ := servers[serverName].(map[string]any)
	if codexRight(entry, ep) {
		return old, nil
	}
	text, err := rewriteTOML(old, servers, entry, ep)
	if err != nil {
		return nil, errors.Join(errChangedMeaning, err)
	}
	after, err := decodeTOML(text)
	if err != nil {
		return nil, errors.Join(errChangedMeaning, err)
	}
	newServers, _ := after[codexTable].(map[string]any)
	fresh, _ := newServers[serverName].(map[string]any)
	if !codexRight(fresh, ep) || !sameTOML(userKeys(entry), userKeys(fresh)) {
		return nil, errChangedMeaning
	}
	for _, doc := range []map[string]any{before, after} {
		if s, ok := doc[codexTable].(map[string]any); ok {
			delete(s, serverName)
			if len(s) == 0 {
				delete(doc, codexTable)
			}
		}
	}
	if !sameTOML(before, after) {
		return nil, errChangedMeaning
	}
	return text, nil
}

func decodeTOML(data []byte) (map[string]any, error) {
	doc := map[string]any{}
	err := toml.Unmarshal(data, &doc)
	return doc, err
}

// sameTOML compares by the canonical text, in which NaN equals itself.
func sameTOML(a, b map[string]any) bool {
	x, errX := toml.Marshal(a)
	y, errY := toml.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

func userKeys(entry map[string]any) map[string]any {
	kept := map[string]any{}
	for key, v := range entry {
		if !codexOurs(key) {
			kept[key] = v
		}
	}
	return kept
}

// statement is one expression of a TOML text: a header or a key with its
// value, on whole lines.
type statement struct {
	start, end int
	kind       unstable.Kind
	path       []string // the full path, including the table that it is in
	inTable    []string
	dotted     bool // a key of several parts
}

// statements splits a text. What lies between them is comments and blank
// lines.
func statements(text []byte) ([]statement, error) {
	p := unstable.Parser{KeepComments: true}
	p.Reset(text)
	var all []statement
	var table []string
	open := false // the last statement's end is not known yet
	for p.NextExpression() {
		e := p.Expression()
		var offset int
		var path []string
		switch e.Kind {
		case unstable.Comment:
			offset = int(e.Raw.Offset)
		case unstable.Table, unstable.ArrayTable, unstable.KeyValue:
			for it := e.Key(); it.Next(); {
				if len(path) == 0 {
					offset = int(it.Node().Raw.Offset)
				}
				path = append(path, string(it.Node().Data))
			}
		default:
			return nil, errors.New("an expression of an unknown kind")
		}
		start := bytes.LastIndexByte(text[:offset], '\n') + 1
		if open {
			all[len(all)-1].end = trimBlankLines(text, all[len(all)-1].start, start)
		}
		open = e.Kind != unstable.Comment
		if !open {
			continue
		}
		s := statement{start: start, kind: e.Kind, dotted: len(path) > 1, inTable: table}
		if e.Kind == unstable.KeyValue {
			s.path = slices.Concat(table, path)
		} else {
			s.path, table = path, path
		}
		all = append(all, s)
	}
	if err := p.Error(); err != nil {
		return nil, err
	}
	if open {
		all[len(all)-1].end = trimBlankLines(text, all[len(all)-1].start, len(text))
	}
	return all, nil
}

// trimBlankLines returns the end of the last line with content in
// text[start:end], including its line end.
func trimBlankLines(text []byte, start, end int) int {
	content := start + len(bytes.TrimRight(text[start:end], " \t\r\n"))
	if i := bytes.IndexByte(text[content:end], '\n'); i >= 0 {
		return content + i + 1
	}
	return end
}

func hasPrefix(path []string, prefix ...string) bool {
	return len(path) >= len(prefix) && slices.Equal(path[:len(prefix)], prefix)
}

// rewriteTOML makes the edit, statement by statement.
func rewriteTOML(text []byte, servers, entry map[string]any, ep Endpoint) ([]byte, error) {
	all, err := statements(text)
	if err != nil {
		return nil, err
	}
	eol := lineEnd(text)
	ours := "url = " + quoteTOML(ep.URL) + eol + "http_headers = { Authorization = " + quoteTOML(ep.bearer()) + " }" + eol

	var cut [][2]int // removed lines
	header := -1     // end of our own table's header
	dottedEnd := -1  // end of the last root statement that begins with mcp_servers.
	for _, s := range all {
		switch {
		case s.kind == unstable.KeyValue && slices.Equal(s.path, []string{codexTable}):
			// mcp_servers = {…}: nothing can be added to it from outside, and
			// an inline table has no comments to lose.
			return expandServers(text, s, servers, entry, ep)
		case s.kind == unstable.Table && slices.Equal(s.path, []string{codexTable, serverName}):
			header = s.end
		case hasPrefix(s.path, codexTable, serverName):
			switch {
			case len(s.path) == 2: // executor = {…}
				cut = append(cut, [2]int{s.start, s.end})
			case codexOurs(s.path[2]):
				cut = append(cut, [2]int{s.start, s.end})
			}
		}
		if s.kind == unstable.KeyValue && len(s.inTable) == 0 && s.dotted && s.path[0] == codexTable {
			dottedEnd = s.end
		}
	}
	insertAt, insert := len(text), ""
	switch {
	case header >= 0:
		insertAt, insert = header, ours
	case dottedEnd >= 0:
		// A table that dotted keys of the root have made cannot be opened
		// again by a header.
		prefix := codexTable + "." + serverName + "."
		insertAt = dottedEnd
		for line := range strings.SplitSeq(strings.TrimSuffix(ours, eol), eol) {
			insert += prefix + line + eol
		}
		if !survives(all) {
			kept, err := keptLines(entry, prefix, eol)
			if err != nil {
				return nil, err
			}
			insert += kept
		}
	default:
		if len(bytes.TrimSpace(text)) > 0 {
			insert = eol
		}
		insert += "[" + codexTable + "." + serverName + "]" + eol + ours
		if inner, ok := innerDotted(all); ok {
			// [mcp_servers] with executor.url = …: same rule, same table.
			insertAt, insert = inner, ""
			for line := range strings.SplitSeq(strings.TrimSuffix(ours, eol), eol) {
				insert += serverName + "." + line + eol
			}
		} else if inline(all) {
			kept, err := keptLines(entry, "", eol)
			if err != nil {
				return nil, err
			}
			insert += kept
		}
	}
	if insertAt > 0 && text[insertAt-1] != '\n' {
		insert = eol + insert
	}
	var b bytes.Buffer
	at := 0
	for _, c := range append(cut, [2]int{len(text), len(text)}) {
		if insertAt >= at && insertAt <= c[0] && insert != "" {
			b.Write(text[at:insertAt])
			b.WriteString(insert)
			at, insert = insertAt, ""
		}
		if c[0] >= at {
			b.Write(text[at:c[0]])
			at = c[1]
		} else if c[1] > at {
			at = c[1]
		}
		if insertAt < at && insert != "" {
			b.WriteString(insert)
			insert = ""
		}
	}
	return b.Bytes(), nil
}

// inline reports whether our entry is written as executor = {…}, whose user's
// keys must be written anew.
func inline(all []statement) bool {
	return slices.ContainsFunc(all, func(s statement) bool {
		return s.kind == unstable.KeyValue && slices.Equal(s.path, []string{codexTable, serverName})
	})
}

// survives reports whether the user's keys of our entry stay where they are.
func survives(all []statement) bool { return !inline(all) }

// innerDotted returns the end of the last executor.KEY statement that is
// inside of [mcp_servers].
func innerDotted(all []statement) (int, bool) {
	end := -1
	for _, s := range all {
		if s.kind == unstable.KeyValue && slices.Equal(s.inTable, []string{codexTable}) && len(s.path) > 2 && s.path[1] == serverName {
			end = s.end
		}
	}
	return end, end >= 0
}

// keptLines writes the user's keys of an entry that was an inline table.
func keptLines(entry map[string]any, prefix, eol string) (string, error) {
	var b strings.Builder
	kept := userKeys(entry)
	keys := make([]string, 0, len(kept))
	for key := range kept {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		var line bytes.Buffer
		enc := toml.NewEncoder(&line)
		enc.SetTablesInline(true)
		if err := enc.Encode(map[string]any{key: kept[key]}); err != nil {
			return "", err
		}
		for l := range strings.Lines(line.String()) {
			b.WriteString(prefix + strings.TrimRight(l, "\r\n") + eol)
		}
	}
	return b.String(), nil
}

// expandServers replaces mcp_servers = {…} by tables of the same meaning.
func expandServers(text []byte, s statement, servers, entry map[string]any, ep Endpoint) ([]byte, error) {
	fresh := map[string]any{}
	for name, v := range servers {
		fresh[name] = v
	}
	ours := userKeys(entry)
	ours["url"] = ep.URL
	ours["http_headers"] = map[string]any{"Authorization": ep.bearer()}
	fresh[serverName] = ours
	tables, err := toml.Marshal(map[string]any{codexTable: fresh})
	if err != nil {
		return nil, err
	}
	rest := replace(text, s.start, s.end, nil)
	eol := lineEnd(text)
	if len(rest) > 0 && rest[len(rest)-1] != '\n' {
		rest = append(rest, eol...)
	}
	if len(bytes.TrimSpace(rest)) > 0 {
		rest = append(rest, eol...)
	}
	return append(rest, strings.ReplaceAll(string(tables), "\n", eol)...), nil
}

// quoteTOML writes a basic string; our values have no characters that need
// escaping, by the endpoint's grammar.
func quoteTOML(s string) string { return `"` + s + `"` }

func codexState(home string, ep Endpoint) state {
	path := codexConfig(home)
	data, err := readConfig(path)
	if err != nil || data == nil {
		return compare(path, err, false, "", "", ep)
	}
	doc, err := decodeTOML(bytes.TrimPrefix(data, []byte(utf8Mark)))
	if err != nil {
		return compare(path, corrupt("TOML", err), false, "", "", ep)
	}
	servers, _ := doc[codexTable].(map[string]any)
	entry, found := servers[serverName].(map[string]any)
	url, _ := entry["url"].(string)
	headers, _ := entry["http_headers"].(map[string]any)
	bearer, _ := headers["Authorization"].(string)
	if _, literal := entry["bearer_token"]; literal || entry["command"] != nil {
		found = false
	}
	return compare(path, nil, found, url, bearer, ep)
}
