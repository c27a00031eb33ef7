#!/bin/bash
# Installs the built programs with all that belongs to them. `make install` calls it, and the Debian packages are made of
# such a tree.
# usage: install.sh             installs
#        install.sh remove      takes that away again, for `make uninstall`: all but configuration, and what the programs made
#
#   PREFIX      where programs go [/usr/local]         DESTDIR  before every path, for packages [none]
#   SYSCONFDIR  where ecompute/ with the configuration goes [/etc]
#   UNITDIR     systemd's units [PREFIX/lib/systemd/system]
#   ZSHDIR      completions of zsh [PREFIX/share/zsh/site-functions]
#   BIN         the built programs [target/package/release]
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
prefix=${PREFIX:-/usr/local} destdir=${DESTDIR:-} bin=${BIN:-target/package/release}
sysconfdir=${SYSCONFDIR:-/etc} unitdir=${UNITDIR:-$prefix/lib/systemd/system} zshdir=${ZSHDIR:-$prefix/share/zsh/site-functions}
share=$destdir$prefix/share
daemons=(ecompute econtroller eplacement mdserver)

case ${1-} in
'') ;;
remove)
  for program in "${daemons[@]}" eschedule; do rm -f "$destdir$prefix/bin/$program"; done
  rm -rf "$share/doc/etcd-compute" "$share/etcd-compute"
  for daemon in "${daemons[@]}"; do rm -f "$destdir$unitdir/$daemon.service" "$share/man/man8/$daemon.8"; done
  for kind in sysusers tmpfiles; do
    for file in packaging/$kind.d/*; do rm -f "$destdir$prefix/lib/$kind.d/${file##*/}"; done
  done
  rm -f "$share/man/man1"/eschedule{,-*}.1
  for program in eschedule eplacement; do
    rm -f "$share/bash-completion/completions/$program" "$destdir$zshdir/_$program" "$share/fish/vendor_completions.d/$program.fish"
  done
  exit
  ;;
*)
  echo "install: \`$1\` is not known: wanted remove, or nothing" >&2
  exit 2
  ;;
esac

for program in "${daemons[@]}" eschedule; do
  install -D -t "$destdir$prefix/bin" "$bin/$program"
done
install -D -m 644 -t "$share/doc/etcd-compute" "$bin/THIRD-PARTY-LICENSES" docs/*
install -D -m 755 scripts/etcd-roles.sh "$share/etcd-compute/etcd-roles.sh"
install -D -m 644 -t "$share/etcd-compute/monitoring" packaging/monitoring/{alerts.yml,dashboard.json,prometheus.yml}
sed -i "s#/usr/share/#$prefix/share/#" "$share/etcd-compute/monitoring/prometheus.yml"

# What an administrator wrote stays.
for file in compute.yaml controller.yaml eplacement.yaml schedule.yaml packaging/mdserver.env; do
  there=$destdir$sysconfdir/ecompute/${file##*/}
  [ -e "$there" ] || install -D -m 644 "$file" "$there"
done

for unit in packaging/systemd/*.service; do
  install -d "$destdir$unitdir"
  sed -e "s#@BINDIR@#$prefix/bin#" -e "s#/etc/ecompute/#$sysconfdir/ecompute/#" "$unit" >"$destdir$unitdir/${unit##*/}"
done
install -D -m 644 -t "$destdir$prefix/lib/sysusers.d" packaging/sysusers.d/*
install -D -m 644 -t "$destdir$prefix/lib/tmpfiles.d" packaging/tmpfiles.d/*

"$bin/eschedule" man "$share/man/man1" 2>/dev/null
page() { # page PROGRAM WHAT_IT_IS
  help2man --no-info --section=8 --name="$2" "$bin/$1" -o "$share/man/man8/$1.8"
}
if command -v help2man >/dev/null; then
  mkdir -p "$share/man/man8"
  page ecompute "the agent of etcd-compute"
  page econtroller "looks after a whole etcd-compute cluster"
  page eplacement "the Placement API server of etcd-compute"
  page mdserver "the metadata server of etcd-compute"
else
  echo "install: there is no help2man: no manual pages of ${daemons[*]}" >&2
fi

mkdir -p "$share/bash-completion/completions" "$destdir$zshdir" "$share/fish/vendor_completions.d"
for program in eschedule eplacement; do
  "$bin/$program" completions bash >"$share/bash-completion/completions/$program"
  "$bin/$program" completions zsh >"$destdir$zshdir/_$program"
  "$bin/$program" completions fish >"$share/fish/vendor_completions.d/$program.fish"
done
