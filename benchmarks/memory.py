"""What `pretrain.py --estimate` says of a CPU's memory beside what training really takes: the peak
resident size of each run, a process of its own, at its end.

Exits 1 where one is off by more than 10 %.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flow_train import cli
from flow_train.compare.process import logged
from flow_train.compare.rows import show
from flow_train.metrics.log import metric_series
from libai_projects.projects.Llama import estimate
from libai_projects.projects.Llama import flags as flag_table

SCRIPT = Path(estimate.__file__).with_name("pretrain.py")
MOST = 0.10
# With few steps of accumulation, as more take no more memory; two updates are the least that have
# AdamW's moments beside activations.
COMMON = ["--preset=small", "--dummy", "--max_iters=3", "--gradient_accumulation_steps=2"]
# Other sizes and batches than small's 125 million parameters, 1,024 tokens and 2 sequences.
SMALLER = "--num_layers=6 --vocab_size=8000 --max_seq_len=512"
RUNS = {
    "many parameters": "--batch_size=1 --max_seq_len=512",
    "narrow": "--num_layers=8 --hidden_size=512 --num_attention_heads=8 "
    "--num_key_value_heads=2 --ffn_hidden_size=1408",
    "many tokens": "--num_layers=4 --vocab_size=8000 --batch_size=8 --max_seq_len=256",
    "plain attention": f"{SMALLER} --batch_size=4 --use_flash=false",
    "plain cross entropy": "--num_layers=2 --batch_size=4 --max_seq_len=256 "
    "--use_fused_cross_entropy=false",
    "all plain": f"{SMALLER} --use_flash=false --use_fused_rope=false "
    "--use_fused_cross_entropy=false --use_fused_swiglu=false --disable=add_rms_norm",
}


def _main() -> int:
    parser = cli.Parser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--only", choices=tuple(RUNS), help="one run; else all")
    only = parser.parse_args().only
    rows, worst = [["run", "predicted MB", "measured MB", "ratio"]], 0.0
    for name in [only] if only else RUNS:
        arguments = [*COMMON, "--device=cpu", *RUNS[name].split()]
        predicted = estimate.cpu_peak(estimate.Job.of(flag_table.parse(arguments)))["total"]
        lines = logged([sys.executable, str(SCRIPT), *arguments], "--output_dir")
        found = 1e9 * max(metric_series(lines, "train", "peak_memory_gb")[1])
        worst = max(worst, abs(predicted / found - 1))
        figures = (f"{predicted / 1e6:.0f}", f"{found / 1e6:.0f}", f"{predicted / found:.3f}")
        rows.append([name, *figures])
    show("Peak of a process that trains a Llama on a CPU", rows)
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(cli.run("memory", _main))
