#!/bin/bash
# Tries the Debian packages of target/deb (`make deb-test` builds them first): lintian; then installed, upgraded,
# removed and purged on a new machine with its own systemd as process 1, in namespaces.
# usage: package-test.sh [SUITE…]        (bookworm, trixie or noble; default: bookworm. Root; some minutes each)
#
# The new machines' file systems, with all that the packages depend on, are kept in CACHE/machines for a week.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8
umask 022
cache=${CACHE:-/var/cache/etcd-compute}
packages=(etcd-compute etcd-compute-agent etcd-compute-control etcd-compute-metadata)
units=(ecompute econtroller eplacement mdserver)

say() { printf '%4d s  %s\n' $SECONDS "$*"; }
die() {
  echo "package-test: $*" >&2
  exit 1
}
# shellcheck source=scripts/machines.sh
. scripts/machines.sh
[ "$(id -u)" -eq 0 ] || die "must be run as root: it makes a file system and namespaces"
for tool in mmdebstrap lintian unshare nsenter; do command -v $tool >/dev/null || die "$tool is missing: run scripts/install-deps.sh package-test"; done
ls target/deb/*.deb >/dev/null || die "there are no packages: run \`make deb\`"

if [ $# -gt 1 ]; then
  for suite in "$@"; do "$0" "$suite"; done
  exit
fi
suite=${1:-bookworm}
work=$(mktemp -d)
chmod 755 "$work"
root=$work/root
cleanup() {
  close_machines
  rm -rf --one-file-system "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# ---- lintian --------------------------------------------------------------------------------------

install -d -o nobody "$work/lintian"
cp target/deb/*.deb "$work/lintian/"
if ! (cd "$work/lintian" && setpriv --reuid nobody --regid nogroup --clear-groups env HOME="$work/lintian" \
  lintian --fail-on error,warning ./*.deb); then die "lintian"; fi
say "lintian: no errors, no warnings"

# ---- a machine ------------------------------------------------------------------------------------

kept=$(root_with_dependencies "$suite")
cp -a --reflink=auto "$kept" "$root"
mkdir -p "$root/packages" "$root/newer"
cp target/deb/*.deb "$root/packages/"
# The same again with a higher version, to be upgraded to.
for deb in target/deb/*.deb; do
  rm -rf "$work/newer"
  dpkg-deb -R "$deb" "$work/newer"
  sed -i -e 's/^\(Version: .*\)/\1+1/' "$work/newer/DEBIAN/control"
  dpkg-deb --root-owner-group -Zgzip -z1 -b "$work/newer" "$root/newer" >/dev/null
done
# There is no console to log in at, and what would be saved at the end is not wanted again.
for unit in console-getty.service libvirt-guests.service sys-kernel-debug.mount sys-kernel-tracing.mount; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
# The network and the guests of the machine around are out of reach.
rm -f "$root/etc/resolv.conf"

inside() { in_machine package-test "$@"; }
image=$cache/tiny.qcow2
[ -e "$image" ] || scripts/guests/build-tiny.sh "$image" "${image%/*}/debs"
install -D -m 644 -t "$root/srv/images" "$image"
open_machines
boot package-test "$root" "$work/console"
say "a new machine runs: $(. "$root/etc/os-release" && echo "$PRETTY_NAME"), $(inside systemctl --version | head -n 1)"

# ---- what is tried --------------------------------------------------------------------------------

# What lies where packages put things; what others change by themselves is left out.
files() {
  inside sh -c 'find /etc /usr /var/lib -path /var/lib/dpkg -prune -o -path /var/lib/etcd -prune -o -path "/var/lib/libvirt" -prune -o \
    -path /usr/share/mime -prune -o -path "/etc/libvirt/qemu" -prune -o -path /var/lib/systemd/timers -prune -o -print' |
    grep -vE '^/var/lib/systemd/(random-seed|linger|catalog|coredump)|^/etc/(passwd|shadow|group|gshadow|subuid|subgid)-?$|^/etc/\.(pwd\.lock|updated)$|^/etc/libvirt/storage(/autostart)?$' | sort
}
each() { # each WORD…: systemctl WORD UNIT is true of every unit
  for unit in "${units[@]}"; do inside systemctl -q "$@" "$unit" || die "$unit: not $*: $(inside systemctl status --no-pager -n 20 "$unit")"; done
}
none() { # none WORD
  for unit in "${units[@]}"; do if inside systemctl -q "$@" "$unit" 2>/dev/null; then die "$unit: $*"; fi; done
}
until_done() { # until_done SECONDS WHAT COMMAND…
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || die "$what: not within the time; $(inside journalctl --no-pager -n 30)"
    sleep 0.5
  done
}
alive() { inside eschedule -o json nodes | grep -c '"alive": *true' >/dev/null; }
told_its_name() { inside eschedule logs web | grep -ac 'web' >/dev/null; }
anew() { # anew UNIT PID: another process is that unit, and it is well
  local new
  new=$(pid "$1") && [ "$new" != "$2" ] && [ "$new" != 0 ] && inside systemctl -q is-active "$1"
}
pid() { inside systemctl show -p MainPID --value "$1"; }
pids() { for unit in "${units[@]}"; do pid "$unit"; done; }
guest() { inside pgrep -f "guest=$instance"; }
active() { inside eschedule -o json show web | grep -q '"state": *"ACTIVE"'; }

files >"$work/before"
inside sh -c 'dpkg -i /packages/*.deb' >"$work/install.log" 2>&1 || { cat "$work/install.log" && die "not installed"; }
none is-enabled
none is-active
say "installed; nothing is started or enabled"

for unit in "${units[@]}"; do inside systemd-analyze --man=no verify "$unit.service" || die "systemd-analyze verify $unit"; done
for unit in "${units[@]}"; do
  score=$(inside systemd-analyze --no-pager security --offline=true "/lib/systemd/system/$unit.service" | sed -n 's/.*exposure level for [^:]*: \([0-9.]*\).*/\1/p')
  echo "        systemd-analyze security $unit: $score"
  awk -v score="$score" 'BEGIN { exit !(score != "" && score <= 3.0) }' || die "more than 3.0"
done

inside systemctl -q start libvirtd
# Where it is not started by itself, as Ubuntu has it.
inside virsh -q net-list --name | grep -qx default || inside virsh -q net-start default
# As docs/cluster.md has it, with the distribution's etcd.
inside eschedule cluster init 127.0.0.1 package-test >"$work/cluster.log"
inside sh -c 'echo ETCD_CONFIG_FILE=/etc/ecompute/etcd.yaml >>/etc/default/etcd && systemctl -q restart etcd'
inside eschedule cluster init >"$work/cluster.log"
inside eschedule node add package-test --host 127.0.0.1 --out /root/bundle >"$work/cluster.log"
join() {
  inside ecompute join /root/bundle >"$work/cluster.log"
  inside sh -c 'echo "images: {local: [/srv/images]}" >>/etc/ecompute/compute.yaml'
}
join
inside systemctl -q enable --now "${units[@]}"
each is-active
until_done 60 "the agent is alive" alive
# Each tells its numbers, under what its unit allows it.
for port in 18091 18092; do
  inside curl --noproxy '*' -fsS "http://127.0.0.1:$port/metrics" | grep -c _build_info >/dev/null || die "no numbers at port $port"
done
for port in 8080 18090; do
  inside sh -c "cd /etc/ecompute && curl --noproxy '*' -fsS --cacert ca.pem --cert monitoring.pem --key monitoring.key https://127.0.0.1:$port/metrics" |
    grep -c _build_info >/dev/null || die "no numbers at port $port"
done
# As who mends a unit that fails all along: more starts in a row than systemd's five.
for _ in 1 2 3 4 5 6; do inside systemctl restart mdserver || die "mdserver cannot be started again"; done
for unit in "${units[@]}"; do
  [ "$(inside systemctl show -p StartLimitIntervalUSec --value "$unit")" = 0 ] || die "$unit stays down once it has failed some times in a row"
done
say "enabled and started"

inside eschedule --wait --timeout 300 --name web 'resources=VCPU:1,MEMORY_MB:128,DISK_GB:1' file:///srv/images/tiny.qcow2 >"$work/guest.log" 2>&1 ||
  { cat "$work/guest.log" && die "no guest"; }
instance=$(sed -n 's/.*OF INSTANCE //p' "$work/guest.log")
qemu=$(guest)
# The tiny guest has its name of the metadata server only; mdserver was there before the agent, and answers.
until_done 60 "the guest is told its name" told_its_name
[ "$(inside sh -c "cut -d: -f3 /proc/$qemu/cgroup | grep -c ecompute" || true)" = 0 ] || die "the guest is in the agent's control group"
say "a guest runs, $instance"

old=$(pids)
inside sh -c 'dpkg -i /newer/*.deb' >"$work/upgrade.log" 2>&1 || { cat "$work/upgrade.log" && die "not upgraded"; }
each is-active
each is-enabled
[ -z "$(comm -12 <(sort <<<"$old") <(pids | sort))" ] || die "not all were started anew: $old, $(pids)"
[ "$(guest)" = "$qemu" ] || die "the guest did not outlive the upgrade"
inside grep -q '/srv/images' /etc/ecompute/compute.yaml || die "the administrator's configuration is lost"
until_done 60 "the guest is ACTIVE after the upgrade" active
say "upgraded: services are new, the guest runs on, the configuration is kept"

for unit in ecompute eplacement; do
  inside sh -c "mkdir -p /run/systemd/system/$unit.service.d && printf '[Service]\nWatchdogSec=12\n' >/run/systemd/system/$unit.service.d/soon.conf"
done
inside systemctl daemon-reload
inside systemctl restart ecompute eplacement
for unit in ecompute eplacement; do
  stopped=$(pid $unit)
  sleep 14
  [ "$(pid $unit)" = "$stopped" ] || die "$unit is well and was started anew"
  inside kill -STOP "$stopped"
  until_done 120 "$unit, which stands, is started anew" anew $unit "$stopped"
  inside sh -c "rm -r /run/systemd/system/$unit.service.d"
done
inside systemctl daemon-reload
[ "$(guest)" = "$qemu" ] || die "the guest did not outlive the watchdog"
say "the watchdog starts anew what stands, and leaves what is well"

inside dpkg --remove "${packages[@]}" >"$work/remove.log" 2>&1
grep -q 'apt-mark manual .*libvirt-daemon-system' "$work/remove.log" || die "removing does not say what would end the guest: $(cat "$work/remove.log")"
none is-active
[ "$(guest)" = "$qemu" ] || die "the guest did not outlive the removal"
inside test -e /etc/ecompute/compute.yaml || die "the configuration went with the removal"
inside dpkg --purge "${packages[@]}" >"$work/purge.log" 2>&1
inside test -e "/var/lib/ecompute/instances/$instance.json" || die "purging took a guest's record: $(cat "$work/purge.log")"
[ "$(guest)" = "$qemu" ] || die "the guest did not outlive the purge"
say "removed and purged: the guest, its disk and its record stay"

inside sh -c 'dpkg -i /packages/*.deb' >/dev/null 2>&1
# Configuration goes with a purge, but not who belongs to the cluster.
inside eschedule cluster init 127.0.0.1 package-test >"$work/cluster.log"
join
inside systemctl -q enable --now "${units[@]}"
until_done 60 "the guest is ACTIVE again" active
inside eschedule destroy web --wait >/dev/null 2>&1 || die "the guest cannot be destroyed"
inside dpkg --purge "${packages[@]}" >"$work/purge.log" 2>&1
inside rm -r /etc/ecompute
files >"$work/after"
inside virsh -q pool-list --all | grep ecompute && die "the storage pool is left"
inside nft list tables | grep ecompute && die "packet rules are left"
inside ip -o addr | grep 169.254.169.254 && die "the address is left"
diff "$work/before" "$work/after" || die "purging left this, or took it"
say "installed anew the agent goes on with the guest; destroyed and purged, nothing is left"

inside systemctl poweroff || true
for _ in $(seq 100); do [ -d "/proc/${machine_init[package-test]}" ] || break; sleep 0.2; done
echo "package-test: $suite passed in $SECONDS s"
