// Package pack moves a box's state between /data and an archive stream: Pack
// reads it, Unpack fills a new box with it, Plan tells what would travel.
//
// Pack holds Executor only while Executor's own data is read, which goes
// first. Databases are copied through SQLite's online backup, as their owners;
// everything else is read in place, through descriptors that follow no link.
// What cannot be kept as it is (special files, special bits, a damaged
// database) never stops a save; it is written down in the archive's end entry.
// Only what no archive may hold at all (a file too large, a tree too deep) does,
// and Plan says so before anything is written.
//
// Nothing of the state is written to disk but one copy of one database at a
// time, in a file without a name.
package pack
