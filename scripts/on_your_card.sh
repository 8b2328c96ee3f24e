#!/usr/bin/env bash
# For the owner of a card: does everything in this repository run on it, and as it does on the CPU?
#   bash scripts/on_your_card.sh DEVICE [OUT] [--quick]
# Checks the device, runs every system small on one and on all devices, compares losses with the
# CPU's, times the rows of the README's tables, and writes all of it to OUT.tar.gz (default:
# report-DEVICE): please send us that. It goes on after a failure; the exit code is 1 if there was
# one, 2 if the device cannot be used. --quick tries the script itself.
set -u
quick=""
arguments=()
for argument in "$@"; do
  if [ "$argument" = --quick ]; then quick=1; else arguments+=("$argument"); fi
done
if [ "${#arguments[@]}" -lt 1 ] || [ "${#arguments[@]}" -gt 2 ]; then
  echo "usage: bash scripts/on_your_card.sh DEVICE [OUT] [--quick]" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
device=${arguments[0]}
out=$(realpath -m "${arguments[1]:-report-$device}")
# train.sh takes the python3 of the PATH.
export PATH="$root/.venv/bin:$PATH" PYTHONPATH="$root" ONEFLOW_ACCEL_DEVICE=$device
export GOLDEN_RECORD=$out/work

mkdir -p "$out/work"
summary=$out/summary.md
cd "$root" || exit 2
if ! python3 -m oneflow_accel --device "$device" --json > "$out/state.json" 2> "$out/problem.txt"; then
  cat "$out/problem.txt"
  exit 2
fi
rm "$out/problem.txt"
count=$(python3 -c "import oneflow_accel as a; print(a.select_device().device_count())" | tail -1)
{
  echo "# $device on $(uname -nrm), $(date -u +%FT%TZ)"
  echo
  echo "$count devices; commit $(git rev-parse HEAD 2>/dev/null || echo unknown)"
  echo
} > "$summary"

failed=()
# NAME FOLDER COMMAND...: run it there, and go on whatever happens.
step() {
  local name=$1 folder=$2 begin=$SECONDS code result=ok
  shift 2
  (cd "$root/$folder" && timeout -k 60 3600 "$@") > "$out/$name.log" 2>&1
  code=$?
  if [ "$code" -ne 0 ]; then
    result="FAILED, exit code $code"
    # A command refuses what a device lacks by this sentence.
    if [ "$code" -eq 2 ] && lacks=$(grep -om1 "error: .*cannot do this.*" "$out/$name.log"); then
      result="not supported (${lacks#error: })"
    else
      failed+=("$name")
    fi
  fi
  echo "- $name: $result, $((SECONDS - begin)) s" | tee -a "$summary"
}

launch() { echo "-m oneflow_accel.launch --master_port auto --nproc_per_node $1"; }

only=${quick:+--only device memory kernels training}
step conformance . python3 -m oneflow_accel conformance $only --json "$out/conformance.json"
cases=${quick:+resnet}
# TF32 is not what the CPU computes.
export ONEFLOW_EP_CUDA_ENABLE_TF32_EXECUTION=0
step losses . python3 scripts/golden_record.py --device "$device" --tolerance 0.01 \
  --processes "$count" $cases
unset ONEFLOW_EP_CUDA_ENABLE_TF32_EXECUTION

data=$out/work/data
export MAGICPROMPT_DATA=$data/prompts/data MAGICPROMPT_VOCAB=$data/prompts/vocab.json
export MAGICPROMPT_MERGES=$data/prompts/merges.txt
llama="projects/Llama/pretrain.py --preset=tiny --dummy --vocab_size=512"
resnet="main.py -a resnet50 --image-size 64 -j 0 -p 1"
gpt2="train.train_epoch=0 train.log_period=1 dataloader.train.num_workers=0"
gpt2="$gpt2 train.train_micro_batch_size=null train.evaluation.enabled=false"
small="model.cfg.num_layers=4 model.cfg.hidden_size=64 model.cfg.ffn_hidden_size=128"
small="$small model.cfg.num_attention_heads=4 model.cfg.max_seq_length=32"
vit="datamodule.data_dir=$data/photos datamodule.num_workers=0"
for n in $(if [ "$count" -gt 1 ]; then echo 1 "$count"; else echo 1; fi); do
  on=""
  several=""
  if [ "$n" -gt 1 ]; then
    on=$(launch "$n")
    several=--multiprocessing-distributed
  fi
  runs=$out/work/x$n
  step "llama-x$n" libai_projects python3 $on $llama --batch_size=1 --num_accumulation_steps=1 \
    --max_iters=20 --output_dir="$runs/llama"
  if [ -n "$quick" ]; then break; fi
  step "resnet50-x$n" resnet50_imagenet python3 $on $resnet $several -b $((4 * n)) \
    --max-steps 5 --output-dir "$runs/resnet50" "$data/photos"
  step "gpt2-x$n" libai_projects bash tools/train.sh tools/train_net.py \
    projects/MagicPrompt/configs/gpt2_training.py "$n" $gpt2 $small train.train_iter=5 \
    train.global_batch_size=$((4 * n)) train.output_dir="$runs/gpt2"
  step "generation-x$n" libai_projects python3 $on projects/MagicPrompt/pipeline.py \
    --model "$runs/gpt2" --max-new-tokens 8
  step "monarch-x$n" . python3 $on -m monarch_flow.train $vit \
    experiment=imagenet/vit/vit-s-butterflyblockdiag-mlp datamodule.batch_size=2 \
    datamodule.batch_size_eval=2 train.global_batch_size=$((2 * n)) trainer.fast_dev_run=1 \
    run_dir="$runs/monarch"
  step "vit_10b-x$n" . python3 $on vit_10b/run_vit_training.py --data_dir "$data/photos" \
    --image_size 32 --patch_size 8 --embed_dim 64 --num_heads 4 --num_blocks 2 --num_workers 0 \
    --batch_size $((4 * n)) --max_steps 5 --warmup_steps 2 --ckpt_dir "$runs/vit_10b"
done

# The README's rows, as the trainers log them.
if [ -z "$quick" ]; then
  runs=$out/work/times
  if python3 -c "import oneflow_accel as a; raise SystemExit(not a.select_device().supports('nhwc'))"
  then last=--channels-last; else last=""; fi
  step time-resnet50-inference-b8 resnet50_imagenet python3 main.py -a resnet50 --dummy -j 0 -b 8 \
    --benchmark all
  step time-resnet50-train-b16 resnet50_imagenet python3 main.py -a resnet50 --dummy $last -j 4 \
    -b 16 --max-steps 30 -p 5 --output-dir "$runs/resnet50"
  step time-vit-s-monarch-train-b8 . python3 -m monarch_flow.train $vit \
    experiment=imagenet/vit/vit-s-butterflyblockdiag-mlp datamodule.batch_size=8 \
    datamodule.batch_size_eval=8 train.global_batch_size=8 trainer.max_epochs=4 \
    trainer.log_every_n_steps=5 run_dir="$runs/vit-s"
  step time-gpt2-train-2x256 libai_projects bash tools/train.sh tools/train_net.py \
    projects/MagicPrompt/configs/gpt2_training.py 1 $gpt2 model.cfg.max_seq_length=256 \
    train.train_iter=30 train.global_batch_size=2 train.output_dir="$runs/gpt2"
  step time-llama-train-1x1024 libai_projects python3 projects/Llama/pretrain.py --preset=small \
    --dummy --batch_size=1 --num_accumulation_steps=1 --max_seq_len=1024 --max_iters=30 \
    --output_dir="$runs/llama"
fi

# What was logged: losses, and rates of the timed runs.
(cd "$out/work" && find . -name metrics.jsonl -exec tar -rf "$out/metrics.tar" {} +)
{
  echo
  tail -1 "$out/conformance.log"
  echo
  python3 - "$out/work/times" <<'EOF'
import json, statistics, sys
from pathlib import Path
for path in sorted(Path(sys.argv[1]).glob("*/metrics.jsonl")):
    values = [json.loads(line)["values"] for line in path.read_text().splitlines()]
    seconds = [value["step_seconds"] for value in values if "step_seconds" in value]
    later = seconds[len(seconds) // 2 :]
    if later:
        print(f"- {path.parent.name}: {statistics.median(later) * 1e3:.1f} ms a step")
EOF
  grep img/s "$out"/time-resnet50-inference-b8.log 2>/dev/null | sed 's/^/- ResNet50 inference b8: /'
  echo
  for name in "${failed[@]+"${failed[@]}"}"; do
    printf '## %s\n\n```\n' "$name"
    tail -25 "$out/$name.log"
    printf '```\n\n'
  done
  echo "Steps that failed: ${failed[*]:-none}"
} >> "$summary"
rm -rf "$out/work"
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
tail -1 "$summary"
echo "The report is $out.tar.gz"
[ "${#failed[@]}" -eq 0 ]
