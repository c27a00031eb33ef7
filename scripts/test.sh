#!/bin/bash
# All tests, on real parts. Needs root: bridges, network namespaces and libvirt.
# usage: test.sh                        all but these three:
#        test.sh long                   also what takes hours
#        test.sh shared                 those of storage that nodes share alone, on a network's file system (on-glusterfs.sh)
#        test.sh upgrade DIRECTORY      this release's programs beside those there, of another (upgrade-test.sh calls it)
#        test.sh parts                  none: makes what they need beside programs, images and environments
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" -ne 0 ]; then
  # The user's own Rust serves, and what comes to it is the user's at the end. Proxies by name: a password in one is nobody's to see.
  rust=("RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}" "CARGO_HOME=${CARGO_HOME:-$HOME/.cargo}")
  code=0
  sudo --preserve-env=http_proxy,https_proxy,no_proxy env "PATH=$PATH" "${rust[@]}" "$0" "$@" || code=$?
  sudo chown -R "$(id -u):$(id -g)" "${CARGO_HOME:-$HOME/.cargo}"
  exit $code
fi
# Whose checkout it is, theirs is what is built in it, however this ends; also where they say `sudo make test`.
if [ -n "${SUDO_USER-}" ] && [ "$SUDO_USER" = "$(stat -c %U .)" ]; then trap 'chown -Rf --reference=. target .cache || true' EXIT; fi
what=${1-}
cache=${CACHE:-/var/cache/etcd-compute}
mkdir -p "$cache"
if ! command -v cargo-nextest >/dev/null; then
  echo "building cargo-nextest, once: nine minutes on two cores"
  cargo install --locked cargo-nextest
fi
export EC_TEST_TINY_IMAGE=$cache/tiny.qcow2 EC_TEST_DEBIAN_IMAGE=$cache/debian.qcow2
export EC_TEST_PLACEMENT=$cache/placement EC_TEST_S3=$cache/s3
parts() {
  scripts/guests/build-tiny.sh "$EC_TEST_TINY_IMAGE" "$cache/debs"
  # Of minutes of a processor each: the image, and every boot of it. Also with the data source that stock images do not look for by
  # themselves.
  [ "$what" != long ] || scripts/guests/build-debian.sh "$EC_TEST_DEBIAN_IMAGE" Ec2
  scripts/placement-venv.sh "$EC_TEST_PLACEMENT"
  scripts/s3-venv.sh "$EC_TEST_S3"
  scripts/fetch-newer-etcd.sh >/dev/null
}
if [ "$what" = parts ]; then
  parts
  exit
fi
# Beside the build: they wait for the network and for one program most of the time.
parts &
parts=$!
# With the failpoints, at which the crash tests stop the agent. In one go with the tests: apart, the
# dependencies would be built twice, with different features.
tests=(--tests)
case $what in
upgrade) tests=(--test upgrade) ;;
shared) tests=(--test faults) ;;
esac
cargo build --locked --workspace --all-features --bins "${tests[@]}"
wait "$parts"
ETCD_BIN_NEW=$(scripts/fetch-newer-etcd.sh)
export ETCD_BIN_NEW
# Random histories are the same ones in every run, so that a failure is of the change; `make fuzz` has others.
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-1}
# Of a failure the reason, not the way to it: that would push the reason out of a log's end.
export RUST_BACKTRACE=0
host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
export "CARGO_TARGET_${host}_RUNNER=$PWD/scripts/in-netns.sh"
if [ "$what" = long ]; then
  export KILLS=${KILLS:-20}
  scripts/docker-test.sh target/debug "$EC_TEST_TINY_IMAGE" openstack
  cargo nextest run --profile long --workspace --locked --all-features --no-capture
  exit
fi
if [ "$what" = upgrade ]; then
  export EC_TEST_PREVIOUS=$2
  cargo nextest run --profile upgrade --workspace --locked --all-features "${tests[@]}" --no-capture
  exit
fi
if [ "$what" = shared ]; then
  scripts/on-glusterfs.sh \
    cargo nextest run --workspace --locked --all-features "${tests[@]}" --ignore-default-filter -E 'test(storage_shared)'
  exit
fi
cargo nextest run --workspace --locked --all-features -E 'not (package(ec-sim) and kind(test))'
# It waits most of the time, in which `make sim` beside .ci/run's tests builds what is next.
scripts/docker-test.sh target/debug "$EC_TEST_TINY_IMAGE"
# Whole clusters are computed, not waited for: optimised it takes a tenth of the time.
# Without what .ci/run has to look for lints: `make sim` beside this has built it already.
env -u RUSTC_WORKSPACE_WRAPPER scripts/simulation.sh nextest run --locked -p ec-sim --all-features --test '*'
