package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var testMachine = Machine{Cores: 2, MemoryMiB: 4096}

func TestDefaults(t *testing.T) {
	c, err := Load(filepath.Join(t.TempDir(), "box.env"), testMachine)
	if err != nil {
		t.Fatal(err)
	}
	if c.BaseImage != "ubuntu:24.04" || c.NodeMajor != 22 || c.CPUs != 2 || c.MemoryMiB != 2048 ||
		c.PortLo != 4790 || c.PortHi != 4999 || !c.InstallExecutor || !c.WireMCP || c.Driver != "auto" {
		t.Errorf("defaults: %+v", c)
	}
}

// Every key is accepted with a good value and refused, by name and line, with
// a bad one.
func TestEveryKey(t *testing.T) {
	cases := map[string]struct{ good, bad string }{
		"BASE_IMAGE":           {"debian:12", ""},
		"NODE_MAJOR":           {"24", "lts"},
		"INSTALL_HERMES":       {"0", "yes"},
		"INSTALL_EXECUTOR":     {"FALSE", "off"},
		"EXPOSE_EXECUTOR_WEB":  {"true", "2"},
		"EXECUTOR_PORT_LO":     {"4800", "80"},
		"EXECUTOR_PORT_HI":     {"4801", "70000"},
		"WIRE_EXECUTOR_MCP":    {"1", ""},
		"BOX_DRIVER":           {"container", "docker"},
		"BOX_CONTAINER_ENGINE": {"docker", ""},
		"BOX_CPUS":             {"3", "0"},
		"BOX_MEM_MIB":          {"2048", "8g"},
		"BOX_OVERLAY_GIB":      {"32", "-1"},
		"BOX_STORAGE_GIB":      {"", "none"},
		"CLAUDE_VERSION":       {"2.1.332", "latest"},
		"CODEX_VERSION":        {"0.171.0", "^0.1"},
		"EXECUTOR_VERSION":     {"1.5.9-beta.1", "v1.5.9"},
		"HERMES_VERSION":       {"v2026.9.24", "../x"},
		"HERMES_INSTALLER":     {"/opt/install.sh", "\x01"},
		"EXTRA_CA_FILE":        {"/etc/ca.pem", "ca.pem"},
		"HTTP_PROXY":           {"http://proxy:3128", "proxy:3128"},
		"HTTPS_PROXY":          {"http://u:p@proxy:3128", "::"},
		"NO_PROXY":             {"localhost,.example", "\x01"},
		"BOX_KERNEL":           {"/srv/kernel.deb", "kernel.deb"},
	}
	for _, key := range Keys() {
		tc, ok := cases[key]
		if !ok {
			t.Errorf("%s has no test", key)
			continue
		}
		if _, err := Parse("box.env", []byte("# c\n"+key+"='"+tc.good+"'\n"), testMachine); err != nil {
			t.Errorf("%s=%q: %v", key, tc.good, err)
		}
		_, err := Parse("box.env", []byte("\n"+key+"='"+tc.bad+"'\n"), testMachine)
		var ce *Error
		if !errors.As(err, &ce) || ce.Line != 2 || ce.File != "box.env" {
			t.Errorf("%s=%q: want an error at box.env:2, got %v", key, tc.bad, err)
		}
	}
}

func TestSyntax(t *testing.T) {
	canary := filepath.Join(t.TempDir(), "executed")
	cases := []struct{ name, in, want, wantErr string }{
		{"bare", "BASE_IMAGE=a:1", "a:1", ""},
		{"export", "export BASE_IMAGE=a:1", "a:1", ""},
		{"comment after value", "BASE_IMAGE=a:1 # why", "a:1", ""},
		{"single quotes are literal", `BASE_IMAGE='a $x'`, "a $x", ""},
		{"double quotes", `BASE_IMAGE="a \"b\" \\ \$" # c`, `a "b" \ $`, ""},
		{"CRLF and BOM", "\ufeffBASE_IMAGE=a:1\r\nBOX_CPUS=1\r\n", "a:1", ""},
		{"no newline at the end", "BOX_CPUS=1\nBASE_IMAGE=z", "z", ""},
		{"command substitution", "BASE_IMAGE=$(touch " + canary + ")", "", "box.env:1"},
		{"quoted substitution", `BASE_IMAGE="$(touch ` + canary + `)"`, "", "expansions"},
		{"backticks", "BASE_IMAGE=`touch " + canary + "`", "", "expansions"},
		{"unknown key", "BASE_IMAG=x", "", "unknown key BASE_IMAG (did you mean BASE_IMAGE?)"},
		{"duplicate", "BOX_CPUS=1\nBOX_CPUS=2", "", "box.env:2: BOX_CPUS is set twice"},
		{"no assignment", "BASE_IMAGE", "", "not KEY=VALUE"},
		{"spaces around =", "BASE_IMAGE = x", "", "not KEY=VALUE"},
		{"open quote", "BASE_IMAGE='x", "", "not closed"},
		{"text after quote", "BASE_IMAGE='x'y", "", "after the closing quote"},
		{"bare space", "BASE_IMAGE=a b", "", "needs quotes"},
		{"semicolon", "BASE_IMAGE=a;b", "", "needs quotes"},
		{"control byte", "BASE_IMAGE=a\x1b[31m", "", "control bytes"},
		{"port order", "EXECUTOR_PORT_LO=5000\nEXECUTOR_PORT_HI=4000", "", "above EXECUTOR_PORT_HI"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			c, err := Parse("box.env", []byte(tc.in), testMachine)
			switch {
			case tc.wantErr != "":
				if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
					t.Errorf("error %v, want %q", err, tc.wantErr)
				}
			case err != nil:
				t.Error(err)
			case c.BaseImage != tc.want:
				t.Errorf("BASE_IMAGE = %q, want %q", c.BaseImage, tc.want)
			}
		})
	}
	if _, err := os.Stat(canary); err == nil {
		t.Error("a value was executed")
	}
}

func TestProxyPasswordStaysOut(t *testing.T) {
	const secret = "hunter2-planted"
	c, err := Parse("box.env", []byte("HTTPS_PROXY=http://u:"+secret+"@p:1\nNODE_MAJOR=24\n"), testMachine)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.GuestFile(); strings.Contains(got, secret) || !strings.Contains(got, "NODE_MAJOR='24'") {
		t.Errorf("guest file:\n%s", got)
	}
	if _, err := Parse("box.env", []byte("HTTPS_PROXY='ftp://u:"+secret+"@p'"), testMachine); err == nil || strings.Contains(err.Error(), secret) {
		t.Errorf("error %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("BASE_IMAGE='a'\r\n# x\nexport BOX_CPUS=\"2\""))
	f.Add([]byte("\ufeffA=$(x)"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("box.env", data, testMachine)
		if err != nil {
			return
		}
		// What we render for the guest reads back the same.
		again, err := Parse("guest", []byte(c.GuestFile()), testMachine)
		if err != nil {
			t.Fatalf("own rendering refused: %v\n%s", err, c.GuestFile())
		}
		if again.BaseImage != c.BaseImage || again.NoProxy != c.NoProxy {
			t.Fatalf("rendering changed a value: %q / %q", again.BaseImage, c.BaseImage)
		}
	})
}
