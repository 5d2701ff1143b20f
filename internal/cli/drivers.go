package cli

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"

	"hermes-box-lite/internal/box"
	"hermes-box-lite/internal/config"
	"hermes-box-lite/internal/vm"
	"hermes-box-lite/internal/vm/container"
	"hermes-box-lite/internal/vm/qemu"
)

// builtinDrivers are the engines that this program can use.
func builtinDrivers(h box.Home, hb func() ([]byte, error)) map[string]func(config.Config) vm.Driver {
	return map[string]func(config.Config) vm.Driver{
		"container": func(c config.Config) vm.Driver { return container.New(c.ContainerEngine) },
		"qemu": func(c config.Config) vm.Driver {
			return qemu.New(qemu.Options{Dir: filepath.Join(h.Machines(), "qemu"), HB: hb, Kernel: c.Kernel})
		},
	}
}

// driver returns a driver by name. "auto" only ever picks a virtual machine:
// a container is weaker and must be asked for.
func (a *app) driver(_ context.Context, c config.Config, name string) (vm.Driver, error) {
	if name == "auto" && a.Drivers["auto"] == nil {
		if runtime.GOOS != "linux" {
			return nil, &vm.EngineError{
				Engine: "BOX_DRIVER=auto",
				Reason: "no driver for virtual machines on " + runtime.GOOS + " is part of this version; containers share a kernel and are used only when box.env says BOX_DRIVER=container",
				Fix:    "box help config",
			}
		}
		name = "qemu"
	}
	if build, ok := a.Drivers[name]; ok {
		return build(c), nil
	}
	return nil, &vm.EngineError{Engine: name, Reason: fmt.Sprintf("the driver %s is not part of this version", name), Fix: "box help config"}
}

// engines are the names of all drivers; "auto" is none of its own.
func (a *app) engines() []string {
	names := make([]string, 0, len(a.Drivers))
	for name := range a.Drivers {
		if name != "auto" {
			names = append(names, name)
		}
	}
	return names
}
