#!/bin/bash
# Train on several machines without a scheduler. Run the same line on each of them, in any order:
#   NODES=2 HOST=10.0.0.1 bash recipes/launch/torchrun.sh my.toml
#   NODES=2 HOST=10.0.0.1 bash recipes/launch/torchrun.sh my.toml --strategy fsdp2
# HOST is the name or address of one of them; its torchrun numbers the machines (rendezvous).
# Recipe, data, model and output must lie on a file system that all machines share.
# RANKS: ranks of each machine; default: one for each GPU.
# If a machine is lost, all end. Run the line on all of them again: the run resumes.
set -euo pipefail
exec torchrun \
    --nnodes "$NODES" --nproc-per-node "${RANKS:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$HOST:${PORT:-29500}" --rdzv-id "${RUN:-plugsft}" \
    --max-restarts 0 \
    -m plugsft launch "$@" --resume-auto
