#!/bin/bash
# Train on several machines without a scheduler. Run the same line on each of them, in any order:
#   NODES=2 HOST=10.0.0.1 bash recipes/launch/torchrun.sh my.toml
#   NODES=2 HOST=10.0.0.1 bash recipes/launch/torchrun.sh my.toml --strategy fsdp2
# HOST is the name or address of one of them; its torchrun numbers the machines (rendezvous).
# Recipe, data, model and output must lie on a file system that all machines share.
# RANKS: ranks of each machine; default: one for each GPU.
# RESTARTS: how often a machine starts again after another was lost; the lost one then joins with
# the same line, and the run resumes. Default 0: all end. The machine HOST must stay.
set -euo pipefail
exec torchrun \
    --nnodes "$NODES" --nproc-per-node "${RANKS:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$HOST:${PORT:-29500}" --rdzv-id "${RUN:-plugsft}" \
    --max-restarts "${RESTARTS:-0}" \
    -m plugsft launch "$@" --resume auto
