package guest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/wire"
)

func (a *app) logsCommand() *cobra.Command {
	var follow bool
	var lines int
	cmd := verb("logs executor", "Show Executor's log",
		"Show the end of Executor's log. With -f, go on with what is being written.",
		cobra.MatchAll(cobra.ExactArgs(1), onlyWord("executor")), func(cmd *cobra.Command, _ []string) error {
			if lines < 0 {
				return &exitError{exitUsage, errors.New("the number of lines is negative")}
			}
			// A closed pipe is an ordinary end, as for tail.
			signal.Ignore(syscall.SIGPIPE)
			err := showLog(cmd.Context(), a.stdout, a.layout.ExecutorLog(), lines, follow)
			if errors.Is(err, syscall.EPIPE) || errors.Is(err, context.Canceled) {
				return nil
			}
			return err
		})
	cmd.Example = "  hb logs executor\n  hb logs executor -f"
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with new lines")
	cmd.Flags().IntVarP(&lines, "lines", "n", 200, "begin so many lines before the end")
	return cmd
}

// showLog prints the last lines of the log and its predecessor, then follows
// across rotations.
func showLog(ctx context.Context, w io.Writer, path string, lines int, follow bool) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) && !follow {
		return errors.New("there is no log yet: Executor has not been started")
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("open the log: %w", err)
	}
	var tail []string
	keep := func(line string) error {
		if lines > 0 {
			if len(tail) >= 2*lines {
				tail = append(tail[:0], tail[len(tail)-lines:]...)
			}
			tail = append(tail, line)
		}
		return nil
	}
	if old, err := os.Open(path + ".1"); err == nil {
		_, _, err = copyLines(old, "", keep)
		if err := errors.Join(err, old.Close()); err != nil {
			return fmt.Errorf("read the older log: %w", err)
		}
	}
	partial := ""
	if f != nil {
		if partial, _, err = copyLines(f, "", keep); err != nil {
			return errors.Join(fmt.Errorf("read the log: %w", err), f.Close())
		}
	}
	show := func(line string) error {
		_, err := io.WriteString(w, wire.Printable(line)+"\n")
		return err
	}
	for _, line := range tail[max(0, len(tail)-lines):] {
		if err := show(line); err != nil {
			return err
		}
	}
	if !follow {
		return f.Close()
	}
	return followLog(ctx, f, path, partial, show)
}

func followLog(ctx context.Context, f *os.File, path, partial string, show func(string) error) error {
	defer func() {
		if f != nil {
			_ = f.Close()
		}
	}()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for {
		// The rotation is looked for before the read: what was written to the
		// old file until then is still shown.
		replaced := f == nil
		if f != nil {
			if now, err := os.Stat(path); err == nil {
				mine, err := f.Stat()
				if err != nil {
					return err
				}
				replaced = !os.SameFile(now, mine)
			}
			var err error
			if partial, _, err = copyLines(f, partial, show); err != nil {
				return err
			}
		}
		if replaced {
			next, err := os.Open(path)
			if err == nil {
				if f != nil {
					_ = f.Close()
				}
				f, partial = next, ""
				continue
			}
			if !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// copyLines hands the whole lines that r has to fn and returns the beginning
// of a line whose end has not come yet.
func copyLines(r io.Reader, partial string, fn func(string) error) (rest string, n int, err error) {
	br := bufio.NewReader(r)
	for {
		chunk, err := br.ReadString('\n')
		partial += chunk
		if err == io.EOF {
			return partial, n, nil
		}
		if err != nil {
			return partial, n, err
		}
		n++
		if err := fn(strings.TrimRight(partial, "\r\n")); err != nil {
			return "", n, err
		}
		partial = ""
	}
}
