#!/bin/bash
# Installs what building, the demo and the tests need from the distribution, where it is missing.
# usage: install-deps.sh build|demo|test      (each includes the ones before it)
set -euo pipefail
level=${1:?usage: $0 build|demo|test}

packages=(gcc libc6-dev pkg-config libvirt-dev protobuf-compiler libprotobuf-dev ca-certificates)
case $level in
build) ;;
demo | test)
  packages+=(etcd-server etcd-client qemu-system-x86 qemu-utils libvirt-daemon-system libvirt-clients
    dnsmasq-base iproute2 iptables nftables python3 openssh-client cpio e2fsprogs curl util-linux
    dpkg-dev procps kmod binutils xz-utils zstd)
  ;;&
test) packages+=(python3-venv docker.io mmdebstrap postgresql debian-archive-keyring) ;;
demo) ;;
*) echo "install-deps: \`$level\` is not known: wanted build, demo or test" >&2; exit 2 ;;
esac

installed() { dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }
missing=()
for package in "${packages[@]}"; do installed "$package" || missing+=("$package"); done
# Releases differ in the packages that these two come from, which only apt's lists tell.
docker_missing= compose_missing=
if [ "$level" = test ]; then
  command -v docker >/dev/null || docker_missing=yes
  docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || compose_missing=yes
fi
[ "${#missing[@]}$docker_missing$compose_missing" = 0 ] && exit 0

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
export DEBIAN_FRONTEND=noninteractive
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends)
"${as_root[@]}" apt-get -q update
available() { [ -n "$(apt-cache show "$1" 2>/dev/null)" ]; }
if [ -n "$docker_missing" ] && available docker-cli; then missing+=(docker-cli); fi
if [ -n "$compose_missing" ]; then
  if available docker-compose-v2; then missing+=(docker-compose-v2); else missing+=(docker-compose); fi
fi
echo "installing ${missing[*]}"
if ! "${apt[@]}" install "${missing[@]}"; then
  # An image may carry qemu-utils from backports, which then does not go with the release's QEMU.
  release=$(. /etc/os-release && echo "${VERSION_CODENAME}")
  utils=$(apt-cache madison qemu-utils | awk -v r="$release" '$0 ~ r && $0 !~ /backports/ {print $3; exit}')
  missing+=("qemu-utils${utils:+=$utils}")
  "${apt[@]}" --allow-downgrades install "${missing[@]}"
fi
