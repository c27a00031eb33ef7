#!/bin/bash
# Builds a tiny guest that boots in seconds without hardware virtualisation: kernel, busybox, dropbear, from
# the distribution's packages alone. No root, no loop mounts, nothing installed.
# usage: build-tiny.sh OUT.qcow2 [PACKAGES]        (PACKAGES keeps what was downloaded)
#
# The disk is an MBR, a FAT partition with syslinux, kernel and initramfs, and nothing else: the initramfs is
# the root file system. What the guest does is in tiny/rc.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:?usage: $0 OUT.qcow2 [PACKAGES]}")
# What it is made by, so that a new checkout of the same files does not build it again.
recipe=$(cat "$0" "$here"/tiny/* | sha256sum)
if [ -e "$out" ] && [ "$(cat "$out.recipe" 2>/dev/null)" = "$recipe" ]; then
  echo "tiny guest image is there already: $out"
  exit 0
fi
die() {
  echo "build-tiny: $*" >&2
  exit 1
}
trap 'die "failed at line $LINENO: $BASH_COMMAND"' ERR
for tool in apt-get apt-cache dpkg-deb cpio qemu-img objdump strip depmod modprobe xz zstd; do
  command -v $tool >/dev/null || die "$tool is missing: run scripts/install-deps.sh demo"
done

# Says the first line of what failed, and only that.
run() {
  local said
  said=$("$@" 2>&1) || die "$1 failed: ${said%%$'\n'*}"
}

# Beside what is made: programs of packages run from here, and of /tmp many machines let nothing be run.
work=$({ mkdir -p "$(dirname "$out")" && mktemp -d "$out.work.XXXXXX"; } 2>/dev/null) || die "$out cannot be written"
trap 'rm -rf "$work"' EXIT
packages=$(realpath -m "${2:-$work/packages}")
tree=$work/tree root=$work/root half=$work/half.qcow2
mkdir -p "$packages" "$tree" "$root"
# Equal inputs shall give equal images.
export SOURCE_DATE_EPOCH=1700000000

# ---- packages -----------------------------------------------------------------------------------

available() { [ -n "$(apt-cache show "$1" 2>/dev/null)" ]; }

# All that a package needs, itself included; names only.
with_dependencies() {
  apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances "$1" | grep -v '^[ |<]' | sed 's/:.*//' | sort -u
}

# Fills `files` with what apt has now. It takes nothing that is there already, and knows what is broken or
# of another release by its checksum.
fetch() {
  local kernel='' name apt=(apt-get -qq -o APT::Sandbox::User=root download)
  for name in linux-image-cloud-amd64 linux-image-virtual linux-image-generic linux-image-amd64; do
    if available $name; then kernel=$name && break; fi
  done
  [ -n "$kernel" ] || return 1
  local names=(busybox-static syslinux syslinux-common mtools dropbear-bin)
  mapfile -t -O ${#names[@]} names < <(
    with_dependencies $kernel | grep -E '^linux-(image|modules)-[0-9]'
    with_dependencies dropbear-bin | grep -E '^(lib|zlib)'
  )
  (cd "$packages" && "${apt[@]}" "${names[@]}") || return 1
  # Asked in an empty directory, it tells all their files.
  mapfile -t files < <(cd "$work" && "${apt[@]}" --print-uris "${names[@]}" | cut -d' ' -f2)
  [ ${#files[@]} -ge ${#names[@]} ]
}
# Lists that are not there, or so old that the mirror has newer packages: only root can renew them.
if ! fetch 2>/dev/null; then
  apt-get -qq update 2>"$work/apt" && fetch 2>"$work/apt" ||
    die "failed to download packages; run apt-get update as root: $(head -1 "$work/apt")"
fi
for file in "${files[@]}"; do run dpkg-deb -x "$packages/$file" "$tree"; done

image=$(ls "$tree"/boot/vmlinuz-* | sort -V | tail -1)
version=${image##*/vmlinuz-}

# ---- root file system ---------------------------------------------------------------------------

mkdir -p "$root"/{bin,sbin,usr/bin,usr/sbin,etc/acpi/PWRF,etc/dropbear,proc,sys,dev,run,tmp,root/.ssh} \
  "$root"/{lib/x86_64-linux-gnu,lib64,lib/modules}
find_one() { find "$tree" -name "$1" \( -type f -o -type l \) | sort | head -1; }
cp "$(find_one busybox)" "$root/bin/busybox"
applets=$("$root/bin/busybox" --list)
for applet in $applets; do
  [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
done
ln -s ../bin/busybox "$root/sbin/init"
ln -s sbin/init "$root/init"

# A program and the libraries that it names, and those that they name.
take() {
  local file=$1 to=$2 library
  cp -L "$file" "$to"
  for library in $(objdump -p "$file" | awk '/NEEDED/ {print $2}'); do
    case $library in ld-linux*) continue ;; esac
    if [ ! -e "$root/lib/x86_64-linux-gnu/$library" ]; then
      file=$(find_one "$library")
      [ -n "$file" ] || die "no package has $library"
      take "$file" "$root/lib/x86_64-linux-gnu/$library"
    fi
  done
}
take "$(find "$tree" -path '*sbin/dropbear' -type f)" "$root/usr/sbin/dropbear"
take "$(find "$tree" -path '*bin/dropbearkey' -type f)" "$root/usr/bin/dropbearkey"
cp -L "$(find_one ld-linux-x86-64.so.2)" "$root/lib64/"

# What the disk, the network and the power button need, and to tell of a panic, in the order of loading; what is built in is not there.
modules=$(find "$tree" -type d -path "*/lib/modules/$version")
mkdir -p "$work/kmod/lib/modules"
mv "$modules" "$work/kmod/lib/modules/"
run depmod -b "$work/kmod" "$version"
number=10
for name in virtio_pci virtio_blk virtio_net virtio_balloon virtio_rng button evdev pvpanic-mmio; do
  while read -r _ file _; do
    module=$(basename "$file" | sed 's/\.ko.*//')
    if ls "$root"/lib/modules/*-"$module".ko >/dev/null 2>&1; then continue; fi
    target=$root/lib/modules/$number-$module.ko
    case $file in
    *.xz) xz -dc "$file" >"$target" ;;
    *.zst) zstd -qdc "$file" >"$target" ;;
    *) cp "$file" "$target" ;;
    esac
    # Without what only debuggers read, and without a signature that nobody asks for: both are looked through at each boot.
    run strip --strip-debug --remove-section=.BTF "$target"
    number=$((number + 1))
  done < <(modprobe -d "$work/kmod" -S "$version" --show-depends $name 2>/dev/null | grep ^insmod)
done

install -m 755 "$here/tiny/rc" "$here/tiny/dhcp" "$root/etc/"
install -m 644 "$here/tiny/inittab" "$root/etc/inittab"
printf '#!/bin/sh\necho "TINY power button" >/dev/console\npoweroff\n' >"$root/etc/acpi/PWRF/00000080"
chmod 755 "$root/etc/acpi/PWRF/00000080"
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
# No password opens it; keys do.
echo 'root:*:19000:0:99999:7:::' >"$root/etc/shadow"
echo /bin/sh >"$root/etc/shells"
echo 'passwd: files' >"$root/etc/nsswitch.conf"
chmod 600 "$root/etc/shadow"
chmod 700 "$root/root" "$root/root/.ssh"
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
(cd "$root" && find . | LC_ALL=C sort | cpio -o -H newc -R 0:0 --reproducible --quiet) | zstd -q -19 >"$work/initrd"

# ---- disk ---------------------------------------------------------------------------------------

export PATH=$tree/usr/bin:$PATH MTOOLS_SKIP_CHECK=1
start=2048 # sectors: the first partition's usual place
sectors=$((($(stat -c %s "$image") + $(stat -c %s "$work/initrd")) / 512 + 6144))
disk=$work/disk.img
truncate -s $(((start + sectors) * 512)) "$disk"
# One partition entry: active, FAT16, first sector and length as little-endian words.
word() { printf '\\x%02x\\x%02x\\x%02x\\x%02x' $(($1 & 255)) $((($1 >> 8) & 255)) $((($1 >> 16) & 255)) $((($1 >> 24) & 255)); }
at() { dd of="$disk" bs=1 seek="$1" conv=notrunc status=none; }
dd if="$(find_one mbr.bin)" of="$disk" bs=440 count=1 conv=notrunc status=none
printf '\x80\xfe\xff\xff\x06\xfe\xff\xff' | at 446
printf "$(word $start)$(word $sectors)" | at 454
printf '\x55\xaa' | at 510
fat="$disk@@$((start * 512))"
run mformat -i "$fat" -T $sectors -h 16 -s 63 -H $start -v TINY -N 74696e79 ::
# Where there is one processor, without APIC and ACPI's routing of interrupts: emulated, they cost a fifth of a boot. To clear
# all memory that the kernel gives itself costs an eighth. To rewrite its own code for the processor at hand (which throws away what
# the emulator has translated), and to make ready what only tracers, BPF and those who sign modules need, another fifth.
unneeded=crypto_kdf108_init,init_kprobe_trace,btf_vmlinux_init,cubictcp_register,slab_sysfs_init,load_system_certificate_list,init_ima
append="console=tty0 console=ttyS0,115200 quiet loglevel=4 net.ifnames=0 panic=5 random.trust_cpu=on no_timer_check cryptomgr.notests \
init_on_alloc=0 mitigations=off noreplace-smp nokaslr initcall_blacklist=$unneeded"
cat >"$work/syslinux.cfg" <<C
SERIAL 0 115200
PROMPT 0
TIMEOUT 1
DEFAULT count
LABEL count
  COM32 ifcpu.c32
  APPEND multicore -- many -- one
LABEL many
  KERNEL /vmlinuz
  INITRD /initrd
  APPEND $append
LABEL one
  KERNEL /vmlinuz
  INITRD /initrd
  APPEND $append pci=noacpi,nomsi
C
run mcopy -i "$fat" "$image" ::/vmlinuz
run mcopy -i "$fat" "$work/initrd" ::/initrd
run mcopy -i "$fat" "$work/syslinux.cfg" ::/syslinux.cfg
for module in ifcpu libcom32 libgpl libutil; do
  run mcopy -i "$fat" "$(find "$tree" -path "*/bios/$module.c32")" ::/
done
run syslinux --install --offset $((start * 512)) "$disk"

# Kernel and initramfs are compressed already: once more would save little, and be undone at each boot.
run qemu-img convert -O qcow2 "$disk" "$half"
chmod 644 "$half"
rm -f "$out.recipe"
mv "$half" "$out"
echo "$recipe" >"$out.recipe"
echo "built $out: $(stat -c %s "$out") bytes, kernel $version"
