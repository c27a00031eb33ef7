#!/bin/sh
# Gets the etcd of a newer Debian release without installing it, and prints the path of the binary:
#
#     ETCD_BIN_NEW=$(scripts/fetch-newer-etcd.sh) cargo test -p ec-store
#
# usage: fetch-newer-etcd.sh [SUITE]     (default: trixie, which has etcd 3.5)
#
# Keeps the result in .cache/.
set -eu

suite=${1:-trixie}
root=$(cd "$(dirname "$0")/.." && pwd)
cache=${XDG_CACHE_HOME:+$XDG_CACHE_HOME/etcd-compute}
cache=${cache:-$root/.cache}/etcd-$suite
binary=$cache/root/usr/bin/etcd

if [ ! -x "$binary" ]; then
    rm -rf "$cache"
    "$root/scripts/fetch-package.sh" "$suite" etcd-server "$cache/root"
    "$binary" --version >&2
fi
echo "$binary"
