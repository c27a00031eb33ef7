#!/bin/bash
# Makes a virtual environment with OpenStack Placement from PyPI, and an empty, migrated SQLite database
# beside it to copy. Does nothing where both are there already.
# usage: placement-venv.sh DIRECTORY
set -euo pipefail
directory=$(realpath -m "${1:?usage: $0 DIRECTORY}")
version=16.0.0
stamp=$directory/.ready-$version
[ -e "$stamp" ] && exit 0
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
