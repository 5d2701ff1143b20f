package cli

import (
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/backup"
	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/wire"
)

func (a *app) saveCommand() *cobra.Command {
	var o box.SaveOptions
	var explain bool
	cmd := &cobra.Command{
		Use:   "save NAME [FILE]",
		Short: "Save the state of a box into an encrypted archive",
		Long: `save writes the state of a box (/data) into an encrypted archive and prints its
path: FILE, or a new one in the backups directory. It never overwrites. The file
is read back and verified before it gets its name.

Executor is paused only while its own data is read; other programs go on, and
what they change meanwhile may be half in the archive, which then says so.
A stopped box is started for the save and stopped again.

The passphrase is that of BOX_PASSPHRASE, the first line of the file that
BOX_PASSPHRASE_FILE names, or asked for twice. Without it nobody reads the
archive, you included.`,
		Example: "  box save alpha\n  box save alpha --keep 7\n  box save alpha /mnt/usb/alpha.tar.gz.gpg\n  box save alpha --explain",
		Args:    rangeArgs(1, "NAME", "FILE"), ValidArgsFunction: a.completeNameThenFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("keep") && o.Keep < 1 {
				return &usageError{fmt.Errorf("--keep %d: at least one archive is kept", o.Keep), cmd.CommandPath()}
			}
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			if _, err := m.Lookup(args[0]); err != nil {
				return err
			}
			if explain {
				plan, err := m.Explain(cmd.Context(), args[0])
				a.term.done()
				if err != nil {
					return err
				}
				return a.printPlan(plan)
			}
			if len(args) == 2 {
				o.Path = args[1]
				// Before anybody is asked for a passphrase.
				if err := backup.Free(o.Path); err != nil {
					return fmt.Errorf("save %s: %w", args[0], err)
				}
			}
			if o.Passphrase, err = a.passphrase(cmd.Context(), true); err != nil {
				return fmt.Errorf("save %s: %w", args[0], err)
			}
			saved, err := m.Save(cmd.Context(), args[0], o)
			a.term.done()
			if saved.Path == "" {
				return err
			}
			a.describeSaved(saved)
			_, printErr := fmt.Fprintln(a.Stdout, saved.Path)
			return errors.Join(err, printErr)
		},
	}
	cmd.Flags().IntVar(&o.Keep, "keep", 0, "then remove verified archives of the box beyond the newest `N`")
	cmd.Flags().BoolVar(&explain, "explain", false, "only tell what would travel and what would not")
	return cmd
}

// describeSaved tells on stderr what the archive holds.
func (a *app) describeSaved(s box.Saved) {
	a.term.say(fmt.Sprintf("%s, %d entries with %s of content; Executor was paused for %s",
		size(s.Report.Size), s.Report.Entries, size(s.Report.Bytes), s.Pause.Round(time.Millisecond)))
	a.describeFindings(s.Report.End)
	for _, path := range s.Pruned {
		a.term.say("removed " + path)
	}
}

// shownFindings bounds the list on a terminal.
const shownFindings = 20

// describeFindings tells what an archive could not keep as it was. Kinds and
// details come out of a box.
func (a *app) describeFindings(end archive.End) {
	for i, f := range end.Findings {
		if i == shownFindings {
			break
		}
		text := "note: " + wire.Printable(f.Path) + ": " + findingText(f.Kind)
		if f.Detail != "" {
			text += " (" + wire.Printable(f.Detail) + ")"
		}
		a.term.say(text)
	}
	if more := len(end.Findings) - shownFindings + end.More; more > 0 {
		a.term.say(fmt.Sprintf("note: and %d more", more))
	}
}

func findingText(kind string) string {
	switch kind {
	case "special":
		return "not a file, directory or link: left out"
	case "mode":
		return "special mode bits were dropped"
	case "owner":
		return "its owner or group does not travel: mapped"
	case "xattr":
		return "an extended attribute does not travel or could not be read"
	case "changed":
		return "changed while it was read"
	case "database":
		return "the database could not be copied consistently"
	case "json":
		return "was not valid JSON each time it was read"
	case "vanished":
		return "vanished while the state was read"
	}
	return wire.Printable(kind)
}

func (a *app) printPlan(plan wire.StatePlan) error {
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "PART\tENTRIES\tSIZE")
	for _, part := range plan.Parts {
		_, _ = fmt.Fprintf(w, "%s\t%d\t%s\n", wire.Printable(part.Name), part.Entries, size(part.Bytes))
	}
	_, _ = fmt.Fprintf(w, "all\t%d\t%s\n", plan.Entries, size(plan.Bytes))
	if len(plan.LeftOut) > 0 {
		_, _ = fmt.Fprintln(w, "\nLEFT OUT\tSIZE\tWHY")
	}
	for _, l := range plan.LeftOut {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\n", wire.Printable(l.Path), size(l.Bytes), wire.Printable(l.Why))
	}
	if plan.More > 0 {
		_, _ = fmt.Fprintf(w, "and %d more\n", plan.More)
	}
	return w.Flush()
}
