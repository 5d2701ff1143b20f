package cli

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/box"
)

func (a *app) cacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Show and remove what is kept for fast starts",
		Long: `cache looks after what box keeps so that new and load are quick: bases, and
templates. A template is the system of a box after its first provisioning, with
the tools and without anything of that box: no state, no logins, no tokens. The
next box with the same base, versions and configuration starts from it.

A template with versions that were the latest ones is used for 7 days. All of it
can be made again; no box depends on it.`,
		Example: "  box cache ls",
		Args:    exactArgs(),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.cacheListCommand(), a.cachePruneCommand())
	return cmd
}

func (a *app) cacheListCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ls",
		Short:             "List what is kept, and what it takes",
		Long:              "ls lists bases and templates with the space that they take on this host.",
		Example:           "  box cache ls",
		Args:              exactArgs(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			entries, err := m.Cache(cmd.Context(), a.enginesInOrder())
			if err != nil {
				return err
			}
			return printCache(a.Stdout, entries)
		},
	}
}

func (a *app) cachePruneCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Remove what is expired or of no use any more",
		Long: `prune removes expired templates and the bases of which there is neither a box
nor a template. With --all it removes everything that no machine needs; the next
new then starts from the base again.`,
		Example:           "  box cache prune\n  box cache prune --all",
		Args:              exactArgs(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			removed, err := m.PruneCache(cmd.Context(), a.enginesInOrder(), all)
			if printErr := printCache(a.Stdout, removed); err == nil {
				err = printErr
			}
			var bytes int64
			for _, e := range removed {
				bytes += e.Bytes
			}
			a.term.Note(fmt.Sprintf("removed %d of them, %d MiB", len(removed), bytes>>20))
			return err
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "remove everything that no machine needs")
	return cmd
}

func (a *app) enginesInOrder() []string {
	names := a.engines()
	slices.Sort(names)
	return names
}

func printCache(w io.Writer, entries []box.CacheEntry) error {
	if len(entries) == 0 {
		return nil
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(tw, "KIND\tID\tDRIVER\tMIB\tMADE\tNOTE") // written to memory
	for _, e := range entries {
		kind, driver := "base", e.Driver
		if e.Template {
			kind = "template"
		}
		if driver == "" {
			driver = "all"
		}
		_, _ = fmt.Fprintf(tw, "%s\t%.12s\t%s\t%d\t%s\t%s\n", kind, e.ID, driver, e.Bytes>>20, e.Made.UTC().Format(time.DateTime), cacheNote(e))
	}
	return tw.Flush()
}

func cacheNote(e box.CacheEntry) string {
	switch {
	case e.Foreign:
		return "of another home"
	case e.Expired:
		return "expired"
	case e.Template:
		return "of " + e.Image
	case e.InUse:
		return "in use"
	case e.Wanted:
		return "of a box or a template"
	}
	return "of no use now"
}
