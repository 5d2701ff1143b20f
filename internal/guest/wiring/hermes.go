package wiring

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

func hermesConfig(home string) string { return filepath.Join(home, ".hermes/config.yaml") }
func hermesEnv(home string) string    { return filepath.Join(home, ".hermes/.env") }

const (
	hermesTable = "mcp_servers"
	// hermesKey is the variable that Hermes puts into the header. It comes
	// from ~/.hermes/.env, so that config.yaml can be shown to others.
	hermesKey    = "MCP_EXECUTOR_API_KEY"
	hermesBearer = "Bearer ${" + hermesKey + "}"
)

func applyHermes(home string, ep Endpoint) (bool, error) {
	env, err := editFile(hermesEnv(home), pause, func(old []byte) ([]byte, error) { return spliceDotenv(old, ep), nil })
	if err != nil {
		return env, err
	}
	config, err := editFile(hermesConfig(home), pause, func(old []byte) ([]byte, error) { return spliceHermes(old, ep) })
	return env || config, err
}

var dotenvLine = regexp.MustCompile(`^[ \t]*(?:export[ \t]+)?` + hermesKey + `[ \t]*=[ \t]*(.*?)[ \t]*\r?\n?$`)

// spliceDotenv sets our variable in an .env text and leaves all other lines.
func spliceDotenv(old []byte, ep Endpoint) []byte {
	eol := lineEnd(old)
	ours := hermesKey + "=" + ep.Token
	var b bytes.Buffer
	done := false
	for line := range bytes.Lines(old) {
		m := dotenvLine.FindSubmatch(line)
		switch {
		case m == nil:
			b.Write(line)
		case done: // a second one: the last would win
		default:
			done = true
			if string(m[1]) == ep.Token {
				b.Write(line)
				break
			}
			b.WriteString(ours)
			b.Write(line[len(bytes.TrimRight(line, "\r\n")):])
		}
	}
	if !done {
		if b.Len() > 0 && b.Bytes()[b.Len()-1] != '\n' {
			b.WriteString(eol)
		}
		b.WriteString(ours + eol)
	}
	return b.Bytes()
}

// dotenvToken returns the value that counts.
func dotenvToken(data []byte) string {
	token := ""
	for line := range bytes.Lines(data) {
		if m := dotenvLine.FindSubmatch(line); m != nil {
			token = strings.Trim(string(m[1]), `"'`)
		}
	}
	return token
}

func hermesOurs(key string) bool {
	return slices.Contains([]string{"url", "headers", "command", "args", "env", "transport", "auth", "oauth"}, key)
}

func hermesRight(entry map[string]any, ep Endpoint) bool {
	headers, _ := entry["headers"].(map[string]any)
	if entry["url"] != ep.URL || len(headers) != 1 || headers["Authorization"] != hermesBearer {
		return false
	}
	for key := range entry {
		if hermesOurs(key) && key != "url" && key != "headers" {
			return false
		}
	}
	return true
}

func hermesUserKeys(entry map[string]any) map[string]any {
	kept := map[string]any{}
	for key, v := range entry {
		if !hermesOurs(key) && key != "enabled" {
			kept[key] = v
		}
	}
	return kept
}

// decodeYAML decodes one document that is a mapping, or nothing.
func decodeYAML(data []byte) (map[string]any, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc map[string]any
	if len(bytes.TrimSpace(data)) == 0 {
		return map[string]any{}, nil
	}
	if err := dec.Decode(&doc); err != nil && err.Error() != "EOF" {
		return nil, err
	}
	var more any
	if err := dec.Decode(&more); err == nil {
		return nil, errors.New("more than one document")
	}
	if doc == nil {
		doc = map[string]any{}
	}
	return doc, nil
}

// spliceHermes returns the text of Hermes' config.yaml with our entry in it.
func spliceHermes(old []byte, ep Endpoint) ([]byte, error) {
	before, err := decodeYAML(old)
	if err != nil {
		return nil, corrupt("YAML", err)
	}
	servers, ok := before[hermesTable].(map[string]any)
	if !ok && before[hermesTable] != nil {
		return nil, errors.New("mcp_servers in it is not a mapping: mend it, then run `hb wire-mcp`")
	}
	entry, _ := servers[serverName].(map[string]any)
	if hermesRight(entry, ep) {
		return old, nil
	}
	var failures []error
	// The splice keeps the text; the rewrite works for every style of
	// writing but may change blank lines and indentation.
	for _, edit := range []func([]byte, Endpoint) ([]byte, error){spliceYAML, rewriteYAML} {
		text, err := edit(old, ep)
		if err == nil {
			err = verifyHermes(before, text, ep)
		}
		if err == nil {
			return text, nil
		}
		failures = append(failures, err)
	}
	return nil, errors.Join(errChangedMeaning, errors.Join(failures...))
}

func verifyHermes(before map[string]any, text []byte, ep Endpoint) error {
	after, err := decodeYAML(text)
	if err != nil {
		return err
	}
	oldEntry := ourEntry(before)
	entry := ourEntry(after)
	if !hermesRight(entry, ep) || !sameYAML(hermesUserKeys(oldEntry), hermesUserKeys(entry)) {
		return errors.New("the entry did not come out right")
	}
	if !sameYAML(withoutHermes(before), withoutHermes(after)) {
		return errors.New("something else changed")
	}
	return nil
}

func ourEntry(doc map[string]any) map[string]any {
	servers, _ := doc[hermesTable].(map[string]any)
	entry, _ := servers[serverName].(map[string]any)
	return entry
}

func withoutHermes(doc map[string]any) map[string]any {
	out := map[string]any{}
	for key, v := range doc {
		if key != hermesTable {
			out[key] = v
		}
	}
	if servers, ok := doc[hermesTable].(map[string]any); ok {
		rest := map[string]any{}
		for name, v := range servers {
			if name != serverName {
				rest[name] = v
			}
		}
		if len(rest) > 0 {
			out[hermesTable] = rest
		}
	}
	return out
}

func sameYAML(a, b map[string]any) bool {
	if reflect.DeepEqual(a, b) {
		return true
	}
	x, errX := yaml.Marshal(a) // NaN equals itself in the text
	y, errY := yaml.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// child returns the key and value nodes of a mapping's key.
func child(mapping *yaml.Node, key string) (int, *yaml.Node, *yaml.Node) {
	if mapping == nil || mapping.Kind != yaml.MappingNode {
		return -1, nil, nil
	}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key && mapping.Content[i].Kind == yaml.ScalarNode {
			return i, mapping.Content[i], mapping.Content[i+1]
		}
	}
	return -1, nil, nil
}

func parseYAML(text []byte) (*yaml.Node, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return nil, err
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		return nil, errors.New("no document")
	}
	return &doc, nil
}

// entryNode builds our entry, with the user's keys of the old one.
func entryNode(old *yaml.Node, ep Endpoint) *yaml.Node {
	scalar := func(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s} }
	quoted := func(s string) *yaml.Node {
		n := scalar(s)
		n.Style = yaml.DoubleQuotedStyle
		return n
	}
	entry := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Content: []*yaml.Node{
		scalar("url"), quoted(ep.URL),
		scalar("headers"),
		{Kind: yaml.MappingNode, Tag: "!!map", Content: []*yaml.Node{scalar("Authorization"), quoted(hermesBearer)}},
	}}
	if i, _, _ := child(old, "enabled"); i < 0 {
		entry.Content = append(entry.Content, scalar("enabled"), &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!bool", Value: "true"})
	}
	if old != nil && old.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(old.Content); i += 2 {
			if !hermesOurs(old.Content[i].Value) {
				entry.Content = append(entry.Content, old.Content[i], old.Content[i+1])
			}
		}
	}
	return entry
}

// entryLines writes our entry as block text at a column.
func entryLines(entry *yaml.Node, indent int, eol string) (string, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	doc := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Content: []*yaml.Node{
		{Kind: yaml.ScalarNode, Tag: "!!str", Value: serverName}, entry,
	}}
	if err := errors.Join(enc.Encode(doc), enc.Close()); err != nil {
		return "", err
	}
	var out strings.Builder
	for line := range strings.Lines(b.String()) {
		line = strings.TrimRight(line, "\n")
		if line != "" {
			out.WriteString(strings.Repeat(" ", indent) + line)
		}
		out.WriteString(eol)
	}
	return out.String(), nil
}

var errNoSplice = errors.New("not written in block style")

// spliceYAML edits the lines of our entry only. It handles block style and
// gives up on everything else.
func spliceYAML(old []byte, ep Endpoint) ([]byte, error) {
	eol := lineEnd(old)
	block := func(indent int, oldEntry *yaml.Node) (string, error) {
		return entryLines(entryNode(oldEntry, ep), indent, eol)
	}
	doc, err := parseYAML(old)
	if err != nil || doc.Content[0].Kind != yaml.MappingNode {
		// Nothing but comments, perhaps.
		lines, err := block(2, nil)
		return appendText(old, hermesTable+":"+eol+lines, eol), err
	}
	top := doc.Content[0]
	if top.Style&yaml.FlowStyle != 0 || top.Column != 1 {
		return nil, errNoSplice
	}
	at, key, servers := child(top, hermesTable)
	if at < 0 {
		lines, err := block(2, nil)
		return appendText(old, hermesTable+":"+eol+lines, eol), err
	}
	lines := splitLines(old)
	if servers.Kind == yaml.ScalarNode && servers.Tag == "!!null" && servers.Value == "" {
		added, err := block(2, nil)
		return joinLines(lines, key.Line, key.Line, added, eol), err
	}
	if servers.Kind != yaml.MappingNode || servers.Style&yaml.FlowStyle != 0 || len(servers.Content) == 0 || servers.Anchor != "" {
		return nil, errNoSplice
	}
	first := servers.Content[0]
	i, name, entry := child(servers, serverName)
	if i < 0 {
		added, err := block(first.Column-1, nil)
		// Right below the key: a comment before the first server is its own.
		return joinLines(lines, key.Line, key.Line, added, eol), err
	}
	if entry.Anchor != "" || entry.Kind == yaml.AliasNode {
		return nil, errNoSplice
	}
	// The entry ends where the next key of its mapping or of the document
	// begins, but for the comments before that key.
	end := len(lines)
	switch {
	case i+2 < len(servers.Content):
		end = servers.Content[i+2].Line - 1
	case at+2 < len(top.Content):
		end = top.Content[at+2].Line - 1
	}
	for end > name.Line {
		if t := strings.TrimSpace(lines[end-1]); t != "" && !strings.HasPrefix(t, "#") && t != "..." {
			break
		}
		end--
	}
	added, err := block(name.Column-1, entry)
	return joinLines(lines, name.Line-1, end, added, eol), err
}

func appendText(old []byte, add, eol string) []byte {
	out := slices.Clone(old)
	if len(out) > 0 && out[len(out)-1] != '\n' {
		out = append(out, eol...)
	}
	return append(out, add...)
}

func splitLines(text []byte) []string {
	var lines []string
	for line := range strings.Lines(string(text)) {
		lines = append(lines, line)
	}
	return lines
}

// joinLines replaces lines[from:to] by text.
func joinLines(lines []string, from, to int, text, eol string) []byte {
	if from < 0 || to > len(lines) || from > to {
		return nil
	}
	head := strings.Join(lines[:from], "")
	if head != "" && !strings.HasSuffix(head, "\n") {
		head += eol
	}
	return []byte(head + text + strings.Join(lines[to:], ""))
}

// rewriteYAML edits the parsed document and writes it anew.
func rewriteYAML(old []byte, ep Endpoint) ([]byte, error) {
	doc, err := parseYAML(old)
	if err != nil {
		return nil, err
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("line %d is not a mapping", top.Line)
	}
	_, _, servers := child(top, hermesTable)
	for servers != nil && servers.Kind == yaml.AliasNode {
		return nil, errors.New("mcp_servers is an alias")
	}
	if servers == nil || servers.Kind != yaml.MappingNode {
		fresh := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		if servers == nil {
			top.Content = append(top.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: hermesTable}, fresh)
			servers = fresh
		} else {
			*servers = *fresh
		}
	}
	if i, _, entry := child(servers, serverName); i >= 0 {
		servers.Content[i+1] = entryNode(entry, ep)
	} else {
		servers.Content = append(servers.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: serverName}, entryNode(nil, ep))
	}
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(doc), enc.Close()); err != nil {
		return nil, err
	}
	return bytes.ReplaceAll(b.Bytes(), []byte("\n"), []byte(lineEnd(old))), nil
}

func hermesState(home string, ep Endpoint) state {
	path := hermesConfig(home)
	data, err := readConfig(path)
	if err != nil || data == nil {
		return compare(path, err, false, "", "", ep)
	}
	doc, err := decodeYAML(bytes.TrimPrefix(data, []byte(utf8Mark)))
	if err != nil {
		return compare(path, corrupt("YAML", err), false, "", "", ep)
	}
	entry := ourEntry(doc)
	url, _ := entry["url"].(string)
	headers, _ := entry["headers"].(map[string]any)
	bearer, _ := headers["Authorization"].(string)
	if bearer == hermesBearer {
		env, err := readConfig(hermesEnv(home))
		if err != nil {
			return compare(hermesEnv(home), err, false, "", "", ep)
		}
		bearer = "Bearer " + dotenvToken(env)
	}
	return compare(path, nil, entry != nil && entry["command"] == nil, url, bearer, ep)
}
