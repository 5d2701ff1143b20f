package archive

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// folder computes one key for all names that a file system which ignores case
// or normalises Unicode (APFS, HFS+, casefolded ext4, NTFS) may take for the
// same. It folds more than any one of them, never less: marks are put in the
// order of their numbers, and characters that HFS+ ignores are left out
// (CVE-2014-9390). A key's key is itself.
type folder struct {
	table map[rune]string // made when the first name needs it
}

// key returns the key of name.
func (f *folder) key(name string) string {
	i := 0
	for i < len(name) && name[i] < utf8.RuneSelf && (name[i] < 'A' || name[i] > 'Z') {
		i++
	}
	if i == len(name) {
		return name
	}
	out := make([]byte, i, len(name)+16)
	copy(out, name)
	var marks []rune // since the last other character
	flush := func() {
		if len(marks) == 0 {
			return
		}
		slices.Sort(marks)
		for _, m := range marks {
			out = utf8.AppendRune(out, m)
		}
		marks = marks[:0]
	}
	for i < len(name) {
		if c := name[i]; c < utf8.RuneSelf {
			flush()
			if c >= 'A' && c <= 'Z' {
				c += 'a' - 'A'
			}
			out = append(out, c)
			i++
			continue
		}
		r, n := utf8.DecodeRuneInString(name[i:])
		if r == utf8.RuneError && n == 1 {
			flush()
			out = append(out, name[i])
			i++
			continue
		}
		i += n
		for _, c := range f.decompose(r) {
			c = foldRune(c)
			switch {
			case unicode.Is(unicode.Cf, c):
			case unicode.Is(unicode.M, c):
				marks = append(marks, c)
			default:
				flush()
				out = utf8.AppendRune(out, c)
			}
		}
	}
	flush()
	return string(out)
}

// decompose returns the canonical decomposition of r's case folding, as far as
// it is not one character for one.
func (f *folder) decompose(r rune) string {
	if r < utf8.RuneSelf {
		return string(r)
	}
	if r >= 0xac00 && r <= 0xd7a3 { // Hangul: The Unicode Standard, section 3.12
		s := r - 0xac00
		jamo := []rune{0x1100 + s/588, 0x1161 + s%588/28}
		if t := s % 28; t != 0 {
			jamo = append(jamo, 0x11a7+t)
		}
		return string(jamo)
	}
	if f.table == nil {
		f.table = make(map[rune]string, 2300)
		for line := range strings.Lines(decompositions) {
			c, n := utf8.DecodeRuneInString(line)
			f.table[c] = strings.TrimSuffix(line[n:], "\n")
		}
	}
	if d, ok := f.table[r]; ok {
		return d
	}
	return string(r)
}

// foldRune returns the least of the characters that differ from r in case
// only, ASCII in lower case.
func foldRune(r rune) rune {
	least := r
	for c := unicode.SimpleFold(r); c != r; c = unicode.SimpleFold(c) {
		least = min(least, c)
	}
	switch {
	case least >= 'A' && least <= 'Z':
		least += 'a' - 'A'
	case least == 0x345: // the mark among the forms of iota
		least = 0x3b9
	}
	return least
}
