package qemu

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"hermes-box-lite/internal/atomicfile"
	"hermes-box-lite/internal/process"
)

// verdict is what this boot of the host taught about KVM.
type verdict struct {
	BootID string `json:"boot_id"`
	Works  bool   `json:"works"`
}

func (d *Driver) verdictPath() string { return filepath.Join(d.opts.Dir, "kvm.json") }

// kvmChoice says whether KVM is to be tried, and whether it has booted a
// machine, or failed to, on this boot of the host.
type kvmChoice struct{ use, proven, lies bool }

// kvm decides. That /dev/kvm opens proves nothing: there are hosts on which it
// opens, answers and yet runs no stock kernel. So the module and the
// processor's flags must be there, and the first boot is limited in time.
func (d *Driver) kvm() kvmChoice {
	if d.opts.Emulate || !d.plausible() {
		return kvmChoice{}
	}
	data, err := os.ReadFile(d.verdictPath())
	var v verdict
	if err != nil || json.Unmarshal(data, &v) != nil || v.BootID != process.BootID() {
		return kvmChoice{use: true}
	}
	return kvmChoice{use: v.Works, proven: v.Works, lies: !v.Works}
}

func (d *Driver) rememberKVM(works bool) error {
	data, err := json.Marshal(verdict{process.BootID(), works})
	if err != nil {
		return err
	}
	return atomicfile.Write(d.verdictPath(), data, 0o600)
}

// lyingKVM is the note of a machine on a host whose KVM did not boot it.
const lyingKVM = "/dev/kvm is there, but no machine booted with it: software emulation is used, which is many times slower"

func kvmPlausible() bool {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	_ = f.Close()
	if runtime.GOARCH != "amd64" {
		return true
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return false
	}
	return hardwareKVM(string(info), func(module string) bool {
		_, err := os.Stat("/sys/module/" + module)
		return err == nil
	})
}

// hardwareKVM looks for an x86 processor's extension and its module.
func hardwareKVM(cpuinfo string, loaded func(module string) bool) bool {
	return hasFlag(cpuinfo, "vmx") && loaded("kvm_intel") || hasFlag(cpuinfo, "svm") && loaded("kvm_amd")
}

func hasFlag(cpuinfo, flag string) bool {
	for line := range strings.Lines(cpuinfo) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "flags" {
			return slices.Contains(strings.Fields(value), flag)
		}
	}
	return false
}
