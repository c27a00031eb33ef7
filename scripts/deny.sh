#!/bin/bash
# Checks with cargo-deny: what may be depended upon, licences, origins; and, where the database of advisories
# can be reached, known vulnerabilities.
# usage: deny.sh            always
#        deny.sh changed    where another package came, or another release of one, or a rule changed, in the last sixty commits:
#                           to build cargo-deny alone takes a minute
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.20.2
since=HEAD~60
packages() { grep -E '^(name|version|source) = '; }
if [ "${1-}" = changed ] && git rev-parse --quiet --verify "$since^{tree}" >/dev/null &&
  git diff --quiet "$since" -- deny.toml &&
  cmp -s <(git show "$since:Cargo.lock" | packages) <(packages <Cargo.lock); then
  echo "dependencies were not checked: they are those of $(git rev-parse --short "$since"); \`make deny\` does it"
  exit 0
fi
# Unoptimised: it is compiled in a third of the time and runs for seconds.
cargo deny --version 2>/dev/null | grep -q . || cargo install --debug --locked cargo-deny --version $version
cargo deny --all-features check bans licenses sources
if cargo deny fetch db 2>/dev/null; then
  cargo deny --all-features check --disable-fetch advisories
else
  echo "advisories were not checked: their database cannot be reached from here" >&2
fi
