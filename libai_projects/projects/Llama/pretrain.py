"""Trains a Llama from scratch on token files; fused operations can be switched off one by one.

    python pretrain.py --batch_size=2 --gradient_accumulation_steps=16 --data=tokens/train.bin
    python pretrain.py --preset=tiny --dummy --max_iters=20
    python pretrain.py --ablate table1
    python pretrain.py --estimate

`--help` lists every flag with its default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # The launcher puts this script's folder first, which is not where the packages are.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

try:
    import oneflow_accel

    import libai_projects  # noqa: F401 - says how to install libai
except ImportError as error:
    sys.exit(
        f"{error}. pretrain.py runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )
from oneflow_accel import distributed, precision, settings
from oneflow_accel.agree import everywhere
from oneflow_accel.command import run
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import registry

from omegaconf import DictConfig

from libai_projects.projects.Llama import flags as flag_table
from libai_projects.text import token_files

CONFIG_FILE = str(Path(__file__).resolve().parent / "configs" / "llama_pretraining.py")


def arguments_of(flags: flag_table.Options) -> list[str]:
    """What tools/train_net.py is called with."""
    arguments = ["--config-file", CONFIG_FILE, *flag_table.overrides(flags)]
    if flags.resume:
        arguments.append("--resume")
    if flags.device:
        arguments += ["--device", flags.device]
    if flags.profile:
        arguments += ["--profile", str(flags.profile)]
    if flags.dummy:
        return [*arguments, "--dummy", "train.evaluation.enabled=false"]
    if not flags.data:
        raise UserError(
            "--data names no token file: make one by prepare.py, or give --dummy for random tokens"
        )
    dataset = "dataloader.train.dataset"
    arguments += [
        f"{dataset}.0.path={flag_table.quoted(flags.data)}",
        f"{dataset}.0.dtype={flags.token_dtype}",
        f"{dataset}.0.packing={flags.packing}",
    ]
    if flags.val_data:
        arguments.append(f"dataloader.validation_data={flag_table.quoted(flags.val_data)}")
    elif not token_files.held_out(flags.data):
        arguments.append("train.evaluation.enabled=false")
    return arguments


def describe(flags: flag_table.Options, cfg: DictConfig) -> list[str]:
    """The first lines of a run: tokens per iteration, and what of the model is not as typed."""
    batch, length = flags.batch_size, flags.max_seq_len
    steps = flag_table.accumulation_steps(flags)
    data_parallel = cfg.train.global_batch_size // (batch * steps)
    tokens = batch * steps * length * data_parallel
    lines = [
        f"tokens per iteration: {tokens:,} = {steps} gradient accumulation steps x "
        f"{data_parallel} data-parallel processes x batch size {batch} x {length} tokens"
    ]
    asked = flags.gradient_accumulation_steps
    if data_parallel > 1 and steps * data_parallel == asked:
        lines.append(
            f"--gradient_accumulation_steps={asked} are {steps} in each of these processes"
        )
    padded = flag_table.padded_vocabulary(flags)
    if padded != flags.vocab_size:
        lines.append(f"vocabulary: {flags.vocab_size} tokens, padded to {padded}, a multiple of 8")
    off = flag_table.disabled(flags)
    if off:
        lines.append(f"switched off: {', '.join(off)}")
    return lines


def complete(flags: flag_table.Options) -> None:
    """Fill in what the data say, vocabulary and padding token, and what each process does."""
    sharing = flags.tensor_parallel * flags.pipeline_parallel
    processes = max(distributed.world_size() // sharing, 1)
    flags.num_accumulation_steps = flag_table.accumulation_steps(flags, processes)
    found = token_files.describe(flags.data) if flags.data and not flags.dummy else None
    if found is not None:
        if flags.vocab_size == 0:
            flags.vocab_size = found.vocab_size
        if flags.pad_token_id < 0 and found.pad_id not in (None, found.eod_id):
            flags.pad_token_id = found.pad_id
    if flags.vocab_size <= 0:
        raise UserError("--vocab_size=0 takes the data's, which have no .json that says it")


def settled(argv: Sequence[str]) -> flag_table.Options:
    """The flags, and a device that can do what they ask for, or none for a text without a run."""
    flags = flag_table.parse(argv)
    # Each of several processes and each loader worker sees these.
    off = flag_table.disabled(flags)
    if off:
        # A wrong name shows here, before anything is written.
        registry.known_names(off, f"--disable={flags.disable}")
        os.environ[settings.DISABLE.name] = ",".join(off)
    if flags.peak_tflops:
        os.environ[settings.PEAK.name] = str(flags.peak_tflops)
    if flags.estimate:
        return flags
    backend = oneflow_accel.select_device(flags.device or None)
    if reason := precision.why_not(backend, flags.precision):
        raise UserError(f"--precision={flags.precision}: {backend.name} cannot do this: {reason}")
    if not flags.ablate:
        complete(flags)
    return flags


def main(argv: Sequence[str]) -> int:
    flags = everywhere(lambda: settled(argv))
    if flags.estimate:
        from libai_projects.projects.Llama import estimate

        estimate.report(flags)
        return 0
    if flags.ablate:
        from libai_projects.projects.Llama import ablation

        return ablation.run(flags, argv)
    arguments = everywhere(lambda: arguments_of(flags))
    # LiBai takes its time to import.
    from libai_projects.tools import train_net

    smaller = "take a smaller --batch_size, --precision=bfloat16, or larger --tensor_parallel"
    return train_net.main(arguments, "pretrain.py", lambda cfg: describe(flags, cfg), smaller)


if __name__ == "__main__":
    sys.exit(run("pretrain.py", lambda: main(sys.argv[1:])))
