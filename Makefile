# The developer's and the newcomer's commands; each says what it does. `make demo` is the place to begin.
SHELL := /bin/bash
# Built things that are worth keeping between runs.
CACHE ?= /var/cache/etcd-compute
SUDO := $(shell [ "$$(id -u)" -eq 0 ] || echo sudo)
# Through sudo the user's own Rust serves.
export PATH := $(PATH):$(shell getent passwd "$${SUDO_USER:-$$(id -un)}" | cut -d: -f6)/.cargo/bin:$(HOME)/.cargo/bin
ifdef SUDO_USER
export RUSTUP_HOME ?= $(shell getent passwd $(SUDO_USER) | cut -d: -f6)/.rustup
endif

.PHONY: help demo demo-down test bench check deny fuzz fuzz-placement

help:
	@echo "make demo       install what is missing, build, start the stack, boot a guest, log in"
	@echo "make demo-down  end the demo; nothing stays but caches in $(CACHE)"
	@echo "make test       all tests, on real etcd, placement, libvirt guests and Docker"
	@echo "make bench      what we promise, beside the bare calls, as medians and ratios"
	@echo "make check      formatting, lints, dependencies and their licences"
	@echo "make deny       the last of these alone"
	@echo "make fuzz       each parser of outside data for a minute"
	@echo "make fuzz-placement  OpenStack's placement and ours, compared at random for MINUTES (10)"

demo:
	scripts/install-deps.sh demo
	cargo build --release --locked -p ecompute -p placement -p eschedule -p mdserver
	$(SUDO) scripts/demo.sh up

demo-down:
	$(SUDO) scripts/demo.sh down

test:
	scripts/install-deps.sh test
	scripts/test.sh

bench:
	scripts/install-deps.sh test
	cargo build --release --locked -p ecompute -p eschedule -p placement -p ec-bench
	$(SUDO) scripts/bench.sh

check: deny
	scripts/install-deps.sh build
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings

deny:
	scripts/deny.sh

fuzz:
	scripts/fuzz.sh 60

MINUTES ?= 10
fuzz-placement:
	scripts/install-deps.sh test
	cargo build --release --locked -p placement
	scripts/fuzz-placement.sh $(MINUTES)
