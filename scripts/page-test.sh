#!/bin/bash
# Follows docs/cluster.md word for word on three new machines in a network of their own, then tries what the page promises.
# usage: page-test.sh [SUITE SUITE SUITE]        (of h1, h2, h3; default: bookworm trixie noble. Root; some minutes)
#
# The commands are those of the page: a line of a code block begins with the host that it is said on, `h1#`, or `*#` for
# each. Packages that the distribution has lie in each machine's apt before: there is no way outside. The new machines' file systems
# are kept in CACHE/machines for a week.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8 ETCDCTL_API=3
umask 022
page=docs/cluster.md
cache=${CACHE:-/var/cache/etcd-compute}
hosts=(h1 h2 h3)
network=10.0.0

say() { printf '%4d s  %s\n' $SECONDS "$*"; }
die() {
  echo "page-test: $*" >&2
  exit 1
}
# shellcheck source=scripts/machines.sh
. scripts/machines.sh

# ---- new machines ---------------------------------------------------------------------------------

# clean SUITE: what the installer of that release leaves, with ssh; and the packages that the page installs, unpacked nowhere.
clean() {
  local suite=$1 root=$cache/machines/$1
  if [ -n "$(find "$root" -maxdepth 0 -mtime +7 2>/dev/null)" ]; then rm -rf --one-file-system "$root"; fi
  if [ ! -e "$root" ]; then
    mkdir -p "$cache/machines"
    rm -rf --one-file-system "$root.part"
    new_root "$suite" "$root.part" apt,ca-certificates,systemd,systemd-sysv,dbus,iproute2,procps,openssh-server --skip=cleanup/apt
    rm -rf "$root.part"/{etc/resolv.conf,etc/machine-id,etc/hostname}
    # There is no console to log in at, and the kernel's file systems for its developers are not to be had.
    local unit
    for unit in console-getty.service sys-kernel-debug.mount sys-kernel-tracing.mount; do
      ln -sf /dev/null "$root.part/etc/systemd/system/$unit"
    done
    # The disk of this host is not tried.
    echo force-unsafe-io >"$root.part/etc/dpkg/dpkg.cfg.d/page-test"
    mv "$root.part" "$root"
    touch "$root"
  fi
  mkdir -p "$root/packages"
  mount --bind target/deb "$root/packages"
  cp -L /etc/resolv.conf "$root/etc/resolv.conf"
  chroot "$root" sh -c 'apt-get -qq -y --download-only --no-install-recommends install /packages/*.deb etcd-server etcd-client curl' >"$work/download.log" 2>&1 ||
    { cat "$work/download.log" >&2 && die "$suite: the packages could not be fetched"; }
  rm "$root/etc/resolv.conf"
  umount "$root/packages"
}

# Mounts, bridge and addresses are this test's own, and go with it.
if [ "${1-}" != --alone ]; then
  [ "$(id -u)" -eq 0 ] || die "must be run as root: it makes file systems and namespaces"
  for tool in mmdebstrap unshare nsenter etcdctl curl openssl python3 ssh-keygen; do
    command -v $tool >/dev/null || die "$tool is missing: run scripts/install-deps.sh package-test"
  done
  ls target/deb/*.deb >/dev/null || die "there are no packages: run \`make deb\`"
  [ -e "$cache/tiny.qcow2" ] || scripts/guests/build-tiny.sh "$cache/tiny.qcow2" "$cache/debs"
  if [ $# -eq 0 ]; then set -- bookworm trixie noble; fi
  [ $# -eq 3 ] || die "wanted three suites, of h1, h2 and h3"
  for suite in "$@"; do unshare --mount --propagation private "$0" --alone clean "$suite"; done
  say "three new file systems: $*"
  exec unshare --mount --net --propagation private "$0" --alone follow "$@"
fi

work=$(mktemp -d)
chmod 755 "$work"
# What runs beside the machines.
beside=()
cleanup() {
  # Those that ended by themselves, or were never begun, are none to end.
  kill "${beside[@]}" 2>/dev/null || true
  close_machines
  umount -q "$work"/h?/root 2>/dev/null || true
  rm -rf --one-file-system "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
if [ "$2" = clean ]; then
  clean "$3"
  exit 0
fi
suites=("${@:3}")

ip link set lo up
ip link add lan type bridge stp_state 0 forward_delay 0
ip address add $network.254/24 dev lan
ip link set lan up
open_machines
ssh-keygen -q -t ed25519 -N '' -C root@h1 -f "$work/key"
number=0
for host in "${hosts[@]}"; do
  place=$work/$host suite=${suites[$number]}
  number=$((number + 1))
  mkdir -p "$place"/{root,upper,work}
  mount -t overlay -o "lowerdir=$cache/machines/$suite,upperdir=$place/upper,workdir=$place/work" overlay "$place/root"
  root=$place/root
  echo $host >"$root/etc/hostname"
  printf '%s\n' '127.0.0.1 localhost' "$network.1 h1" "$network.2 h2" "$network.3 h3" >"$root/etc/hosts"
  uuid=$(</proc/sys/kernel/random/uuid)
  echo "${uuid//-/}" >"$root/etc/machine-id"
  # What the page wants to be there: our packages, and root of h1 may log in to the others.
  cp target/deb/*.deb "$root/root/"
  install -d -m 700 "$root/root/.ssh"
  install -m 600 "$work/key.pub" "$root/root/.ssh/authorized_keys"
  rm -f "$root"/etc/ssh/ssh_host_*
  ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/ssh_host_ed25519_key"
  echo "$network.$number $(cut -d' ' -f 1,2 "$root/etc/ssh/ssh_host_ed25519_key.pub")" >>"$work/known_hosts"
done
install -m 600 "$work/key" "$work/h1/root/root/.ssh/id_ed25519"
install -m 644 "$work/key.pub" "$work/h1/root/root/.ssh/id_ed25519.pub"
install -m 644 "$work/known_hosts" "$work/h1/root/root/.ssh/known_hosts"
address_of() { echo "$network.${1#h}"; }
start() { boot "$1" "$work/$1/root" "$work/$1/console" "$(address_of "$1")/24"; }
for host in "${hosts[@]}"; do start "$host"; done
for host in "${hosts[@]}"; do
  say "$host: $(. "$work/$host/root/etc/os-release" && echo "$PRETTY_NAME"), systemd $(in_machine "$host" systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p')"
done

# ---- the page -------------------------------------------------------------------------------------

# follow HEADING: says what the code blocks below that heading say.
follow() {
  local line where command targets host began=$SECONDS count=0
  while IFS= read -r line; do
    [[ $line =~ ^(h[0-9]+|\*)#\ +(.*)$ ]] || die "$page, $1: no host at the beginning of: $line"
    where=${BASH_REMATCH[1]} command=${BASH_REMATCH[2]}
    if [ "$where" = '*' ]; then targets=("${hosts[@]}"); else targets=("$where"); fi
    for host in "${targets[@]}"; do
      local line_began=$SECONDS
      if ! in_machine "$host" bash -c "cd && $command" >"$work/said" 2>&1 </dev/null; then
        tail -n 40 "$work/said" >&2
        die "$page, $1: on $host this failed: $command"
      fi
      cp "$work/said" "$work/said.$host"
      if [ $((SECONDS - line_began)) -ge 10 ]; then say "  on $host, $((SECONDS - line_began)) s: ${command%%  #*}"; fi
    done
    count=$((count + 1))
  done < <(awk -v wanted="$1" '/^#/ { on = $0 == wanted } on && /^```/ { code = !code; next } on && code' $page)
  [ $count -gt 0 ] || die "$page has no commands below: $1"
  say "$1: $count lines of the page ($((SECONDS - began)) s)"
}
until_done() { # until_done SECONDS WHAT COMMAND…
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || die "$what: not within the time: $("$@" 2>&1 || true; journal)"
    sleep 0.5
  done
}
journal() { for host in "${!machine_init[@]}"; do in_machine "$host" journalctl --no-pager -n 15 -u ecompute -u eplacement -u econtroller -u etcd; done; }
# field PYTHON: of the JSON document on standard input, as d.
field() { python3 -c 'import json, sys; d = json.load(sys.stdin); print(eval(sys.argv[1]))' "$1"; }
nodes() { in_machine h1 eschedule -o json nodes 2>/dev/null; } # which warns of etcd 3.4
node_is() { [ "$(nodes | field "[(n['alive'], n['disabled']) for n in d if n['name'] == '$1']")" = "[($2, $3)]" ]; }

began=$SECONDS
follow '## Packages'
follow '## The first host'
[ "$(in_machine h1 systemctl show -p Restart --value etcd)" = always ] || die "an etcd that ends by itself stays down"
[ "$(in_machine h1 systemctl show -p StartLimitIntervalUSec --value etcd)" = 0 ] || die "an etcd that fails in a row stays down"
follow '## Each host'
for host in "${hosts[@]}"; do until_done 60 "$host is a node" node_is $host True False; done
say "three nodes, $((SECONDS - began)) s after the first line of the page (packages were fetched before)"
[ $((SECONDS - began)) -lt 600 ] || die "the page promises ten minutes"
if grep -i warning "$work"/said.h?; then die "there are warnings"; fi

# ---- guests ---------------------------------------------------------------------------------------

mkdir "$work/images"
cp "$cache/tiny.qcow2" "$work/images/"
python3 -m http.server --bind $network.254 --directory "$work/images" 80 >/dev/null 2>&1 &
beside+=($!)
in_machine h1 eschedule keypair add me /root/.ssh/id_ed25519.pub >/dev/null
pids=()
for host in "${hosts[@]}"; do
  in_machine h1 eschedule run on-$host --node $host --query 'resources=VCPU:1,MEMORY_MB:128,DISK_GB:1' --key me \
    --image http://$network.254/tiny.qcow2 --wait --timeout 400 >"$work/guest.$host" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || { cat "$work"/guest.* >&2 && journal && die "no guest"; }; done
show() { in_machine h1 eschedule -o json show "on-$1"; }
instance_of() { show "$1" | field "d['instance']"; }
guest_is() { [ "$(show "$1" | field "d['state']")" = "$2" ]; }
# Guests on libvirt's own network are reached from their host.
log_in() {
  local address
  address=$(in_machine h1 eschedule "on-$1") && [ -n "$address" ] || return 1
  in_machine "$1" ssh -o BatchMode=yes -o ConnectTimeout=5 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -i /root/key \
    "root@$address" "${@:2}"
}
for host in "${hosts[@]}"; do
  install -m 600 "$work/key" "$work/$host/root/root/key"
  until_done 240 "a login at the guest of $host" log_in "$host" true
done
in_machine h1 eschedule logs on-h3 --lines 2 >/dev/null || die "h1 cannot read the console of h3's guest"
follow '### Looking into etcd, and at an agent'
say "a guest on each, with an address and a login: $(for host in "${hosts[@]}"; do in_machine h1 eschedule on-$host; done | xargs)"

# ---- strangers ------------------------------------------------------------------------------------

etc() { echo "$work/$1/root/etc/ecompute/$2"; }
ca=$(etc h1 ca.pem)
openssl req -quiet -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=eschedule -keyout "$work/foreign.key" \
  -out "$work/foreign.pem" 2>/dev/null || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=eschedule \
  -keyout "$work/foreign.key" -out "$work/foreign.pem" 2>/dev/null
code() { curl --noproxy '*' -s -o /dev/null -w '%{http_code}' --max-time 10 "$@" || true; } # 000: nothing was answered
listeners=0
for host in "${hosts[@]}"; do
  # All but sshd, libvirt's name server and metadata, which are for guests (packet rules hold them to their bridge).
  ports=$(in_machine "$host" ss -Hltn | awk '$4 !~ /^(127\.|\[::1\]|192\.168\.122\.1:|169\.254\.169\.254:)/ { sub(/.*:/, "", $4); if ($4 != 22) print $4 }' | sort -un | xargs)
  case $host in h1) wanted="2379 8080 18090" ;; *) wanted=18090 ;; esac
  [ "$ports" = "$wanted" ] || die "$host listens at $ports, wanted: $wanted"
  for port in $ports; do
    at=$(address_of $host):$port
    [[ $(code "http://$at/") =~ ^(000|400)$ ]] || die "$at answers without TLS"
    [ "$(code --cacert "$ca" "https://$at/healthz")" = 000 ] || die "$at answers who shows no certificate"
    [ "$(code --cacert "$ca" --cert "$work/foreign.pem" --key "$work/foreign.key" "https://$at/healthz")" = 000 ] ||
      die "$at answers who shows a foreign certificate"
    [ "$(code --cacert "$ca" --cert "$(etc h1 eschedule.pem)" --key "$(etc h1 eschedule.key)" "https://$at/healthz")" != 000 ] ||
      die "$at does not answer who belongs here"
    listeners=$((listeners + 1))
  done
done
say "$listeners ports are open beyond loopback, and ask for a certificate of the cluster"

# ---- h2's credentials -----------------------------------------------------------------------------

uuid_of() { nodes | field "[n['node'] for n in d if n['name'] == '$1'][0]"; }
n2=$(uuid_of h2) n3=$(uuid_of h3) i3=$(instance_of h3)
as_root() { etcdctl --endpoints https://$network.1:2379 --cacert "$ca" --cert "$(etc h1 root.pem)" --key "$(etc h1 root.key)" "$@"; }
as_h2() { etcdctl --endpoints https://$network.1:2379 --cacert "$ca" --cert "$(etc h2 node.pem)" --key "$(etc h2 node.key)" "$@"; }
refusals=0
h2_is_refused() { # h2_is_refused WORD…: by etcd, and for want of rights
  local said
  if said=$(as_h2 "$@" 2>&1); then die "h2 may do this: $*: $said"; fi
  grep -q 'permission denied' <<<"$said" || die "h2 was refused otherwise: $*: $said"
  refusals=$((refusals + 1))
}
[ -n "$(as_h2 get --prefix "/ecompute/requests/$n2/" --keys-only)" ] || die "h2 cannot read its own requests"
for tree in requests userdata status outcomes; do
  h2_is_refused get --prefix "/ecompute/$tree/$n3/"
  h2_is_refused get --prefix "/ecompute/$tree/"
  h2_is_refused put "/ecompute/$tree/$n3/$i3" '{}'
  h2_is_refused del "/ecompute/$tree/$n3/$i3"
done
for key in nodes/$n3 alive/$n3 agents/$n3 instances/$i3 names/default/on-h3/$i3 placement/epoch placement-tokens/x flavors/x keypairs/default/me; do
  h2_is_refused put "/ecompute/$key" '{}'
  h2_is_refused del "/ecompute/$key"
done
for tree in '' placement/ placement-tokens/ keypairs/ names/ agents/; do h2_is_refused get --prefix "/ecompute/$tree"; done
h2_is_refused user add h4:password
h2_is_refused user grant-role "ecompute-$n2" root
h2_is_refused role grant-permission "ecompute-$n2" --prefix readwrite /
h2_is_refused auth disable
h2_is_refused snapshot save "$work/stolen"
lease=$(as_root get "/ecompute/alive/$n3" -w json | field "'%x' % d['kvs'][0]['lease']")
h2_is_refused lease revoke "$lease"
say "etcd refused h2 $refusals times"

provider=https://$network.1:8080/resource_providers
h2_asks() { # h2_asks METHOD PATH [BODY]: the status code
  code --cacert "$ca" --cert "$(etc h2 node.pem)" --key "$(etc h2 node.key)" -H "X-Auth-Token: $(cat "$(etc h2 node.token)")" \
    -H 'OpenStack-API-Version: placement 1.39' -H 'Content-Type: application/json' -X "$1" "${provider%/resource_providers}$2" ${3:+-d "$3"}
}
[ "$(h2_asks GET "/resource_providers/$n3")" = 200 ] || die "h2 cannot read placement"
[ "$(h2_asks PUT "/resource_providers/$n2" '{"name": "h2"}')" = 200 ] || die "h2 cannot change its own provider"
denied() { [ "$(h2_asks "$@")" = 403 ] || die "h2 may do this in placement: $*: $(h2_asks "$@")"; }
denied PUT "/resource_providers/$n3" '{"name": "mine"}'
denied DELETE "/resource_providers/$n3"
# With what is so now, so that it fails for want of rights alone.
generation=$(curl --noproxy '*' -s --cacert "$ca" --cert "$(etc h2 node.pem)" --key "$(etc h2 node.key)" -H "X-Auth-Token: $(cat "$(etc h2 node.token)")" \
  "$provider/$n3" | field "d['generation']")
denied PUT "/resource_providers/$n3/traits" '{"resource_provider_generation": '"$generation"', "traits": []}'
denied PUT "/resource_providers/$n3/inventories" '{"resource_provider_generation": '"$generation"', "inventories": {}}'
denied DELETE "/allocations/$i3"
denied POST /resource_providers '{"name": "h4"}'
[ "$(code --cacert "$ca" --cert "$(etc h2 node.pem)" --key "$(etc h2 node.key)" "$provider")" = 401 ] || die "placement answers h2 without a token"
guest_is h3 ACTIVE && log_in h3 true || die "h3's guest is not as it was"
say "placement refused h2 what is h3's; h3's guest is as it was"

h2_reads() { code --cacert "$ca" --cert "$(etc h2 node.pem)" --key "$(etc h2 node.key)" "https://$(address_of "$1"):18090/$2"; }
for path in view metrics usage streams/ticket; do
  [ "$(h2_reads h3 $path)" = 403 ] || die "h3's port tells h2 of /$path"
done
[ "$(h2_reads h3 healthz)" = 200 ] && [ "$(h2_reads h2 view)" = 200 ] || die "h2 cannot read what it may"
[ "$(code --cacert "$ca" --cert "$(etc h2 node.pem)" --key "$(etc h2 node.key)" "https://$network.1:8080/metrics")" = 403 ] ||
  die "placement tells h2 its numbers"
say "h3's port tells h2 that it is well, and nothing else, and placement no numbers"

# ---- cables and power -----------------------------------------------------------------------------

qemu() { in_machine h3 pgrep -f "guest=$i3"; }
running=$(qemu)
began=$SECONDS
ip link set lan-h3 down
until_done 90 "h3, which is cut off, is marked" node_is h3 False True
say "h3 was cut off, and is marked as missing after $((SECONDS - began)) s"
if in_machine h1 eschedule run nowhere --node h3 --query 'resources=VCPU:1,MEMORY_MB:128,DISK_GB:1' --image http://$network.254/tiny.qcow2 >/dev/null 2>&1; then
  die "an instance went to a node that is missing"
fi
began=$SECONDS
ip link set lan-h3 up
until_done 90 "h3 is back" node_is h3 True False
[ "$(qemu)" = "$running" ] || die "the guest of h3 did not outlive the cut"
say "h3 is back after $((SECONDS - began)) s; its guest ran on"

cut_power h3
began=$SECONDS
start h3
until_done 120 "h3 is back after a loss of power" node_is h3 True False
until_done 240 "a login at the guest of h3 after a loss of power" log_in h3 true
guest_is h3 ACTIVE || die "h3's guest is not ACTIVE"
say "h3 lost power, and $((SECONDS - began)) s after its start its guest is there again"

cut_power h1
began=$SECONDS
start h1
for host in "${hosts[@]}"; do until_done 120 "$host is a node after h1 lost power" node_is $host True False; done
until_done 240 "a login at the guest of h1 after a loss of power" log_in h1 true
say "h1 lost power, and $((SECONDS - began)) s after its start all three are nodes and its guest is there again"

# ---- afterwards -----------------------------------------------------------------------------------

serial() { openssl x509 -noout -serial -in "$(etc "$1" "$2")"; }
shown() { openssl s_client -connect "$(address_of "$1"):$2" -CAfile "$ca" -cert "$(etc h1 eschedule.pem)" -key "$(etc h1 eschedule.key)" </dev/null 2>/dev/null | openssl x509 -noout "${@:3}"; }
serves() { [ "$(shown "$1" "$2" -serial)" = "$(serial "$1" "$3")" ]; }
placement_is_named() { grep -q "$1" <<<"$(shown h1 8080 -ext subjectAltName)"; }
all_well() { for host in "${hosts[@]}"; do node_is $host True False || return 1; done; }

old=$(serial h1 etcd.pem)
follow '### Certificates run out after 398 days'
[ "$old" != "$(serial h1 etcd.pem)" ] || die "etcd has no new certificate"
until_done 60 "etcd shows its new certificate" serves h1 2379 etcd.pem
until_done 60 "eplacement shows its new certificate" serves h1 8080 eplacement.pem
until_done 60 "all nodes are well with new certificates" all_well

cp "$(etc h2 node.token)" "$work/old.token"
follow '### New credentials for a host'
until_done 60 "h2's port shows its new certificate" serves h2 18090 node.pem
[ "$(code --cacert "$ca" --cert "$(etc h2 node.pem)" --key "$(etc h2 node.key)" -H "X-Auth-Token: $(<"$work/old.token")" "$provider")" = 401 ] ||
  die "h2's old token is good"
[ "$(h2_asks PUT "/resource_providers/$n2" '{"name": "h2"}')" = 200 ] || die "h2's new token is not good"
until_done 60 "all nodes are well with h2's new credentials" all_well

follow '### Another name or address of the first host'
shown h1 2379 -ext subjectAltName | grep -q control.example || die "etcd does not have its new name"
until_done 60 "eplacement has its new name" placement_is_named control.example
until_done 90 "all nodes are well with the first host's new name" all_well

h3_shows=(--cacert "$ca" --cert "$(etc h3 node.pem)" --key "$(etc h3 node.key)")
etcdctl --endpoints https://$network.1:2379 "${h3_shows[@]}" watch --prefix /ecompute/instances/ >>"$work/watched" 2>/dev/null &
beside+=($!)
change_h2() { in_machine h1 eschedule lock on-h2 && in_machine h1 eschedule unlock on-h2; }
h3_hears() { change_h2 && [ -s "$work/watched" ]; }
until_done 30 "h3 hears of a change to h2's guest" h3_hears
in_machine h1 eschedule volume create beside-h3 --size 1 --node h3 --wait >/dev/null || die "no volume on h3"
follow '### A host is lost or was taken over'
for host in h1 h2; do until_done 60 "$host goes on" node_is $host True False; done
# Its client goes on trying, and hears nothing.
: >"$work/watched"
until_done 60 "h2's guest is changed" change_h2
sleep 3
[ ! -s "$work/watched" ] || die "h3, which was revoked, hears of a change: $(cat "$work/watched")"
if etcdctl --endpoints https://$network.1:2379 "${h3_shows[@]}" get "/ecompute/nodes/$n3" >/dev/null 2>&1; then die "etcd lets h3 in, which was revoked"; fi
# What etcd asks no rights for.
takes() { etcdctl --endpoints https://$network.1:2379 --command-timeout 5s --cacert "$ca" --cert "$1.pem" --key "$1.key" lease grant 60 >/dev/null 2>&1; }
if takes "$(etc h3 node)"; then die "etcd takes a connection of h3, which was revoked"; fi
takes "$(etc h2 node)" || die "etcd takes no connection of h2"
[ "$(code "${h3_shows[@]}" -H "X-Auth-Token: $(cat "$(etc h3 node.token)")" "$provider")" = 401 ] ||
  die "placement lets h3 in, which was revoked"
told=$(for at in 1:8080/metrics 2:18090/metrics 2:18090/view 2:18090/healthz; do code "${h3_shows[@]}" "https://$network.$at"; echo; done | xargs)
[ "$told" = '403 403 403 200' ] || die "h3, which was revoked, is answered $told"
h3_is_gone() { [ "$(nodes | field "[n['name'] for n in d if n['name'] == 'h3' and n['alive']]")" = '[]' ]; }
until_done 90 "h3, which was revoked, is no living node" h3_is_gone
qemu >/dev/null || die "the guest of h3 ended with its host's rights"
say "revoked: neither etcd nor placement lets h3 in, nor tells what it watched; its guest runs on"

for ending in pem key token; do cp "$(etc h1 eschedule.$ending)" "$work/copied.$ending"; done
follow '### Another certificate was copied'
if takes "$work/copied"; then die "etcd takes a connection of a copied certificate that was revoked"; fi
until_done 60 "the cluster's own are good" nodes
[ "$(code --cacert "$ca" --cert "$(etc h1 eschedule.pem)" --key "$(etc h1 eschedule.key)" -H "X-Auth-Token: $(<"$work/copied.token")" "$provider")" = 401 ] ||
  die "the copied token is good"
for host in h1 h2; do until_done 60 "$host goes on" node_is $host True False; done
say "copied credentials of the command line open nothing any more"

cut_power h3
follow '### A host will never come back'
[ "$(nodes | field "[n['name'] for n in d if n['node'] == '$n3']")" = '[]' ] || die "h3 is a node still"
[ "$(in_machine h1 eschedule list --node "$n3" -o name 2>/dev/null)" = '' ] || die "h3 has instances still"
own=(--cacert "$ca" --cert "$(etc h1 eschedule.pem)" --key "$(etc h1 eschedule.key)" -H "X-Auth-Token: $(<"$(etc h1 eschedule.token)")")
[ "$(code "${own[@]}" "$provider/$n3")" = 404 ] || die "placement has h3 still"
[ "$(code "${own[@]}" "$provider/$n2")" = 200 ] || die "placement does not have h2"
for host in h1 h2; do until_done 60 "$host goes on" node_is $host True False; done
say "h3, which never comes back, is forgotten"
echo "page-test: passed in $SECONDS s"
