#!/bin/bash
# Builds a guest that boots in seconds under plain emulation: kernel, busybox, dropbear and the few scripts
# in tiny/. It takes an address by DHCP, fetches the metadata (EC2's tree), and lets in who has a key.
#
# usage: build-tiny.sh OUT.qcow2 [CACHE_DIR]      (CACHE_DIR keeps the downloaded packages)
#
# Runs on Debian 12 and newer and on Ubuntu, as any user. Installs nothing and mounts nothing: packages are
# fetched by apt and unpacked. From the same packages comes the same image, bit for bit.
set -euo pipefail

usage="usage: $0 OUT.qcow2 [CACHE_DIR]"
out=$(realpath -m "${1:?$usage}")
here=$(dirname "$(realpath "$0")")
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

newest=$(find "$here/build-tiny.sh" "$here/tiny" -type f -newer "$out" -print -quit 2>/dev/null || true)
if [ -e "$out" ] && [ -z "$newest" ]; then
  echo "$out is there already and newer than its sources"
  exit 0
fi

missing=()
for tool in apt-get:apt apt-cache:apt dpkg-deb:dpkg cpio:cpio gzip:gzip qemu-img:qemu-utils dd:coreutils; do
  command -v "${tool%:*}" >/dev/null || missing+=("${tool%:*} (package ${tool#*:})")
done
if [ ${#missing[@]} -gt 0 ]; then
  printf 'build-tiny: the tool %s is missing\n' "${missing[@]}" >&2
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages=$(realpath -m "${2:-$work/packages}")
mkdir -p "$packages" "$(dirname "$out")" "$work/x"
# Nothing in the image has another date than this.
export SOURCE_DATE_EPOCH=1700000000

# ---- packages -----------------------------------------------------------------------------------

# The kernel that today's metapackage stands for: Debian's for clouds is small, Ubuntu's for guests next.
kernel=
for meta in linux-image-cloud-amd64 linux-image-virtual; do
  kernel=$(apt-cache depends "$meta" 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
  [ -z "$kernel" ] || break
done
[ -n "$kernel" ] || { echo "build-tiny: apt knows no kernel for guests: run apt-get update" >&2; exit 1; }
wanted=("$kernel" dropbear-bin busybox-static syslinux syslinux-common mtools)
# Ubuntu keeps the modules apart.
modules=${kernel/linux-image/linux-modules}
if apt-cache show "$modules" >/dev/null 2>&1; then wanted+=("$modules"); fi
# dropbear's libraries have other names on every release, so apt is asked for them.
mapfile -t libraries < <(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
  --no-replaces --no-enhances dropbear-bin | grep -E '^lib[a-z0-9.+-]+$' | sort -u)
for package in "${wanted[@]}" "${libraries[@]}"; do
  if ! compgen -G "$packages/${package}_*.deb" >/dev/null; then
    # Fetched beside and then moved, so that a broken fetch or a second build leaves no half file.
    fetched=$(mktemp -d "$work/fetch.XXXX")
    (cd "$fetched" && apt-get -qq -o APT::Sandbox::User=root download "$package")
    mv "$fetched"/*.deb "$packages/"
  fi
  # The newest, where the cache has seen several.
  deb=$(compgen -G "$packages/${package}_*.deb" | sort -V | tail -n 1)
  dpkg-deb -x "$deb" "$work/x"
done

# ---- root file system: all of it in the initramfs ------------------------------------------------

x=$work/x root=$work/root
mkdir -p "$root"/{bin,sbin,usr/bin,usr/sbin,lib/modules,proc,sys,dev,run,tmp,mnt,root/.ssh,var/log,etc/acpi/PWRF}
cp "$(find "$x" -path '*bin/busybox' -type f)" "$root/bin/busybox"
for applet in $("$root/bin/busybox" --list); do ln -sf /bin/busybox "$root/bin/$applet"; done
ln -sf /bin/busybox "$root/init"
ln -sf /bin/busybox "$root/sbin/init"
for program in sbin/dropbear bin/dropbearkey bin/dbclient; do
  cp "$(find "$x" -path "*/$program" -type f)" "$root/usr/$program"
done

# The loader of the packages itself tells which of their libraries dropbear needs.
loader=$(find "$x" -name ld-linux-x86-64.so.2 | head -n 1)
path=$(find "$x" -name 'lib*.so.*' -printf '%h\n' | sort -u | tr '\n' ':')
mkdir -p "$root/lib64"
cp -L "$loader" "$root/lib64/"
"$loader" --library-path "$path" --list "$root/usr/sbin/dropbear" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' |
  while read -r library; do cp -L "$library" "$root/lib/"; done

# In the order of loading. What is missing is built into the kernel, or not needed by it.
number=10
for module in virtio virtio_ring virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk failover \
  net_failover virtio_net virtio_balloon rng-core virtio-rng af_packet button evdev; do
  file=$(find "$x" -path '*/modules/*' -name "$module.ko*" | head -n 1)
  target=$root/lib/modules/$number-$module.ko
  case $file in
  '') continue ;;
  *.xz) xz -dc "$file" >"$target" ;;
  *.zst) zstd -qdc "$file" >"$target" ;;
  *) cp "$file" "$target" ;;
  esac
  number=$((number + 1))
done

install -m 755 "$here/tiny/rc" "$here/tiny/dhcp" "$root/etc/"
install -m 644 "$here/tiny/inittab" "$root/etc/"
# The power button, pressed by the hypervisor.
printf '#!/bin/sh\npoweroff\n' >"$root/etc/acpi/PWRF/00000080"
chmod 755 "$root/etc/acpi/PWRF/00000080"
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
echo 'root:*:19000:0:99999:7:::' >"$root/etc/shadow"
echo 'passwd: files' >"$root/etc/nsswitch.conf"
echo /bin/sh >"$root/etc/shells"
chmod 700 "$root/root" "$root/root/.ssh"
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
(cd "$root" && find . | sort | cpio --quiet -o -H newc -R 0:0 --reproducible | gzip -9n) >"$work/initrd"

# ---- disk: boot record, a gap that rc keeps its mark in, one FAT partition with syslinux ----------

start=2048 # sectors before the partition
kernel_file=$(find "$x/boot" -name 'vmlinuz-*')
sectors=$(((($(stat -c %s "$kernel_file") + $(stat -c %s "$work/initrd")) / 1048576 + 2) * 2048))
disk=$work/disk.img
truncate -s $(((start + sectors) * 512)) "$disk"

# The table has one entry: active, type 6, first sector and count in little-endian order.
little_endian() {
  local byte
  for byte in 0 8 16 24; do printf '\\x%02x' $((($1 >> byte) & 255)); done
}
dd if="$x/usr/lib/syslinux/mbr/mbr.bin" of="$disk" bs=440 count=1 conv=notrunc status=none
printf "tiny\0\0\x80\xfe\xff\xff\x06\xfe\xff\xff$(little_endian $start)$(little_endian $sectors)" |
  dd of="$disk" bs=1 seek=440 conv=notrunc status=none
printf '\x55\xaa' | dd of="$disk" bs=1 seek=510 conv=notrunc status=none

# syslinux calls mtools, both from the packages.
export PATH=$x/usr/bin:$PATH MTOOLS_SKIP_CHECK=1
partition=$disk@@$((start * 512))
mformat -i "$partition" -T "$sectors" -h 16 -s 63 -H "$start" -v TINY -N 74696e79 ::
cat >"$work/syslinux.cfg" <<'C'
SERIAL 0 115200
PROMPT 0
TIMEOUT 1
DEFAULT tiny
LABEL tiny
  KERNEL /vmlinuz
  INITRD /initrd
  APPEND console=ttyS0,115200 quiet net.ifnames=0 panic=5 random.trust_cpu=on
C
touch -d "@$SOURCE_DATE_EPOCH" "$work/syslinux.cfg" "$work/initrd"
cp -p "$kernel_file" "$work/vmlinuz"
touch -d "@$SOURCE_DATE_EPOCH" "$work/vmlinuz"
mcopy -m -i "$partition" "$work/vmlinuz" "$work/initrd" "$work/syslinux.cfg" ::/
syslinux --install --offset $((start * 512)) "$disk"

# Whole or not at all, also when two builds meet.
qemu-img convert -c -O qcow2 "$disk" "$work/out.qcow2"
cp "$work/out.qcow2" "$out.$$"
mv "$out.$$" "$out"
echo "built $out: $(stat -c %s "$out") bytes, kernel ${kernel_file##*vmlinuz-}, initramfs $(stat -c %s "$work/initrd") bytes"
