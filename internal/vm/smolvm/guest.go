package smolvm

// Scripts that run in a guest, in any POSIX shell. HB_ROOT is set by the
// stand-in of the tests only. What is under /run is gone after a stop: it is a
// tmpfs there (src/agent/oci.rs).

// setupScript makes /data. An image machine's /workspace lies on the storage
// disk beside the system (smolvm-agent, storage.rs), and a pack of the machine
// leaves it out: so /data is a bind mount of a directory there, and templates
// hold no state. Where it cannot be mounted /data is a plain directory. What it
// was the first time is written down and stays: state must not come and go.
const setupScript = `r=${HB_ROOT:-}; k=$r/var/lib/hermes-box/data-kind; kind=
mounted() { while read -r _ _ _ _ m _; do [ "$m" = "$r/data" ] && return 0; done </proc/self/mountinfo; return 1; }
mkdir -p "$r/data" "$r/run/hermes-box" "$r/var/lib/hermes-box" || exit 1
[ -e "$k" ] && read -r kind <"$k"
if [ "$kind" != plain ] && ! mounted; then
	if mkdir -p "$r/workspace/data" && mount --bind "$r/workspace/data" "$r/data" 2>/dev/null; then kind=bound
	elif [ "$kind" = bound ]; then echo "/data cannot be mounted" >&2; exit 1
	else kind=plain; fi
	echo "$kind" >"$k" || exit 1
fi
`

// workloadScript is a machine's main command. It notes its process for the
// farewell and becomes the workload.
const workloadScript = setupScript + `echo $$ >"$r/run/hermes-box/main" && exec "$@"`

// upScript succeeds once the workload was started.
const upScript = `[ -s "${HB_ROOT:-}/run/hermes-box/main" ]`

// farewellScript ends the workload, for smolvm ends a machine without telling
// its processes. The workload is the first process of its container, so this
// script may go down with it.
const farewellScript = `r=${HB_ROOT:-}
sync
read -r p <"$r/run/hermes-box/main" || exit 0
kill -TERM "$p" || exit 0
while read -r _ _ s _ <"/proc/$p/stat" && [ "$s" != Z ]; do sleep 0.1; done 2>/dev/null
sync`

// The marker proves that a disk belongs to a machine: owner id, name and time
// of creation, readable and writable by root alone.
const (
	readMarkerScript  = `cat "${HB_ROOT:-}/var/lib/hermes-box/machine" 2>/dev/null || true`
	writeMarkerScript = `set -e; umask 077; f=${HB_ROOT:-}/var/lib/hermes-box/machine; echo "$1" >"$f.new"; sync; mv -f "$f.new" "$f"; sync`
)

// dataKindScript prints what setupScript decided.
const dataKindScript = `cat "${HB_ROOT:-}/var/lib/hermes-box/data-kind"`

// againScript goes before the scripts below in commands of the caller: a
// container whose workload has ended is made anew by smolvm, without /data.
const againScript = `[ -e "${HB_ROOT:-}/run/hermes-box/main" ] || { ` + setupScript + `}
`

// execScript runs a command between two marks on its standard error: only they
// tell the command's exit code from smolvm's own, and a command that never ran
// from one whose connection broke. $1 is the command's id. The command gets a
// session of its own, by which it is ended when the caller gives up: ending
// smolvm's client leaves it running.
const execScript = `i=$1; shift; d=${HB_ROOT:-}/run/hermes-box-exec
mkdir -p "$d" || exit 1
s=; command -v setsid >/dev/null 2>&1 && s=setsid
printf '\036hbx-begin %s\n' "$i" >&2
$s /bin/sh -c 'echo $$ >"$1" || exit 125; shift; exec "$@"' sh "$d/$i" "$@"
c=$?
rm -f "$d/$i"
printf '\036hbx-end %s %d\n' "$i" "$c" >&2
exit $c`

// ttyScript is execScript for a command with a terminal, on which the marks are
// too. The terminal gives it a session.
const ttyScript = `i=$1; shift; d=${HB_ROOT:-}/run/hermes-box-exec
mkdir -p "$d" && echo $$ >"$d/$i" || exit 1
printf '\036hbx-begin %s\n' "$i"
"$@"
c=$?
rm -f "$d/$i"
printf '\036hbx-end %s %d\n' "$i" "$c"
exit $c`

// killScript ends every process of a noted command, politely and then for good:
// those of its session, or, where it has none of its own, those below it. Daemons
// with a session of their own (tmux's server) stay.
const killScript = `n=${HB_ROOT:-}/run/hermes-box-exec/$1
read -r p <"$n" || exit 0
rm -f "$n"
own=; all=" $p "
fields() { read -r l <"/proc/$1/stat" || return 1; l=${l##*) }; }
fields "$p" && { set -- $l; [ "$4" = "$p" ] && own=1; } 2>/dev/null
gather() {
	more=1
	while [ -n "$more" ]; do
		more=
		for f in /proc/[0-9]*; do
			q=${f#/proc/}
			case $all in *" $q "*) continue;; esac
			fields "$q" || continue
			set -- $l
			if [ -n "$own" ]; then [ "$4" = "$p" ] || continue
			else case $all in *" $2 "*) ;; *) continue;; esac; fi
			all="$all$q "; more=1
		done
	done
} 2>/dev/null
for g in TERM TERM TERM TERM TERM KILL KILL KILL; do
	gather
	left=
	for q in $all; do fields "$q" && case $l in Z*) ;; *) left="$left $q";; esac; done 2>/dev/null
	[ -n "$left" ] || exit 0
	kill -$g $left 2>/dev/null
	[ $g = TERM ] && kill -CONT $left 2>/dev/null
	sleep 0.2
done`
