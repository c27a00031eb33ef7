#!/bin/sh
# Unpacks a package of another Debian release without installing it: nothing about the host changes.
# usage: fetch-package.sh SUITE PACKAGE DIRECTORY      (does nothing if DIRECTORY is there)
#
# Uses the mirror that this host's own apt uses, with an apt configuration and package lists of its own.
set -eu

suite=$1 package=$2 directory=$3
[ ! -d "$directory" ] || exit 0

for tool in apt-get dpkg-deb dpkg; do
    command -v "$tool" >/dev/null || {
        echo "fetch-package.sh: this needs $tool, that is a Debian host" >&2
        exit 1
    }
done

# The mirror is that of the host's first source which has the main component of Debian itself.
mirror=$(
    {
        cat /etc/apt/sources.list 2>/dev/null
        cat /etc/apt/sources.list.d/*.list 2>/dev/null
        # The newer form has one field per line.
        sed -n 's/^URIs: *\([^ ]*\).*/deb \1 x main/p' /etc/apt/sources.list.d/*.sources 2>/dev/null
    } | sed -n 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\/debian\/\{0,1\}\) .*main.*/\2/p' | head -n 1
)
mirror=${mirror:-http://deb.debian.org/debian}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/parts"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/sources.list"
: >"$work/status"

apt() {
    apt-get -q -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts="$work/parts" \
        -o Dir::State::Lists="$work/lists" -o Dir::State::Status="$work/status" \
        -o Dir::Cache="$work" -o Dir::Cache::Archives="$work/archives" -o APT::Sandbox::User=root "$@" >&2
}

apt update
(cd "$work" && apt download "$package")
mkdir -p "$(dirname "$directory")"
# Unpacked beside and moved into place, so that an interrupted run leaves nothing that looks finished.
dpkg-deb -x "$work/$package"_*.deb "$directory.part"
mv "$directory.part" "$directory"
