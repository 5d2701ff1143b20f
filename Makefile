# Two commands matter to a newcomer: `make demo` runs the product, `make test`
# passes the tests. Every tool that they need is pinned in tools/go.mod or
# installed from the distribution by scripts/host-packages.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.version=$(VERSION)
GOBUILD := CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)'
TOOLS   := $(CURDIR)/.tools/bin
HB      := internal/hbbin/bin/hb-linux-amd64.gz internal/hbbin/bin/hb-linux-arm64.gz
SOURCES := $(shell find cmd internal -name '*.go') go.mod go.sum

.PHONY: help build demo check test e2e e2e-full e2e-smolvm bench fuzz fuzz-archives faults lint base bare-base tools cross vuln clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 14

build: box ## build ./box with hb for both architectures inside

internal/hbbin/bin/hb-linux-%.gz: $(SOURCES)
	GOOS=linux GOARCH=$* $(GOBUILD) -o out/hb-linux-$* ./cmd/hb
	gzip -9 -n -c out/hb-linux-$* >$@

box: $(HB) $(SOURCES)
	$(GOBUILD) -o box ./cmd/box

demo: ## make a box with the real tools and show that it is healthy
	scripts/demo

base: $(HB) ## make a local Debian base with the tools; prints its path
	@HB=out/hb-linux-$$(go env GOARCH) scripts/base

bare-base: $(HB) ## make a local Debian base without anything; prints its path
	@HB=out/hb-linux-$$(go env GOARCH) scripts/base --bare

check: lint cross vuln $(HB) ## everything fast: lint, build for all hosts, unit and script tests
	go test -timeout 20m ./...

lint: tools 
	$(TOOLS)/golangci-lint run ./...
	$(TOOLS)/golangci-lint fmt --diff ./...
	GOOS=darwin $(TOOLS)/golangci-lint run --enable-only govet,typecheck ./cmd/box/...
	go vet -tags e2e ./e2e
	@if command -v shellcheck >/dev/null; then shellcheck scripts/* .ci/run; else echo "WARNING: shellcheck is not installed, so the scripts were not checked" >&2; fi

cross: $(HB) ## build box for every supported host
	@for target in linux/amd64 linux/arm64 darwin/amd64 darwin/arm64; do \
	  GOOS=$${target%/*} GOARCH=$${target#*/} CGO_ENABLED=0 go build -o /dev/null ./cmd/box && echo "builds for $$target"; done

vuln: tools
	@scripts/vuln $(TOOLS)/govulncheck

tools: $(TOOLS)/golangci-lint

$(TOOLS)/golangci-lint: tools/go.mod tools/go.sum
	cd tools && GOBIN=$(TOOLS) go install tool
	touch $@

test: check faults e2e ## all tests, with the whole table of faults

e2e: build ## scenarios on real containers with the real tools
	scripts/e2e

e2e-full: build ## the same, and the slow ones
	scripts/e2e --full

e2e-smolvm: build ## the smolvm driver on its stand-in; with BOX_E2E_SMOLVM=1 on the installed smolvm
	scripts/e2e-smolvm

FAULTS_PART ?= all

faults: $(HB) ## end every verb at every point in every way, on fake machines; prints the table
	FAULTS=$(FAULTS_PART) go test -count=1 -timeout 120m -v -run '^TestFaults$$' ./internal/cli

bench: build ## compare archives with tar, gzip, gpg and restic, and boxes with a raw boot
	scripts/host-packages bench vm
	mkdir -p out
	go run ./bench -json out/bench.json
	go run ./bench -boxes qemu -runs 3 -base "$$(make -s base)" -json out/bench-boxes.json

fuzz-archives: ## fuzz what reads archives for FUZZTIME (60s) a target
	scripts/fuzz internal/archive internal/backup

fuzz: ## fuzz every target for FUZZTIME (60s)
	scripts/fuzz

clean: ## remove what was built
	rm -rf box out .tools $(HB)
