#!/bin/bash
# Runs the previous release's programs and this one's together, in every mixture of the two: tests/upgrade.
# usage: upgrade-test.sh [REVISION]      (default: the newest tag v* before HEAD; where there is none, what was there before
#                                         the present version was set)
#
# The other release is built in target/previous, which is kept: the next run of the same revision is quick.
set -euo pipefail
cd "$(dirname "$0")/.."
die() {
  echo "upgrade-test: $*" >&2
  exit 1
}
revision=${1:-$(git tag --merged HEAD --no-contains HEAD --sort=-version:refname 'v*' | head -n 1)}
if [ -z "$revision" ]; then
  # No line of a dependency begins so.
  revision=$(git log -1 --format=%H -G'^version = "' -- Cargo.toml)^
fi
revision=$(git rev-parse --quiet --verify "$revision^{commit}") || die "there is no revision \`${1:-before this version}\` here"
place=$PWD/target/previous
if [ "$(cat "$place/revision" 2>/dev/null)" != "$revision" ]; then
  rm -rf "$place/source" "$place/revision"
  mkdir -p "$place/source"
  # With the present time, not the commit's: cargo would take what is older than its last build for built.
  git archive "$revision" | tar -C "$place/source" --touch -xf -
  echo "$revision" >"$place/revision"
fi
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$place/source/Cargo.toml" | head -n 1)
echo "from $version ($(git log -1 --format='%h, %cs' "$revision"))"
# As its own release builds it for tests, with the compiler that it names.
(cd "$place/source" && cargo build --locked --workspace --all-features --bins --target-dir "$place/target")
exec scripts/test.sh upgrade "$place/target/debug"
