#!/bin/sh
# Runs every fuzz target for a bounded time, from the committed seeds and what earlier runs have found.
#
# usage: fuzz.sh [SECONDS_PER_TARGET [TARGET...]]      (default: 60, all of them)
#
# Installs cargo-fuzz where it is missing; a C++ compiler must be there. Uses the nightly toolchain; where
# there is none, the pinned one with its unstable flags unlocked. A failure leaves its input in
# fuzz/artifacts/TARGET/ and ends the script.
set -eu

seconds=${1:-60}
[ $# -eq 0 ] || shift
cd "$(dirname "$0")/.."

command -v cargo-fuzz >/dev/null || cargo install --locked cargo-fuzz
if rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
    toolchain=+nightly
else
    toolchain=
    export RUSTC_BOOTSTRAP=1
fi

# An empty $toolchain must vanish, not become an empty argument.
# shellcheck disable=SC2086
fuzz() { cargo $toolchain fuzz "$@"; }

fuzz build
[ $# -gt 0 ] || set -- $(fuzz list)
for target; do
    echo "== $target, ${seconds} s"
    mkdir -p "fuzz/corpus/$target"
    # One input may take 10 s and 2 GiB: more is a finding as well.
    fuzz run "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 \
        -verbosity=1 2>"fuzz/corpus/$target.log" || {
        tail -n 40 "fuzz/corpus/$target.log" >&2
        exit 1
    }
    grep -E 'stat::number_of_executed_units|stat::peak_rss_mb' "fuzz/corpus/$target.log" || true
done
echo "no findings"
