#!/bin/bash
# Checks with cargo-deny: what may be depended upon, licences, origins; and, where the database of advisories
# can be reached, known vulnerabilities.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.20.2
# Unoptimised: it is compiled in a third of the time and runs for seconds.
cargo deny --version 2>/dev/null | grep -q . || cargo install --debug --locked cargo-deny --version $version
cargo deny --all-features check bans licenses sources
if cargo deny fetch db 2>/dev/null; then
  cargo deny --all-features check --disable-fetch advisories
else
  echo "advisories were not checked: their database cannot be reached from here" >&2
fi
