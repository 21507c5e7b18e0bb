#!/usr/bin/env bash
# Short real runs of clients that people already have, against a real server with two adapters.
#
#   scripts/acceptance.sh [openai | vllm-bench | guidellm | lm-eval]...      all four by default
#
# Each client is installed into a virtual environment of its own under .acceptance/ (4.2 GB
# in all), which also keeps its report and its log. `make setup` must have run before;
# SERVER_PYTHON names another interpreter that can run the server.
set -euo pipefail
cd "$(dirname "$0")/.."

ALL=(openai vllm-bench guidellm lm-eval)
NUM_REQUESTS=20
KEPT=$PWD/.acceptance
HERE=scripts/acceptance
SERVER_PYTHON=${SERVER_PYTHON:-.venv/bin/python}
BASE=base
ADAPTERS=(random-1 random-2)

VLLM=vllm==0.32.0
# What the benchmark imports. vLLM's own list would bring another torch and gigabytes of CUDA.
VLLM_NEEDS=(transformers openai aiohttp requests pybase64 pillow msgspec cbor2 psutil pyzmq
    openai-harmony cachetools cloudpickle py-cpuinfo prometheus-client partial-json-parser fastapi
    uvicorn uvloop llguidance einops)
VLLM_PARTS=("$VLLM" xgrammar apache-tvm-ffi)

# OpenMP threads that spin while they wait take the cores from those that work.
export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME=$KEPT/huggingface
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export PYTHONUNBUFFERED=1 COLUMNS=200

server_pid=

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

pip_install() {  # CLIENT ARGUMENT...
    local client=$1
    shift
    "$KEPT/$client/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        -c constraints-dev.txt "$@" >>"$KEPT/$client.install.log" 2>&1
}

install_openai() { pip_install openai openai; }

# torch by itself and first: what follows would else choose a CUDA build of it.
install_guidellm() {
    pip_install guidellm torch && pip_install guidellm guidellm==0.8.1
}

# Needs neither torch nor a tokenizer of its own: it finds the server's /tokenize.
install_lm-eval() { pip_install lm-eval 'lm-eval[api]==0.4.13'; }

install_vllm-bench() {
    pip_install vllm-bench torch && pip_install vllm-bench --no-deps "${VLLM_PARTS[@]}" &&
        pip_install vllm-bench "${VLLM_NEEDS[@]}"
}

install() {
    local client=$1 stamp=$KEPT/$1/.installed recipe
    recipe=$(declare -f "install_$client"; printf '%s ' "${VLLM_PARTS[@]}" "${VLLM_NEEDS[@]}")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$recipe" ]; then
        return
    fi
    say "installing $client into .acceptance/$client (its log: .acceptance/$client.install.log)"
    : >"$KEPT/$client.install.log"
    "$SERVER_PYTHON" -m venv --clear "$KEPT/$client" >>"$KEPT/$client.install.log" 2>&1 || return 1
    "install_$client" || return 1
    printf '%s' "$recipe" >"$stamp"
}

start_server() {  # LOG
    local modules=() name
    for name in "${ADAPTERS[@]}"; do
        modules+=("$name=$KEPT/adapters/$name")
    done
    PYTHONPATH=$PWD "$SERVER_PYTHON" -m loramux.cli.main serve --port 0 \
        --served-model-name "$BASE" --device-memory 1GiB --lora-modules "${modules[@]}" >"$1" 2>&1 &
    server_pid=$!
    local deadline=$((SECONDS + 180))
    until url=$(grep -o 'Listening on http://[0-9.:]*' "$1" | grep -o 'http.*'); do
        kill -0 "$server_pid" 2>/dev/null || { say "the server ended:"; tail -n 20 "$1"; return 1; }
        [ $SECONDS -lt $deadline ] || { say "the server did not listen within 180 s"; return 1; }
        sleep 0.5
    done
}

stop_server() {
    [ -n "$server_pid" ] || return 0
    kill "$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
    server_pid=
}

# Each run writes its report to $1, and its output to where the caller says.

run_openai() {
    "$KEPT/openai/bin/python" $HERE/openai_pass.py "$1" "$url" "$BASE" "${ADAPTERS[@]}"
}

run_vllm-bench() {
    "$KEPT/vllm-bench/bin/python" $HERE/vllm_bench.py --backend openai --base-url "$url" \
        --endpoint /v1/completions --model "$BASE" --tokenizer "$tokenizer" \
        --lora-modules "${ADAPTERS[@]}" --lora-assignment round-robin \
        --dataset-name random --random-input-len 32 --random-output-len 16 \
        --num-prompts $NUM_REQUESTS --max-concurrency 4 --save-result --save-detailed \
        --result-dir "$(dirname "$1")" --result-filename "$(basename "$1")"
}

run_guidellm() {
    "$KEPT/guidellm/bin/guidellm" run \
        --backend "kind=openai_http,target=$url,model=${ADAPTERS[0]}" \
        --profile kind=concurrent,streams=4 --constraint "kind=max_requests,count=$NUM_REQUESTS" \
        --tokenizer "kind=huggingface_auto,model=$tokenizer" \
        --data kind=synthetic_text,prompt_tokens=32,output_tokens=16 \
        --output "kind=json,path=$1" --disable-progress
}

run_lm-eval() {
    rm -rf "$1.d"
    "$KEPT/lm-eval/bin/lm_eval" --model local-completions --batch_size 2 --output_path "$1.d" \
        --model_args "model=${ADAPTERS[1]},base_url=$url/v1/completions,num_concurrent=4" \
        --include_path $HERE --tasks capital_choice,capital_writing &&
        mv "$1.d"/*/results_*.json "$1" && rm -r "$1.d"
}

accept() {
    local client=$1 report=$KEPT/$1.report.json log=$KEPT/$1.log verdict
    if ! install "$client"; then
        verdict=$(grep -i '^error' "$KEPT/$client.install.log" | tail -n 1 || true)
        printf '%-11s NOT INSTALLED  %s (.acceptance/%s.install.log)\n' \
            "$client" "${verdict:-pip failed}" "$client"
        return 1
    fi
    say "running $client (its log: .acceptance/$client.log)"
    rm -f "$report"
    if start_server "$KEPT/$client.server.log" && "run_$client" "$report" >"$log" 2>&1 &&
        verdict=$("$SERVER_PYTHON" $HERE/check_report.py "$client" "$report" "$url" 2>&1); then
        printf '%-11s ok      %s\n' "$client" "$verdict"
    else
        tail -n 30 "$log" >&2
        printf '%-11s FAILED  %s (.acceptance/%s.log)\n' "$client" "${verdict:-}" "$client"
        stop_server
        return 1
    fi
    stop_server
}

clients=("$@")
[ $# -gt 0 ] || clients=("${ALL[@]}")
for client in "${clients[@]}"; do
    [[ " ${ALL[*]} " == *" $client "* ]] || die "no client $client; there are: ${ALL[*]}"
done
PYTHONPATH=$PWD "$SERVER_PYTHON" -c 'import fastapi, loramux, uvicorn' 2>/dev/null ||
    die "$SERVER_PYTHON cannot run the server. Run make setup first, or set SERVER_PYTHON."
mkdir -p "$KEPT"
trap stop_server EXIT
for i in "${!ADAPTERS[@]}"; do
    "$SERVER_PYTHON" examples/make_adapter.py "$KEPT/adapters/${ADAPTERS[i]}" --seed "$i" >/dev/null
done
tokenizer=$(PYTHONPATH=$PWD "$SERVER_PYTHON" $HERE/tokenizer_folder.py)
num_failed=0
for client in "${clients[@]}"; do
    accept "$client" || num_failed=$((num_failed + 1))
done
[ $num_failed = 0 ] || exit 1
