package vmtest

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"hermes-box-lite/internal/vm"
)

// systemFile is a place of the system that survives a boot, in a fake machine
// as in a real one.
const systemFile = `"$HB_ROOT"/opt/vmtest`

// dataFile is a place of the state.
const dataFile = `"$HB_ROOT"/data/vmtest`

// write leaves a word in both.
func (s *suite) write(t *testing.T, name, word string) {
	t.Helper()
	s.sh(t, name, `mkdir -p "$HB_ROOT"/opt; echo `+word+` >`+systemFile+`; echo `+word+` >`+dataFile+`; sync `+systemFile+` `+dataFile)
}

// holds checks the words that a machine has there; "" is none.
func (s *suite) holds(t *testing.T, name, system, data string) {
	t.Helper()
	for file, want := range map[string]string{systemFile: system, dataFile: data} {
		if got := s.sh(t, name, `cat `+file+` 2>/dev/null || :`); got != want {
			t.Errorf("%s of %s has %q, want %q", file, name, got, want)
		}
	}
}

// template makes machines out of the system of another one.
func (s *suite) template(t *testing.T) {
	cacher, ok := s.Driver.(vm.Cacher)
	if !ok {
		t.Skip("this driver keeps no templates")
	}
	ctx := s.ctx(t)
	id := randomHex(32)
	// After the machines are gone.
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), s.Patience)
		defer cancel()
		if err := cacher.Evict(ctx, id); err != nil && !errors.Is(err, vm.ErrNoTemplate) {
			t.Error(err)
		}
	})
	first := s.spec(t, s.prefix+"-first")
	s.create(t, first)
	s.write(t, first.Name, "one")

	if err := cacher.MakeTemplate(ctx, first.Name, randomHex(16), id); !errors.Is(err, vm.ErrNotOwner) {
		t.Errorf("MakeTemplate of a machine that is not the caller's: %v", err)
	}
	missing := s.spec(t, s.prefix+"-none")
	missing.Template = id
	if _, err := s.Driver.Create(ctx, missing); !errors.Is(err, vm.ErrNoTemplate) {
		t.Errorf("Create from a template that is not there: %v", err)
		s.remove(t, missing)
	}
	begin := time.Now()
	if err := cacher.MakeTemplate(ctx, first.Name, first.OwnerID, id); err != nil {
		t.Fatal(err)
	}
	t.Logf("the template took %v", time.Since(begin).Round(time.Millisecond))
	if s.state(t, first.Name) != vm.Running {
		t.Error("the machine no longer runs after MakeTemplate")
	}
	s.holds(t, first.Name, "one", "one")
	s.write(t, first.Name, "two")
	s.cached(t, cacher, id, true)

	second := s.spec(t, s.prefix+"-second")
	second.Template = id
	s.create(t, second)
	s.holds(t, second.Name, "one", "") // no state, and nothing of what came later
	s.write(t, second.Name, "other")
	s.holds(t, first.Name, "two", "two")

	// The first is stopped and made a template again: the new one counts.
	if err := s.Driver.Stop(ctx, first.Name); err != nil {
		t.Fatal(err)
	}
	if err := cacher.MakeTemplate(ctx, first.Name, first.OwnerID, id); err != nil {
		t.Fatal(err)
	}
	if s.state(t, first.Name) != vm.Stopped {
		t.Error("MakeTemplate left a stopped machine running")
	}
	s.remove(t, first)
	third := s.spec(t, s.prefix+"-third")
	third.Template = id
	s.create(t, third)
	// Some engines keep a template as long as a machine stands on it.
	if err := cacher.Evict(ctx, id); err == nil {
		s.cached(t, cacher, id, false)
		if err := cacher.Evict(ctx, id); !errors.Is(err, vm.ErrNoTemplate) {
			t.Errorf("Evict of what is gone: %v", err)
		}
	} else if !errors.Is(err, vm.ErrInUse) {
		t.Fatal(err)
	}
	// Neither the machine nor the template that they came from is needed.
	for name, word := range map[string]string{third.Name: "two", second.Name: "other"} {
		if err := s.Driver.Stop(ctx, name); err != nil {
			t.Fatal(err)
		}
		if err := s.Driver.Start(ctx, name); err != nil {
			t.Fatal(err)
		}
		if got := s.sh(t, name, "cat "+systemFile); got != word {
			t.Errorf("%s has %q, want %q", name, got, word)
		}
	}
}

func (s *suite) cached(t *testing.T, cacher vm.Cacher, id string, want bool) {
	t.Helper()
	all, err := cacher.Cached(s.ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(c vm.Cached) bool { return c.Template && c.ID == id })
	if (i >= 0) != want {
		t.Fatalf("Cached has the template: %v, want %v", i >= 0, want)
	}
	if i >= 0 && (time.Since(all[i].Made) > time.Hour || time.Until(all[i].Made) > time.Hour) {
		t.Errorf("the template was made at %v", all[i].Made)
	}
	for _, c := range all {
		if !c.Template && c.InUse {
			if err := cacher.Evict(s.ctx(t), c.ID); !errors.Is(err, vm.ErrInUse) {
				t.Errorf("Evict of a base that machines need: %v", err)
			}
		}
	}
}

// clone copies a running machine, the copy, and a stopped one.
func (s *suite) clone(t *testing.T) {
	cloner, ok := s.Driver.(vm.Cloner)
	if !ok {
		t.Skip("this driver clones no machines")
	}
	ctx := s.ctx(t)
	source := s.spec(t, s.prefix+"-src")
	s.create(t, source)
	s.write(t, source.Name, "one")
	if _, err := cloner.Clone(ctx, source.Name, randomHex(16), s.spec(t, s.prefix+"-no")); !errors.Is(err, vm.ErrNotOwner) {
		t.Errorf("Clone of a machine that is not the caller's: %v", err)
	}
	if _, err := cloner.Clone(ctx, source.Name, source.OwnerID, source); !errors.Is(err, vm.ErrExists) {
		t.Errorf("Clone onto a machine that is there: %v", err)
	}
	clone := func(from vm.Spec, suffix string) vm.Spec {
		t.Helper()
		spec := s.spec(t, s.prefix+suffix)
		m, err := cloner.Clone(ctx, from.Name, from.OwnerID, spec)
		t.Cleanup(func() { s.remove(t, spec) })
		if err != nil {
			t.Fatal(err)
		}
		if m.OwnerID != spec.OwnerID || m.Name != spec.Name {
			t.Errorf("the clone is %+v", m)
		}
		if err := s.Driver.Start(ctx, spec.Name); err != nil {
			t.Fatal(err)
		}
		return spec
	}
	copied := clone(source, "-copy")
	s.holds(t, copied.Name, "one", "one")
	s.write(t, copied.Name, "copy")
	s.write(t, source.Name, "two")
	s.holds(t, copied.Name, "copy", "copy")
	again := clone(copied, "-again")
	s.holds(t, again.Name, "copy", "copy")

	// What was written after the clone survives a stop, and the source its
	// clones' source.
	if err := s.Driver.Stop(ctx, source.Name); err != nil {
		t.Fatal(err)
	}
	last := clone(source, "-last")
	s.holds(t, last.Name, "two", "two")
	s.remove(t, copied)
	if err := s.Driver.Start(ctx, source.Name); err != nil {
		t.Fatal(err)
	}
	s.holds(t, source.Name, "two", "two")
	s.remove(t, source)
	if err := s.Driver.Stop(ctx, again.Name); err != nil {
		t.Fatal(err)
	}
	if err := s.Driver.Start(ctx, again.Name); err != nil {
		t.Fatal(err)
	}
	s.holds(t, again.Name, "copy", "copy")
}
