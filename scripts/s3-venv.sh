#!/bin/bash
# Makes a virtual environment with moto's server from PyPI, an S3 for tests. Does nothing where it is there already.
# usage: s3-venv.sh DIRECTORY
set -euo pipefail
directory=$(realpath -m "${1:?usage: $0 DIRECTORY}")
version=5.2.5
stamp=$directory/.ready-$version
if [ ! -e "$stamp" ]; then
  echo "installing moto $version into $directory (once)"
  rm -rf "$directory"
  # The distribution's own Python: one from a version manager may not be readable for every user.
  /usr/bin/python3 -m venv "$directory"
  "$directory/bin/pip" install -q --disable-pip-version-check "moto[s3,server]==$version"
  touch "$stamp"
fi
