#!/bin/bash
# The whole product on this machine: etcd, placement, libvirt, an agent, one real guest.
# usage: demo.sh up | down        (run `make demo` and `make demo-down`, which also build)
#
# Uses the machine's running libvirtd and its network `default` where there are any, and starts and ends
# its own otherwise. Everything it starts is noted under $STATE/run with pid and start time, so that
# `down` ends exactly that and nothing else, also after a killed run.
set -euo pipefail

cd "$(dirname "$0")/.."
REPO=$PWD
BIN=${BIN:-$REPO/target/release}
STATE=/var/lib/etcd-compute-demo
CACHE=/var/cache/etcd-compute
RUN=$STATE/run
NETWORK_NAME=ecompute-demo
URI=qemu:///system

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
die() {
  echo "demo: $*" >&2
  exit 1
}

# ---- processes ------------------------------------------------------------------------------------

# Field 22 of stat is the start time: with it a pid names one process for ever.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# start NAME COMMAND…: in the background, in a session of its own, logging to $STATE/NAME.log
start() {
  local name=$1
  shift
  setsid "$@" >"$STATE/$name.log" 2>&1 </dev/null &
  echo "$! $(start_time $!)" >"$RUN/$name.pid"
}

alive() {
  local pid started
  read -r pid started 2>/dev/null <"$RUN/$1.pid" || return 1
  [ -n "$started" ] && [ "$(start_time "$pid")" = "$started" ]
}

# stop NAME: SIGTERM, and SIGKILL after 30 s
stop() {
  if alive "$1"; then
    local pid
    read -r pid _ <"$RUN/$1.pid"
    kill -TERM "$pid"
    for _ in $(seq 300); do alive "$1" || break; sleep 0.1; done
    if alive "$1"; then kill -KILL "$pid"; fi
  fi
  rm -f "$RUN/$1.pid"
}

# until SECONDS WHAT COMMAND…
await() {
  local seconds=$1 what=$2
  shift 2
  for _ in $(seq $((seconds * 5))); do
    if "$@" >/dev/null 2>&1; then return; fi
    sleep 0.2
  done
  die "$what did not come up within $seconds s; see the logs in $STATE"
}

port_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
# The first free port of those given.
free_port() {
  for port in "$@"; do if port_free "$port"; then echo "$port"; return; fi; done
  die "none of the ports $* is free"
}

virsh() { command virsh -q -c "$URI" "$@"; }

# ---- libvirt --------------------------------------------------------------------------------------

libvirt_up() {
  if virsh version >/dev/null 2>&1; then
    echo "using the running libvirtd"
    return
  fi
  echo "starting libvirtd"
  command -v virtlogd >/dev/null || die "virtlogd is missing: install libvirt-daemon-system"
  if [ ! -S /run/libvirt/virtlogd-sock ]; then start virtlogd virtlogd; fi
  # Where the processor has no virtualisation, a /dev/kvm that QEMU cannot use makes libvirt probe it
  # again at every start of a guest, for seconds; out of sight it does not.
  if [ -e /dev/kvm ] && ! grep -qwE 'vmx|svm' /proc/cpuinfo; then
    start libvirtd scripts/reaper.py unshare -m sh -c 'mount --bind /dev/null /dev/kvm && exec libvirtd'
  else
    start libvirtd scripts/reaper.py libvirtd
  fi
  await 30 libvirtd virsh version
}

network_up() {
  NETWORK=default
  if virsh net-list --name | grep -qx default; then
    echo "using the running network default"
  elif virsh net-list --all --name | grep -qx default && virsh net-start default >/dev/null 2>"$STATE/net-start.log"; then
    echo default >"$RUN/network-started"
  else
    NETWORK=$NETWORK_NAME
    local n
    for n in $(seq 150 200); do ip -o route | grep -q "192\.168\.$n\." || break; done
    echo "$NETWORK" >"$RUN/network-defined"
    virsh net-define /dev/stdin >/dev/null <<X
<network>
  <name>$NETWORK</name>
  <forward mode='nat'/>
  <bridge name='ecdemo0' stp='off' delay='0'/>
  <ip address='192.168.$n.1' netmask='255.255.255.0'>
    <dhcp><range start='192.168.$n.10' end='192.168.$n.250'/></dhcp>
  </ip>
</network>
X
    virsh net-start "$NETWORK" >/dev/null
  fi
  virsh net-info "$NETWORK" | awk '/^Bridge:/ {print $2}' >"$RUN/bridge"
  echo "guests are on network $NETWORK, bridge $(cat "$RUN/bridge")"
}

# ---- up -------------------------------------------------------------------------------------------

up() {
  [ -x "$BIN/ecompute" ] || die "$BIN/ecompute is missing: run \`make demo\`, which builds it"
  if [ -d "$STATE" ]; then
    say "Ending an earlier demo"
    down
  fi
  mkdir -p "$RUN"
  chmod 755 "$STATE"
  trap 'echo "demo: failed; \`make demo-down\` cleans up, the logs are in $STATE" >&2' ERR

  say "Guest image (built once, kept in $CACHE)"
  mkdir -p "$CACHE"
  scripts/guests/build-tiny.sh "$CACHE/tiny.qcow2" "$CACHE/debs"

  say "Starting the stack"
  local etcd peer placement
  etcd=$(free_port 2379 12379 22379)
  peer=$(free_port 2380 12380 22380)
  placement=$(free_port 8080 18080 28080)
  start etcd etcd --name demo --data-dir "$STATE/etcd" \
    --listen-client-urls "http://127.0.0.1:$etcd" --advertise-client-urls "http://127.0.0.1:$etcd" \
    --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
    --initial-cluster "demo=http://127.0.0.1:$peer" \
    --auto-compaction-mode periodic --auto-compaction-retention 1h
  start eplacement "$BIN/eplacement" --listen "127.0.0.1:$placement" --etcd "http://127.0.0.1:$etcd"
  libvirt_up
  network_up
  await 30 etcd env ETCDCTL_API=3 etcdctl --endpoints "127.0.0.1:$etcd" endpoint health
  await 30 eplacement curl -fsS "http://127.0.0.1:$placement/readyz"

  cat >"$STATE/compute.yaml" <<C
etcd: {host: 127.0.0.1, port: $etcd}
placement: {endpoint: "http://127.0.0.1:$placement"}
state_dir: $STATE/ecompute
images: {local: [$CACHE]}
libvirt: {network: $NETWORK}
# Emulated or not, the demo's guests are idle: many may share a processor.
allocation_ratio: {VCPU: 16.0}
C
  cat >"$STATE/schedule.yaml" <<C
etcd: {host: 127.0.0.1, port: $etcd}
placement: {endpoint: "http://127.0.0.1:$placement"}
image: file://$CACHE/tiny.qcow2
C
  "$BIN/ecompute" --config "$STATE/compute.yaml" --check
  start ecompute "$BIN/ecompute" --config "$STATE/compute.yaml"
  await 60 "the agent" sh -c "'$BIN/eschedule' --config '$STATE/schedule.yaml' -o json nodes | grep -q '\"node\"'"
  eschedule nodes

  say "Scheduling a virtual machine"
  ssh-keygen -q -t ed25519 -N '' -C demo -f "$STATE/id_ed25519"
  # Through sudo the stack, and so the key, is for the user who called it.
  if [ -n "${SUDO_USER-}" ]; then chown "$SUDO_USER" "$STATE/id_ed25519"; fi
  printf '#!/bin/sh\necho "hello from user-data on $(hostname)"\n' >"$STATE/user-data"
  eschedule --wait --timeout 300 --name demo --key "$STATE/id_ed25519.pub" --user-data "$STATE/user-data" \
    'resources=VCPU:1,MEMORY_MB:128,DISK_GB:1' | tee "$STATE/scheduled"
  local instance ip
  instance=$(sed -n 's/.*OF INSTANCE //p' "$STATE/scheduled")
  ip=$(eschedule "$instance")

  say "Logging in with the key that the metadata server handed out"
  printf '$ ssh -i %s/id_ed25519 root@%s\n' "$STATE" "$ip"
  local tries=0
  until guest "$ip" true 2>"$STATE/ssh.log"; do
    tries=$((tries + 1))
    [ $tries -lt 60 ] || { cat "$STATE/ssh.log" >&2; die "no login at $ip"; }
    sleep 1
  done
  guest "$ip" 'echo "I am $(hostname), $(uname -sr), up $(cut -d. -f1 /proc/uptime) s, address $(cat /run/ip)"'
  # What user-data printed is on the console, which libvirt keeps.
  grep -a "hello from user-data" "$STATE/ecompute/consoles/$instance.log" || die "user-data did not run"
  [ "$(guest "$ip" hostname)" = demo ] || die "the guest did not get its name from the metadata server"

  say "What etcd knows (etcdctl get --prefix /ecompute --keys-only)"
  ETCDCTL_API=3 etcdctl --endpoints "127.0.0.1:$etcd" get --prefix /ecompute --keys-only | grep .
  eschedule list

  say "The stack is yours"
  cat <<T
  export ESCHEDULE_CONFIG=$STATE/schedule.yaml PATH=$BIN:\$PATH
  eschedule list
  eschedule --wait 'resources=VCPU:1,MEMORY_MB:128,DISK_GB:1'
  eschedule destroy --wait demo
  curl -sH 'X-Auth-Token: admin' http://127.0.0.1:$placement/resource_providers
  etcdctl --endpoints 127.0.0.1:$etcd get --prefix /ecompute
  Logs: $STATE/*.log        End: make demo-down
T
}

eschedule() { "$BIN/eschedule" --config "$STATE/schedule.yaml" "$@"; }
guest() {
  local ip=$1
  shift
  ssh -n -i "$STATE/id_ed25519" -o BatchMode=yes -o ConnectTimeout=5 -o StrictHostKeyChecking=no \
    -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "root@$ip" "$@"
}

# ---- down -----------------------------------------------------------------------------------------

down() {
  if [ ! -d "$STATE" ]; then
    echo "no demo is running"
    return
  fi
  mkdir -p "$RUN"
  # The proper way first: ask, and let the agent do it.
  if alive ecompute && alive etcd && alive eplacement; then
    local instance
    for instance in $(eschedule -o json list | sed -n 's/^ *"instance": "\(.*\)",*/\1/p'); do
      eschedule destroy --wait --timeout 60 "$instance" || echo "demo: will remove $instance by hand" >&2
    done
  fi
  stop ecompute
  # What a killed run left behind; its domains carry its node in their metadata.
  local node bridge domain
  node=$(cat "$STATE/ecompute/uuid" 2>/dev/null || echo none)
  bridge=$(cat "$RUN/bridge" 2>/dev/null || echo none)
  if ! virsh version >/dev/null 2>&1 && { [ -e "$RUN/libvirtd.pid" ] || [ "$node" != none ]; }; then
    # Guests outlive their libvirtd: a libvirtd is needed to end them.
    libvirt_up
  fi
  if [ "$node" != none ] && virsh version >/dev/null 2>&1; then
    for domain in $(virsh list --all --name); do
      if virsh dumpxml "$domain" | grep -q "$node"; then
        virsh destroy "$domain" >/dev/null 2>&1 || true # it may be shut off already
        virsh undefine "$domain" --managed-save --snapshots-metadata >/dev/null
      fi
    done
    local pool
    pool=ecompute$(tr / - <<<"$STATE/ecompute/disks")
    if virsh pool-info "$pool" >/dev/null 2>&1; then
      virsh pool-destroy "$pool" >/dev/null 2>&1 || true # it may be inactive already
      virsh pool-undefine "$pool" >/dev/null
    fi
  fi
  if ip -o addr show dev "$bridge" 2>/dev/null | grep -q '169\.254\.169\.254'; then
    ip addr del 169.254.169.254/32 dev "$bridge"
  fi
  # Packet rules and the metadata servers' meeting place serve all agents of a host: the last one takes them along.
  find /run/ecompute/metadata -type l -lname "$STATE/*" -delete 2>/dev/null || true # there may never have been one
  if ! find /run/ecompute/metadata -type l 2>/dev/null | grep -q .; then
    for family in bridge inet; do nft delete table $family ecompute 2>/dev/null || true; done # nor these
    rm -rf /run/ecompute/metadata
    rmdir /run/ecompute 2>/dev/null || true
  fi
  if [ -e "$RUN/network-started" ]; then virsh net-destroy "$(cat "$RUN/network-started")" >/dev/null || true; fi
  if [ -e "$RUN/network-defined" ]; then
    virsh net-destroy "$(cat "$RUN/network-defined")" >/dev/null 2>&1 || true # it may be inactive already
    virsh net-undefine "$(cat "$RUN/network-defined")" >/dev/null || true     # or never have been defined
  fi
  stop eplacement
  stop etcd
  stop libvirtd
  stop virtlogd
  rm -rf "$STATE"
  echo "the demo is gone; built things are kept in $CACHE"
}

[ "$(id -u)" -eq 0 ] || die "must be run as root: libvirt's networks and 169.254.169.254 need it (make demo uses sudo)"
case ${1-} in
up) up ;;
down) down ;;
*) die "usage: $0 up|down" ;;
esac
