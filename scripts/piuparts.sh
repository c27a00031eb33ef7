#!/bin/bash
# Tries the packages of target/deb with Debian's piuparts: what they leave after removing and purging, and whether they can be
# installed again after each.
# usage: piuparts.sh [SUITE…]         (bookworm, trixie; default: both. Root; some minutes each)
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8
umask 022
die() {
  echo "piuparts: $*" >&2
  exit 1
}
# shellcheck source=scripts/machines.sh
. scripts/machines.sh
[ "$(id -u)" -eq 0 ] || die "must be run as root: it makes file systems"
for tool in mmdebstrap piuparts; do command -v $tool >/dev/null || die "$tool is missing: run scripts/install-deps.sh package-test"; done
ls target/deb/*.deb >/dev/null || die "there are no packages: run \`make deb\`"
[ $# -gt 0 ] || set -- bookworm trixie
for suite in "$@"; do
  # It knows what is where in Debian only.
  case $suite in bookworm | trixie) ;; *) die "wanted bookworm or trixie, not \`$suite\`" ;; esac
done

work=$(mktemp -d)
chmod 755 "$work"
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT TERM
for suite in "$@"; do
  # What libvirt and others leave is theirs to mend.
  root=$(root_with_dependencies "$suite")
  for way in '' --install-remove-install --install-purge-install; do
    debs=(target/deb/*.deb)
    # Here it installs what they depend on before and from the distribution, which has nothing of ours: without the metapackage.
    if [ "$way" = --install-purge-install ]; then debs=(target/deb/etcd-compute-*.deb); fi
    # Nothing of ours is in the distribution that could be upgraded from: package-test.sh upgrades. The directory is debconf's own,
    # made when anything is installed.
    piuparts --distribution "$suite" --mirror "$mirror_debian main" --existing-chroot "$root" --no-upgrade-test --tmpdir "$work" \
      --skip-logrotatefiles-test --ignore /var/cache/debconf/tmp.ci/ ${way:+$way} --log-level=info --log-file "$work/log" "${debs[@]}" >/dev/null 2>&1 || {
      grep -E 'ERROR|FAIL|WARN' -A 12 "$work/log" >&2 || tail -n 30 "$work/log" >&2
      die "$suite, ${way:-installed and purged}: failed"
    }
    # Links that lead nowhere are the distribution's, and there before.
    grep -E '^[0-9.ms]+ (ERROR|WARN)' "$work/log" | grep -v 'Broken symlinks' || true
    echo "$suite, ${way:-installed and purged}: passed"
  done
done
