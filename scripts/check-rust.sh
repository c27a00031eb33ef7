#!/bin/bash
# Looks for the Rust that the build needs, before anything else is installed or built.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
how="get it with rustup (https://rustup.rs); distributions carry older ones"
if ! command -v cargo >/dev/null; then
  echo "Rust $wanted is needed, and there is no cargo in PATH: $how" >&2
  exit 1
fi
# rustup fetches what rust-toolchain.toml names, at this very call where it is not there yet.
if ! found=$(cargo --version); then
  echo "cargo does not run (see above); Rust $wanted is needed: $how" >&2
  exit 1
fi
found=$(cut -d' ' -f2 <<<"$found")
if [ "$(printf '%s\n' "$wanted" "${found%%-*}" | sort -V | head -n 1)" != "$wanted" ]; then
  echo "Rust $wanted is needed, and $(command -v cargo) is $found: $how" >&2
  exit 1
fi
