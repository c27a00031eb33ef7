#!/bin/bash
# Builds a cloud image with real cloud-init out of the host's own distribution (Debian or Ubuntu): mmdebstrap
# into a directory, mke2fs from the directory, GRUB written by hand. Root, but no loop mounts.
# usage: build-debian.sh OUT.qcow2 [DATASOURCE]
#
# As in stock images no data source is pinned: cloud-init finds it by the machine's SMBIOS fields. DATASOURCE
# (Ec2, OpenStack) pins one, in a copy of OUT named by it (OUT-Ec2.qcow2), for tests of that data source.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
out=$(realpath -m "${1:?usage: $0 OUT.qcow2 [DATASOURCE]}")
pinned=${2-}
die() {
  echo "build-debian: $*" >&2
  exit 1
}
[ "$(id -u)" -eq 0 ] || die "must be run as root: packages are configured in a chroot"
for tool in mmdebstrap mke2fs debugfs qemu-img; do
  command -v $tool >/dev/null || die "$tool is missing: run scripts/install-deps.sh test"
done
start=2048 # sectors: the partition's usual place, with room for GRUB before it
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() {
  local suite root=$work/root mb=1536 kernel=linux-image-cloud-amd64
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:?}")
  if grep -q '^ID=ubuntu' /etc/os-release; then kernel=linux-image-virtual; fi
  # The host's own mirrors, without backports and foreign repositories.
  apt-get indextargets --format 'deb $(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
    grep -E " ($suite|$suite-updates|$suite-security) (main|universe)$" | sort -u >"$work/sources"
  [ -s "$work/sources" ] || die "apt has no lists of $suite: run apt-get update"

  cat >"$work/grub.cfg" <<'C'
set timeout=0
serial --unit=0 --speed=115200
search --no-floppy --label rootfs --set=root
linux /vmlinuz root=LABEL=rootfs ro console=tty0 console=ttyS0,115200 net.ifnames=0 quiet
initrd /initrd.img
boot
C
  # Emulated processors take a minute for the keys and locales that nobody here needs.
  printf 'locale: C.UTF-8\nssh_genkeytypes: [ed25519]\n' >"$work/cloud.cfg"
  mmdebstrap --quiet --mode=root --variant=minbase --format=directory \
    --include=systemd-sysv,udev,dbus,$kernel,initramfs-tools,zstd \
    --include=cloud-init,cloud-guest-utils,openssh-server,sudo,netplan.io,systemd-resolved,iproute2 \
    --include=e2fsprogs,fdisk,qemu-guest-agent,grub-pc-bin,grub-common,ca-certificates,curl \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --aptopt='Acquire::Languages "none"' \
    --customize-hook='echo "LABEL=rootfs / ext4 defaults 0 1" >"$1/etc/fstab"' \
    --customize-hook='chroot "$1" systemctl -q enable systemd-networkd systemd-resolved' \
    --customize-hook='rm -f "$1"/etc/ssh/ssh_host_* "$1/etc/hostname"; : >"$1/etc/machine-id"' \
    --customize-hook="cp '$work/cloud.cfg' '$root/etc/cloud/cloud.cfg.d/10_small.cfg'" \
    --customize-hook="mkdir -p '$root/boot/grub' && cp '$work/grub.cfg' '$root/boot/grub/'" \
    --customize-hook='chroot "$1" grub-mkimage -O i386-pc -o /boot/grub/core.img -p "(hd0,msdos1)/boot/grub" biosdisk part_msdos ext2 search search_label normal linux serial terminal configfile' \
    "$suite" "$root" - <"$work/sources"
  local grub=$root/boot/grub/core.img
  [ "$(stat -c %s "$grub")" -le $(((start - 1) * 512)) ] || die "GRUB does not fit before the partition"

  truncate -s ${mb}M "$work/root.img"
  # Features that the release's GRUB may not know yet are left out.
  mke2fs -q -F -t ext4 -O ^metadata_csum_seed,^orphan_file -L rootfs -d "$root" "$work/root.img"
  truncate -s $((start * 512 + mb * 1048576)) "$work/disk.img"
  dd if="$work/root.img" of="$work/disk.img" bs=1M seek=$((start * 512)) oflag=seek_bytes conv=notrunc,sparse status=none
  dd if="$root/usr/lib/grub/i386-pc/boot.img" of="$work/disk.img" bs=440 count=1 conv=notrunc status=none
  dd if="$grub" of="$work/disk.img" bs=512 seek=1 conv=notrunc status=none
  # One partition entry: active, Linux, first sector and length as little-endian words.
  local at="dd of=$work/disk.img bs=1 conv=notrunc status=none"
  printf '\x80\xfe\xff\xff\x83\xfe\xff\xff' | $at seek=446
  printf "$(word $start)$(word $((mb * 2048)))" | $at seek=454
  printf '\x55\xaa' | $at seek=510
  qemu-img convert -c -O qcow2 "$work/disk.img" "$out.new"
  rm -f "$out.recipe"
  mv "$out.new" "$out"
  echo "$recipe" >"$out.recipe"
  echo "built $out: $(stat -c %s "$out") bytes, $suite"
}

word() { printf '\\x%02x\\x%02x\\x%02x\\x%02x' $(($1 & 255)) $((($1 >> 8) & 255)) $((($1 >> 16) & 255)) $((($1 >> 24) & 255)); }

# One file more in the finished file system; no mount is needed for that.
pin() {
  local to=${out%.qcow2}-$pinned.qcow2 config=/etc/cloud/cloud.cfg.d/99_datasource.cfg
  if [ "$to" -nt "$out" ]; then return; fi
  echo "datasource_list: [ $pinned, None ]" >"$work/pin"
  qemu-img convert -O raw "$out" "$work/pinned.img"
  debugfs -w -R "write $work/pin $config" "$work/pinned.img?offset=$((start * 512))" >/dev/null 2>"$work/debugfs"
  debugfs -R "cat $config" "$work/pinned.img?offset=$((start * 512))" 2>/dev/null | grep -q "$pinned" ||
    die "failed to write $config: $(cat "$work/debugfs")"
  qemu-img convert -c -O qcow2 "$work/pinned.img" "$to.new"
  mv "$to.new" "$to"
  echo "built $to"
}

# What it is made by, so that a new checkout of the same files does not build it again.
recipe=$(cat "$0" /etc/os-release | sha256sum)
if [ ! -e "$out" ] || [ "$(cat "$out.recipe" 2>/dev/null)" != "$recipe" ]; then
  mkdir -p "$(dirname "$out")"
  build
fi
[ -z "$pinned" ] || pin
