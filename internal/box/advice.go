package box

import (
	"regexp"
	"strings"

	"hermes-box-lite/internal/wire"
)

var (
	insideCommand = regexp.MustCompile(`^hb( -?[a-z][a-z-]*)+$`)
	outsideVerb   = regexp.MustCompile(`^box (repair|start|stop|doctor) ([A-Za-z0-9-]+)$`)
)

// advice turns what a guest advises into a command of this host, or, with
// command "", into text. A guest is hostile: what it says is offered as a
// command to run here only when it has one of our own forms and concerns its
// own box.
func advice(name, fix string) (command, text string) {
	if insideCommand.MatchString(fix) {
		return "box enter " + name + " -- " + fix, ""
	}
	var commands []string
	for part := range strings.SplitSeq(fix, " && ") {
		m := outsideVerb.FindStringSubmatch(part)
		if m == nil || m[2] != name && m[2] != "NAME" {
			return "", wire.Printable(fix)
		}
		commands = append(commands, "box "+m[1]+" "+name)
	}
	return strings.Join(commands, " && "), ""
}

// adviceText is advice as one line of a report.
func adviceText(name, fix string) string {
	command, text := advice(name, fix)
	if command == "" && text != "" {
		return "in the box: " + text
	}
	return command
}

// guestError is hb's own word of a fault, with its advice.
func guestError(name, fault, fix string) *GuestError {
	command, text := advice(name, fix)
	fault = wire.Printable(fault)
	if text != "" {
		fault += " (" + text + ")"
	}
	return &GuestError{Text: fault, Fix: command}
}
