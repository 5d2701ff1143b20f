package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/archive"
	"hermes-box-lite/internal/backup"
	"hermes-box-lite/internal/wire"
)

// verification is the schema of `box verify --json`.
type verification struct {
	Schema   int               `json:"schema"`
	Path     string            `json:"path"`
	Size     int64             `json:"size"` // bytes
	SHA256   string            `json:"sha256"`
	Legacy   bool              `json:"legacy"`
	Manifest *archive.Manifest `json:"manifest"` // null for a legacy archive
	Entries  int64             `json:"entries"`
	Bytes    int64             `json:"bytes"` // of content
	Digest   string            `json:"digest"`
	Findings []archive.Finding `json:"findings"`
	More     int               `json:"more"` // findings beyond those listed
}

func (a *app) verifyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "verify FILE",
		Short: "Read a whole archive and tell what it is",
		Long: `verify decrypts and reads the whole archive, checks every entry of it and prints
what it is of. It writes nothing decrypted anywhere and asks no engine.`,
		Example: "  box verify backups/alpha-20260625-120000.tar.gz.gpg\n  box verify FILE --json",
		Args:    exactArgs("FILE"), ValidArgsFunction: completeFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			if err := readable(args[0]); err != nil {
				return err
			}
			p, err := a.passphrase(cmd.Context(), false)
			if err != nil {
				return fmt.Errorf("verify %s: %w", args[0], err)
			}
			a.term.Step("verify")
			report, err := m.VerifyArchive(cmd.Context(), args[0], p)
			a.term.done()
			if err != nil {
				return fmt.Errorf("verify: %w", err)
			}
			v := verification{
				Schema: 1, Path: args[0], Size: report.Size, SHA256: report.SHA256, Legacy: report.Legacy,
				Entries: report.Entries, Bytes: report.Bytes, Digest: report.Digest,
				Findings: report.End.Findings, More: report.End.More,
			}
			if !report.Legacy {
				v.Manifest = &report.Manifest
			}
			if a.json {
				enc := json.NewEncoder(a.Stdout)
				enc.SetIndent("", "  ")
				return enc.Encode(v)
			}
			return a.printVerification(v, report)
		},
	}
	cmd.Flags().BoolVar(&a.json, "json", false, "print JSON of a fixed schema")
	return cmd
}

func (a *app) printVerification(v verification, report backup.Report) error {
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	row := func(name, value string) { _, _ = fmt.Fprintf(w, "%s\t%s\n", name, value) }
	row("file", wire.Printable(v.Path)+", "+size(v.Size))
	row("sha256", v.SHA256)
	if v.Manifest == nil {
		row("format", "legacy archive of the shell tool, without a manifest")
	} else {
		row("format", fmt.Sprint(v.Manifest.Format))
		row("box", v.Manifest.Box)
		row("saved", v.Manifest.Time.Format(time.RFC3339))
		row("lineage", v.Manifest.Lineage)
		var tools []string
		for _, t := range v.Manifest.Tools {
			tools = append(tools, t.Name+" "+t.Version)
		}
		row("tools", orDash(wire.Printable(strings.Join(tools, ", "))))
		row("logins", orDash(strings.Join(v.Manifest.Logins, ", ")))
	}
	row("content", fmt.Sprintf("%d entries, %s", v.Entries, size(v.Bytes)))
	row("digest", v.Digest)
	if err := w.Flush(); err != nil {
		return err
	}
	a.describeFindings(report.End)
	return nil
}

func (a *app) extractCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "extract FILE [DIR]",
		Short: "Write the content of an archive into a new directory",
		Long: `extract verifies the whole archive, then writes its content into the new
directory DIR, or one below the backups directory, with mode 0700, and prints
its path. When anything fails nothing is left.

What is extracted can hold credentials, sessions and private work: treat it as
secret.`,
		Example: "  box extract backups/alpha-20260625-120000.tar.gz.gpg",
		Args:    rangeArgs(1, "FILE", "DIR"), ValidArgsFunction: completeFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, _, err := a.manager()
			if err != nil {
				return err
			}
			if err := readable(args[0]); err != nil {
				return err
			}
			dir := ""
			if len(args) == 2 {
				dir = args[1]
			}
			p, err := a.passphrase(cmd.Context(), false)
			if err != nil {
				return fmt.Errorf("extract %s: %w", args[0], err)
			}
			dir, err = m.ExtractArchive(cmd.Context(), args[0], dir, p)
			a.term.done()
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.Stdout, dir)
			return err
		},
	}
}

// readable tells of a file that cannot be read before anybody is asked for a
// passphrase.
func readable(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO would wait for its writer
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a file", path)
	}
	return errors.Join(err, f.Close())
}

// completeFile completes an archive's path.
func completeFile(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return nil, cobra.ShellCompDirectiveDefault
}
