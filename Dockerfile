# plugsft on a machine with NVIDIA GPUs, with the versions that its tests run:
#   docker build --tag plugsft .
#   docker run --rm --gpus all --shm-size 8g --volume "$PWD:/work" plugsft my.toml
# hadolint checks this file in the tests. It has not been built: where it was written, no machine
# has Docker.
FROM python:3.12-slim-bookworm

# torch.compile and Triton kernels need a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /plugsft
COPY tools/constraints.txt tools/constraints.txt
RUN pip install --no-cache-dir --constraint tools/constraints.txt torch
COPY . .
RUN pip install --no-cache-dir --constraint tools/constraints.txt \
    ".[deepspeed,fast,fp8,liger,quantize,trackers]"

WORKDIR /work
ENTRYPOINT ["plugsft"]
CMD ["--help"]
