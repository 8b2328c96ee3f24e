#!/usr/bin/env bash
# Train (or evaluate) on N processes of each node:
#   bash tools/train.sh tools/train_net.py CONFIG N [flags and overrides of train_net.py]
# On several nodes, on each: NODE=<nodes> NODE_RANK=<0,1,...> ADDR=<address of node 0> PORT=<port>
set -euo pipefail

if [ "$#" -lt 3 ]; then
  echo "usage: bash tools/train.sh tools/train_net.py CONFIG PROCESSES [flags] [KEY=VALUE ...]" >&2
  exit 2
fi

export ONEFLOW_FUSE_OPTIMIZER_UPDATE_CAST=true

# exec: signals for this script reach the launcher.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/launch.py" \
  --nproc_per_node "$3" --nnodes "${NODE:-1}" --node_rank "${NODE_RANK:-0}" \
  --master_addr "${ADDR:-127.0.0.1}" --master_port "${PORT:-auto}" \
  "$1" "$2" "${@:4}"
