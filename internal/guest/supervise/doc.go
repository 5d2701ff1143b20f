// Package supervise is the workload of a box: `hb supervise`.
//
// A small guardian (PID 1 in most boxes) reaps orphans, turns TERM into a
// graceful end and restarts the worker when it dies. The worker is a single
// instance by a lock; it keeps Executor running as the agent, serves the door
// and answers on the control socket, which is root's alone.
//
// What it promises: never two Executors, because the check and the spawn
// happen under one mutex and an orphan of a killed worker is ended first; a
// pause that is durable and decided under the same mutex; a running Executor
// only counts as up after the full MCP handshake. What is asked of it: the
// verbs of hb, through Ask, HoldExecutor and StandIn.
package supervise
