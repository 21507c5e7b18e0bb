#!/usr/bin/env bash
# Makes a virtual environment for each folder of tests/clients that has a requirements.txt, and installs
# the Node clients. usage: setup_clients.sh FOLDER VENV, with the server's environment as VENV.
set -euo pipefail

folder=${1:?usage: setup_clients.sh FOLDER VENV}
server=${2:?usage: setup_clients.sh FOLDER VENV}
here=tests/clients

say() { printf '==> %s\n' "$*"; }

# The lists are complete. Without resolving, clients that exclude each other's dependencies for no
# reason, or ask for CUDA, install side by side.
install_python() {  # NAME
    local env=$folder/$1
    if cmp -s "$here/$1/requirements.txt" "$env/.installed"; then
        return
    fi
    say "installing the clients of $here/$1"
    "$server/bin/python" -m venv --clear "$env"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        -r "$here/$1/requirements.txt"
    if [ "$1" = benchmarks ]; then
        share_torch "$env"
    fi
    cp "$here/$1/requirements.txt" "$env/.installed"
}

# What the list does not have is found in the server's environment: torch, of gigabytes.
share_torch() {  # ENV
    local path='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$server/bin/python" -c "$path" >"$("$1/bin/python" -c "$path")/server.pth"
}

has_node() { node --version >/dev/null 2>&1 && npm --version >/dev/null 2>&1; }

install_node() {
    if ! has_node && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing nodejs and npm (apt)"
        apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq nodejs npm >/dev/null || true
    fi
    if ! has_node; then
        say "no Node: its clients are skipped. Install it: apt-get install nodejs npm"
        return
    fi
    if cmp -s $here/node/package-lock.json $here/node/node_modules/.installed; then
        return
    fi
    say "installing the clients of $here/node"
    npm ci --prefix $here/node --no-audit --no-fund --loglevel error
    cp $here/node/package-lock.json $here/node/node_modules/.installed
}

for list in "$here"/*/requirements.txt; do
    install_python "$(basename "$(dirname "$list")")"
done
install_node
