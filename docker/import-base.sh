#!/bin/sh
# Makes the base image from Debian packages where no registry can be reached.
#
# usage: import-base.sh [IMAGE]        (default: debian:bookworm-slim; the part before the dash is the suite)
#
# Does nothing if the image is there already. Takes apt's sources and proxies from this host, and its
# own certificate authorities, so that builds on top of the image reach what this host reaches.
# Needs root, docker, and mmdebstrap or debootstrap.
set -eu

image=${1:-debian:bookworm-slim}
suite=${image##*:}
suite=${suite%%-*}

if docker image inspect "$image" >/dev/null 2>&1; then
    echo "$image is there already"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/root"

# Debian's own sources only: other packages' sources of this host have no business in the image.
sources=$work/sources.list
{
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null
    # One field per line and paragraphs between, in the newer form.
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -e "$file" ] || continue
        awk '
            function out(  u, s, n, m, i, j) {
                n = split(uris, u, " "); m = split(suites, s, " ")
                for (i = 1; i <= n; i++) for (j = 1; j <= m; j++) print "deb", u[i], s[j], components
                uris = suites = components = ""
            }
            /^ *$/ { out() }
            sub(/^URIs: */, "") { uris = $0 }
            sub(/^Suites: */, "") { suites = $0 }
            sub(/^Components: */, "") { components = $0 }
            END { out() }
        ' "$file"
    done
} | sed -n 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\/debian\(-security\)\{0,1\}\/\{0,1\} .*\)/deb \2/p' |
    grep -E "^deb [^ ]+ $suite(-updates|-security)? " | sort -u >"$sources" || true
[ -s "$sources" ] || echo "deb http://deb.debian.org/debian $suite main" >"$sources"
main=$(awk -v suite="$suite" '$3 == suite { print $2; exit }' "$sources")

if command -v mmdebstrap >/dev/null; then
    mmdebstrap --quiet --variant=minbase --include=ca-certificates --format=directory "$suite" "$work/root" - <"$sources"
else
    debootstrap --variant=minbase --include=ca-certificates "$suite" "$work/root" "$main"
fi
cp "$sources" "$work/root/etc/apt/sources.list"
apt-config dump | grep -iE '^Acquire::[^ ]*(Proxy|Verify-Peer|CaInfo)' >"$work/root/etc/apt/apt.conf.d/80host" ||
    rm -f "$work/root/etc/apt/apt.conf.d/80host"

if ls /usr/local/share/ca-certificates/*.crt >/dev/null 2>&1; then
    cp /usr/local/share/ca-certificates/*.crt "$work/root/usr/local/share/ca-certificates/"
    chroot "$work/root" update-ca-certificates >/dev/null 2>&1
fi

# What makes the slim image slim.
rm -rf "$work"/root/usr/share/doc/* "$work"/root/usr/share/man/* "$work"/root/usr/share/locale/* \
    "$work"/root/var/lib/apt/lists/* "$work"/root/var/cache/apt/*
mkdir -p "$work/root/var/lib/apt/lists/partial" "$work/root/var/cache/apt/archives/partial"
tar -C "$work/root" --numeric-owner --one-file-system -c . |
    docker import --change 'CMD ["bash"]' - "$image" >/dev/null
echo "$image made from $main"
