#!/bin/bash
# Checks with cargo-deny that the dependencies are those which the architecture allows.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
cargo deny check bans sources
