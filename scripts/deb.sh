#!/bin/bash
# Makes Debian packages of the built programs, in target/deb. `make deb` builds first and calls it.
# The same commit, built on the same system, gives the same bytes: times are those of the last commit.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$PWD/target/deb
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
packaged=$(dpkg-parsechangelog -S Version)
[ "$packaged" = "$version" ] || {
  echo "deb: debian/changelog says $packaged, Cargo.toml $version" >&2
  exit 1
}
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
# How xz cuts its work, and so its bytes, would depend on the number of processors.
export SOURCE_DATE_EPOCH DPKG_DEB_THREADS_MAX=1 LC_ALL=C.UTF-8 TZ=UTC DEB_OUT=$out
umask 022
rm -rf "$out"
mkdir -p "$out"
debian/rules clean
debian/rules binary
debian/rules clean
(cd "$out" && sha256sum -- *.deb)
