#!/bin/bash
# Tests the containers from nothing: builds them, brings the stack up on ports of its own, uses it with
# the real command line, and takes it down again with its data.
#
# usage: docker-test.sh DIRECTORY IMAGE [openstack]     DIRECTORY holds eplacement, econtroller, eschedule, ecompute and mdserver;
#                                                       IMAGE is the tiny guest; with OpenStack's placement, of another profile, too
#
# Starts dockerd where none runs, and a libvirtd of its own in namespaces of its own, and ends exactly these
# again. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."

usage="usage: $0 DIRECTORY IMAGE [openstack]"
directory=$(realpath "${1:?$usage}")
image=$(realpath "${2:?$usage}")
with=${3:-}
# Far from the usual ports, so that a stack or demo in use goes on.
export ETCD_PORT=${ETCD_PORT:-32379} PLACEMENT_PORT=${PLACEMENT_PORT:-38080}
export OPENSTACK_PLACEMENT_PORT=${OPENSTACK_PLACEMENT_PORT:-38778}
# The builder that needs no plugin; the files suit both.
export DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0
project=etcd-compute-test
work=$(mktemp -d)
# dnsmasq does not stay root, and must pass.
chmod 755 "$work"
dockerd_pid='' libvirt_pid=''
bridge=ecdocker0
# The agent's container, as compose.yaml has it, on directories of this test.
export AGENT_TAG=test AGENT_CONTEXT=$work/agent EPLACEMENT_CONTEXT=$work/eplacement LIBVIRT_RUN=$work/sock
export ECOMPUTE_STATE=$work/state ECOMPUTE_CONFIG=$work/config
# The release that the binaries were built on.
. /etc/os-release
case $ID in
ubuntu) AGENT_BASE_IMAGE=ubuntu:$VERSION_CODENAME ;;
*) AGENT_BASE_IMAGE=debian:$VERSION_CODENAME-slim ;;
esac
export AGENT_BASE_IMAGE

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
    compose --profile agent --profile openstack down -v >/dev/null 2>&1 || true
    docker image rm "localhost/etcd-compute/agent:$AGENT_TAG" "localhost/etcd-compute/eplacement:$AGENT_TAG" >/dev/null 2>&1 || true
  fi
  if [ -n "$libvirt_pid" ]; then
    # Its namespace ends with it, and everything in there.
    kill -KILL "$libvirt_pid" 2>/dev/null || true
    wait "$libvirt_pid" 2>/dev/null || true
    ip link del "$bridge" 2>/dev/null || true # a clean end has removed it
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

say "base images"
for base in debian:trixie-slim debian:bookworm-slim "$AGENT_BASE_IMAGE"; do
  docker image inspect "$base" >/dev/null 2>&1 || timeout 60 docker pull -q "$base" 2>/dev/null ||
    docker/import-base.sh "$base"
done

say "building"
install -D -m 644 -t "$work/agent" docker/agent/Dockerfile
install -D -m 755 -t "$work/agent" docker/agent/run
install -D -s -t "$work/agent/bin" "$directory/ecompute" "$directory/eschedule" "$directory/mdserver"
install -D -m 644 -t "$work/eplacement" docker/eplacement/Dockerfile
install -D -s -t "$work/eplacement/bin" "$directory/eplacement" "$directory/econtroller"
if [ -z "${PIP_INDEX_URL:-}" ] && command -v pip >/dev/null; then
  # A site's own mirror, where pip on this host is told of one.
  PIP_INDEX_URL=$(pip config get global.index-url 2>/dev/null || true)
  PIP_TRUSTED_HOST=$(pip config get global.trusted-host 2>/dev/null || true)
  [ -z "$PIP_INDEX_URL" ] && unset PIP_INDEX_URL || export PIP_INDEX_URL PIP_TRUSTED_HOST
fi
compose --profile agent ${with:+--profile "$with"} build >"$work/build.log" 2>&1 || die "build failed: $(tail -n 20 "$work/build.log")"

say "up on ports $ETCD_PORT and $PLACEMENT_PORT"
compose up -d etcd placement >"$work/up.log" 2>&1 || die "up failed: $(tail -n 20 "$work/up.log")"
is_healthy() {
  local container
  container=$(compose ps -q "$1")
  [ "$(docker inspect -f '{{.State.Health.Status}}' "$container")" = healthy ]
}
within 90 "health of etcd" is_healthy etcd
within 90 "health of placement" is_healthy placement

say "the controller looks after both"
compose up -d controller >"$work/up.log" 2>&1 || die "the controller did not start: $(tail -n 20 "$work/up.log")"
controller_looks() { compose logs controller 2>/dev/null | grep -q 'looking after the cluster'; }
within 30 "the controller's start" controller_looks
within 90 "health of the controller" is_healthy controller

say "etcd is one that we recommend, and keeps a key, also over a restart"
etcdctl() { compose exec -T etcd etcdctl "$@" </dev/null; }
release=$(compose exec -T etcd etcd --version </dev/null)
grep -qE '^etcd Version: 3\.[5-9]' <<<"$release" || die "etcd is not 3.5 or newer: $release"
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
makes_a_provider() {
  ask GET "$1/" | grep -q '"max_version": *"1.39"' || die "$1 does not tell its versions"
  ask POST "$1/resource_providers" '{"name": "test"}' | grep -q '"name": *"test"' || die "$1 made no provider"
}
makes_a_provider "$placement"

if [ -n "$with" ]; then
  say "so does OpenStack's"
  compose --profile openstack up -d openstack-placement >"$work/up.log" 2>&1 ||
    die "OpenStack's placement did not start: $(tail -n 20 "$work/up.log")"
  within 90 "health of OpenStack's placement" is_healthy openstack-placement
  makes_a_provider "http://127.0.0.1:$OPENSTACK_PLACEMENT_PORT"
  compose --profile openstack stop openstack-placement >/dev/null 2>&1
fi

say "eschedule uses placement and etcd"
cat >"$work/schedule.yaml" <<YAML
etcd: {host: 127.0.0.1, port: $ETCD_PORT}
placement: {endpoint: "$placement"}
image: file://$work/state/tiny.qcow2
YAML
eschedule() { "$directory/eschedule" --config "$work/schedule.yaml" "$@"; }
eschedule nodes || die "eschedule nodes failed with exit code $?"
code=0
answer=$(eschedule 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256') || code=$?
[ "$answer" = "NO ALLOCATIONS LEFT" ] || die "without room it said: $answer"
[ "$code" -eq 1 ] || die "without room its exit code was $code"

say "a libvirtd for the agent"
for name in sock etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt state config; do
  mkdir -p "$work/$name"
done
printf 'unix_sock_dir = "%s"\nunix_sock_rw_perms = "0700"\nauth_unix_rw = "none"\n' "$work/sock" \
  >"$work/etc/libvirt/libvirtd.conf"
printf '%s\n' 'user = "root"' 'group = "root"' 'security_driver = "none"' 'namespaces = []' \
  'cgroup_controllers = []' 'remember_owner = 0' >"$work/etc/libvirt/qemu.conf"
: >"$work/etc/libvirt/virtlogd.conf"
# libvirtd looks its own name up at every start of a guest.
echo "127.0.0.1 localhost $(hostname)" >"$work/hosts"
: >"$work/resolv.conf"
cat >"$work/init" <<'INIT'
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/libvirt /run/lock
for name in etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt; do
  mkdir -p "/$name"
  mount --bind "$1/$name" "/$name"
done
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
# Where the processor cannot virtualise, libvirt would probe a device that can be opened at every start.
if [ -e /dev/kvm ] && ! grep -qwE 'vmx|svm' /proc/cpuinfo; then mount --bind /dev/null /dev/kvm; fi
virtlogd -f /etc/libvirt/virtlogd.conf &
libvirtd -f /etc/libvirt/libvirtd.conf &
# Process 1 of its namespace: orphaned guests are reaped here.
while :; do wait -n || sleep 1; done
INIT
unshare --mount --pid --fork --kill-child --mount-proc --propagation private bash "$work/init" "$work" \
  >"$work/libvirtd.log" 2>&1 &
libvirt_pid=$!
virsh() { command virsh -q -c "qemu+unix:///system?socket=$work/sock/libvirt-sock" "$@"; }
libvirt_answers() {
  kill -0 "$libvirt_pid" 2>/dev/null || die "libvirtd ended: $(tail -n 3 "$work/libvirtd.log")"
  virsh version >/dev/null 2>&1
}
within 60 "libvirtd" libvirt_answers
for n in $(seq 201 250); do ip -o route | grep -q "192\.168\.$n\." || break; done
virsh net-define /dev/stdin >/dev/null <<XML
<network>
  <name>guests</name>
  <forward mode='nat'/>
  <bridge name='$bridge' stp='off' delay='0'/>
  <ip address='192.168.$n.1' netmask='255.255.255.0'>
    <dhcp><range start='192.168.$n.10' end='192.168.$n.250'/></dhcp>
  </ip>
</network>
XML
virsh net-start guests >/dev/null

say "the agent in its container"
cp "$image" "$work/state/tiny.qcow2"
cp "$work/schedule.yaml" "$work/config/"
cat >"$work/config/compute.yaml" <<YAML
name: docker-test
etcd: {host: 127.0.0.1, port: $ETCD_PORT}
placement: {endpoint: "$placement"}
state_dir: $work/state
listen: 127.0.0.1:0
images: {local: [$work/state]}
libvirt: {network: guests}
YAML
compose --profile agent up -d --no-build agent >"$work/up.log" 2>&1 ||
  die "the agent did not start: $(tail -n 20 "$work/up.log")"
for program in ecompute eschedule mdserver; do compose --profile agent exec -T agent "$program" --version </dev/null; done
node_is_there() { eschedule -o json nodes | grep -q docker-test; }
within 60 "the agent's registration" node_is_there
compose --profile agent exec -T agent ecompute --check </dev/null

say "a guest, built from the container"
eschedule --wait --timeout 180 --name contained 'resources=VCPU:1,MEMORY_MB:128,DISK_GB:1' ||
  die "no guest: $(compose --profile agent logs --tail=20 agent)"
eschedule contained | grep -q "^192\.168\.$n\." || die "its address is not of the network"
[ "$(virsh list --name | grep -c .)" -eq 1 ] || die "wanted one domain: $(virsh list --all)"
eschedule destroy --wait --timeout 60 contained
[ -z "$(virsh list --all --name | tr -d '[:space:]')" ] || die "a domain is left: $(virsh list --all)"

if compose logs controller 2>/dev/null | grep -q "failed to look after"; then
  compose logs controller 2>/dev/null | grep -q "answer again" || die "the controller: $(compose logs --tail=20 controller)"
fi

say "down"
compose --profile agent stop agent >/dev/null 2>&1
[ "$(docker inspect -f '{{.State.ExitCode}}' "$(compose --profile agent ps -q agent)")" = 0 ] ||
  die "the agent did not end well: $(compose --profile agent logs --tail=20 agent)"
if ip -o addr show dev "$bridge" | grep -q '169\.254\.169\.254'; then die "the metadata address is left"; fi

say "an agent that is not to be started again"
echo "no_such_key: 1" >>"$work/config/compute.yaml"
compose --profile agent start agent >/dev/null 2>&1
agent=$(compose --profile agent ps -q agent)
is_down() { docker exec "$agent" test -e /run/ecompute-is-down; }
within 30 "the end of an agent whose configuration is wrong" is_down
sleep 5
[ "$(docker inspect -f '{{.RestartCount}}' "$agent")" = 0 ] || die "it was started again"
compose --profile agent stop -t 5 agent >/dev/null 2>&1
[ "$(docker inspect -f '{{.State.ExitCode}}' "$agent")" = 2 ] || die "its container did not end by itself"
compose --profile agent --profile openstack down -v >/dev/null 2>&1
[ -z "$(docker ps -aq --filter "label=com.docker.compose.project=$project")" ] || die "containers are left"
[ -z "$(docker volume ls -q --filter "label=com.docker.compose.project=$project")" ] || die "volumes are left"
virsh net-destroy guests >/dev/null
say "all is well"
