package guest_test

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"hermes-box-lite/internal/wire"
)

// What the doctor says of a workspace is mended by what it advises; what nobody
// mends, a user's own arrangement, is no fault.
func TestWorkspaceChecks(t *testing.T) {
	foreign := func(path string) error { return os.Lchown(path, 12345, 12345) }
	for _, tt := range []struct {
		name            string
		root            bool // only root can bring it about
		put             func(workspace, elsewhere string) error
		writable, owner wire.Status
	}{
		{"a directory", false, func(workspace, _ string) error { return os.Mkdir(workspace, 0o755) }, wire.Pass, wire.Pass},
		{"another's", true, func(workspace, _ string) error {
			return errors.Join(os.Mkdir(workspace, 0o755), foreign(workspace))
		}, wire.Pass, wire.Fail}, // root may write it, too
		{"another's link", true, func(workspace, elsewhere string) error {
			return errors.Join(os.Symlink(elsewhere, workspace), foreign(workspace))
		}, wire.Pass, wire.Pass},
		{"a link to nothing", false, func(workspace, elsewhere string) error { return os.Symlink(elsewhere+"/none", workspace) }, wire.Pass, wire.Pass},
		{"a link to no directory", false, func(workspace, _ string) error { return os.Symlink("/dev/null", workspace) }, wire.Info, wire.Pass},
		{"a file", false, func(workspace, _ string) error { return os.WriteFile(workspace, nil, 0o600) }, wire.Info, wire.Pass},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.root && os.Geteuid() != 0 {
				t.Skip("only root can give files away")
			}
			b := newBox(t, "").provisioned()
			if err := errors.Join(os.Remove(b.l.Workspace()), tt.put(b.l.Workspace(), t.TempDir())); err != nil {
				t.Fatal(err)
			}
			stdout, stderr, _ := b.run("doctor", "--json", "--part", wire.DoctorRest)
			var report wire.Report
			if err := json.Unmarshal([]byte(stdout), &report); err != nil {
				t.Fatalf("%v: %s", err, stderr)
			}
			want := map[string]wire.Status{"state.writable": tt.writable, "state.owner": tt.owner}
			for _, c := range report.Checks {
				if status, ok := want[c.ID]; ok {
					delete(want, c.ID)
					if c.Status != status || status == wire.Fail && !strings.HasPrefix(c.Fix, "box repair ") {
						t.Errorf("%+v, want %s", c, status)
					}
				}
			}
			if len(want) > 0 {
				t.Errorf("nothing is said of %v", want)
			}
		})
	}
}
