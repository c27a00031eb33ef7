#!/bin/bash
# Installs what building, the demo, the tests and packages need from the distribution, where it is missing.
# usage: install-deps.sh build|demo|test|shared-test    (each includes the ones before it)
#        install-deps.sh package|package-test     (these two include build)
set -euo pipefail
level=${1:?usage: $0 build|demo|test|shared-test|package|package-test}
# Also with a user's own PATH the system's programs are seen; apt's texts are read below.
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C DEBIAN_FRONTEND=noninteractive

die() {
  echo "install-deps: $*" >&2
  exit 1
}
# Without it, an interrupted apt would look like one that failed.
trap 'echo "install-deps: interrupted; run it again to go on" >&2; exit 130' INT TERM

packages=(gcc libc6-dev pkg-config libvirt-dev protobuf-compiler libprotobuf-dev ca-certificates)
case $level in
build) ;;
package | package-test)
  packages+=(debhelper git help2man musl-tools python3)
  [ "$level" = package ] || packages+=(lintian mmdebstrap debian-archive-keyring util-linux piuparts
    curl etcd-client iproute2 openssh-client openssl procps)
  ;;
demo | test | shared-test)
  packages+=(etcd-server etcd-client qemu-system-x86 qemu-utils libvirt-daemon-system libvirt-clients
    dnsmasq-base iproute2 iptables nftables python3 openssh-client cpio e2fsprogs curl util-linux
    dpkg-dev procps kmod binutils xz-utils zstd)
  ;;&
shared-test) packages+=(glusterfs-server glusterfs-client) ;;&
test | shared-test)
  # virt-xml-validate is of libvirt-clients, and calls xmllint.
  packages+=(python3-venv mmdebstrap postgresql prometheus debian-archive-keyring libxml2-utils virtinst)
  # Another Docker than the distribution's serves as well, and would have to go for it.
  command -v dockerd >/dev/null || packages+=(docker.io)
  ;;
demo) ;;
*)
  echo "install-deps: \`$level\` is not known: wanted build, demo, test, shared-test, package or package-test" >&2
  exit 2
  ;;
esac
command -v dpkg-query >/dev/null || die "this needs Debian or Ubuntu; elsewhere, install yourself: ${packages[*]}"
# Before anything is installed and built for long. The programs by themselves may do elsewhere; nobody has tried.
[ "$level" = build ] || [ "$(dpkg --print-architecture)" = amd64 ] ||
  die "guests of the demo and the tests, and packages, are for x86-64 only, and this is $(dpkg --print-architecture)"

installed() { dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }
find_missing() {
  missing=()
  for package in "${packages[@]}"; do installed "$package" || missing+=("$package"); done
}
find_missing
# Releases differ in the packages that these two come from, which only apt's lists tell.
docker_missing='' compose_missing=''
if [[ $level = *test && $level != package-test ]]; then
  command -v docker >/dev/null || docker_missing=yes
  docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || compose_missing=yes
fi
[ "${#missing[@]}$docker_missing$compose_missing" = 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || die "${missing[*]} are missing: run this as root, or install sudo"
  # sudo lets none of these through by itself; by name, since all who look at processes would see a password in them.
  as_root=(sudo --preserve-env=http_proxy,https_proxy,no_proxy)
fi
# Machines that were just started install their updates: that is waited for.
wait_for_lock=300
apt() {
  "${as_root[@]}" env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -q -y -o "DPkg::Lock::Timeout=$wait_for_lock" "$@"
}

# Fails with what apt says, also where it would only warn. The lock of the lists has no timeout of its own.
update() {
  local end=$((SECONDS + wait_for_lock))
  while :; do
    if said=$(apt -o APT::Update::Error-Mode=any update 2>&1); then return 0; fi
    grep -q 'Could not get lock' <<<"$said" && [ "$SECONDS" -lt "$end" ] || return 1
    echo "another apt is at work: waiting for it"
    sleep 5
  done
}
available() { [ -n "$(apt-cache show "$1" 2>/dev/null)" ]; }
echo "reading the package lists"
if ! update; then
  # A foreign source that is away need not matter.
  reason=$(grep -m 1 -E '^(E|Err|W):?' <<<"$said" || tail -n 1 <<<"$said")
  for package in "${missing[@]}"; do
    available "$package" || die "$package cannot be installed, since apt-get update failed: $reason"
  done
  echo "install-deps: apt-get update failed, going on with the lists that are there: $reason" >&2
fi
if [ -n "$docker_missing" ] && available docker-cli; then packages+=(docker-cli); fi
if [ -n "$compose_missing" ]; then
  if available docker-compose-v2; then packages+=(docker-compose-v2); else packages+=(docker-compose); fi
fi
find_missing
for package in "${missing[@]}"; do
  available "$package" || die "no source of this machine's apt has $package; Ubuntu has some in universe"
done
echo "installing ${missing[*]}"
[ "$level" != test ] || echo "(Docker, PostgreSQL and Prometheus are services: they are started, and stay enabled)"

# All that is needed is named, not only what is missing, and nothing may go: apt would solve a conflict by removing what is
# needed as well.
install=(install --no-install-recommends --no-remove)
if ! apt "${install[@]}" "${packages[@]}"; then
  # A machine may carry some of it from another suite (qemu-utils from backports), which does not go with the
  # release's own. Those are put to the release's version.
  release=$(. /etc/os-release && echo "${VERSION_CODENAME:?}")
  pinned=()
  for package in "${packages[@]}"; do
    if installed "$package"; then
      version=$(apt-cache madison "$package" | awk -F ' *[|] *' -v r=" $release(-updates|-security)?/" \
        '(" " $3) ~ r { gsub(/ /, "", $2); print $2; exit }')
      have=$(dpkg-query -W -f '${Version}' "$package")
      if [ -n "$version" ] && dpkg --compare-versions "$have" gt "$version"; then
        echo "$package $have is of another suite: taking $version of $release"
        package=$package=$version
      fi
    fi
    pinned+=("$package")
  done
  [ "${pinned[*]}" != "${packages[*]}" ] || die "apt could not install them; it says why above"
  apt "${install[@]}" --allow-downgrades "${pinned[@]}" || die "apt could not install them; it says why above"
fi
find_missing
[ ${#missing[@]} -eq 0 ] || die "apt ended well, and these are not installed: ${missing[*]}; try apt-get install ${missing[*]}"
