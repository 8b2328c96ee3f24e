#!/usr/bin/env bash
# Run an inference script on N processes of each node:
#   bash tools/infer.sh projects/MagicPrompt/pipeline.py N [arguments of the script]
# On several nodes, on each: NODE=<nodes> NODE_RANK=<0,1,...> ADDR=<address of node 0> PORT=<port>
set -euo pipefail

if [ "$#" -lt 2 ]; then
  echo "usage: bash tools/infer.sh SCRIPT PROCESSES [arguments of the script]" >&2
  exit 2
fi

# The weights are loaded anyway.
export ONEFLOW_LINEAR_EMBEDDING_SKIP_INIT=1

exec python3 "$(dirname "${BASH_SOURCE[0]}")/launch.py" \
  --nproc_per_node "$2" --nnodes "${NODE:-1}" --node_rank "${NODE_RANK:-0}" \
  --master_addr "${ADDR:-127.0.0.1}" --master_port "${PORT:-auto}" \
  "$1" "${@:3}"
