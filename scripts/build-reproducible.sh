#!/bin/bash
# Builds the programs so that the same sources, compiler and system give the same bytes, wherever the checkout and
# the crates lie. For `make install` and `make deb`.
# usage: build-reproducible.sh             all programs, into target/package/release
#        build-reproducible.sh static      eschedule alone, linked with musl and nothing of the system, into
#                                          target/package/x86_64-unknown-linux-musl/release
set -euo pipefail
cd "$(dirname "$0")/.."
crates=${CARGO_HOME:-$HOME/.cargo}
# What panics and C's assertions name files by.
export RUSTFLAGS="--remap-path-prefix=$PWD=/usr/src/etcd-compute --remap-path-prefix=$crates=/usr/src/cargo"
export CFLAGS="-ffile-prefix-map=$crates=/usr/src/cargo -ffile-prefix-map=$PWD=/usr/src/etcd-compute"
# What C makes of __DATE__ and __TIME__ (mimalloc says when it was built). Not the commit's: what is compiled is kept over commits.
export SOURCE_DATE_EPOCH=0
# A target of its own, so that other builds, which have other flags, and this one do not undo each other.
build() { exec cargo build --release --locked --target-dir target/package "$@"; }
case ${1-} in
'') build -p ecompute -p econtroller -p placement -p eschedule -p mdserver ;;
static)
  target=x86_64-unknown-linux-musl
  rustup target add $target
  build --target $target -p eschedule
  ;;
*)
  echo "build-reproducible: \`$1\` is not known: wanted static, or nothing" >&2
  exit 2
  ;;
esac
