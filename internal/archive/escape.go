package archive

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// printable escapes what could move a terminal's cursor or mislead its reader:
// control bytes, invalid UTF-8, and runes that are invisible or turn the
// direction of text. Applied twice it changes nothing more.
func printable(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			b.WriteString(`\x` + strconv.FormatUint(0x100+uint64(s[i]), 16)[1:])
		case shows(r):
			b.WriteString(s[i : i+n])
		default:
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
		i += n
	}
	return b.String()
}

func shows(r rune) bool {
	if r == ' ' || r > ' ' && r < 0x7f {
		return true
	}
	// Letters by category that draw nothing: the Hangul fillers and the empty
	// braille pattern; default ignorable marks.
	switch {
	case r == 0x115f, r == 0x1160, r == 0x2800, r == 0x3164, r == 0xffa0, r == 0x034f:
		return false
	case r >= 0xfe00 && r <= 0xfe0f, r >= 0xe0100 && r <= 0xe01ef, r >= 0x180b && r <= 0x180f, r == 0x17b4, r == 0x17b5:
		return false
	}
	return unicode.IsPrint(r)
}

// cut shortens escaped text to at most n bytes, saying so.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	n -= len("...")
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "..."
}
