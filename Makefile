# Every module of the workspace is tested on its own: at the root, ./... stops
# at the nested modules.
MODULES := $(shell sed -n 's/^[[:space:]]*\(use \)\{0,1\}\(\.[^ ]*\)$$/\2/p' go.work)
GO      ?= go
# Packages of one module run side by side; on a small machine fewer is faster.
TESTFLAGS ?=

.PHONY: test race vet fmt lint bench chaos fuzz quickstart modules

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

CHAOS_TIME  ?= 5m
CHAOS_SEED  ?= 1
CHAOS_STORE ?=
chaos: ## kills nodes and databases for CHAOS_TIME per store and mode, and checks what is left
	cd server_test/faults && IDEMPOTENCY_CHAOS_TIME=$(CHAOS_TIME) IDEMPOTENCY_CHAOS_SEED=$(CHAOS_SEED) \
		IDEMPOTENCY_CHAOS_STORE=$(CHAOS_STORE) $(GO) test -run '^TestChaos$$' -v -timeout 24h .

BENCH ?= .
COUNT ?= 6
bench: ## all benchmarks, peers and floors in the same run
	cd server_test/bench && $(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) -timeout 60m .

quickstart:
	$(GO) run ./examples/quickstart

modules: ## prints the modules' folders, a line each
	@printf '%s\n' $(MODULES)
