#!/bin/bash
# Cargo, for the simulation: what its histories spend their time in is optimised (crates/ec-sim/optimised.toml), in a directory of its
# own. What is the same in the tests' build, procedural macros, C and two hundred crates, is taken from there, and not built twice.
# usage: simulation.sh build|run|nextest run OPTION…
set -euo pipefail
cd "$(dirname "$0")/.."
tests=${CARGO_TARGET_DIR:-target}
export CARGO_TARGET_DIR=$tests/sim
mkdir -p "$CARGO_TARGET_DIR"
# One after the other; what a build beside this one changes meanwhile is built anew.
exec {lock}>"$CARGO_TARGET_DIR/taking"
flock "$lock"
if [ ! -e "$CARGO_TARGET_DIR/debug" ] && [ -e "$tests/debug/.fingerprint" ]; then
  taken=$CARGO_TARGET_DIR/taken
  rm -rf "$taken"
  mkdir -p "$taken"
  # What cargo writes where it lies is copied; the compiler makes each of its files anew.
  # A build beside this one may take a file away meanwhile: what was not taken is built here, so that is no failure, only slower.
  cp -a "$tests"/debug/{.fingerprint,build} "$taken" 2>/dev/null || true
  cp -al "$tests/debug/deps" "$taken" 2>/dev/null || true
  mv "$taken" "$CARGO_TARGET_DIR/debug"
fi
exec {lock}>&-
verb=("$1")
[ "$1" != nextest ] || verb+=("$2")
exec cargo "${verb[@]}" --config crates/ec-sim/optimised.toml "${@:${#verb[@]}+1}"
