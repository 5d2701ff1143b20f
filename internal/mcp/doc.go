// Package mcp proves that Executor's MCP endpoint is healthy.
//
// Probe runs the whole handshake over plain HTTP/1.1: a request without a
// token must be refused in Executor's own words, then the session is opened
// with the token, the tools are listed and the session is closed. Its answer
// is one of a closed set of verdicts. Exit codes of other programs, an open
// port or an HTML page with status 200 prove nothing.
//
// ProveDoor makes a forwarded port prove that it knows the agent token before
// any credential is sent to it.
//
// Whatever answers is hostile: no redirects, no proxy, no compression, bodies
// of at most 1 MiB, a deadline per request and one in all. Tokens never appear
// in a summary or an error. Host and guest both call it; it uses the standard
// library only.
package mcp
