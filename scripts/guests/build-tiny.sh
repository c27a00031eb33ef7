#!/bin/bash
# Build a tiny bootable guest image (qcow2) from Debian packages only.
# No root, no loop mounts, nothing installed on the host but: apt, dpkg-deb,
# cpio, qemu-img (qemu-utils), zstd or gzip.  mke2fs (e2fsprogs).
# (Debian's busybox-static 1.35 crashes on wget -T, so use timeout)
# usage: build-tiny.sh OUT.qcow2 [WORKDIR]     (WORKDIR keeps downloaded .debs)
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT.qcow2 [WORKDIR]}")
if [ "$out" -nt "$0" ]; then echo "tiny guest image is there already: $out"; exit 0; fi
for tool in apt-get apt-cache dpkg-deb cpio qemu-img mke2fs gzip; do
  PATH=$PATH:/usr/sbin:/sbin command -v $tool >/dev/null || { echo "build-tiny: $tool is missing; install apt, dpkg, cpio, qemu-utils, e2fsprogs, gzip" >&2; exit 1; }
done
work=$(realpath -m "${2:-$(mktemp -d)}")
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1700000000}
export PATH=$PATH:/usr/sbin:/sbin
debs=$work/debs; rm -rf "$work/x" "$work/ird" "$work"/*.img; mkdir -p "$debs" "$work/x" "$work/ird"

apt-cache show linux-image-cloud-amd64 >/dev/null 2>&1 || apt-get -qq update
kver=${KPKG:-$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p' | head -1)}
pk="$kver dropbear-bin libtomcrypt1 libtommath1 libgmp10 libcrypt1 zlib1g libc6 busybox-static syslinux syslinux-common mtools"
for p in $pk; do
  ls "$debs/${p}"_*.deb >/dev/null 2>&1 || (cd "$debs" && apt-get -qq -o APT::Sandbox::User=root download "$p")
done
for p in $pk; do dpkg-deb -x "$debs/${p}"_*.deb "$work/x"; done
X=$work/x; R=$work/ird
K=$(ls "$X"/boot/vmlinuz-*); V=${K##*vmlinuz-}

# ---- root (initramfs) -------------------------------------------------------
mkdir -p "$R"/{bin,sbin,usr/bin,usr/sbin,etc/acpi/PWRF,etc/dropbear,proc,sys,dev,run,tmp,root/.ssh,var/log,lib/x86_64-linux-gnu,lib64,lib/modules,www,mnt}
cp "$X/bin/busybox" "$R/bin/busybox"
for a in $("$R/bin/busybox" --list); do case $a in busybox) ;; *) ln -s busybox "$R/bin/$a";; esac; done
ln -s ../bin/busybox "$R/sbin/init"
find "$X" -name dropbear -type f -perm -u+x -path '*sbin*' -exec cp {} "$R/usr/sbin/dropbear" \;
find "$X" -name dropbearkey -type f -perm -u+x -exec cp {} "$R/usr/bin/dropbearkey" \; 
find "$X" -name dbclient -type f -perm -u+x -exec cp {} "$R/usr/bin/dbclient" \;
for l in libtomcrypt.so.1 libtommath.so.1 libgmp.so.10 libcrypt.so.1 libz.so.1 libc.so.6 libresolv.so.2; do
  f=$(find "$X" -name "$l" \( -type f -o -type l \) | head -1); cp -L "$f" "$R/lib/x86_64-linux-gnu/$l"
done
cp -L "$(find "$X" -name ld-linux-x86-64.so.2 | head -1)" "$R/lib64/ld-linux-x86-64.so.2"
# kernel modules, in load order (ext4, 8250 and acpi core are built in)
i=10
for m in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk failover net_failover virtio_net virtio_balloon virtio-rng button evdev; do
  f=$(find "$X/lib/modules" -name "$m.ko*" | head -1)
  [ -n "$f" ] && cp "$f" "$R/lib/modules/$i-$m.ko" && i=$((i+1))
done
echo 'root:x:0:0:root:/root:/bin/sh' >"$R/etc/passwd"; echo 'root:x:0:' >"$R/etc/group"; echo /bin/sh >"$R/etc/shells"
echo 'root:*:19000:0:99999:7:::' >"$R/etc/shadow"; chmod 600 "$R/etc/shadow"; chmod 700 "$R/root" "$R/root/.ssh"
echo 'passwd: files' >"$R/etc/nsswitch.conf"
cat >"$R/etc/inittab" <<'E'
::sysinit:/etc/rc
::respawn:/usr/sbin/dropbear -F -E -R -s
::respawn:/bin/acpid -f -l /var/log/acpid
::respawn:/bin/httpd -f -p 80 -h /www
ttyS0::respawn:-/bin/sh
::ctrlaltdel:/bin/reboot
::shutdown:/etc/rc.stop
E
cat >"$R/etc/acpi/PWRF/00000080" <<'E'
#!/bin/sh
echo "TINY acpi power button" >/dev/console
poweroff
E
cat >"$R/etc/rc.stop" <<'E'
#!/bin/sh
echo "TINY shutting down at $(cut -d' ' -f1 /proc/uptime)s" >/dev/console
umount /mnt 2>/dev/null; sync
E
cat >"$R/etc/udhcpc.script" <<'E'
#!/bin/sh
case "$1" in
deconfig) ip addr flush dev $interface; ip link set $interface up;;
bound|renew)
  ip addr flush dev $interface
  ip addr add $ip/${mask:-24} dev $interface
  [ -n "$mtu" ] && ip link set dev $interface mtu $mtu
  for r in $router; do ip route add default via $r dev $interface 2>/dev/null; break; done
  # RFC 3442 classless static routes: pairs "net/len gw"
  set -- $staticroutes
  while [ $# -ge 2 ]; do ip route add "$1" via "$2" dev $interface 2>/dev/null || ip route add "$1" dev $interface 2>/dev/null; shift 2; done
  : >/etc/resolv.conf; for d in $dns; do echo "nameserver $d" >>/etc/resolv.conf; done
  echo "$ip" >/run/ip;;
esac
E
cat >"$R/etc/rc" <<'E'
#!/bin/sh
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /run
say() { echo "TINY $(cut -d' ' -f1 /proc/uptime)s $*" >/dev/console; }
for m in /lib/modules/*.ko; do insmod $m 2>/dev/null || say "insmod $m failed"; done
say "kernel $(uname -r) mem $(grep MemTotal /proc/meminfo | tr -s ' ')"
say "vda $(( $(cat /sys/block/vda/size 2>/dev/null || echo 0) / 2048 )) MiB"
mount -t ext4 /dev/vda2 /mnt 2>/dev/null && { n=$(( $(cat /mnt/boots 2>/dev/null || echo 0) + 1 )); echo $n >/mnt/boots; sync; say "boot number $n of this disk"; }
ip link set lo up
n=0; while [ ! -e /sys/class/net/eth0 ] && [ $n -lt 20 ]; do sleep 0.2; n=$((n+1)); done
if [ -e /sys/class/net/eth0 ]; then
  ip link set eth0 up
  say "eth0 mac $(cat /sys/class/net/eth0/address)"
  # -b: go to background when there is no answer yet
  udhcpc -i eth0 -s /etc/udhcpc.script -t 20 -T 1 -A 2 -b -p /run/udhcpc.pid >/run/udhcpc.log 2>&1
fi
say "ip $(cat /run/ip 2>/dev/null || echo none)"
ip route | sed 's/^/TINY route /' >/dev/console
M=http://169.254.169.254
get() { timeout 4 wget -q -O - "$M/$1" 2>/dev/null; }
ver=; n=0
ip route get 169.254.169.254 >/dev/null 2>&1 || ip route add 169.254.169.254/32 dev eth0
while [ $n -lt ${MD_TRIES:-10} ]; do
  for v in 2009-04-04 latest; do
    id=$(get $v/meta-data/instance-id) && [ -n "$id" ] && { ver=$v; break 2; }
  done
  n=$((n+1)); sleep 1
done
if [ -n "$ver" ]; then
  h=$(get $ver/meta-data/hostname); [ -n "$h" ] || h=$(get $ver/meta-data/local-hostname)
  [ -n "$h" ] && { hostname "$h"; echo "$h" >/etc/hostname; echo "127.0.0.1 localhost $h" >/etc/hosts; }
  say "metadata $ver instance-id=$id hostname=$h"
  # EC2: public-keys/ lists "0=name"; the key itself is public-keys/0/openssh-key
  : >/root/.ssh/authorized_keys
  for k in $(get $ver/meta-data/public-keys/); do get $ver/meta-data/public-keys/${k%%=*}/openssh-key >>/root/.ssh/authorized_keys; echo >>/root/.ssh/authorized_keys; done
  chmod 600 /root/.ssh/authorized_keys
  sed 's/^\(.\{60\}\).*/\1.../; /^$/d; s/^/TINY key /' /root/.ssh/authorized_keys >/dev/console
  get $ver/user-data >/run/user-data
  say "user-data $(wc -c </run/user-data) bytes"
  case "$(head -c 2 /run/user-data 2>/dev/null)" in
  '#!') chmod 700 /run/user-data
    # run it once for each instance-id on this disk
    if [ "$(cat /mnt/instance-id 2>/dev/null)" = "$id" ]; then say "user-data already run for $id"
    else echo "$id" >/mnt/instance-id; sync; /run/user-data 2>&1 | sed 's/^/TINY userdata: /' >/dev/console; say "user-data done"; fi;;
  esac
else say "metadata none"; fi
printf '{"instance-id":"%s","hostname":"%s","ip":"%s"}\n' "$id" "$(hostname)" "$(cat /run/ip 2>/dev/null)" >/www/index.html
say "READY free $(grep MemAvailable /proc/meminfo | tr -s ' ')"
E
chmod +x "$R"/etc/rc "$R"/etc/rc.stop "$R"/etc/udhcpc.script "$R"/etc/acpi/PWRF/00000080
ln -s sbin/init "$R/init"
find "$R" -exec touch -h -d @"$SOURCE_DATE_EPOCH" {} +
(cd "$R" && find . | LC_ALL=C sort | cpio -o -H newc -R 0:0 --reproducible --quiet | gzip -9n >"$work/initrd")

# ---- disk: MBR + FAT16 (syslinux, kernel, initrd) + small ext4 --------------
fatmb=$(( ( $(stat -c %s "$K") + $(stat -c %s "$work/initrd") ) / 1048576 + 2 )); extmb=8
truncate -s $((1+fatmb+extmb))M "$work/disk.img"
# MBR partition table by hand: status, CHS, type, CHS, LBA start, sectors (little endian)
le() { printf '\\x%02x\\x%02x\\x%02x\\x%02x' $(($1&255)) $((($1>>8)&255)) $((($1>>16)&255)) $((($1>>24)&255)); }
{ printf 'ynit\0\0'; printf "\\x80\\xfe\\xff\\xff\\x06\\xfe\\xff\\xff$(le 2048)$(le $((fatmb*2048)))"
  printf "\\x00\\xfe\\xff\\xff\\x83\\xfe\\xff\\xff$(le $(((1+fatmb)*2048)))$(le $((extmb*2048)))"
  head -c 32 /dev/zero; printf '\x55\xaa'; } | dd of="$work/disk.img" bs=1 seek=440 conv=notrunc status=none
export PATH="$X/usr/bin:$PATH" MTOOLS_SKIP_CHECK=1
off=1048576
mformat -i "$work/disk.img@@$off" -T $((fatmb*2048)) -h 16 -s 63 -H 2048 -v TINY -N 74696e79 ::
cat >"$work/syslinux.cfg" <<'C'
SERIAL 0 115200
PROMPT 0
TIMEOUT 1
DEFAULT l
LABEL l
  KERNEL /vmlinuz
  INITRD /initrd
  APPEND console=tty0 console=ttyS0,115200 quiet loglevel=4 net.ifnames=0 panic=5 random.trust_cpu=on
C
mcopy -i "$work/disk.img@@$off" "$K" ::/vmlinuz
mcopy -i "$work/disk.img@@$off" "$work/initrd" ::/initrd
mcopy -i "$work/disk.img@@$off" "$work/syslinux.cfg" ::/syslinux.cfg
syslinux --install --offset $off "$work/disk.img"
dd if="$X/usr/lib/syslinux/mbr/mbr.bin" of="$work/disk.img" bs=440 count=1 conv=notrunc status=none
truncate -s ${extmb}M "$work/ext.img"
mke2fs -q -F -t ext4 -O ^has_journal,^metadata_csum -U 74696e79-0000-4000-8000-000000000000 -L tinydata "$work/ext.img"
dd if="$work/ext.img" of="$work/disk.img" bs=1M seek=$((1+fatmb)) conv=notrunc,sparse status=none
qemu-img convert -c -O qcow2 "$work/disk.img" "$out.new"
mv "$out.new" "$out"
rm -rf "$work/x" "$work/ird" "$work/disk.img" "$work/ext.img"
echo "built $out: $(stat -c %s "$out") bytes, kernel $V"
