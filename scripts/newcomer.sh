#!/bin/bash
# Follows the README on new machines: minimal root file systems with git, make and sudo, in namespaces of their own.
# usage: newcomer.sh [CASE…]         (default: all)
#
#   debian12            what is to be installed is, the demo runs and ends, nothing is left of it
#   debian12-backports  the same, where qemu-utils is there from backports, which does not go with the release's QEMU
#   debian13, ubuntu24.04
#
# Nothing is compiled in there: the release binaries of this checkout are seen inside. So that they run, this
# host must be no newer than the system that is tried. Root; some minutes each. A case that cannot be tried (no mirror,
# no keyring) has failed.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C
umask 022
limit=900 # seconds for one case
work=''

die() {
  echo "newcomer: $*" >&2
  exit 1
}
mirror_debian=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
mirror_ubuntu=${UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu}

# base CASE ROOT: the new machine, as its installer leaves it, with what the README wants to be there.
base() {
  local include=apt,git,make,sudo,ca-certificates
  local options=(--quiet --variant=minbase --format=directory)
  case $1 in
  debian12) mmdebstrap "${options[@]}" --include=$include bookworm "$2" "deb $mirror_debian bookworm main" ;;
  debian12-backports)
    mmdebstrap "${options[@]}" --include=$include,qemu-utils/bookworm-backports bookworm "$2" \
      "deb $mirror_debian bookworm main" "deb $mirror_debian bookworm-backports main"
    ;;
  debian13) mmdebstrap "${options[@]}" --include=$include trixie "$2" "deb $mirror_debian trixie main" ;;
  ubuntu24.04)
    local keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
    if [ ! -e $keyring ]; then
      # Debian 12 has no such package; Debian's own signature vouches for that of 13.
      scripts/fetch-package.sh trixie ubuntu-keyring "$work/keyring" >/dev/null 2>&1 ||
        { echo "no keyring of Ubuntu is to be had (package ubuntu-keyring)" && return 1; }
      keyring=$work/keyring$keyring
      # In newer packages, a link whose target lies beside it.
      [ -e "$keyring" ] || { echo "the package ubuntu-keyring has no $keyring" && return 1; }
    fi
    mmdebstrap "${options[@]}" --include=$include --keyring="$keyring" noble "$2" \
      "deb [signed-by=$keyring] $mirror_ubuntu noble main universe"
    ;;
  *) echo "no such case" && return 1 ;;
  esac
}

# What this host needs to reach the mirrors serves inside as well: proxies and authorities.
like_host() {
  apt-config dump | grep -iE '^Acquire::[^ ]*(Proxy|Verify-Peer|CaInfo)' >"$1/etc/apt/apt.conf.d/80host" || true
  if ls /usr/local/share/ca-certificates/*.crt >/dev/null 2>&1; then
    cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/"
    chroot "$1" update-ca-certificates >/dev/null 2>&1
  fi
  cp -L /etc/resolv.conf /etc/hosts "$1/etc/"
  hostname >"$1/etc/hostname"
  # The keyring's path of outside means nothing inside.
  sed -i 's/^deb \[signed-by=[^]]*\] /deb /' "$1"/etc/apt/sources.list
  # A mirror's own description of its suites serves as lists, as after an installation.
  rm -rf "$1/var/lib/apt/lists" && mkdir -p "$1/var/lib/apt/lists/partial"
}

# inside ROOT NET COMMAND…: as on a machine of its own; NET is `outside` (this host's network) or `alone`.
inside() {
  local root=$1 net=()
  [ "$2" = outside ] || net=(--net)
  shift 2
  unshare --mount --pid --uts --ipc --fork --kill-child --propagation private "${net[@]}" bash -c '
    set -e
    root=$1 checkout=$2
    shift 2
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup" 2>/dev/null || true # where the host has any
    mount -t tmpfs tmpfs "$root/dev"
    for name in null zero full random urandom tty; do : >"$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
    mkdir -p "$root"/dev/{pts,shm,net}
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    number=0
    for name in stdin stdout stderr; do ln -s "/proc/self/fd/$number" "$root/dev/$name"; number=$((number + 1)); done
    mount -t tmpfs tmpfs "$root/dev/shm"
    if [ -e /dev/net/tun ]; then : >"$root/dev/net/tun"; mount --bind /dev/net/tun "$root/dev/net/tun"; fi
    mount -t tmpfs tmpfs "$root/run"
    mkdir -p "$root/run/lock" "$root/checkout"
    mount --bind "$checkout" "$root/checkout"
    mount -o remount,bind,ro "$root/checkout"
    ip link set lo up 2>/dev/null || true # the network of this host has it up
    cd "$root"
    pivot_root . mnt
    umount -l /mnt
    cd /checkout
    export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    # Process 1 of the namespace: what is left behind is reaped here.
    "$@" &
    main=$!
    code=0
    wait $main || code=$?
    exit $code
  ' bash "$root" "$PWD" "$@"
}

# The whole case, in a process of its own that has a time limit. Says what was seen.
try() {
  local case=$1 root=$work/root start=$SECONDS
  step() { printf '%s: %s (%s s)\n' "$case" "$*" $((SECONDS - start)); }
  base "$case" "$root" || { echo "$case: FAILED: no new machine could be made, see above" && return 1; }
  like_host "$root"
  local before
  before=$(chroot "$root" dpkg-query -W | wc -l)
  step "made, $before packages"
  [ "$case" != debian12-backports ] || chroot "$root" dpkg-query -W qemu-utils | grep -q bpo ||
    { echo "$case: FAILED: qemu-utils is not from backports" && return 1; }

  # Without Rust nothing is installed, and what is missing is said.
  local said
  if said=$(inside "$root" outside make demo 2>&1); then echo "$case: FAILED: no Rust, and make demo went well" && return 1; fi
  grep -q rustup <<<"$said" && [ "$(chroot "$root" dpkg-query -W | wc -l)" = "$before" ] ||
    { echo "$case: FAILED: without Rust make demo said: $said" && return 1; }
  step "make demo asks for Rust first"

  inside "$root" outside scripts/install-deps.sh demo >"$work/install.log" 2>&1 ||
    { tail -n 15 "$work/install.log" && echo "$case: FAILED: scripts/install-deps.sh demo" && return 1; }
  # The first time must do: a second one finds nothing to do, without asking apt.
  [ -z "$(inside "$root" alone scripts/install-deps.sh demo 2>&1)" ] ||
    { echo "$case: FAILED: something is missing after scripts/install-deps.sh demo" && return 1; }
  step "installed: $(chroot "$root" dpkg-query -W -f '${Package} ${Version}, ' etcd-server qemu-utils qemu-system-x86 libvirt-daemon-system)"
  # The image needs packages, and the demo has no way outside.
  inside "$root" outside scripts/guests/build-tiny.sh /var/cache/etcd-compute/tiny.qcow2 /var/cache/etcd-compute/debs ||
    { echo "$case: FAILED: the guest's image" && return 1; }
  step "guest's image built"
  inside "$root" alone target/release/ecompute --version >"$work/demo.log" 2>&1 ||
    { cat "$work/demo.log" && echo "$case: FAILED: the binaries do not run there: were they built on a newer system?" && return 1; }

  # shellcheck disable=SC2016  # it is for the shell inside
  inside "$root" alone bash -ec '
    before=$(ls /tmp /root | wc -l)
    scripts/demo.sh up
    echo "--- what the README says next"
    . /var/lib/etcd-compute-demo/env
    eschedule list | grep ACTIVE
    etcdctl get --prefix /ecompute --keys-only | grep /status/
    ecompute --check | grep "^etcd"
    echo "--- a second one, and the end"
    if scripts/demo.sh up; then echo "a second demo began" && exit 1; fi
    eschedule list | grep ACTIVE
    # One that was killed and started again by hand.
    read -r pid _ </var/lib/etcd-compute-demo/run/ecompute.pid
    kill -KILL "$pid"
    setsid ecompute >/dev/null 2>&1 </dev/null &
    if said=$(scripts/demo.sh down 2>&1); then echo "the demo went under an agent: $said" && exit 1; fi
    grep "ecompute (pid $!)" <<<"$said"
    kill "$!" && wait "$!" || true
    scripts/demo.sh down
    if pgrep -a "etcd|eplacement|econtroller|ecompute|qemu|dnsmasq|libvirtd|virtlogd"; then echo "processes are left" && exit 1; fi
    if ip -o addr | grep 169.254.169.254; then echo "the address is left" && exit 1; fi
    [ ! -e /var/lib/etcd-compute-demo ]
    [ "$(ls /tmp /root | wc -l)" = "$before" ]
  ' >"$work/demo.log" 2>&1 || { tail -n 40 "$work/demo.log" && echo "$case: FAILED: the demo" && return 1; }
  step "demo: $(grep -m 1 '^I am demo' "$work/demo.log")"
}

[ "$(id -u)" -eq 0 ] || die "must be run as root: it makes file systems and namespaces"
for tool in mmdebstrap unshare pivot_root; do command -v $tool >/dev/null || die "$tool is missing: run scripts/install-deps.sh test"; done
for program in ecompute econtroller eplacement eschedule mdserver; do
  [ -x "target/release/$program" ] || die "target/release/$program is missing: run \`make newcomer\`, which builds it"
done

if [ "${1-}" = --one ]; then
  work=$2
  try "$3"
  exit 0
fi
[ $# -gt 0 ] || set -- debian12 debian12-backports debian13 ubuntu24.04
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT TERM
failed=()
for case in "$@"; do
  work=$(mktemp -d)
  chmod 755 "$work"
  code=0
  timeout --foreground --kill-after=20 $limit "$0" --one "$work" "$case" || code=$?
  [ $code -ne 124 ] || echo "$case: FAILED: not within $limit s"
  if [ $code -ne 0 ]; then failed+=("$case"); else echo "$case: passed"; fi
  rm -rf --one-file-system "$work"
done
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
