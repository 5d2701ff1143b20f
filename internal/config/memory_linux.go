package config

import (
	"os"
	"strconv"
	"strings"
)

// memoryMiB is the host's memory; 0: unknown.
func memoryMiB() int {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(data))
	if len(fields) < 2 || fields[0] != "MemTotal:" {
		return 0
	}
	kib, _ := strconv.Atoi(fields[1])
	return kib / 1024
}
