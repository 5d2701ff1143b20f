# Says what is wrong with a home that fill.sh made; nothing when all is there.
set -u
cd
fail() { echo "wrong: $*"; }
grep -q 'history of claude' .claude/projects/p/session.jsonl || fail claude
grep -q 'history of codex' .codex/sessions/2026/rollout.jsonl || fail codex
[ "$(stat -c '%a %U' .claude/.credentials.json)" = '600 agent' ] || fail login "$(stat -c '%a %U' .claude/.credentials.json)"
grep -q remember .hermes/memories/MEMORY.md || fail hermes
grep -q number .config/nvim/init.vim || fail nvim
cd workspace
[ "$(git -C repo worktree list | wc -l)" = 2 ] || fail worktrees
git -C repo fsck --strict 2>&1 | grep -v '^notice' && fail fsck
[ "$(git -C tree status --porcelain)" = ' M file' ] || fail 'state of the worktree' "$(git -C tree status --porcelain)"
[ "$(stat -c %h a/node_modules/7)" = 3 ] || fail 'hard links' "$(stat -c %h a/node_modules/7)"
[ a/node_modules/7 -ef b/node_modules/7 ] || fail 'one file under two names'
[ "$(readlink a/dangling)" = /opt/nowhere/python ] || fail 'a dangling link'
[ "$(stat -c %s sparse)" = 67108867 ] || fail 'size of a sparse file'
[ "$(stat -c %b sparse)" -lt 2048 ] || fail 'a sparse file takes' "$(stat -c %b sparse)" blocks
[ "$(date -u -r a/node_modules +%s.%N)" = "$(date -u -d '1999-12-31 23:59:59.123456789' +%s.%N)" ] || fail 'time of a directory'
[ ! -e fifo ] || fail 'the FIFO is here'
[ ! -e ~/.cache/large ] || fail 'the cache is here'
