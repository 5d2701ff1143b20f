// node writer.js FILE: writes numbered rows into a database with a write-ahead
// log, says each number once it is committed, and never empties the log.
const { DatabaseSync } = require('node:sqlite');
const db = new DatabaseSync(process.argv[2]);
db.exec('PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=0; CREATE TABLE IF NOT EXISTS memory(n INTEGER PRIMARY KEY, text TEXT)');
const insert = db.prepare('INSERT INTO memory(text) VALUES(?)');
setInterval(() => console.log(Number(insert.run('x'.repeat(500)).lastInsertRowid)), 20);
