#!/bin/bash
# Leaves out each comparison of a transaction, one at a time, and says which seed of the simulation finds that.
# usage: guards.sh                 all of crates/ec-cloud, crates/ec-replica and ecompute, in seeds 0..3000 (SEEDS): an hour or two
#        guards.sh FILE:LINE…      only these
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${SEEDS:-0..3000}
scripts/simulation.sh build --quiet --locked -p ec-sim --all-features --bin ec-sim
if [ $# -eq 0 ]; then
  # Each call in a chain of its own line; tests compare what they want.
  mapfile -t places < <(grep -rn --include=*.rs '\.when\(_all\)\?(' crates/ec-cloud/src crates/ec-replica/src ecompute/src |
    grep -v '/tests' | cut -d: -f1,2)
  set -- "${places[@]}"
fi
missed=0
for place; do
  if log=$(PLANTED=$place "${CARGO_TARGET_DIR:-target}/sim/debug/ec-sim" "$seeds" --first); then
    echo "$place  NOT FOUND in $seeds"
    missed=$((missed + 1))
    continue
  fi
  # A history that fails says why; where none does, it is ec-sim itself that failed.
  again=$(sed -n 's/^the first again:.* //p' <<<"$log")
  if ! why=$(grep -m1 -E '^(VIOLATION|PANIC)' <<<"$log") || [ -z "$again" ]; then
    echo "guards: ec-sim failed, and no history of it: $(tail -1 <<<"$log")" >&2
    exit 2
  fi
  echo "$place  found by seed $again: $why"
done
echo "$# left out, $missed not found"
[ $missed -eq 0 ]
