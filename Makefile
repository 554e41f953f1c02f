# Every module of the workspace is tested on its own: at the root, ./... stops
# at the nested modules.
MODULES := $(shell sed -n 's/^[[:space:]]*\(use \)\{0,1\}\(\.[^ ]*\)$$/\2/p' go.work)
GO      ?= go
# Packages of one module run side by side; on a small machine fewer is faster.
TESTFLAGS ?=

.PHONY: test race vet fmt lint bench fuzz quickstart modules

test: ## all modules' tests; needs nothing but Go
	@set -e; for m in $(MODULES); do echo "== $$m"; (cd $$m && $(GO) test $(TESTFLAGS) ./...); done

race: ## the same with the race detector; needs a C compiler
	@$(MAKE) --no-print-directory test TESTFLAGS="-race $(TESTFLAGS)"

vet:
	@set -e; for m in $(MODULES); do (cd $$m && $(GO) vet ./...); done

fmt:
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "gofmt would change:"; echo "$$out"; exit 1; fi

lint: ## staticcheck over every module
	@set -e; for m in $(MODULES); do echo "== staticcheck $$m"; (cd $$m && $(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...); done

FUZZTIME ?= 10s
fuzz: ## each fuzzer for FUZZTIME
	@GO="$(GO)" FUZZTIME="$(FUZZTIME)" sh .ci/fuzz $(MODULES)

BENCH ?= .
COUNT ?= 6
bench: ## all benchmarks, peers and floors in the same run
	cd server_test/bench && $(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) -timeout 60m .

quickstart:
	$(GO) run ./examples/quickstart

modules: ## prints the modules' folders, a line each
	@printf '%s\n' $(MODULES)
