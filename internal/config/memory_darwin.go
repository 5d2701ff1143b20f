package config

import "golang.org/x/sys/unix"

// memoryMiB is the host's memory; 0: unknown.
func memoryMiB() int {
	bytes, err := unix.SysctlUint64("hw.memsize") // sysctl(3)
	if err != nil {
		return 0
	}
	return int(bytes >> 20) //nolint:gosec // far below 2^63
}
