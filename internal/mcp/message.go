package mcp

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"strings"
)

var (
	errTooLong   = errors.New("a body of more than 1 MiB")
	errNoMessage = errors.New("the stream ended without the response")
)

// boundedReader fails, instead of ending, when more than left bytes come: a
// cut body must not pass for a whole one.
type boundedReader struct {
	r    io.Reader
	left int64
}

func (b *boundedReader) Read(p []byte) (int, error) {
	if b.left < 0 {
		return 0, errTooLong
	}
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.r.Read(p)
	b.left -= int64(n)
	if b.left < 0 {
		return 0, errTooLong
	}
	return n, err
}

func mediaType(contentType string) string {
	mt, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return ""
	}
	return mt
}

// readMessage reads the JSON-RPC response to the request id from a body of
// either form that MCP allows and returns its result.
func readMessage(contentType string, body io.Reader, id int) (json.RawMessage, error) {
	switch mediaType(contentType) {
	case "application/json":
		data, err := io.ReadAll(body)
		if err != nil {
			return nil, readError(err)
		}
		return parseResponse(data, id)
	case "text/event-stream":
		return readEventStream(body, id)
	case "":
		return nil, errors.New("no content type")
	default:
		return nil, errors.New("neither JSON nor an event stream but " + mediaType(contentType))
	}
}

func readError(err error) error {
	if errors.Is(err, errTooLong) {
		return err
	}
	return fmt.Errorf("read the body: %w", err)
}

// readEventStream returns at the first event that is the response, since a
// server may keep the stream open behind it. Other messages (notifications,
// requests of the server) may come before.
func readEventStream(body io.Reader, id int) (json.RawMessage, error) {
	br := bufio.NewReader(body)
	var data []byte
	hasData := false
	for {
		line, err := br.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return nil, readError(err)
		}
		ended := err == io.EOF
		line = bytes.TrimRight(line, "\r\n")
		switch {
		case len(line) == 0 || ended:
			// By the standard an event that is not closed by an empty line is
			// discarded; a last line without newline is no complete event.
			if hasData && !ended {
				if isResponse(data, id) {
					return parseResponse(data, id)
				}
			}
			data, hasData = nil, false
		case bytes.HasPrefix(line, []byte("data:")):
			value := bytes.TrimPrefix(line[len("data:"):], []byte(" "))
			if hasData {
				data = append(data, '\n')
			}
			data, hasData = append(data, value...), true
		default:
			// event:, id:, retry: and comments carry nothing for us.
		}
		if ended {
			return nil, errNoMessage
		}
	}
}

// isResponse tells our response (also a malformed one) from other messages.
func isResponse(data []byte, id int) bool {
	var m struct {
		ID     json.RawMessage `json:"id"`
		Method *string         `json:"method"`
	}
	if json.Unmarshal(data, &m) != nil {
		return true // let parseResponse say what is wrong
	}
	return m.Method == nil && string(m.ID) == fmt.Sprint(id)
}

// parseResponse checks one JSON-RPC response and returns its result.
func parseResponse(data []byte, id int) (json.RawMessage, error) {
	var m struct {
		JSONRPC string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Result  json.RawMessage `json:"result"`
		Error   *struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
		} `json:"error"`
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, errors.New("the body is not a JSON-RPC response")
	}
	switch {
	case m.JSONRPC != "2.0":
		return nil, errors.New("not JSON-RPC 2.0")
	case string(m.ID) != fmt.Sprint(id):
		return nil, errors.New("the response is to another request")
	case m.Error != nil:
		return nil, fmt.Errorf("JSON-RPC error %d: %s", m.Error.Code, strings.TrimSpace(m.Error.Message))
	case len(m.Result) == 0 || m.Result[0] != '{':
		return nil, errors.New("no result")
	}
	return m.Result, nil
}
