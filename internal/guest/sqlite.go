package guest

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/guest/sqlitefile"
	"hermes-box-lite/internal/wire"
)

// sqliteLimit bounds the check of all databases.
const sqliteLimit = 45 * time.Second

// sqliteResult is one line of check-sqlite.
type sqliteResult struct {
	Path   string      `json:"path"`
	Status wire.Status `json:"status"`
	Detail string      `json:"detail"`
}

// checkSQLiteCommand checks every database of Executor, Codex and Hermes. It
// runs as the agent.
func (a *app) checkSQLiteCommand() *cobra.Command {
	return verb("check-sqlite", "Check the databases as the agent", "", cobra.NoArgs, func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), sqliteLimit)
		defer cancel()
		var roots []string
		for _, name := range []string{".executor", ".codex", ".hermes"} {
			roots = append(roots, filepath.Join(a.layout.Home(), name))
		}
		enc := json.NewEncoder(a.stdout)
		paths, complete := sqlitefile.Find(roots)
		for _, path := range paths {
			status, detail := sqlitefile.Check(ctx, path)
			if err := enc.Encode(sqliteResult{path, status, detail}); err != nil {
				return err
			}
		}
		if !complete {
			return enc.Encode(sqliteResult{a.layout.Home(), wire.Info, "too many files: not all databases were examined"})
		}
		return nil
	})
}

func summarizeSQLite(results []sqliteResult) wire.Check {
	c := wire.Check{ID: "state.sqlite", Status: wire.Pass}
	counts := map[wire.Status]int{}
	var failed, noted []string
	for _, r := range results {
		counts[r.Status]++
		switch r.Status {
		case wire.Pass:
		case wire.Fail:
			failed = append(failed, r.Path+": "+r.Detail)
		default:
			noted = append(noted, r.Path+": "+r.Detail)
		}
	}
	c.Summary = fmt.Sprintf("%d databases are sound", counts[wire.Pass])
	switch {
	case len(failed) > 0:
		c.Status, c.Summary = wire.Fail, fmt.Sprintf("%d of %d databases are damaged", len(failed), len(results))
		c.Evidence = strings.Join(failed[:min(3, len(failed))], "; ")
		c.Fix = "box load BACKUP NEWNAME # restores a backup into a new box"
	case len(noted) > 0:
		c.Status = wire.Info
		c.Summary += fmt.Sprintf(", %d could not be checked now", len(noted))
		c.Evidence = strings.Join(noted[:min(3, len(noted))], "; ")
	case len(results) == 0:
		c.Summary = "there are no databases yet"
	}
	return c
}
