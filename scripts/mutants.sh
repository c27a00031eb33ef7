#!/bin/bash
# Mutation tests of the pure crates: one thing in the code is made wrong, and the crate's own tests must notice; and
# so with each thing that cargo-mutants can make wrong.
#
# usage: mutants.sh all|changed [ARGUMENT...]      (arguments are cargo-mutants's)
#        mutants.sh install                         cargo-mutants alone, where it is missing
#
# `changed` looks only at lines that differ from SINCE (default: twenty commits ago), and there at six mutants at
# most, which takes a minute. Fails where one survives that .cargo/mutants.toml does not excuse.
set -euo pipefail
cd "$(dirname "$0")/.."
version=27.1.0
crates=(ec-model ec-plan ec-placement-model)
most=6
what=${1:?usage: $0 all|changed|install [ARGUMENT...]}
shift
cargo mutants --version >/dev/null 2>&1 || cargo install --debug --locked cargo-mutants --version $version
[ "$what" != install ] || exit 0

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target} CARGO_PROFILE_DEV_DEBUG=false
out=$CARGO_TARGET_DIR/mutants
tree=$out/tree
# In a copy, so that nobody finds a mutant in what they commit, and always the same one, so that only what changed is
# compiled anew. Its files are new: else what was built of the last mutant would pass for what is there.
rm -rf "$tree"
mkdir -p "$tree"
git ls-files -z --cached --others --exclude-standard |
  tar --create --null --files-from=- --ignore-failed-read --warning=no-failed-read | tar --extract --touch -C "$tree"

# The same random tests for each mutant and in each run; a failure need not be made small.
export PROPTEST_RNG_SEED=1 PROPTEST_MAX_SHRINK_ITERS=0 PROPTEST_DISABLE_FAILURE_PERSISTENCE=true
mutants() { cargo mutants --dir "$tree" --output "$out" "${crates[@]/#/--package=}" "$@"; }

case $what in
all) ;;
changed)
  since=${SINCE:-HEAD~20}
  if ! git rev-parse --quiet --verify "$since^{tree}" >/dev/null; then
    [ -z "${SINCE:-}" ] || { echo "mutants: SINCE=$SINCE is no commit" >&2 && exit 2; }
    # The history is shorter: all of it is new.
    since=$(git hash-object -t tree /dev/null)
  fi
  git diff "$since" -- "${crates[@]/#/crates/}" >"$out/diff"
  list=$(mutants --list --in-diff "$out/diff" "$@")
  if [ -z "$list" ]; then
    echo "nothing that could be mutated has changed in ${crates[*]} since $since"
    exit 0
  fi
  count=$(wc -l <<<"$list")
  parts=$(((count + most - 1) / most))
  part=$((0x$(git rev-parse --short=7 HEAD) % parts))
  echo "$count mutants of what changed since $since; part $((part + 1)) of $parts is tested"
  set -- --in-diff "$out/diff" --sharding round-robin --shard "$part/$parts" "$@"
  ;;
*)
  echo "mutants: \`$what\` is not known: wanted all, changed or install" >&2
  exit 2
  ;;
esac

# 2 and 3: some survived, or never came to an end, which is noticed well enough.
run() {
  local status=0
  mutants --in-place --no-shuffle --colors=never "$@" || status=$?
  case $status in 0 | 2 | 3) ;; *) exit $status ;; esac
}
# Most fall at once to a few random cases. Who does not gets all.
PROPTEST_CASES=100 run "$@"
[ -s "$out/mutants.out/missed.txt" ] || exit 0
echo "again with as many random cases as the tests have"
# By their files, too: a field that is left out is tested whatever the expressions are.
mapfile -t survivors < <(
  sed 's/:.*//; s/^/--file=/' "$out/mutants.out/missed.txt" | sort -u
  sed 's/[][\.*^$+?(){}|]/\\&/g; s/.*/--re=^&$/' "$out/mutants.out/missed.txt"
)
run "${survivors[@]}"
[ ! -s "$out/mutants.out/missed.txt" ] || {
  echo "these survived:" >&2
  cat "$out/mutants.out/missed.txt" >&2
  exit 1
}
