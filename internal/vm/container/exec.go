package container

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/attach"
)

// execScript runs a command and leaves a note of it in the guest, for two
// questions that the engine's command line cannot answer: which processes to
// kill when the caller gives up (a killed `exec` client leaves its command
// running), and whether an exit code that the engine also uses for its own
// failures (125 and up) was really the command's. $1 is the note's name.
const execScript = `d=/run/hermes-box-exec; n=$d/$1; shift
mkdir -p "$d" && echo "pid $$" >"$n" || exit 125
"$@"
c=$?
if [ $c -ge 125 ]; then echo "exit $c" >"$n"; else rm -f "$n"; fi
exit $c`

// killScript ends every process of the noted command's session, politely and
// then for good. Daemons with a session of their own (tmux's server) stay.
const killScript = `n=/run/hermes-box-exec/$1
read -r k s <"$n" && [ "$k" = pid ] || exit 0
rm -f "$n"
members() {
	for f in /proc/[0-9]*/stat; do
		read -r l <"$f" || continue
		p=${f#/proc/}; p=${p%/stat}
		set -- ${l##*) }
		[ "$4" = "$s" ] && [ "$1" != Z ] && echo "$p"
	done 2>/dev/null
}
for g in TERM TERM TERM TERM TERM KILL KILL KILL; do
	m=$(members)
	[ -n "$m" ] || exit 0
	kill -$g $m 2>/dev/null
	[ $g = TERM ] && kill -CONT $m 2>/dev/null
	sleep 0.2
done`

// Exec implements vm.Driver.
func (d *Driver) Exec(ctx context.Context, name string, c vm.Command) (int, error) {
	if len(c.Argv) == 0 {
		return 0, errors.New("no command to execute")
	}
	// By name and without a look before: each question to the engine takes as
	// long as a short command. A failure is looked into afterwards.
	full := prefix + name
	note := make([]byte, 12)
	_, _ = rand.Read(note) // never fails
	id := hex.EncodeToString(note)

	args := []string{"container", "exec"}
	if c.Stdin != nil || c.TTY != nil {
		args = append(args, "--interactive")
	}
	if c.TTY != nil {
		args = append(args, "--tty", "--env", "TERM="+c.TTY.Term)
	}
	args = append(args, full, "/bin/sh", "-c", execScript, "sh", id)
	cmd := exec.Command(d.engine, append(args, c.Argv...)...)

	code, err := attach.Run(ctx, cmd, c)
	switch {
	case err != nil:
		return 0, errors.Join(fmt.Errorf("%s exec: %w", d.engine, err), d.kill(ctx, full, id))
	case code < 125:
		return code, nil
	}
	return d.confirm(ctx, name, id, code)
}

// confirm asks the guest whether a code that may be the engine's own was the
// command's.
func (d *Driver) confirm(ctx context.Context, name, id string, code int) (int, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	full := prefix + name
	out, err := d.run(ctx, "container", "exec", full, "/bin/sh", "-c",
		`n=/run/hermes-box-exec/$1; cat "$n" 2>/dev/null && rm -f "$n"`, "sh", id)
	if noted, ok := strings.CutPrefix(strings.TrimSpace(string(out)), "exit "); err == nil && ok {
		if own, convErr := strconv.Atoi(noted); convErr == nil && own == code {
			return code, nil
		}
	}
	switch c, lookErr := d.container(ctx, name); {
	case errors.Is(lookErr, vm.ErrNotFound):
		return 0, lookErr
	case lookErr == nil && c.state != vm.Running:
		return 0, fmt.Errorf("%s: %w", full, vm.ErrNotRunning)
	}
	return 0, fmt.Errorf("%s exec ended with %d, and not by its command (%w)", d.engine, code,
		errors.Join(err, d.kill(ctx, full, id)))
}

// kill ends the guest's side of an Exec whose client is gone.
func (d *Driver) kill(ctx context.Context, container, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	_, err := d.run(ctx, "container", "exec", container, "/bin/sh", "-c", killScript, "sh", id)
	if err != nil {
		return fmt.Errorf("end the command in the guest: %w", err)
	}
	return nil
}
