#!/bin/bash
# Follows docs/cluster.md word for word on three new machines in a network of their own, then tries what the page promises.
# usage: page-test.sh [SUITE SUITE SUITE]        (of h1, h2, h3; default: bookworm trixie noble. Root; some minutes)
#
# The commands are those of the page: a line of a code block begins with the host that it is said on, `h1#`, or `*#` for
# each. Packages that the distribution has lie in each machine's apt before: there is no way outside. The new machines' file systems
# are kept in CACHE/machines for a week.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8 ETCDCTL_API=3
umask 022
page=docs/cluster.md
cache=${CACHE:-/var/cache/etcd-compute}
hosts=(h1 h2 h3)
network=10.0.0

say() { printf '%4d s  %s\n' $SECONDS "$*"; }
die() {
  echo "page-test: $*" >&2
  exit 1
}
# shellcheck source=scripts/machines.sh
. scripts/machines.sh

# ---- new machines ---------------------------------------------------------------------------------

# clean SUITE: what the installer of that release leaves, with ssh; and the packages that the page installs, unpacked nowhere.
clean() {
  local suite=$1 root=$cache/machines/$1
  if [ -n "$(find "$root" -maxdepth 0 -mtime +7 2>/dev/null)" ]; then rm -rf --one-file-system "$root"; fi
  if [ ! -e "$root" ]; then
    mkdir -p "$cache/machines"
    rm -rf --one-file-system "$root.part"
    new_root "$suite" "$root.part" apt,ca-certificates,systemd,systemd-sysv,dbus,iproute2,procps,openssh-server --skip=cleanup/apt
    rm -rf "$root.part"/{etc/resolv.conf,etc/machine-id,etc/hostname}
    # There is no console to log in at, and the kernel's file systems for its developers are not to be had.
    local unit
    for unit in console-getty.service sys-kernel-debug.mount sys-kernel-tracing.mount; do
      ln -sf /dev/null "$root.part/etc/systemd/system/$unit"
    done
    mv "$root.part" "$root"
    touch "$root"
  fi
  mkdir -p "$root/packages"
  mount --bind target/deb "$root/packages"
  cp -L /etc/resolv.conf "$root/etc/resolv.conf"
  chroot "$root" sh -c 'apt-get -qq -y --download-only install /packages/*.deb etcd-server' >"$work/download.log" 2>&1 ||
    { cat "$work/download.log" >&2 && die "$suite: the packages could not be fetched"; }
  rm "$root/etc/resolv.conf"
  umount "$root/packages"
}

# Mounts, bridge and addresses are this test's own, and go with it.
if [ "${1-}" != --alone ]; then
  [ "$(id -u)" -eq 0 ] || die "must be run as root: it makes file systems and namespaces"
  for tool in mmdebstrap unshare nsenter etcdctl curl openssl python3 ssh-keygen; do
    command -v $tool >/dev/null || die "$tool is missing: run scripts/install-deps.sh package-test"
  done
  ls target/deb/*.deb >/dev/null || die "there are no packages: run \`make deb\`"
  [ -e "$cache/tiny.qcow2" ] || scripts/guests/build-tiny.sh "$cache/tiny.qcow2" "$cache/debs"
  if [ $# -eq 0 ]; then set -- bookworm trixie noble; fi
  [ $# -eq 3 ] || die "wanted three suites, of h1, h2 and h3"
  for suite in "$@"; do unshare --mount --propagation private "$0" --alone clean "$suite"; done
  say "three new file systems: $*"
  exec unshare --mount --net --propagation private "$0" --alone follow "$@"
fi

work=$(mktemp -d)
chmod 755 "$work"
images=''
cleanup() {
  if [ -n "$images" ]; then kill "$images" 2>/dev/null || true; fi
  close_machines 2>/dev/null # bash tells of each that was killed
  umount -q "$work"/h?/root 2>/dev/null || true
  rm -rf --one-file-system "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
if [ "$2" = clean ]; then
  clean "$3"
  exit 0
fi
suites=("${@:3}")

ip link set lo up
ip link add lan type bridge stp_state 0 forward_delay 0
ip address add $network.254/24 dev lan
ip link set lan up
open_machines
ssh-keygen -q -t ed25519 -N '' -C root@h1 -f "$work/key"
number=0
for host in "${hosts[@]}"; do
  place=$work/$host suite=${suites[$number]}
  number=$((number + 1))
  mkdir -p "$place"/{root,upper,work}
  mount -t overlay -o "lowerdir=$cache/machines/$suite,upperdir=$place/upper,workdir=$place/work" overlay "$place/root"
  root=$place/root
  echo $host >"$root/etc/hostname"
  printf '%s\n' '127.0.0.1 localhost' "$network.1 h1" "$network.2 h2" "$network.3 h3" >"$root/etc/hosts"
  uuid=$(</proc/sys/kernel/random/uuid)
  echo "${uuid//-/}" >"$root/etc/machine-id"
  # What the page wants to be there: our packages, and root of h1 may log in to the others.
  cp target/deb/*.deb "$root/root/"
  install -d -m 700 "$root/root/.ssh"
  install -m 600 "$work/key.pub" "$root/root/.ssh/authorized_keys"
  rm -f "$root"/etc/ssh/ssh_host_*
  ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/ssh_host_ed25519_key"
  echo "$network.$number $(cut -d' ' -f 1,2 "$root/etc/ssh/ssh_host_ed25519_key.pub")" >>"$work/known_hosts"
done
install -m 600 "$work/key" "$work/h1/root/root/.ssh/id_ed25519"
install -m 644 "$work/known_hosts" "$work/h1/root/root/.ssh/known_hosts"
address_of() { echo "$network.${1#h}"; }
start() { boot "$1" "$work/$1/root" "$work/$1/console" "$(address_of "$1")/24"; }
for host in "${hosts[@]}"; do start "$host"; done
for host in "${hosts[@]}"; do
  say "$host: $(. "$work/$host/root/etc/os-release" && echo "$PRETTY_NAME"), systemd $(in_machine "$host" systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p')"
done

# ---- the page -------------------------------------------------------------------------------------

# follow HEADING: says what the code blocks below that heading say.
follow() {
  local line where command targets host began=$SECONDS count=0
  while IFS= read -r line; do
    [[ $line =~ ^(h[0-9]+|\*)#\ +(.*)$ ]] || die "$page, $1: no host at the beginning of: $line"
    where=${BASH_REMATCH[1]} command=${BASH_REMATCH[2]}
    if [ "$where" = '*' ]; then targets=("${hosts[@]}"); else targets=("$where"); fi
    for host in "${targets[@]}"; do
      if ! in_machine "$host" bash -c "cd && $command" >"$work/said" 2>&1 </dev/null; then
        tail -n 40 "$work/said" >&2
        die "$page, $1: on $host this failed: $command"
      fi
      cp "$work/said" "$work/said.$host"
    done
    count=$((count + 1))
  done < <(awk -v wanted="$1" '/^#/ { on = $0 == wanted } on && /^```/ { code = !code; next } on && code' $page)
  [ $count -gt 0 ] || die "$page has no commands below: $1"
  say "$1: $count lines of the page ($((SECONDS - began)) s)"
}
until_done() { # until_done SECONDS WHAT COMMAND…
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || die "$what: not within the time: $("$@" 2>&1 || true; journal)"
    sleep 0.5
  done
}
journal() { for host in "${!machine_init[@]}"; do in_machine "$host" journalctl --no-pager -n 15 -u ecompute -u eplacement -u econtroller -u etcd; done; }
# field PYTHON: of the JSON document on standard input, as d.
field() { python3 -c 'import json, sys; d = json.load(sys.stdin); print(eval(sys.argv[1]))' "$1"; }
nodes() { in_machine h1 eschedule -o json nodes; }
node_is() { [ "$(nodes | field "[(n['alive'], n['disabled']) for n in d if n['name'] == '$1']")" = "[($2, $3)]" ]; }

began=$SECONDS
follow '## Packages'
follow '## The first host'
follow '## Each host'
for host in "${hosts[@]}"; do until_done 60 "$host is a node" node_is $host True False; done
for host in "${hosts[@]}"; do in_machine $host systemctl --failed --no-pager; done
say "three nodes, $((SECONDS - began)) s after the first line of the page (packages were fetched before)"
[ $((SECONDS - began)) -lt 600 ] || die "the page promises ten minutes"
if grep -i warning "$work"/said.h?; then die "there are warnings"; fi
