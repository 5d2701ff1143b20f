# What months of work leave in a home.
set -eu
cd
mkdir -p .claude/projects/p .codex/sessions/2026 .hermes/memories .config/nvim .local/share/store/v1 workspace
echo '{"type":"user","text":"history of claude"}' >.claude/projects/p/session.jsonl
echo '{"text":"history of codex"}' >.codex/sessions/2026/rollout.jsonl
echo '{"claude":"login"}' >.claude/.credentials.json
echo '{"codex":"login"}' >.codex/auth.json
chmod 600 .claude/.credentials.json .codex/auth.json
echo remember >.hermes/memories/MEMORY.md
echo 'set number' >.config/nvim/init.vim

cd workspace
git init -q -b main repo
cd repo
git config user.name agent
git config user.email agent@box
echo one >file
git add file
git commit -qm one
git worktree add -q ../tree -b side
echo 'not committed' >>../tree/file

# A store of packages with hard links into projects, as pnpm and uv have.
cd ~/workspace
for p in a b; do
	mkdir -p $p/node_modules/.bin
	for i in $(seq 50); do
		[ -e ~/.local/share/store/v1/$i ] || echo "package $i" >~/.local/share/store/v1/$i
		ln ~/.local/share/store/v1/$i $p/node_modules/$i
	done
	ln -s ../1 $p/node_modules/.bin/one
	ln -s /opt/nowhere/python $p/dangling
done
truncate -s 64M sparse
printf end >>sparse
touch -d '1999-12-31 23:59:59.123456789' a/node_modules
mkfifo fifo
mkdir -p ~/.cache/large
head -c 20000000 /dev/urandom >~/.cache/large/file
