#!/bin/sh
# Runs a test program in a network of its own: `cargo nextest` calls this for each test where it is named as
# the runner. Only end to end tests need one: 169.254.169.254 is one per network, and so they run side by side.
case $1 in
*/e2e-* | */faults-* | */upgrade-*) ;;
*) exec "$@" ;;
esac
# /sys shows the network that it was mounted in.
exec unshare --net --mount --propagation private sh -c '
  mount -t sysfs sysfs /sys && ip link set lo up && exec "$@"' sh "$@"
