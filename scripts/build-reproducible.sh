#!/bin/bash
# Builds the programs so that the same sources, compiler and system give the same bytes, wherever the checkout and
# the crates lie, and THIRD-PARTY-LICENSES beside them. For `make install` and `make deb`.
# usage: build-reproducible.sh             all programs, into target/package/release
#        build-reproducible.sh static      eschedule alone, linked with musl and nothing of the system, into
#                                          target/package/x86_64-unknown-linux-musl/release
set -euo pipefail
cd "$(dirname "$0")/.."
crates=${CARGO_HOME:-$HOME/.cargo}
# What panics and C's assertions name files by.
export CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=$PWD=/usr/src/etcd-compute"$'\x1f'"--remap-path-prefix=$crates=/usr/src/cargo"
# As a shell reads them, so that a path may have a space.
export CC_SHELL_ESCAPED_FLAGS=1 CFLAGS="'-ffile-prefix-map=$crates=/usr/src/cargo' '-ffile-prefix-map=$PWD=/usr/src/etcd-compute'"
# What C makes of __DATE__ and __TIME__ (mimalloc says when it was built). Not the commit's: what is compiled is kept over commits.
export SOURCE_DATE_EPOCH=0
# All of it first, also what only tests need: the licences are told from a look at the whole workspace, and on a new machine it would fail
# for want of these after the whole build.
fetch() { cargo fetch --locked --target "$1"; }
# A target of its own, so that other builds, which have other flags, and this one do not undo each other.
build() { cargo build --release --locked --target-dir target/package "$@"; }
# Whose work the programs are linked with goes with them.
licenses() { # licenses DIRECTORY TARGET PACKAGE…
  scripts/third-party-licenses.py "${@:2}" >"$1/THIRD-PARTY-LICENSES.part"
  mv "$1/THIRD-PARTY-LICENSES.part" "$1/THIRD-PARTY-LICENSES"
}
case ${1-} in
'')
  packages=(ecompute econtroller placement eschedule mdserver)
  host=$(rustc -vV | sed -n 's/^host: //p')
  fetch "$host"
  build "${packages[@]/#/--package=}"
  licenses target/package/release "$host" "${packages[@]}"
  ;;
static)
  target=x86_64-unknown-linux-musl
  rustup target add $target
  fetch $target
  build --target $target -p eschedule
  program=target/package/$target/release/eschedule
  # A dependency's C may find a library here that other systems do not have.
  if readelf -d "$program" | grep -F '(NEEDED)' >&2; then
    echo "build-reproducible: $program is not static: it needs these" >&2
    exit 1
  fi
  "$program" --version >/dev/null
  licenses target/package/$target/release $target eschedule
  ;;
*)
  echo "build-reproducible: \`$1\` is not known: wanted static, or nothing" >&2
  exit 2
  ;;
esac
