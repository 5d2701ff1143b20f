// Package clitest is what the tests of the command line and the programs that
// stand in their boxes (clitest/box and clitest/tools) tell each other.
package clitest

// Variables by which a test tells its box processes where everything is.
const (
	EngineVar = "FAKE_DIR"   // the engine: machines and faults
	BuiltVar  = "FAKE_BUILT" // what the tests built: hb, and what a machine has
	SaidVar   = "FAKE_SAID"  // file that collects all that box says

	ListLimitVar    = "FAKE_LIST_LIMIT"  // deadline of ls
	CleanupLimitVar = "FAKE_CLEAN_LIMIT" // deadline of clean-up
	EngineLimitVar  = "FAKE_CALL_LIMIT"  // deadline of the engine's other calls
	GuestLimitVar   = "FAKE_GUEST_LIMIT" // deadline of calls of hb
)

// Version is what box and hb say when they are built without one.
const Version = "dev"

// Packages to build.
const (
	Box   = "hermes-box-lite/internal/cli/clitest/box"
	Tools = "hermes-box-lite/internal/cli/clitest/tools"
)
