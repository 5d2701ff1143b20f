#!/usr/bin/env bash
# Stands for Hermes' official installer in the end-to-end tests. It takes the
# options that hb passes to the official one and leaves what that one leaves
# as far as hb looks: a launcher in the code's directory that knows its
# version, and a home with a configuration.
set -euo pipefail

[ "$(id -un)" = agent ] || { echo "must run as agent, not $(id -un)" >&2; exit 1; }
code='' home='' quiet=''
while [ $# -gt 0 ]; do
	case $1 in
	--dir) code=$2; shift 2 ;;
	--hermes-home) home=$2; shift 2 ;;
	--commit) shift 2 ;;
	--non-interactive) quiet=yes; shift ;;
	--skip-setup) shift ;;
	*) echo "unknown option $1" >&2; exit 2 ;;
	esac
done
[ "$quiet" = yes ] || { echo "would ask questions" >&2; exit 1; }
[ "$HOME" = /data/home/agent ] || { echo "HOME is $HOME" >&2; exit 1; }

mkdir -p "$code/venv/bin" "$home/memories" "$home/skills"
cat >"$code/venv/bin/hermes" <<'LAUNCHER'
#!/bin/sh
case ${1:-} in
--version) echo "Hermes Agent v0.21.5" ;;
*) echo "a stand-in for Hermes Agent" ;;
esac
LAUNCHER
chmod 755 "$code/venv/bin/hermes"
[ -e "$home/config.yaml" ] || cat >"$home/config.yaml" <<'CONFIG'
# The user's own words stay.
model:
  provider: nous
mcp_servers:
  other: {url: "http://127.0.0.1:9/mcp", enabled: false}
CONFIG
echo "installed the stand-in for Hermes in $code"
