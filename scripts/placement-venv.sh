#!/bin/bash
# Makes a virtual environment with OpenStack Placement from PyPI, an empty, migrated SQLite database beside it
# to copy, and the clients that tests use: gabbi, which runs Placement's own API tests, and the command
# "openstack" with Placement's plugin. Does nothing where all are there already, adds the clients where only
# they are missing.
# usage: placement-venv.sh DIRECTORY
set -euo pipefail
directory=$(realpath -m "${1:?usage: $0 DIRECTORY}")
version=16.0.0
gabbi=4.2.3
openstackclient=10.5.0
osc_placement=4.9.1
stamp=$directory/.ready-$version
clients_stamp=$directory/.clients-gabbi-$gabbi-openstackclient-$openstackclient-osc-placement-$osc_placement
if [ ! -e "$stamp" ]; then
  echo "installing OpenStack Placement $version into $directory (once)"
  rm -rf "$directory"
  mkdir -p "$directory"
  # The distribution's own Python: one from a version manager may not be readable for every user.
  /usr/bin/python3 -m venv "$directory"
  "$directory/bin/pip" install -q --disable-pip-version-check "openstack-placement==$version" gunicorn psycopg2-binary
  cat >"$directory/template.conf" <<C
[api]
auth_strategy = noauth2
[placement_database]
connection = sqlite:///$directory/template.sqlite
C
  OS_PLACEMENT_CONFIG_DIR=$directory "$directory/bin/placement-manage" --config-file "$directory/template.conf" db sync
  touch "$stamp"
fi
if [ ! -e "$clients_stamp" ]; then
  echo "installing the clients of its tests into $directory (once)"
  # With Placement named again, so that a client cannot change its version.
  "$directory/bin/pip" install -q --disable-pip-version-check "openstack-placement==$version" "gabbi==$gabbi" \
    "python-openstackclient==$openstackclient" "osc-placement==$osc_placement"
  touch "$clients_stamp"
fi
