# The developer's and the newcomer's commands; each says what it does. `make demo` is the place to begin.
SHELL := /bin/bash
# Built things that are worth keeping between runs.
CACHE ?= /var/cache/etcd-compute
# By which proxy packages and crates are fetched, which sudo does not let through by itself; by name, since a password may be in it, and
# `sudo env http_proxy=…` would show that to all who look at processes.
PROXIES := --preserve-env=http_proxy,https_proxy,no_proxy
SUDO := $(shell [ "$$(id -u)" -eq 0 ] || echo sudo $(PROXIES))
# Through sudo the user's own Rust serves.
export PATH := $(PATH):$(shell getent passwd "$${SUDO_USER:-$$(id -un)}" | cut -d: -f6)/.cargo/bin:$(HOME)/.cargo/bin
ifdef SUDO_USER
export RUSTUP_HOME ?= $(shell getent passwd $(SUDO_USER) | cut -d: -f6)/.rustup
# Who says `sudo make demo` keeps a target/ of their own, and their own cache of crates.
ifeq ($(SUDO_USER),$(shell stat -c %U .))
AS_OWNER := sudo $(PROXIES) -H -u $(SUDO_USER) env PATH="$(PATH)" RUSTUP_HOME="$(RUSTUP_HOME)"
endif
endif
BUILD := $(AS_OWNER) cargo build --release --locked

.PHONY: help demo demo-down test long newcomer bench check deny fuzz fuzz-placement sim guards mutants \
  mutants-changed install uninstall deb deb-test page-test piuparts eschedule-static \
  upgrade-test shared-test

help:
	@echo "make demo       install what is missing, build, start the stack, boot a guest, log in"
	@echo "make demo-down  end the demo; nothing stays but caches in $(CACHE)"
	@echo "make test       all tests, on real etcd, placement, libvirt guests and Docker"
	@echo "make long       hours: these, a stock Debian through every verb, and KILLS (20) kills at each step of each"
	@echo "make shared-test  the tests of storage that nodes share, on a GlusterFS that is mounted twice"
	@echo "make upgrade-test  this release's programs and those of PREVIOUS (the one before) together, in every mixture"
	@echo "make newcomer   install and demo on new Debian 12, Debian 13 and Ubuntu 24.04, in namespaces"
	@echo "make bench      what we promise, beside the bare calls, as medians and ratios"
	@echo "make install    programs, units, pages and completions, below DESTDIR and PREFIX (/usr/local)"
	@echo "make uninstall  takes these away again; configuration stays, and so does what the programs made"
	@echo "make deb        Debian packages, in target/deb; the same commit gives the same bytes"
	@echo "make deb-test   these, and installs, upgrades, removes and purges them on a new machine of SUITES (bookworm)"
	@echo "make page-test  follows docs/cluster.md word for word on three new machines, and tries what it promises"
	@echo "make piuparts   what the packages leave behind, of SUITES (bookworm trixie)"
	@echo "make eschedule-static  the command line for any Linux, in target/package"
	@echo "make check      formatting, lints, dependencies and their licences"
	@echo "make deny       the last of these alone"
	@echo "make fuzz       random histories of an instance, and each parser of outside data for a minute"
	@echo "make sim        histories of a whole cluster under simulated time, of SEEDS (0..3000; 17 is one)"
	@echo "make guards     which comparisons of transactions that simulation misses when they are left out, all or PLACES (file:line)"
	@echo "make mutants    what the tests of the pure crates notice of each thing made wrong in them"
	@echo "make mutants-changed  the same of six of what changed in the last twenty commits, or since SINCE"
	@echo "make fuzz-placement  OpenStack's placement and ours, compared at random for MINUTES (10)"

demo:
	$(AS_OWNER) scripts/check-rust.sh
	scripts/install-deps.sh demo
	$(BUILD) -p ecompute -p econtroller -p placement -p eschedule -p mdserver
	$(SUDO) scripts/demo.sh up

demo-down:
	$(SUDO) scripts/demo.sh down

test:
	scripts/check-rust.sh
	scripts/install-deps.sh test
	scripts/test.sh

# Built by whom the checkout belongs to, also where root installs.
PREFIX ?= /usr/local
install:
	$(AS_OWNER) scripts/check-rust.sh
	$(AS_OWNER) scripts/build-reproducible.sh
	PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" scripts/install.sh

uninstall:
	PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" scripts/install.sh remove

deb:
	$(AS_OWNER) scripts/check-rust.sh
	scripts/install-deps.sh package
	$(AS_OWNER) scripts/build-reproducible.sh
	$(AS_OWNER) scripts/deb.sh

deb-test: deb
	scripts/install-deps.sh package-test
	$(SUDO) env CACHE=$(CACHE) scripts/package-test.sh $(SUITES)

page-test: deb
	scripts/install-deps.sh package-test
	$(SUDO) env CACHE=$(CACHE) scripts/page-test.sh $(SUITES)

piuparts: deb
	scripts/install-deps.sh package-test
	$(SUDO) scripts/piuparts.sh $(SUITES)

eschedule-static:
	$(AS_OWNER) scripts/check-rust.sh
	scripts/install-deps.sh package
	$(AS_OWNER) scripts/build-reproducible.sh static

long:
	scripts/check-rust.sh
	scripts/install-deps.sh test
	scripts/test.sh long

upgrade-test:
	scripts/check-rust.sh
	scripts/install-deps.sh test
	scripts/upgrade-test.sh $(PREVIOUS)

shared-test:
	scripts/check-rust.sh
	scripts/install-deps.sh shared-test
	scripts/test.sh shared

newcomer:
	$(AS_OWNER) scripts/check-rust.sh
	scripts/install-deps.sh test
	$(BUILD) -p ecompute -p econtroller -p placement -p eschedule -p mdserver
	$(SUDO) scripts/newcomer.sh $(CASES)

bench:
	$(AS_OWNER) scripts/check-rust.sh
	scripts/install-deps.sh test
	$(BUILD) -p ecompute -p eschedule -p placement -p ec-bench
	$(SUDO) scripts/bench.sh

# Another that looks for the same: .ci/run has it done by the build of what it tests.
LINT = cargo clippy --workspace --all-targets --all-features --locked -- -D warnings

check:
	scripts/check-rust.sh
	scripts/install-deps.sh build
	scripts/deny.sh $(DENY)
	cargo fmt --all --check
	$(LINT)

deny:
	scripts/deny.sh

fuzz:
	PROPTEST_CASES=500000 cargo test --release --locked -p ec-plan --test histories
	scripts/fuzz.sh 60

MINUTES ?= 10
fuzz-placement:
	scripts/install-deps.sh test
	$(BUILD) -p placement
	scripts/fuzz-placement.sh $(MINUTES)

SEEDS ?= 0..3000
sim:
	scripts/check-rust.sh
	scripts/simulation.sh run --locked -p ec-sim --all-features -- $(SEEDS) --jobs $$(nproc)

guards:
	scripts/check-rust.sh
	scripts/guards.sh $(PLACES)

mutants:
	scripts/check-rust.sh
	scripts/mutants.sh all

mutants-changed:
	scripts/check-rust.sh
	scripts/mutants.sh changed
