package cli

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/config"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/container"
	"hermes-box-lite/internal/vm/qemu"
	"hermes-box-lite/internal/vm/smolvm"
)

// builtinDrivers are the engines that this program can use; note is told what
// they do when that takes long.
func builtinDrivers(h box.Home, hb func() ([]byte, error), note func(string)) map[string]func(config.Config) vm.Driver {
	// One for all: it asks its program once for the version.
	smol := smolvm.New(smolvm.Options{Dir: filepath.Join(h.Machines(), "smolvm"), Note: note})
	return map[string]func(config.Config) vm.Driver{
		"container": func(c config.Config) vm.Driver { return container.New(c.ContainerEngine) },
		"qemu": func(c config.Config) vm.Driver {
			return qemu.New(qemu.Options{Dir: filepath.Join(h.Machines(), "qemu"), HB: hb, Kernel: c.Kernel})
		},
		"smolvm": func(config.Config) vm.Driver { return smol },
	}
}

// driver returns a driver by name. "auto" only ever picks a virtual machine:
// a container is weaker and must be asked for.
func (a *app) driver(ctx context.Context, c config.Config, name string) (vm.Driver, error) {
	if preferred, ok := a.Drivers["smolvm"]; ok && name == "auto" && a.Drivers["auto"] == nil {
		name = automatic(ctx, runtime.GOOS, preferred(c))
	}
	if build, ok := a.Drivers[name]; ok {
		return build(c), nil
	}
	return nil, &vm.EngineError{Engine: name, Reason: fmt.Sprintf("the driver %s is not part of this version", name), Fix: "box help config"}
}

// automatic chooses between the engines of virtual machines. On macOS there is
// smolvm alone, which says what it misses. On Linux qemu does without KVM, so it
// takes over where smolvm is not installed, is too old or another program, or may
// not use KVM.
func automatic(ctx context.Context, system string, preferred vm.Driver) string {
	if system != "linux" {
		return "smolvm"
	}
	if p, ok := preferred.(interface{ Usable(context.Context) error }); ok && p.Usable(ctx) == nil {
		return "smolvm"
	}
	return "qemu"
}

// engines are the names of all drivers; "auto" is none of its own, and smolvm,
// where it is not installed, has no machines to tell of.
func (a *app) engines() []string {
	names := make([]string, 0, len(a.Drivers))
	for name := range a.Drivers {
		if _, err := exec.LookPath(name); name == "auto" || name == "smolvm" && err != nil {
			continue
		}
		names = append(names, name)
	}
	return names
}
