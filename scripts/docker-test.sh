#!/bin/bash
# Tests the containers from nothing: builds them, brings the stack up on ports of its own, uses it with
# the real command line, and takes it down again with its data.
#
# usage: docker-test.sh [DIRECTORY]     where eschedule, ecompute and mdserver lie; default target/release,
#                                       else target/debug
#
# Starts dockerd where none runs, and ends exactly that one again. Needs root for it.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=${1:-}
if [ -z "$directory" ]; then
  directory=target/release
  [ -x "$directory/eschedule" ] || directory=target/debug
fi
# Far from the usual ports, so that a stack or demo in use goes on.
export ETCD_PORT=${ETCD_PORT:-32379} PLACEMENT_PORT=${PLACEMENT_PORT:-38080}
# The builder that needs no plugin; the files suit both.
export DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0
project=etcd-compute-test
work=$(mktemp -d)
dockerd_pid=

say() { printf '== %s\n' "$*"; }
die() {
  echo "docker-test: $*" >&2
  exit 1
}

if docker compose version >/dev/null 2>&1; then
  compose() { docker compose -f docker/compose.yaml -p "$project" "$@"; }
elif command -v docker-compose >/dev/null; then
  compose() { docker-compose -f docker/compose.yaml -p "$project" "$@"; }
else
  die "neither docker-compose nor docker compose is there"
fi

finish() {
  status=$?
  trap - EXIT
  if docker info >/dev/null 2>&1; then
    [ "$status" -eq 0 ] || compose logs --tail=20 >&2 || true
    compose down -v >/dev/null 2>&1 || true
  fi
  if [ -n "$dockerd_pid" ]; then
    kill -TERM "$dockerd_pid" 2>/dev/null || true
    wait "$dockerd_pid" 2>/dev/null || true
  fi
  rm -rf "$work"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# within SECONDS WHAT COMMAND…: until the command succeeds
within() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || die "$what: not within the time"
    sleep 0.5
  done
}

docker_answers() { docker info >/dev/null 2>&1; }
if ! docker_answers; then
  say "starting dockerd"
  dockerd >"$work/dockerd.log" 2>&1 &
  dockerd_pid=$!
  dockerd_is_up() {
    kill -0 "$dockerd_pid" 2>/dev/null || die "dockerd ended: $(tail -n 3 "$work/dockerd.log")"
    docker_answers
  }
  within 60 "dockerd" dockerd_is_up
fi

say "base image"
if ! docker image inspect debian:bookworm-slim >/dev/null 2>&1; then
  timeout 60 docker pull -q debian:bookworm-slim 2>/dev/null || docker/import-base.sh
fi

say "building"
if [ -z "${PIP_INDEX_URL:-}" ] && command -v pip >/dev/null; then
  # A site's own mirror, where pip on this host is told of one.
  PIP_INDEX_URL=$(pip config get global.index-url 2>/dev/null || true)
  PIP_TRUSTED_HOST=$(pip config get global.trusted-host 2>/dev/null || true)
  [ -z "$PIP_INDEX_URL" ] && unset PIP_INDEX_URL || export PIP_INDEX_URL PIP_TRUSTED_HOST
fi
compose build etcd placement >"$work/build.log" 2>&1 || die "build failed: $(tail -n 20 "$work/build.log")"

say "up on ports $ETCD_PORT and $PLACEMENT_PORT"
compose up -d etcd placement >"$work/up.log" 2>&1 || die "up failed: $(tail -n 20 "$work/up.log")"
is_healthy() {
  local container
  container=$(compose ps -q "$1")
  [ "$(docker inspect -f '{{.State.Health.Status}}' "$container")" = healthy ]
}
within 90 "health of etcd" is_healthy etcd
within 90 "health of placement" is_healthy placement

say "etcd keeps a key, also over a restart"
etcdctl() { compose exec -T etcd etcdctl "$@" </dev/null; }
etcdctl put /test/key value >/dev/null
compose restart etcd >/dev/null 2>&1
within 60 "etcd after its restart" is_healthy etcd
[ "$(etcdctl get --print-value-only /test/key | tr -d '\r')" = value ] || die "etcd lost a key in a restart"

say "placement makes a resource provider"
placement=http://127.0.0.1:$PLACEMENT_PORT
ask() {
  python3 - "$@" <<'PYTHON'
import json, sys, urllib.request
method, url, *body = sys.argv[1:]
request = urllib.request.Request(url, method=method, data=body[0].encode() if body else None, headers={
    "X-Auth-Token": "admin", "Content-Type": "application/json", "OpenStack-API-Version": "placement 1.39"})
with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
    print(answer.read().decode())
PYTHON
}
ask GET "$placement/" | grep -q '"max_version": "1.39"' || die "placement does not tell its versions"
ask POST "$placement/resource_providers" '{"name": "test"}' | grep -q '"name": "test"' || die "no provider was made"

if [ -x "$directory/eschedule" ]; then
  say "$directory/eschedule uses both"
  cat >"$work/schedule.yaml" <<YAML
etcd: {host: 127.0.0.1, port: $ETCD_PORT}
placement: {endpoint: "$placement"}
YAML
  eschedule() { "$directory/eschedule" --config "$work/schedule.yaml" "$@"; }
  eschedule nodes || die "eschedule nodes failed with exit code $?"
  code=0
  answer=$(eschedule 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256') || code=$?
  [ "$answer" = "NO ALLOCATIONS LEFT" ] || die "without room it said: $answer"
  [ "$code" -eq 1 ] || die "without room its exit code was $code"
else
  say "skipped: there is no $directory/eschedule"
fi

if [ -x "$directory/ecompute" ] && [ -x "$directory/mdserver" ] && [ -x "$directory/eschedule" ]; then
  say "the agent's image has what its programs need"
  mkdir -p "$work/agent"
  cp docker/agent/Dockerfile "$work/agent/"
  install -D -s -t "$work/agent/bin" "$directory/ecompute" "$directory/eschedule" "$directory/mdserver"
  docker build -q --network host -t etcd-compute/agent:test "$work/agent" >/dev/null 2>"$work/agent.log" ||
    die "build of the agent failed: $(tail -n 20 "$work/agent.log")"
  for program in ecompute eschedule mdserver; do
    docker run --rm etcd-compute/agent:test "$program" --version
  done
  docker run --rm --network host -v "$work/schedule.yaml:/etc/ecompute/schedule.yaml:ro" \
    etcd-compute/agent:test eschedule nodes || die "eschedule in the container failed with exit code $?"
  docker image rm etcd-compute/agent:test >/dev/null
else
  say "skipped: $directory does not hold all three programs"
fi

say "down"
compose down -v >/dev/null 2>&1
[ -z "$(docker ps -aq --filter "label=com.docker.compose.project=$project")" ] || die "containers are left"
[ -z "$(docker volume ls -q --filter "label=com.docker.compose.project=$project")" ] || die "volumes are left"
say "all is well"
