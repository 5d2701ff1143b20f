package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"hermes-box-lite/internal/config"
)

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "box",
		Short: "Persistent, isolated boxes for AI coding agents",
		Long: `box keeps isolated machines ("boxes") in which AI coding agents live: Claude
Code, Codex, Hermes Agent and Neovim, with Executor as their MCP gateway.

Tools are replaceable, state is precious: everything under /data in a box
survives stop, start and repair, and travels in encrypted archives (save, load).`,
		Example:           "  box new alpha\n  box enter alpha\n  box doctor alpha",
		Version:           a.Version,
		Args:              exactArgs(),
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: false},
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().BoolVar(&a.verbose, "verbose", false, "show the output of everything that runs in the box")
	root.SetVersionTemplate("box {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return &usageError{err, cmd.CommandPath()} })
	root.AddCommand(
		a.newCommand(), a.lsCommand(), a.enterCommand(), a.openCommand(), a.startCommand(), a.stopCommand(),
		a.doctorCommand(), a.repairCommand(), a.saveCommand(), a.loadCommand(), a.verifyCommand(), a.extractCommand(),
		a.forkCommand(), a.rmCommand(), a.cacheCommand(), configTopic(), exitTopic(),
	)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "help":
			refuseUnknownTopic(cmd)
		case "completion":
			completeCompletion(cmd)
		}
	}
	markUsage(root)
	return root
}

// markUsage makes every refusal of arguments a usage error.
func markUsage(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(c *cobra.Command, args []string) error {
			if err := check(c, args); err != nil {
				return &usageError{err, c.CommandPath()}
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		markUsage(sub)
	}
}

// refuseUnknownTopic: cobra's own help prints the usage and exits with 0.
func refuseUnknownTopic(help *cobra.Command) {
	help.Args = func(cmd *cobra.Command, args []string) error {
		if found, rest, err := cmd.Root().Find(args); err != nil || found == nil || len(rest) > 0 {
			return fmt.Errorf("help: there is no command %q", strings.Join(args, " "))
		}
		return nil
	}
}

// completeCompletion adds what cobra's own command for completions lacks: an
// example for each shell, and refusal of a shell that is none.
func completeCompletion(completion *cobra.Command) {
	completion.Example = "  source <(box completion bash)"
	completion.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	for _, shell := range completion.Commands() {
		shell.Example = "  box completion " + shell.Name()
	}
}

func configTopic() *cobra.Command {
	return &cobra.Command{
		Use:   "config",
		Short: "The settings in box.env",
		Long: `box.env holds assignments, KEY=VALUE, one a line; it is parsed and never
executed. It is looked for in $BOX_HOME, else beside the program, else in
$XDG_CONFIG_HOME/hermes-box. Unknown keys and bad values are refused.

  BASE_IMAGE            image of new boxes: an OCI reference, or a path of an OCI
                        layout, docker archive, root filesystem tar or directory
                        (ubuntu:24.04)
  NODE_MAJOR            major version of Node.js (22)
  INSTALL_HERMES        install Hermes Agent (true)
  INSTALL_EXECUTOR      install Executor (true)
  EXPOSE_EXECUTOR_WEB   forward Executor to a port of this host's loopback (true)
  EXECUTOR_PORT_LO, EXECUTOR_PORT_HI
                        the range of those ports (4790 to 4999)
  WIRE_EXECUTOR_MCP     register Executor with Claude, Codex and Hermes (true)
  BOX_DRIVER            auto, smolvm, qemu or container; auto only picks a
                        virtual machine (auto)
  BOX_CONTAINER_ENGINE  podman, or another program of the same kind (podman)
  BOX_CPUS, BOX_MEM_MIB size of new boxes (min(4, cores); min(8192, half of RAM))
  BOX_OVERLAY_GIB       size of the system disk, sparse (64)
  BOX_STORAGE_GIB       size of the disk of /data where it has its own
  BOX_KERNEL            a directory with boot/vmlinuz and lib/modules, or a kernel
                        package, for virtual machines (the base's own, else the
                        one that the host's package client brings)
  CLAUDE_VERSION, CODEX_VERSION, EXECUTOR_VERSION, HERMES_VERSION
                        versions to install; empty means the latest
  HERMES_INSTALLER      another address, or path in the box, of Hermes' installer
  EXTRA_CA_FILE         CA bundle to trust inside (the host's own additional CAs)
  HTTP_PROXY, HTTPS_PROXY, NO_PROXY
                        proxies for everything inside

Base, driver, sizes and exposure apply to new boxes; ` + "`box repair`" + ` applies the
rest and names what it did not.

Keys: ` + strings.Join(config.Keys(), " "),
	}
}

func exitTopic() *cobra.Command {
	return &cobra.Command{
		Use:   "exit-codes",
		Short: "What the exit codes mean",
		Long: fmt.Sprintf(`%3d  done
%3d  failed
%3d  wrong usage, or a fault in box.env
%3d  the box is unhealthy or not running
%3d  no such box, or its machine is gone
%3d  another command is changing the box
%3d  wrong passphrase, or the archive is damaged
%3d  the archive holds what none of ours would: it is unsafe
%3d  cleanup incomplete: something may be left, a person must act
%3d  (enter -- CMD only) box itself failed; other codes are CMD's own
%3d+n  ended by signal n`,
			exitOK, exitFailed, exitUsage, exitUnhealthy, exitNotFound, exitLocked, exitAuth, exitUnsafe, exitCleanup, exitTransport, exitSignal),
	}
}
