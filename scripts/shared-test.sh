#!/bin/bash
# Runs the tests of storage that nodes share on a network's file system: a GlusterFS of this machine alone, mounted twice, one mount for
# each node. What one of them does the other sees a moment later, as with NFS, which the tests' one directory cannot show.
# usage: shared-test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" -ne 0 ]; then
  rust=("RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}" "CARGO_HOME=${CARGO_HOME:-$HOME/.cargo}")
  code=0
  sudo env "PATH=$PATH" "${rust[@]}" "$0" || code=$?
  sudo chown -R "$(id -u):$(id -g)" target .cache "${CARGO_HOME:-$HOME/.cargo}"
  exit $code
fi
if [ "${1-}" != inside ]; then
  scripts/install-deps.sh shared-test
  scripts/test.sh build
  # With a network, mounts and processes of its own, of which nothing is left whatever happens.
  exec unshare --net --mount --propagation private --pid --fork --kill-child --mount-proc "$0" inside
fi
place=$(mktemp -d)
trap 'umount -l "$place"/mounts/* 2>/dev/null; rm -rf "$place/brick"; rm -rf "$place"' EXIT
ip link set lo up
# gluster takes no loopback address for a server's.
ip address add 192.0.2.1/32 dev lo
mkdir -p "$place"/{brick,mounts/{first,other}} /var/lib/glusterd
mount -t tmpfs tmpfs /var/lib/glusterd
mount -t tmpfs tmpfs /run
glusterd --pid-file "$place/glusterd.pid" --log-file "$place/glusterd.log"
for _ in $(seq 50); do
  gluster --mode=script volume info >/dev/null 2>&1 && break
  sleep 0.2
done
gluster --mode=script volume create shared "192.0.2.1:$place/brick" force
gluster --mode=script volume start shared
for mount in first other; do
  mount -t glusterfs "192.0.2.1:/shared" "$place/mounts/$mount"
done
EC_TEST_SHARED=$place/mounts scripts/test.sh shared
