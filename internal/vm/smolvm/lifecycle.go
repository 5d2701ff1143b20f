package smolvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"hermes-box-lite/internal/vm"
)

// Create implements vm.Driver.
func (d *Driver) Create(ctx context.Context, spec vm.Spec) (vm.Machine, error) {
	if err := checkName(spec.Name); err != nil {
		return vm.Machine{}, err
	}
	if !hexID.MatchString(spec.OwnerID) {
		return vm.Machine{}, errors.New("the owner id is not 32 hexadecimal digits")
	}
	if err := d.Usable(ctx); err != nil {
		return vm.Machine{}, err
	}
	held, err := d.lock(ctx, spec.Name)
	if err != nil {
		return vm.Machine{}, err
	}
	defer held.release()
	_, found, err := d.find(ctx, spec.Name)
	if err != nil {
		return vm.Machine{}, err
	}
	if found {
		return vm.Machine{}, fmt.Errorf("smolvm machine %s: %w", spec.Name, vm.ErrExists)
	}
	if left, err := d.leftOver(spec.Name); err != nil {
		return vm.Machine{}, err
	} else if left != "" {
		return vm.Machine{}, fmt.Errorf("%s: %w", left, vm.ErrExists)
	}
	source, err := d.source(ctx, spec)
	if err != nil {
		return vm.Machine{}, err
	}
	db, err := database()
	if err != nil {
		return vm.Machine{}, err
	}
	c := claim{Name: spec.Name, Owner: spec.OwnerID, DataDir: d.dataDir(spec.Name), Database: db, Template: spec.Template}
	if err := d.writeClaim(c); err != nil {
		return vm.Machine{}, fmt.Errorf("note the machine: %w", err)
	}
	_, createErr := d.run(ctx, d.opts.Patience.Work, createArgs(spec, source)...)
	// What decides is what is there now.
	m, found, err := d.find(ctx, spec.Name)
	switch {
	case err != nil:
		return vm.Machine{}, errors.Join(createErr, err)
	case !found && createErr == nil:
		return vm.Machine{}, errors.New("smolvm reports the machine made, and does not list it")
	case !found:
		return vm.Machine{}, createErr
	case owner(m, claim{}) != spec.OwnerID:
		// The name was lost to somebody; the disks are theirs.
		return vm.Machine{}, errors.Join(fmt.Errorf("smolvm machine %s: %w", spec.Name, vm.ErrExists), createErr, d.dropClaim(spec.Name))
	case createErr != nil:
		return vm.Machine{}, createErr
	}
	c.Created = m.CreatedAt
	if err := d.writeClaim(c); err != nil {
		return vm.Machine{}, fmt.Errorf("note the machine: %w", err)
	}
	return machine(m, c), nil
}

// createArgs asks for a machine. The network is always virtio: with smolvm's
// other kind (TSI) a guest has no interface of its own (src/network/launch.rs).
func createArgs(spec vm.Spec, source []string) []string {
	args := []string{
		"machine", "create", "--name", spec.Name,
		"--label", labelOwner + "=" + spec.OwnerID, "--label", labelName + "=" + spec.Name,
	}
	if spec.Template != "" {
		args = append(args, "--label", labelTemplate+"="+spec.Template)
	}
	args = append(append(args, source...), "--net", "--net-backend", "virtio-net")
	if spec.CPUs > 0 {
		args = append(args, "--cpus", strconv.Itoa(spec.CPUs))
	}
	if spec.MemoryMiB > 0 {
		args = append(args, "--mem", strconv.Itoa(spec.MemoryMiB))
	}
	// An image machine writes to the storage disk: system and /data both.
	if size := max(spec.SystemGiB, spec.StorageGiB); size > 0 {
		args = append(args, "--storage", strconv.Itoa(size))
	}
	if spec.HostPort > 0 {
		args = append(args, "--label", labelPort+"="+strconv.Itoa(spec.HostPort),
			"-p", strconv.Itoa(spec.HostPort)+":"+strconv.Itoa(spec.GuestPort))
	}
	return append(append(args, "--", "/bin/sh", "-c", workloadScript, "sh"), spec.Workload...)
}

// existing returns a machine and its claim.
func (d *Driver) existing(ctx context.Context, name string) (listed, claim, error) {
	m, found, err := d.find(ctx, name)
	if err != nil {
		return listed{}, claim{}, err
	}
	if !found {
		if left, err := d.leftOver(name); err != nil || left != "" {
			return listed{}, claim{}, errors.Join(errors.New(left), err)
		}
		return listed{}, claim{}, fmt.Errorf("smolvm machine %s: %w", name, vm.ErrNotFound)
	}
	c, err := d.readClaim(name)
	return m, c, err
}

// Start implements vm.Driver.
func (d *Driver) Start(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	held, err := d.lock(ctx, name)
	if err != nil {
		return err
	}
	defer held.release()
	return d.start(ctx, name)
}

func (d *Driver) start(ctx context.Context, name string) error {
	m, c, err := d.existing(ctx, name)
	if err != nil {
		return err
	}
	runs, err := d.reallyRuns(ctx, m)
	if err != nil {
		return err
	}
	if !runs {
		if err := d.hypervisor(); err != nil {
			return err
		}
		if err := d.disksAreThere(m, c); err != nil {
			return err
		}
		if err := d.boot(ctx, m); err != nil {
			return err
		}
	}
	if owner(m, c) == "" {
		return nil
	}
	if err := d.settle(ctx, name); err != nil {
		return err
	}
	return d.checkMarker(ctx, m, c)
}

// reallyRuns finds out whether a machine runs before it is started or stopped:
// smolvm kills one that it calls unreachable when it is told to start it, and
// that word may be old, or mean no more than that all connections are in use.
func (d *Driver) reallyRuns(ctx context.Context, m listed) (bool, error) {
	switch m.State {
	case "running":
		return true, nil
	case "frozen":
		return false, fmt.Errorf("smolvm machine %s is frozen as the base of clones that smolvm made; delete those first", m.Name)
	case "created", "stopped":
		return false, nil
	}
	for try := range 2 {
		if try > 0 {
			select {
			case <-ctx.Done():
				return false, context.Cause(ctx)
			case <-time.After(d.opts.Patience.Pause):
			}
		}
		if d.answers(ctx, m.Name) {
			return true, nil
		}
	}
	n, err := d.busy(m.Name)
	if err != nil {
		return false, err
	}
	if n > 0 {
		return false, fmt.Errorf("smolvm machine %s does not answer, but %d sessions in it are open: it may only be busy, and was left alone (end them and try again)", m.Name, n)
	}
	return false, ctx.Err()
}

// disksAreThere refuses to start a record without its disks: smolvm would make
// new ones, and an empty box would pass for the old one.
func (d *Driver) disksAreThere(m listed, c claim) error {
	if owner(m, c) == "" || !c.Marked {
		return nil
	}
	if _, err := os.Stat(d.dataDir(m.Name)); err != nil {
		return fmt.Errorf("the disks of smolvm machine %s are gone: %w", m.Name, err)
	}
	return nil
}

// boot starts a machine. A boot that took longer than smolvm's fixed 30 seconds
// is tried once more: a busy host needs that.
func (d *Driver) boot(ctx context.Context, m listed) error {
	program, err := d.program(ctx)
	if err != nil {
		return err
	}
	for try := 0; ; try++ {
		_, err = d.runProgram(ctx, d.opts.Patience.Start, program, d.note, "machine", "start", "--name", m.Name)
		if try > 0 || !says(err, "did not become ready") {
			break
		}
	}
	if says(err, "ddress already in use", "is already in use by running machine") {
		return fmt.Errorf("127.0.0.1:%s: %w (%w)", m.Labels[labelPort], vm.ErrPortTaken, err)
	}
	if err != nil {
		return err
	}
	now, found, err := d.find(ctx, m.Name)
	switch {
	case err != nil:
		return err
	case !found:
		return fmt.Errorf("smolvm machine %s is no longer listed after its start", m.Name)
	case now.State == "created" || now.State == "stopped":
		return fmt.Errorf("smolvm machine %s ended at once", m.Name)
	}
	return nil
}

// settle waits until the workload was started and commands run.
func (d *Driver) settle(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, d.opts.Patience.Settle,
		fmt.Errorf("smolvm machine %s did not run its main command within %s", name, d.opts.Patience.Settle))
	defer cancel()
	for {
		_, err := d.ask(ctx, d.opts.Patience.Probe, name, upScript)
		if err == nil {
			return nil
		}
		if errors.Is(err, vm.ErrNotRunning) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func marker(m listed) string {
	return fmt.Sprintf("1 %s %s %d", m.Labels[labelOwner], m.Name, m.CreatedAt)
}

// checkMarker compares the disk's word with the record's, and gives the disk of
// a new machine its marker.
func (d *Driver) checkMarker(ctx context.Context, m listed, c claim) error {
	found, err := d.ask(ctx, d.opts.Patience.Ask, m.Name, readMarkerScript)
	if err != nil {
		return fmt.Errorf("read the marker of smolvm machine %s: %w", m.Name, err)
	}
	fresh := c.Owner == owner(m, c) && !c.Marked
	switch {
	case found == marker(m):
	case fresh && (found == "" || c.Template != ""), c.Owner == "" && found == "":
		if _, err := d.ask(ctx, d.opts.Patience.Ask, m.Name, writeMarkerScript, marker(m)); err != nil {
			return fmt.Errorf("mark smolvm machine %s: %w", m.Name, err)
		}
	case found == "":
		return fmt.Errorf("smolvm machine %s came up on a new disk: its own was lost (a record of a deleted machine that smolvm wrote back does that); nothing was put on it", m.Name)
	default:
		return fmt.Errorf("the disk of smolvm machine %s belongs to another machine: %w", m.Name, vm.ErrNotOwner)
	}
	if c.Owner == owner(m, c) && !c.Marked {
		c.Marked = true
		return d.writeClaim(c)
	}
	return nil
}

// Stop implements vm.Driver.
func (d *Driver) Stop(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	held, err := d.lock(ctx, name)
	if err != nil {
		return err
	}
	defer held.release()
	return d.stop(ctx, name)
}

func (d *Driver) stop(ctx context.Context, name string) error {
	m, _, err := d.existing(ctx, name)
	if err != nil {
		return err
	}
	if m.State == "created" || m.State == "stopped" {
		return nil
	}
	runs, err := d.reallyRuns(ctx, m)
	if err != nil {
		return err
	}
	if runs {
		// It takes what it takes; what comes of it is seen below.
		_, _ = d.ask(ctx, d.opts.Patience.Goodbye, name, farewellScript)
	}
	if _, err := d.run(ctx, d.opts.Patience.Work, "machine", "stop", "--name", name); err != nil {
		return err
	}
	now, found, err := d.find(ctx, name)
	switch {
	case err != nil:
		return err
	case !found:
		return fmt.Errorf("smolvm machine %s is no longer listed after its stop", name)
	case now.State != "stopped" && now.State != "created":
		return fmt.Errorf("smolvm machine %s is %s after its stop", name, strconv.QuoteToASCII(now.State))
	}
	return nil
}

// deletions bounds how often a machine is deleted that comes back: a command
// that cannot connect writes the record back that it had read before.
const deletions = 3

// Delete implements vm.Driver.
func (d *Driver) Delete(ctx context.Context, name, ownerID string) error {
	if err := checkName(name); err != nil {
		return err
	}
	held, err := d.lock(ctx, name)
	if err != nil {
		return err
	}
	defer held.release()
	c, err := d.readClaim(name)
	if err != nil {
		return err
	}
	m, found, err := d.find(ctx, name)
	if err != nil {
		return err
	}
	if !found {
		return d.deleteLeftOver(name, ownerID, c)
	}
	for range deletions {
		if err := d.mayDelete(ctx, m, c, ownerID); err != nil {
			return err
		}
		if m.State == "created" || m.State == "stopped" {
			// A start that was killed may have left a process that the record does
			// not know; a stop finds it (src/cli/vm_common.rs).
			if _, err := d.run(ctx, d.opts.Patience.Work, "machine", "stop", "--name", name); err != nil {
				return err
			}
		}
		// -f, for without it smolvm asks, takes the end of its input for a no,
		// and calls that a success. It would also delete under clones, which
		// mayDelete has refused.
		_, deleteErr := d.run(ctx, d.opts.Patience.Work, "machine", "delete", "--name", name, "-f")
		if m, found, err = d.find(ctx, name); err != nil {
			return errors.Join(deleteErr, err)
		}
		if !found {
			return d.forget(name)
		}
		if deleteErr != nil {
			return deleteErr
		}
	}
	return fmt.Errorf("smolvm machine %s is still there after its deletion", name)
}

// mayDelete compares all that tells whose a machine is.
func (d *Driver) mayDelete(ctx context.Context, m listed, c claim, ownerID string) error {
	if ownerID == "" || owner(m, c) != ownerID {
		return fmt.Errorf("smolvm machine %s: %w", m.Name, vm.ErrNotOwner)
	}
	if m.State == "frozen" {
		return fmt.Errorf("smolvm machine %s is frozen as the base of clones that smolvm made; delete those first", m.Name)
	}
	if m.State != "running" {
		return nil
	}
	// A machine that does not answer is deleted by its labels.
	found, err := d.ask(ctx, d.opts.Patience.Probe, m.Name, readMarkerScript)
	if err == nil && found != "" && found != marker(m) && (c.Marked || c.Template == "") {
		return fmt.Errorf("the disk of smolvm machine %s belongs to another machine: %w", m.Name, vm.ErrNotOwner)
	}
	return nil
}

// deleteLeftOver removes what a creation of ours left that failed or was killed.
func (d *Driver) deleteLeftOver(name, ownerID string, c claim) error {
	left, err := d.leftOver(name)
	if err != nil {
		return err
	}
	if left == "" {
		if c.Owner != "" && c.Owner == ownerID {
			err = d.dropClaim(name)
		}
		return errors.Join(fmt.Errorf("smolvm machine %s: %w", name, vm.ErrNotFound), err)
	}
	if ownerID == "" || c.Owner != ownerID || !c.covers(d.dataDir(name)) {
		return fmt.Errorf("%s: %w", left, vm.ErrNotOwner)
	}
	return d.forget(name)
}

// forget removes what is left of a machine of ours that smolvm no longer lists,
// and then its claim.
func (d *Driver) forget(name string) error {
	dir := d.dataDir(name)
	if pid := vmm(dir); pid != 0 {
		return fmt.Errorf("smolvm no longer lists machine %s, but its process %d still runs", name, pid)
	}
	if !owned(dir, name) {
		return fmt.Errorf("%s belongs to another machine of smolvm", dir)
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove what smolvm left of %s: %w", name, err)
	}
	return errors.Join(os.RemoveAll(filepath.Join(d.opts.Dir, "sessions", name)), d.dropClaim(name))
}
