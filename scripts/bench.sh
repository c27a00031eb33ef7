#!/bin/bash
# Measures with the release binaries, on real parts; `make bench` builds them first. Needs root.
# usage: bench.sh [--json] [placement [--quick] | far | schedule | burst | echo | verbs | volumes | images | strategies | reboot]     with a name, that part alone
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${CACHE:-/var/cache/etcd-compute}
export EC_TEST_TINY_IMAGE=$cache/tiny.qcow2 EC_TEST_PLACEMENT=$cache/placement
mkdir -p "$cache"
scripts/guests/build-tiny.sh "$EC_TEST_TINY_IMAGE" "$cache/debs" >&2
scripts/placement-venv.sh "$EC_TEST_PLACEMENT" >&2
# On the distribution's etcd and on a newer release, each fresh.
placement() {
  local newer
  newer=$(scripts/fetch-newer-etcd.sh)
  for etcd in "$(command -v etcd)" "$newer"; do
    "$etcd" --version | head -n 1 >&2
    PATH=$(dirname "$etcd"):$PATH target/release/ec-bench "$@"
  done
}
case " $* " in
*" placement "*) placement "$@" ;;
*" far "* | *" schedule "* | *" burst "* | *" echo "* | *" verbs "* | *" volumes "* | *" images "* | *" strategies "* | *" reboot "*) target/release/ec-bench "$@" ;;
*)
  target/release/ec-bench "$@"
  placement "$@" placement
  ;;
esac
