#!/usr/bin/env bash
# Makes a virtual environment with Ray for tests/ray. What its list does not have (loramux's own
# dependencies) is found in the server's environment. usage: setup_ray.sh FOLDER VENV
set -euo pipefail

folder=${1:?usage: setup_ray.sh FOLDER VENV}
server=${2:?usage: setup_ray.sh FOLDER VENV}
list=tests/ray/requirements.txt

if cmp -s "$list" "$folder/.packages"; then
    exit
fi
printf '==> installing Ray into %s\n' "$folder"
"$server/bin/python" -m venv --clear "$folder"
# The list is complete, and its versions fit those of constraints.txt.
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r "$list"
path='import sysconfig; print(sysconfig.get_path("purelib"))'
"$server/bin/python" -c "$path" >"$("$folder/bin/python" -c "$path")/server.pth"
cp "$list" "$folder/.packages"
