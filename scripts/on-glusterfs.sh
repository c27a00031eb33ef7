#!/bin/bash
# Runs a command with EC_TEST_SHARED: a directory with two mounts of one network's file system, a GlusterFS of this machine alone. What
# is done by one of them is seen by the other a moment later, as with NFS, which the tests' one directory cannot show.
# usage: on-glusterfs.sh COMMAND...              (as root)
set -euo pipefail
if [ "${1:?usage: $0 COMMAND...}" != inside ]; then
  # With a network, mounts and processes of its own, of which nothing is left whatever happens.
  exec unshare --net --mount --propagation private --pid --fork --kill-child --mount-proc "$0" inside "$@"
fi
shift
place=$(mktemp -d)
trap 'umount -l "$place"/mounts/* 2>/dev/null; rm -rf --one-file-system "$place"' EXIT
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
EC_TEST_SHARED=$place/mounts "$@"
