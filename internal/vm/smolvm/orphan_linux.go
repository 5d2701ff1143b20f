package smolvm

import (
	"os/exec"
	"syscall"
)

// endWithCaller has the kernel interrupt a call when its caller dies: a creation
// or a start that went on would write a machine's record after the next command
// has removed it.
func endWithCaller(cmd *exec.Cmd) { cmd.SysProcAttr.Pdeathsig = syscall.SIGINT }
