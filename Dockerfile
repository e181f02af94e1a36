# The server in a container, for CPUs or, with --build-arg VARIANT=cuda, for NVIDIA GPUs. deploy/README.md has the
# commands, and says why there is a compiler in the image.

ARG VARIANT=cpu
ARG PYTHON_IMAGE=python:3.12-slim
ARG CUDA_IMAGE=nvidia/cuda:12.8.1-base-ubuntu24.04

# g++ builds the native kernels for the processor that the container runs on.
FROM ${PYTHON_IMAGE} AS cpu-base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

# Triton compiles its launchers in C against Python's headers. torch's wheels bring CUDA's libraries.
FROM ${CUDA_IMAGE} AS cuda-base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${VARIANT}-base AS build
ARG VARIANT
ARG TORCH=torch==2.13.0
# Where pip finds torch, and everything else; empty: where it always does.
ARG TORCH_INDEX_URL=
ARG INDEX_URL=
ARG EXTRAS=grammar,otel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /app
WORKDIR /src
# Apart from the sources, so that a change of them does not install torch anew.
RUN index="${TORCH_INDEX_URL:-${INDEX_URL}}" \
 && /app/bin/pip install ${index:+--index-url "${index}"} "${TORCH}"
COPY . .
RUN extras="${EXTRAS}" \
 && if [ "${VARIANT}" = cuda ]; then extras="gpu${extras:+,${extras}}"; fi \
 && /app/bin/pip install ${INDEX_URL:+--index-url "${INDEX_URL}"} ".${extras:+[${extras}]}"

FROM ${VARIANT}-base AS serve
RUN groupadd --system --gid 10001 specmamba \
 && useradd --system --uid 10001 --gid specmamba --home-dir /var/lib/specmamba --create-home specmamba \
 && install --directory --owner specmamba --group specmamba --mode 0700 /var/cache/specmamba
COPY --from=build /app /app
# Compiled kernels and downloaded checkpoints are kept in the volume. The address is that of the container, which
# no client reaches but through the published ports: give --api-key where that is not the loopback.
ENV PATH=/app/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/specmamba \
    HF_HOME=/var/cache/specmamba/huggingface \
    TRITON_CACHE_DIR=/var/cache/specmamba/triton \
    SPECMAMBA_HOST=0.0.0.0 \
    SPECMAMBA_PORT=30000
USER 10001:10001
WORKDIR /var/lib/specmamba
VOLUME /var/cache/specmamba
EXPOSE 30000
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['SPECMAMBA_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["specmamba"]
CMD ["serve"]
