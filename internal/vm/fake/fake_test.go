//go:build linux

package fake_test

import (
	"os"
	"path/filepath"
	"testing"

	"hermes-box-lite/internal/vm/fake"
	"hermes-box-lite/internal/vm/vmtest"
)

func TestConformance(t *testing.T) {
	dir := t.TempDir()
	d := fake.New(dir, "")
	leftOver := func(t *testing.T, name string) {
		t.Helper()
		path := filepath.Join(dir, "machines", name, "root", "data")
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(filepath.Join(dir, "machines", name)) })
	}
	vmtest.Run(t, vmtest.Harness{
		Driver: d, Foreign: leftOver, LeftOver: leftOver,
		Crash: func(t *testing.T, name string) {
			if err := d.Kill(name); err != nil {
				t.Fatal(err)
			}
		},
	})
}
