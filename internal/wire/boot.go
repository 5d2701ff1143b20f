package wire

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Seed is what the host tells hb when it is the init of a virtual machine:
// SeedPath in the initramfs. It holds the machine's own host key, so the file
// is as secret as the disk.
type Seed struct {
	Hostname  string   `json:"hostname"`
	HostKey   string   `json:"host_key"`   // OpenSSH private key, PEM
	ClientKey string   `json:"client_key"` // the one authorized key, authorized_keys form
	Workload  []string `json:"workload"`   // the machine's long-lived command
	Address   string   `json:"address"`    // IPv4 with prefix length, of the way out
	Gateway   string   `json:"gateway"`
	DNS       string   `json:"dns"`
	// ChannelAddress is that of the second network device, on which the host
	// comes in.
	ChannelAddress string `json:"channel_address"`
	Time           int64  `json:"time"` // the host's clock when the machine was started, Unix seconds
}

// Places in the initramfs, and the guest port of the execution channel.
const (
	SeedPath    = "/seed.json"
	ModulesPath = "/modules.list" // paths of kernel modules, in loading order
	ChannelPort = 4722
)

// Requests of the execution channel beyond those of RFC 4254.
const (
	// KillRequest, on a session: end the command with its whole session, and
	// answer when it is gone.
	KillRequest = "kill@hermes-box"
	// PowerOffRequest, global: end all services and power off.
	PowerOffRequest = "poweroff@hermes-box"
)

// EncodeArgv makes an SSH exec request's command of an argument list: no
// shell takes it apart again.
func EncodeArgv(argv []string) (string, error) {
	if len(argv) == 0 {
		return "", errors.New("no command")
	}
	data, err := json.Marshal(rawStrings(argv))
	return string(data), err
}

// DecodeArgv is the inverse of EncodeArgv.
func DecodeArgv(command string) ([]string, error) {
	var raw [][]byte
	if err := DecodeStrict([]byte(command), &raw); err != nil {
		return nil, fmt.Errorf("the command is no argument list: %w", err)
	}
	if len(raw) == 0 {
		return nil, errors.New("no command")
	}
	argv := make([]string, len(raw))
	for i, arg := range raw {
		argv[i] = string(arg)
	}
	return argv, nil
}

// rawStrings keeps arguments that are no UTF-8 as they are: JSON strings
// would not.
func rawStrings(argv []string) [][]byte {
	raw := make([][]byte, len(argv))
	for i, arg := range argv {
		raw[i] = []byte(arg)
	}
	return raw
}
