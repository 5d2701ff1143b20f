// Package guest is the command tree of hb, the program inside a box: what the
// agent types (status, doctor, down, up, …) and, hidden from help, what the
// host calls over a driver's Exec.
//
// Verbs that need root call themselves again through sudo. Programs of the
// agent get the agent's environment and nothing of the caller's. Everything
// that is printed for people is escaped, since it may come from files or
// programs of the agent. Exit codes: 0 ok, 1 failed, 2 usage, 3 unhealthy.
//
// cmd/hb calls Main; Linux only.
package guest
