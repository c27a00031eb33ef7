#!/bin/bash
# The whole product on this machine: etcd, placement, libvirt, an agent, one real guest.
# usage: demo.sh up | down        (run `make demo` and `make demo-down`, which also build)
#
# Uses the machine's running libvirtd and its network `default` where there are any, and starts and ends
# its own otherwise. Everything it starts is noted under $STATE/run with pid and start time, so that
# `down` ends exactly that and nothing else, also after a killed run.
set -euo pipefail
# The texts of virsh are read; root's PATH may be a user's (su); QEMU and dnsmasq run as others and must pass.
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin
umask 022
# A shell that sourced an earlier demo's `env` has them; etcdctl refuses a variable beside its own flag.
unset "${!ETCDCTL_@}"

cd "$(dirname "$0")/.."
REPO=$PWD
GIVEN=${BIN-}
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
  # Without the lock, which is the script's and not that of what goes on running.
  setsid "$@" >"$STATE/$name.log" 2>&1 </dev/null 9>&- &
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

# What works in the demo's directory and was not started by the demo: an agent or an etcd that somebody started again by hand.
# It would go on without what is deleted under it.
strangers() {
  local name pid session own=' '
  for name in etcd eplacement econtroller ecompute; do
    if alive "$name"; then
      read -r pid _ <"$RUN/$name.pid"
      own+="$pid "
    fi
  done
  for pid in $(cd /proc && echo [0-9]*); do
    read -r name 2>/dev/null <"/proc/$pid/comm" || continue # it has ended
    case $name in etcd | eplacement | econtroller | ecompute) ;; *) continue ;; esac
    # Each was begun in a session of its own, and so is what it begins.
    session=$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | cut -d' ' -f4)
    if [[ $own == *" $session "* ]]; then continue; fi
    # An agent is told of its configuration by its environment, too.
    if tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF "$STATE/" ||
      { [ "$name" = ecompute ] && tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qF "ECOMPUTE_CONFIG=$STATE/"; } ||
      find "/proc/$pid/fd" -lname "$STATE/*" 2>/dev/null | grep -q .; then
      echo "$name (pid $pid)"
    fi
  done
}

# until SECONDS WHAT COMMAND…
await() {
  local seconds=$1 what=$2
  shift 2
  for _ in $(seq $((seconds * 5))); do
    if "$@" >/dev/null 2>&1; then return; fi
    sleep 0.2
  done
  tail -n 3 "$STATE"/{etcd,eplacement,econtroller,virtlogd,libvirtd,ecompute}.log >&2 2>/dev/null || true # not all were started yet
  die "$what did not come up within $seconds s"
}

port_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
# free_port WHAT PORT…: the first free one; what has the usual one is named.
free_port() {
  local what=$1 usual=$2 port
  shift
  for port in "$@"; do
    if port_free "$port"; then
      [ "$port" = "$usual" ] || echo "port $usual is taken by $(holder "$usual"): the demo's $what uses $port" >&2
      echo "$port"
      return
    fi
  done
  die "none of the ports $* is free"
}
# Who listens on a port: the program, and its pid where it is to be had.
holder() {
  local found
  found=$(ss -Hltnp "sport = :$1" 2>/dev/null | sed -n 's/.*users:(("\([^"]*\)",pid=\([0-9]*\).*/\1 (pid \2)/p' | head -n 1)
  echo "${found:-another program}"
}

# A daemon that was killed leaves its socket behind: it is asked.
answers() { python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])' "$1" 2>/dev/null; }

# In a session of its own, so that no polkit agent of virsh's writes to the terminal.
virsh() { setsid -w virsh -q -c "$URI" "$@" 9>&-; }

# ---- libvirt --------------------------------------------------------------------------------------

libvirt_up() {
  if virsh version >/dev/null 2>&1; then
    echo "using the running libvirtd"
    return
  fi
  echo "starting libvirtd"
  # A network that libvirtd starts by itself (Ubuntu's package has it so) is the demo's to end: it outlives its libvirtd.
  local was_up=''
  if [ -e /run/libvirt/network/default.xml ]; then was_up=yes; fi
  command -v virtlogd >/dev/null || die "virtlogd is missing: install libvirt-daemon-system"
  if ! answers /run/libvirt/virtlogd-sock; then
    start virtlogd virtlogd
    await 30 virtlogd answers /run/libvirt/virtlogd-sock
  fi
  # Where the processor has no virtualisation, a /dev/kvm that QEMU cannot use makes libvirt probe it
  # again at every start of a guest, for seconds; out of sight it does not, but where one is defined: what is there in
  # its place can be opened. (One that cannot be does not go with the mounts that libvirt makes for QEMU.)
  if [ -e /dev/kvm ] && ! grep -qwE 'vmx|svm' /proc/cpuinfo; then
    start libvirtd scripts/reaper.py unshare -m sh -c 'mount --bind /dev/null /dev/kvm && exec libvirtd'
  else
    start libvirtd scripts/reaper.py libvirtd
  fi
  await 30 libvirtd virsh version
  if [ -z "$was_up" ] && virsh net-list --name | grep -qx default; then echo default >"$RUN/network-started"; fi
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
    if [ -e "$STATE/net-start.log" ]; then echo "network default cannot be started ($(grep . "$STATE/net-start.log" 2>/dev/null | tail -n 1)): making one"; fi
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
  if [ -e "$RUN/complete" ] && alive ecompute && alive etcd; then
    die "a demo is running, perhaps with guests of yours: \`make demo-down\` ends it, guests and all"
  fi
  if [ -d "$STATE" ]; then
    say "Cleaning up after an earlier demo, which was interrupted or killed"
    down
  fi
  room /var/lib
  mkdir -p "$RUN"
  echo "$BIN" >"$RUN/bin"
  trap 'failed $? failed' EXIT

  say "Guest image (built once, kept in $CACHE)"
  mkdir -p "$CACHE"
  scripts/guests/build-tiny.sh "$CACHE/tiny.qcow2" "$CACHE/debs"

  say "Starting the stack"
  local etcd peer placement agent controller
  etcd=$(free_port etcd 2379 12379 22379)
  peer=$(free_port "etcd, between members," 2380 12380 22380)
  placement=$(free_port eplacement 8080 18080 28080)
  agent=$(free_port agent 18090 28090 38090)
  controller=$(free_port econtroller 18091 28091 38091)
  start etcd etcd --name demo --data-dir "$STATE/etcd" \
    --listen-client-urls "http://127.0.0.1:$etcd" --advertise-client-urls "http://127.0.0.1:$etcd" \
    --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
    --initial-cluster "demo=http://127.0.0.1:$peer" \
    --auto-compaction-mode periodic --auto-compaction-retention 1h
  start eplacement "$BIN/eplacement" --listen "127.0.0.1:$placement" --etcd "http://127.0.0.1:$etcd"
  libvirt_up
  network_up
  await 30 etcd env ETCDCTL_API=3 etcdctl --endpoints "127.0.0.1:$etcd" endpoint health
  await 30 eplacement curl --noproxy '*' -fsS "http://127.0.0.1:$placement/readyz"

  cat >"$STATE/compute.yaml" <<C
etcd: {host: 127.0.0.1, port: $etcd}
placement: {endpoint: "http://127.0.0.1:$placement"}
state_dir: $STATE/ecompute
listen: 127.0.0.1:$agent
# Nobody but who runs the demo listens at this machine's loopback, whose images may be tried.
images: {local: [$CACHE], allow_addresses: [127.0.0.0/8], store: {url: "file://$STATE/image-store"}}
libvirt: {network: $NETWORK, graphics: vnc}
# Emulated or not, the demo's guests are idle: many may share a processor.
allocation_ratio: {VCPU: 16.0}
C
  ssh-keygen -q -t ed25519 -N '' -C demo -f "$STATE/id_ed25519"
  # Through sudo the stack, and so the key, is for the user who called it.
  mkdir -p "$STATE/image-store"
  if [ -n "${SUDO_USER-}" ]; then chown "$SUDO_USER" "$STATE/id_ed25519" "$STATE/image-store"; fi
  cat >"$STATE/schedule.yaml" <<C
etcd: {host: 127.0.0.1, port: $etcd}
placement: {endpoint: "http://127.0.0.1:$placement"}
image: file://$CACHE/tiny.qcow2
image_store: {url: "file://$STATE/image-store"}
defaults: {keys: [$STATE/id_ed25519.pub]}
C
  cat >"$STATE/controller.yaml" <<C
listen: 127.0.0.1:$controller
etcd: {host: 127.0.0.1, port: $etcd}
placement: {endpoint: "http://127.0.0.1:$placement"}
C
  # What a shell needs so that the commands of the README mean this demo.
  cat >"$STATE/env" <<C
export ESCHEDULE_CONFIG=$STATE/schedule.yaml ECOMPUTE_CONFIG=$STATE/compute.yaml
export ETCDCTL_API=3 ETCDCTL_ENDPOINTS=127.0.0.1:$etcd
export PATH=$(printf %q "$BIN"):\$PATH MANPATH=$STATE/man:\${MANPATH-}
C
  "$BIN/eschedule" man "$STATE/man/man1"
  # Guests come and go at the same addresses, so their host keys mean nothing.
  cat >"$STATE/ssh_config" <<C
User root
IdentityFile $STATE/id_ed25519
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
C
  "$BIN/ecompute" --config "$STATE/compute.yaml" --check
  start econtroller "$BIN/econtroller" --config "$STATE/controller.yaml"
  start ecompute "$BIN/ecompute" --config "$STATE/compute.yaml"
  await 60 "the agent" agent_is_there
  eschedule nodes

  say "Scheduling a virtual machine"
  printf '#!/bin/sh\necho "hello from user-data on $(hostname)"\n' >"$STATE/user-data"
  eschedule --wait --timeout 300 --name demo --user-data "$STATE/user-data" \
    'resources=VCPU:1,MEMORY_MB:128,DISK_GB:1' | tee "$STATE/scheduled"
  local instance ip
  instance=$(sed -n 's/.*OF INSTANCE //p' "$STATE/scheduled")
  ip=$(eschedule "$instance")

  say "Logging in with the key that the metadata server handed out"
  echo "\$ ssh -F $STATE/ssh_config root@$ip"
  local tries=0
  until guest "$ip" true 2>"$STATE/ssh.log"; do
    tries=$((tries + 1))
    [ $tries -lt 60 ] || no_login "$ip"
    sleep 1
  done
  guest "$ip" 'echo "I am $(hostname), $(uname -sr), up $(cut -d. -f1 /proc/uptime) s, address $(cat /run/ip)"'
  # What user-data printed is on the console, which libvirt keeps.
  grep -a "hello from user-data" "$STATE/ecompute/consoles/$instance.log" || die "user-data did not run"
  [ "$(guest "$ip" hostname)" = demo ] || die "the guest did not get its name from the metadata server"

  say "What etcd knows (etcdctl get --prefix /ecompute --keys-only)"
  ETCDCTL_API=3 etcdctl --endpoints "127.0.0.1:$etcd" get --prefix /ecompute --keys-only | grep .
  eschedule list

  touch "$RUN/complete"
  trap - EXIT INT TERM
  say "The stack is yours"
  cat <<T
  . $STATE/env                         # first: the commands below then mean this demo
  eschedule list
  eschedule --wait 'resources=VCPU:1,MEMORY_MB:128,DISK_GB:1'
  eschedule ssh demo -- uptime
  eschedule destroy --wait demo
  etcdctl get --prefix /ecompute
  ${SUDO_USER:+sudo }$(printf %q "$BIN")/ecompute --config $STATE/compute.yaml --check
  curl --noproxy '*' -sH 'X-Auth-Token: admin' http://127.0.0.1:$placement/resource_providers
  Logs: $STATE/*.log        End: make demo-down
T
}

eschedule() { "$BIN/eschedule" --config "$STATE/schedule.yaml" "$@"; }
agent_is_there() { eschedule -o json nodes | grep '"node"'; }
guest() {
  local ip=$1
  shift
  ssh -n -F "$STATE/ssh_config" -o BatchMode=yes -o ConnectTimeout=5 "root@$ip" "$@"
}

# What may be in the way was told before the agent's start, far above.
no_login() {
  cat "$STATE/ssh.log" >&2
  "$BIN/ecompute" --config "$STATE/compute.yaml" --check 2>/dev/null | grep -E ' (WARNING|FAILED) ' >&2 || true # it may find nothing
  die "no login at $1"
}

# room DIRECTORY: enough for etcd, the image and a guest there? What nearly fills a disk is told by `ecompute --check`.
room() {
  local free
  free=$(df -Pm "$1" | awk 'NR == 2 {print $4}')
  [ "$free" -ge 3072 ] || die "only $free MiB are free on the disk of $1: the demo needs 3072, for its guest, images and etcd"
}

# failed CODE HOW: what a demo that did not come to its end leaves, and how to be rid of it.
failed() {
  local code=$1 how=$2 running='' name
  for name in etcd eplacement econtroller libvirtd virtlogd ecompute; do if alive "$name"; then running+=" $name"; fi; done
  if [ "$(df -Pm "$STATE" 2>/dev/null | awk 'NR == 2 {print $4}')" = 0 ]; then echo "demo: the disk of $STATE is full" >&2; fi
  echo "demo: $how; ${running:+still running:$running; }\`make demo-down\` cleans up, the logs are in $STATE" >&2
  exit "$code"
}

# ---- down -----------------------------------------------------------------------------------------

down() {
  if [ ! -d "$STATE" ]; then
    echo "no demo is running"
    return
  fi
  mkdir -p "$RUN"
  local others
  others=$(strangers | paste -sd, | sed 's/,/, /g')
  [ -z "$others" ] ||
    die "still running, and not started by the demo: $others: end what works in $STATE, and say \`make demo-down\` again; nothing was changed"
  # By the programs that the demo was begun with.
  local BIN=$BIN
  # One that an earlier release began, or that was interrupted at once, has no note of them.
  if [ -z "$GIVEN" ] && [ -e "$RUN/bin" ]; then BIN=$(<"$RUN/bin"); fi
  # The proper way first: ask, and let the agent do it.
  if [ ! -x "$BIN/eschedule" ]; then
    echo "demo: $BIN/eschedule is missing: will remove all guests by hand" >&2
  elif alive ecompute && alive etcd && alive eplacement; then
    local instance
    for instance in $(eschedule -o json list | sed -n 's/^ *"instance": "\(.*\)",*/\1/p'); do
      eschedule destroy --wait --timeout 60 "$instance" || echo "demo: will remove $instance by hand" >&2
    done
  fi
  stop ecompute
  # What a killed run left behind; its domains carry its node in their metadata.
  local node bridge domain
  node=$(cat "$STATE/ecompute/uuid" 2>/dev/null || true)
  # Nothing is in every domain.
  [[ $node =~ ^[0-9a-f-]{36}$ ]] || node=none
  bridge=$(cat "$RUN/bridge" 2>/dev/null || echo none)
  if ! virsh version >/dev/null 2>&1 && { [ -e "$RUN/libvirtd.pid" ] || [ "$node" != none ]; }; then
    # Guests outlive their libvirtd: a libvirtd is needed to end them.
    libvirt_up
  fi
  if [ "$node" != none ] && virsh version >/dev/null 2>&1; then
    for domain in $(virsh list --all --name); do
      if grep -q "$node" <<<"$(virsh dumpxml "$domain")"; then
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
  # There may never have been one. A link whose target is gone is of an agent that was killed and cleaned away.
  find /run/ecompute/metadata -type l -lname "$STATE/*" -delete 2>/dev/null || true
  find /run/ecompute/metadata -xtype l -delete 2>/dev/null || true
  # Agents in other network namespaces meet elsewhere.
  local meetings
  meetings=/run/ecompute/metadata/$(stat -Lc %i /proc/self/ns/net)
  if ! find "$meetings" -type l 2>/dev/null | grep -q .; then
    for family in bridge inet; do nft delete table $family ecompute 2>/dev/null || true; done # nor these
    rm -rf "$meetings"
    rmdir /run/ecompute/metadata /run/ecompute 2>/dev/null || true # others' may be there
  fi
  local network
  if [ -e "$RUN/network-started" ]; then
    network=$(cat "$RUN/network-started")
    # After the host was started anew it may be inactive.
    if ! virsh net-list --name | grep -qx "$network"; then
      :
    elif [ -n "$(ls -A "/sys/class/net/$bridge/brif" 2>/dev/null)" ]; then
      echo "demo: the network $network has guests that are not the demo's, and stays" >&2
    else
      virsh net-destroy "$network" >/dev/null
    fi
  fi
  if [ -e "$RUN/network-defined" ]; then
    network=$(cat "$RUN/network-defined")
    virsh net-destroy "$network" >/dev/null 2>&1 || true  # it may be inactive already
    virsh net-undefine "$network" >/dev/null 2>&1 || true # or never have been defined
  fi
  stop econtroller
  stop eplacement
  stop etcd
  stop libvirtd
  stop virtlogd
  rm -rf "$STATE"
  echo "the demo is gone; built things are kept in $CACHE"
}

[ "$(id -u)" -eq 0 ] || die "must be run as root: libvirt's networks and 169.254.169.254 need it (make demo uses sudo)"
case ${1-} in
up | down)
  # One at a time: two would take each other's state away.
  mkdir -p "$CACHE"
  exec 9<"$CACHE"
  flock -n 9 || die "another \`make demo\` or \`make demo-down\` is at work: wait for it, or interrupt it"
  ;;
esac
case ${1-} in
up)
  trap 'trap - EXIT; failed 130 interrupted' INT TERM
  up
  ;;
down)
  trap 'echo "demo: interrupted; \`make demo-down\` goes on where it was" >&2; exit 130' INT TERM
  down
  ;;
*) die "usage: $0 up|down" ;;
esac
