// Package archive is the closed grammar of what travels: a tar stream that
// holds one box's state between a manifest and an end entry. There is one
// parser ([Read]), one writer ([Writer]) and one extractor ([Extractor]), and
// one ledger of rules that parser and writer share, so that the writer cannot
// write what the parser refuses.
//
// We write every archive ourselves, so only what the writer writes is
// accepted; anything else is an [EntryError] that names the entry and the
// rule. The one exception are the archives of the shell tool that came before
// (GNU tar of ".", recognised by their first entry "./"), which are read under
// the same safety rules and reported as legacy.
//
// Neither compression nor encryption happens here: internal/backup puts them
// around the stream on the host, the guest's pack and unpack use the bare one.
//
// # The stream
//
// A POSIX (pax) tar: the regular file "manifest" (JSON, see [Manifest]), then
// "data" and what is below it, then the regular file "end" (JSON, see [End]),
// then the end marker (two zero blocks) and nothing but zeros after it. An
// entry's parent is an earlier directory, no name occurs twice, modes are
// within 0777, owners are the names "agent" and "root" (numbers are ignored),
// extended attributes are user.* only. Sparse files travel as plain content.
//
// # The state digest
//
// The digest in "end" speaks for the state whatever order it was written in.
// With str(b) = the length of b as 8 bytes big-endian, then b, and int(n) = n
// as 8 bytes big-endian two's complement:
//
//	content = SHA-256 of a file's bytes
//	meta    = SHA-256(type | int(mode) | int(seconds) | int(nanoseconds) |
//	          str(content or target) | int(number of attributes) |
//	          for each attribute by name, bytewise: str(name) str(value))
//	digest  = SHA-256("hermes-box state 1\n" | int(number of entries) |
//	          for each entry: first 16 bytes of SHA-256(name), first 16 bytes of meta;
//	          entries in the bytewise order of these)
//
// type is one byte: 'd', 'f' or 'l'. Seconds and nanoseconds are those of the
// modification time, nanoseconds never negative. A directory's str() is of no
// bytes; a symbolic link counts with mode 0777. A hard link counts as type 'f'
// under its own name with the meta of the file it leads to. Names have no
// trailing slash. "manifest" and "end" do not count; owners do not count,
// because they may differ where an archive is looked at.
package archive
