# syntax=docker/dockerfile:1.7
# Two images: `docker build --target cpu .` and `docker build --target cuda .` (the default).
# Arguments of `docker run` are flags of `loramux serve`:
#   docker run --gpus all -p 8000:8000 -e LORAMUX_API_KEY=... -v loramux-cache:/cache \
#       loramux:cuda --model org/name
# Without a key the server does not listen on all addresses, unless --insecure-no-auth is given.

FROM python:3.12-slim-bookworm AS source
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/loramux
ENV PATH=/opt/loramux/bin:$PATH
WORKDIR /src
# Every package that comes from PyPI, with its hashes; scripts/lock.sh writes the file.
COPY requirements-image.txt ./
RUN pip install --require-hashes --no-deps -r requirements-image.txt
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY loramux ./loramux
COPY examples/images ./examples/images
RUN pip install --no-deps --no-build-isolation --no-index .

# The CPU build of torch comes from torch's own index, at the version of constraints.txt.
FROM source AS build-cpu
RUN pip install --no-deps --index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch

# torch for CUDA 13.0 and triton, with the versions with which the GPU kernels are tuned and measured.
FROM source AS build-cuda
COPY requirements-image-cuda.txt ./
RUN pip install --require-hashes --no-deps -r requirements-image-cuda.txt

FROM python:3.12-slim-bookworm AS runtime
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home loramux \
    && install -d -o loramux -g loramux /cache /data
ENV PATH=/opt/loramux/bin:$PATH \
    LORAMUX_CACHE=/cache/loramux \
    LORAMUX_DATA=/data \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    NUMBA_CACHE_DIR=/cache/numba \
    CUDA_CACHE_PATH=/cache/cuda
WORKDIR /home/loramux
EXPOSE 8000
VOLUME ["/cache", "/data"]
# The first start downloads the model and compiles kernels; until then the server does not listen.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "loramux", "serve", "--host", "0.0.0.0", "--port", "8000"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/loramux /opt/loramux
USER 10001

FROM runtime AS cuda
# Triton compiles the launchers of its kernels with gcc when they are first used. The driver comes
# from the NVIDIA container toolkit, the CUDA libraries with torch.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/loramux /opt/loramux
USER 10001
