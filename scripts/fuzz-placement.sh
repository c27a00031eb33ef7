#!/bin/bash
# Runs OpenStack's API tests against both servers, then compares them at random for some minutes. At a difference, its
# requests are in placement-diff.jsonl, to be kept under tests/replays/ once it is mended.
# usage: fuzz-placement.sh MINUTES [SEED]
set -euo pipefail
minutes=${1:?usage: $0 MINUTES [SEED]}
seed=${2:-$RANDOM}
repository=$(cd "$(dirname "$0")/.." && pwd)
cache=${CACHE:-/var/cache/etcd-compute}
"$repository/scripts/placement-venv.sh" "$cache/placement"
echo "OpenStack's own API tests, on OpenStack's server and on ours"
"$repository/scripts/placement-api-tests/run.py" --target openstack --venv "$cache/placement" | tail -n 1
"$repository/scripts/placement-api-tests/run.py" --target eplacement --venv "$cache/placement" \
  --binary "$repository/target/release/eplacement" | tail -n 1
work=$(mktemp -d)
pids=()
finish() {
  status=$?
  trap - EXIT
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
  exit "$status"
}
trap finish EXIT
cp "$cache/placement/template.sqlite" "$work/placement.sqlite"
printf '[api]\nauth_strategy = noauth2\n[placement_database]\nconnection = sqlite:///%s\n' "$work/placement.sqlite" \
  >"$work/placement.conf"
OS_PLACEMENT_CONFIG_DIR=$work "$cache/placement/bin/gunicorn" --workers 1 --worker-class gthread --threads 1 \
  --bind 127.0.0.1:38891 placement.wsgi.api:application >"$work/openstack.log" 2>&1 &
pids+=($!)
etcd --data-dir "$work/etcd" --listen-client-urls http://127.0.0.1:38879 --advertise-client-urls http://127.0.0.1:38879 \
  --listen-peer-urls http://127.0.0.1:38880 --initial-advertise-peer-urls http://127.0.0.1:38880 \
  --initial-cluster default=http://127.0.0.1:38880 >"$work/etcd.log" 2>&1 &
pids+=($!)
"$repository/target/release/eplacement" --listen 127.0.0.1:38892 --etcd http://127.0.0.1:38879 >"$work/ours.log" 2>&1 &
pids+=($!)
for url in http://127.0.0.1:38891/ http://127.0.0.1:38892/readyz; do
  curl -sSf --noproxy '*' --retry 60 --retry-delay 1 --retry-connrefused -o /dev/null "$url"
done
echo "from seed $seed, for $minutes minutes"
"$cache/placement/bin/python" "$repository/scripts/placement-diff.py" http://127.0.0.1:38891 http://127.0.0.1:38892 \
  --seed "$seed" --rounds 1 --minutes "$minutes"
