"""What `pretrain.py --estimate` says of a CPU's memory beside what training really takes: the peak
resident size of each run, a process of its own, at its end.

Exits 1 where one is off by more than 10 %.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from oneflow_accel.errors import UserError

from rich.console import Console
from rich.table import Table

from flow_train import cli
from libai_projects.projects.Llama import estimate
from libai_projects.projects.Llama import flags as flag_table

SCRIPT = Path(estimate.__file__).with_name("pretrain.py")
METRICS, PEAK = "metrics.jsonl", "peak_memory_gb"
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


def measured(arguments: list[str]) -> int:
    """Bytes of a run; UserError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), *arguments, f"--output_dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise UserError(f"{' '.join(arguments)}:\n{(done.stdout + done.stderr)[-2000:]}")
        lines = (Path(folder) / METRICS).read_text().splitlines()
    return int(1e9 * max(json.loads(line)["values"].get(PEAK, 0) for line in lines))


def main() -> int:
    return cli.run("memory", _main)


def _main() -> int:
    parser = cli.Parser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--only", choices=tuple(RUNS), help="one run; else all")
    only = parser.parse_args().only
    table = Table(title="Peak of a process that trains a Llama on a CPU")
    for column in ("run", "predicted MB", "measured MB", "ratio"):
        table.add_column(column, justify="left" if column == "run" else "right")
    worst = 0.0
    for name, text in RUNS.items():
        if only not in (None, name):
            continue
        arguments = [*COMMON, "--device=cpu", *text.split()]
        predicted = estimate.cpu_peak(estimate.Job.of(flag_table.parse(arguments)))["total"]
        found = measured(arguments)
        worst = max(worst, abs(predicted / found - 1))
        table.add_row(
            name, f"{predicted / 1e6:.0f}", f"{found / 1e6:.0f}", f"{predicted / found:.3f}"
        )
    Console().print(table)
    return int(worst > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
