#!/bin/bash
# Makes roles and users in an etcd with authentication, or for one that is about to get it: each part of the cloud
# may do what it must, and no more. docs/security.md tells what that is.
#
# For an etcd with passwords: `eschedule cluster init` and `node add` make the same for one with client certificates.
#
# usage: etcd-roles.sh node UUID|control|placement [USER]
#
# Reads the new user's password from standard input. etcdctl finds the etcd, and who may make users there, as
# always: ETCDCTL_ENDPOINTS, ETCDCTL_USER, ETCDCTL_CACERT … PREFIX (default /ecompute) is `etcd.prefix` of compute.yaml,
# PLACEMENT_PREFIX (default PREFIX/placement) is `prefix` of eplacement.yaml. Doing it again changes nothing but the
# password; with another prefix it is refused.
set -euo pipefail
export ETCDCTL_API=3
prefix=${PREFIX:-/ecompute}
prefix=${prefix%/}
placement=${PLACEMENT_PREFIX:-$prefix/placement}
usage() {
  echo "etcd-roles: $1; usage: $0 node UUID|control|placement [USER], with the password on standard input" >&2
  exit 2
}

keys=() trees=() readable=()
case ${1:-} in
node)
  node=${2:-}
  [[ $node =~ ^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$ ]] || usage "\`$node\` is no node's uuid (small letters, with dashes)"
  role=ecompute-$node user=${3:-ecompute-$node}
  keys=("agents/$node" "alive/$node" "nodes/$node")
  trees=("requests/$node/" "userdata/$node/" "status/$node/" "outcomes/$node/" "held/$node/" "held-userdata/$node/")
  # Whether a claim is ours, and which nodes there are.
  readable=("instances/" "nodes/" "alive/")
  ;;
control)
  role=ecompute-control user=${2:-eschedule}
  trees=("instances/" "names/" "volume-names/" "requests/" "userdata/" "flavors/" "keypairs/" "images/" "image-names/" "public-images/" "groups/" "members/" "actions/")
  readable=("nodes/" "alive/" "status/" "outcomes/" "held/" "held-userdata/")
  ;;
placement)
  role=ecompute-placement user=${2:-eplacement}
  ;;
*) usage "\`${1:-}\` is not known" ;;
esac
# One without a newline behind it is one, too.
IFS= read -r password || [ -n "$password" ] || usage "no password came"
[ -n "$password" ] || usage "the password is empty"
# etcdctl would take the first word for all of it.
[[ $password != *[[:space:]]* ]] || usage "there is white space in the password, of which etcdctl takes only what is before it: choose one without"

# Roles have the same names whatever the prefix is: one that two clouds had would let each into the other.
if has=$(etcdctl role get "$role" 2>/dev/null); then
  while read -r key; do
    key=${key#\[} key=${key%%,*}
    case $key in
    "$prefix"/* | "${placement%/}"/* | "${placement%/}-tokens/"*) ;;
    *)
      echo "etcd-roles: role $role has rights to $key, which is not below $prefix: it is another cloud's; give each an etcd of its own" >&2
      exit 1
      ;;
    esac
  done < <(sed -n 's/^\t//p' <<<"$has")
else
  etcdctl role add "$role" >/dev/null
fi
grant() { etcdctl role grant-permission "$role" "$@" >/dev/null; }
for key in "${keys[@]}"; do grant readwrite "$prefix/$key"; done
for tree in "${trees[@]}"; do grant --prefix readwrite "$prefix/$tree"; done
for tree in "${readable[@]}"; do grant --prefix read "$prefix/$tree"; done
if [ "$1" = placement ]; then
  grant --prefix readwrite "${placement%/}/"
  # Tokens that lie in etcd.
  grant --prefix read "${placement%/}-tokens/"
fi
# The password goes through a pipe: arguments can be read by every user of this machine.
if etcdctl user get "$user" >/dev/null 2>&1; then
  etcdctl user passwd "$user" --interactive=false <<<"$password" >/dev/null
else
  etcdctl user add "$user" --interactive=false <<<"$password" >/dev/null
fi
etcdctl user grant-role "$user" "$role" >/dev/null
echo "user $user has role $role"
