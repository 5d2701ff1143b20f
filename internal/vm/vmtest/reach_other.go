//go:build !linux

package vmtest

import "testing"

func (s *suite) reach(t *testing.T) { t.Skip("network namespaces are Linux's") }
