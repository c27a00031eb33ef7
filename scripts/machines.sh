# shellcheck shell=bash
# New machines: root file systems of Debian and Ubuntu, each with its own systemd as process 1, in namespaces. Sourced by
# package-test.sh, page-test.sh and piuparts.sh, which have `die`. What runs in a machine is in one control group, and ends with it.
mirror_debian=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
mirror_ubuntu=${UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu}

# new_root SUITE ROOT PACKAGES [OPTION…]: what an installer leaves, with PACKAGES (a,b,c).
new_root() {
  local suite=$1 root=$2 sources
  local options=(--quiet --variant=minbase --format=directory --include="$3" "${@:4}")
  case $suite in
  bookworm | trixie) sources="deb $mirror_debian $suite main" ;;
  noble)
    local keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg keys
    if [ ! -e $keyring ]; then
      # Debian 12 has no such package; Debian's own signature vouches for that of 13.
      keys=$(mktemp -d)
      chmod 755 "$keys" # apt's own user reads it
      scripts/fetch-package.sh trixie ubuntu-keyring "$keys/ubuntu" >/dev/null 2>&1 || die "no keyring of Ubuntu is to be had (package ubuntu-keyring)"
      keyring=$keys/ubuntu$keyring
    fi
    options+=(--keyring="$keyring")
    sources="deb [signed-by=$keyring] $mirror_ubuntu noble main universe"
    ;;
  *) die "\`$suite\` is not known: wanted bookworm, trixie or noble" ;;
  esac
  mmdebstrap "${options[@]}" "$suite" "$root" "$sources" || die "no root file system of $suite could be made; it says why above"
  # The keyring's path of outside means nothing inside.
  sed -i 's/^deb \[signed-by=[^]]*\] /deb /' "$root/etc/apt/sources.list"
  [ -z "${keys-}" ] || rm -r "$keys"
}

# root_with_dependencies SUITE: prints where one is that has etcd and all that our packages depend on, and nothing of ours: what
# comes and goes there is theirs. Kept in CACHE/machines for a week, and not to be changed.
root_with_dependencies() {
  local root=${CACHE:-/var/cache/etcd-compute}/machines/packages-$1
  local packages=apt,ca-certificates,systemd,systemd-sysv,dbus,iproute2,procps,curl,etcd-server,etcd-client
  packages+=,libvirt-daemon-system,libvirt-clients,qemu-system-x86,qemu-utils,nftables,dnsmasq-base,openssh-client
  if [ -n "$(find "$root" -maxdepth 0 -mtime +7 2>/dev/null)" ]; then rm -rf --one-file-system "$root"; fi
  if [ ! -e "$root" ]; then
    mkdir -p "${root%/*}"
    rm -rf --one-file-system "$root.part"
    new_root "$1" "$root.part" $packages >&2
    mv "$root.part" "$root"
    touch "$root"
  fi
  echo "$root"
}

# Process 1 of each machine as this host sees it, by the machine's name.
declare -A machine_init=()
machines_group=''

# A control group for all of them, of the version that their systemd knows; some hosts have both versions.
open_machines() {
  local place
  for place in /sys/fs/cgroup/unified /sys/fs/cgroup; do
    if [ -e $place/cgroup.procs ]; then
      machines_group=$place/machines-$$
      mkdir "$machines_group"
      return
    fi
  done
  die "there are no control groups of version 2"
}

# boot NAME ROOT CONSOLE [ADDRESS/PREFIX]: with an address, the machine has an eth0 at bridge `lan` of this network.
boot() {
  local name=$1 root=$2 console=$3 address=${4-} group=$machines_group/$1 outer
  local port=lan-$name
  mkdir -p "$group"
  # Into its group before its namespace is made, so that the group is all that it sees.
  # shellcheck disable=SC2016  # it is for the shell inside
  sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group" \
    unshare --mount --pid --uts --ipc --net --cgroup --fork --kill-child --propagation private bash -c '
    set -e
    root=$1 address=$3
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for name in null zero full random urandom tty; do : >"$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
    mkdir -p "$root"/dev/{pts,shm,net}
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    : >"$root/dev/console"
    mount -t tmpfs tmpfs "$root/dev/shm"
    if [ -e /dev/net/tun ]; then : >"$root/dev/net/tun"; mount --bind /dev/net/tun "$root/dev/net/tun"; fi
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    hostname "$2"
    ip link set lo up
    if [ -n "$address" ]; then
      until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
      ip address add "$address" dev eth0
      ip link set eth0 up
    fi
    cd "$root"
    pivot_root . mnt
    umount -l /mnt
    exec env -i container=namespaces PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --log-target=console --log-level=notice
  ' bash "$root" "$name" "$address" >"$console" 2>&1 </dev/null &
  outer=$!
  disown "$outer" # its end is nothing that the shell should tell of
  machine_init[$name]=''
  for _ in $(seq 300); do
    if [ -z "${machine_init[$name]}" ]; then
      machine_init[$name]=$(pgrep -P "$outer" || true)
      if [ -n "${machine_init[$name]}" ] && [ -n "$address" ]; then
        ip link add "$port" type veth peer name eth0 netns "${machine_init[$name]}"
        ip link set "$port" master lan up
      fi
    elif [[ $(in_machine "$name" systemctl is-system-running 2>/dev/null || true) =~ running|degraded ]]; then
      return
    fi
    kill -0 "$outer" 2>/dev/null || break
    sleep 0.2
  done
  cat "$console" >&2
  if [ -n "${machine_init[$name]}" ]; then in_machine "$name" systemctl --no-pager --failed >&2 || true; fi
  die "$name did not come up"
}

# in_machine NAME COMMAND…: as root there.
in_machine() {
  nsenter -t "${machine_init[$1]}" -m -u -i -n -p -C -r -w env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "${@:2}"
}

# cut_power NAME: all that runs there is gone at once, and nothing was told.
cut_power() {
  local group=$machines_group/$1
  echo 1 >"$group/cgroup.kill"
  for _ in $(seq 100); do
    if ! grep -q 1 <(sed -n 's/^populated //p' "$group/cgroup.events"); then break; fi
    sleep 0.1
  done
  find "$group" -depth -type d -exec rmdir {} +
  # With the namespace its end of the cable goes, too, some moments later.
  ip link del "lan-$1" 2>/dev/null || true
  unset "machine_init[$1]"
}

# Ends what is left of them.
close_machines() {
  [ -n "$machines_group" ] || return 0
  local group
  for group in "$machines_group"/*/; do
    if [ -d "$group" ]; then echo 1 >"$group/cgroup.kill"; fi
  done
  for _ in $(seq 50); do find "$machines_group" -depth -type d -exec rmdir {} + 2>/dev/null && break; sleep 0.1; done
}
