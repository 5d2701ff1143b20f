package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/wire"
)

// listing is the schema of `box ls --json`.
type listing struct {
	Schema int          `json:"schema"`
	Boxes  []listingBox `json:"boxes"`
}

type listingBox struct {
	Name        string         `json:"name"`
	State       string         `json:"state"`
	Driver      string         `json:"driver"`
	Isolation   string         `json:"isolation"`
	ExecutorURL string         `json:"executor_url"`
	LastBackup  *listingBackup `json:"last_backup"`
	Note        string         `json:"note"`
}

type listingBackup struct {
	Path     string    `json:"path"`
	Time     time.Time `json:"time"`
	Verified bool      `json:"verified"`
}

func (a *app) lsCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the boxes, their state and Executor addresses",
		Long: `ls lists the boxes of this host. Their state is creating, running, stopped,
interrupted or unknown. It locks nothing and starts nothing.

--all adds the machines of the engines that are not boxes of this host.`,
		Example:           "  box ls\n  box ls --all\n  box ls --json",
		Args:              exactArgs(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			statuses, err := m.List(cmd.Context(), all, a.engines())
			if err != nil {
				return err
			}
			backups, err := m.NewestBackups(statuses)
			if err != nil {
				return err
			}
			list := listing{Schema: 1, Boxes: []listingBox{}}
			for _, s := range statuses {
				row := listingBox{
					Name: s.Name, State: s.State, Driver: s.Driver, Isolation: s.Isolation,
					ExecutorURL: s.ExecutorURL, Note: wire.Printable(s.Note),
				}
				if backup, found := backups[s.Name]; found && s.State != box.StateForeign {
					row.LastBackup = &listingBackup{backup.Path, backup.Time, backup.Verified}
				}
				list.Boxes = append(list.Boxes, row)
			}
			if a.json {
				enc := json.NewEncoder(a.Stdout)
				enc.SetIndent("", "  ")
				return enc.Encode(list)
			}
			return a.printListing(list)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "add the machines of the engines that are not ours")
	cmd.Flags().BoolVar(&a.json, "json", false, "print JSON of a fixed schema")
	return cmd
}

func (a *app) printListing(list listing) error {
	if len(list.Boxes) == 0 {
		a.term.say("no boxes yet; `box new NAME` makes one")
		return nil
	}
	out := bufio.NewWriter(a.Stdout) // tabwriter writes each cell for itself
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "NAME\tSTATE\tISOLATION\tEXECUTOR-URL\tLAST-BACKUP")
	for _, b := range list.Boxes {
		backup := "-"
		if b.LastBackup != nil {
			backup = age(time.Since(b.LastBackup.Time)) + " ago"
			if !b.LastBackup.Verified {
				backup += " (not verified here)"
			}
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", wire.Printable(b.Name), b.State, orDash(wire.Printable(b.Isolation)), orDash(b.ExecutorURL), backup)
	}
	if err := errors.Join(w.Flush(), out.Flush()); err != nil {
		return err
	}
	for _, b := range list.Boxes {
		if b.Note != "" {
			a.term.say(wire.Printable(b.Name) + ": " + b.Note)
		}
	}
	return nil
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// age is a duration for people.
func age(d time.Duration) string {
	for _, unit := range []struct {
		name string
		size time.Duration
	}{{"day", 24 * time.Hour}, {"hour", time.Hour}, {"minute", time.Minute}} {
		if n := int(d / unit.size); n == 1 {
			return "1 " + unit.name
		} else if n > 1 {
			return fmt.Sprintf("%d %ss", n, unit.name)
		}
	}
	return "moments"
}

// describeBackup is what rm says before it asks.
func describeBackup(m *box.Manager, h box.Home, name string) (string, error) {
	backup, found, err := m.NewestBackup(name)
	if err != nil {
		return "", err
	}
	if !found {
		return "there is no backup of " + name + " in " + h.Backups(), nil
	}
	verified := "verified"
	if !backup.Verified {
		verified = "never verified on this host"
	}
	return fmt.Sprintf("the newest backup of %s is %s old and %s: %s", name, age(time.Since(backup.Time)), verified, backup.Path), nil
}
