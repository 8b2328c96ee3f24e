"""The flags of pretrain.py, --key=value each, and what they are in a LiBai config."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.precision import canonical

from flow_train.cli import Parser

# Sizes by name; the first is the diary's, others are published models', and two to try things out.
PRESETS: dict[str, dict[str, Any]] = {
    "z2all": {},
    "small": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "ffn_hidden_size": 2048,
        "num_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_seq_len": 1024,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "ffn_hidden_size": 0,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_seq_len": 128,
    },
    "tinyllama": {"vocab_size": 32000, "num_key_value_heads": 4},
    "llama2_7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_seq_len": 4096,
    },
    "llama3_8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_seq_len": 8192,
        "rope_theta": 500000.0,
    },
}
# What each flag that is false switches off, by names of `oneflow_accel.kernels.registry`.
FUSED: dict[str, tuple[str, ...]] = {
    "use_flash": ("scaled_dot_product_attention",),
    "use_fused_rope": ("rope",),
    "use_fused_cross_entropy": (
        "cross_entropy",
        "linear_cross_entropy",
        "linear_cross_entropy_mean",
    ),
    "use_fused_rmsnorm": ("rms_norm", "add_rms_norm"),
    "use_fused_dropout_add_norm": ("add_rms_norm",),
    "use_fused_swiglu": ("swiglu",),
    "fused_adamw": ("adamw",),
}
# Where a flag goes in the config as it is.
_KEYS = {
    "vocab_size": "model.cfg.vocab_size",
    "hidden_size": "model.cfg.hidden_size",
    "num_layers": "model.cfg.num_layers",
    "num_attention_heads": "model.cfg.num_attention_heads",
    "num_key_value_heads": "model.cfg.num_key_value_heads",
    "max_seq_len": "model.cfg.max_seq_length",
    "rms_norm_eps": "model.cfg.rms_norm_epsilon",
    "rope_theta": "model.cfg.rope_theta",
    "rope_interleaved": "model.cfg.rope_interleaved",
    "attention_bias": "model.cfg.attention_bias",
    "tie_word_embeddings": "model.cfg.tie_word_embeddings",
    "initializer_range": "model.cfg.initializer_range",
    "residual_in_fp32": "model.cfg.residual_in_fp32",
    "sequence_first": "model.cfg.sequence_first",
    "sequence_parallel": "model.cfg.sequence_parallel",
    "attention_dropout": "model.cfg.attention_dropout_prob",
    "dropout": "model.cfg.output_dropout_prob",
    "embedding_dropout": "model.cfg.embedding_dropout_prob",
    "batch_size": "train.train_micro_batch_size",
    "max_iters": "train.train_iter",
    "seed": "train.seed",
    "output_dir": "train.output_dir",
    "init_from": "train.load_weight",
    "log_interval": "train.log_period",
    "save_interval": "train.checkpointer.period",
    "eval_interval": "train.evaluation.eval_period",
    "eval_iters": "train.evaluation.eval_iter",
    "num_workers": "dataloader.train.num_workers",
    "tensor_parallel": "train.dist.tensor_parallel_size",
    "pipeline_parallel": "train.dist.pipeline_parallel_size",
    "recompute": "train.activation_checkpoint.enabled",
    "graph": "graph.enabled",
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "eps": "optim.eps",
    "warmup_iters": "train.scheduler.warmup_iters",
}
# What llm-zero2all, its forerunners and other commands call a flag.
ALIASES = {
    "hidden_size": ("hidden_dim", "dim", "n_embd"),
    "ffn_hidden_size": ("intermediate_size",),
    "num_layers": ("n_layers", "n_layer"),
    "num_attention_heads": ("n_heads", "n_head"),
    "num_key_value_heads": ("n_kv_heads",),
    "max_seq_len": ("block_size",),
    "gradient_accumulation_steps": ("grad_accum",),
    "learning_rate": ("lr",),
    "precision": ("dtype",),
    "output_dir": ("out_dir",),
    "data": ("train_bin_dir",),
    "val_data": ("valid_bin_dir",),
    "graph": ("compile",),
}
# One rate for both branches of a block, which llm-zero2all has two for.
_BRANCHES = ("dropout1", "dropout2")
_ROPE = ("linear", "dynamic", "llama3")

# Group, then name, default, help; the type is the default's.
_FLAGS: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "model": (
        ("vocab_size", 64320, "tokens, padded to a multiple of 8; 0: the data's"),
        ("hidden_size", 2048, "width"),
        ("ffn_hidden_size", 5632, "inner width; 0: 8/3 of the width, rounded up to multiple_of"),
        ("multiple_of", 256, "what ffn_hidden_size=0 is rounded up to"),
        ("num_layers", 22, "blocks"),
        ("num_attention_heads", 32, "heads of queries"),
        ("num_key_value_heads", 8, "heads of keys and values, which query heads share"),
        ("max_seq_len", 2048, "tokens of a sequence"),
        ("rms_norm_eps", 1e-5, "added to the mean square"),
        ("rope_theta", 10000.0, "base of the angles"),
        ("rope_scaling", "", "linear, dynamic or llama3; empty: none"),
        ("rope_factor", 2.0, "by how much rope_scaling stretches positions"),
        ("rope_original_len", 0, "positions before rope_scaling; 0: max_seq_len"),
        ("rope_interleaved", False, "turn neighbours, as Meta's weights have it"),
        ("attention_bias", False, "biases of queries, keys, values and the output"),
        ("tie_word_embeddings", False, "one weight for embedding and logits"),
        ("initializer_range", 0.02, "standard deviation of weights"),
        ("pad_token_id", -1, "token whose embedding begins as 0; -1: the data's, if it has one"),
        ("residual_in_fp32", True, "keep the residual in float32 under mixed precision"),
        ("sequence_first", False, "activations (time, batch, hidden)"),
        ("dropout", 0.0, "of each branch, before it is added"),
        ("attention_dropout", 0.0, "of attention's weights"),
        ("embedding_dropout", 0.0, "of embeddings"),
    ),
    "training": (
        ("batch_size", 2, "sequences at once, per data-parallel process"),
        ("gradient_accumulation_steps", 16, "of these per step, data-parallel processes together"),
        ("num_accumulation_steps", 0, "the same of one process; 0: its share of those"),
        ("max_iters", 100000, "steps of the optimizer"),
        ("max_minutes", 0.0, "end at the first evaluation after so long; 0: never"),
        ("learning_rate", 4e-4, "the largest"),
        ("min_lr", 0.0, "the last; 0: a tenth of the largest"),
        ("warmup_iters", 2000, "steps over which it rises"),
        ("lr_decay_iters", 0, "steps after which it is the last; 0: max_iters"),
        ("weight_decay", 0.1, "of weights of two axes or more"),
        ("beta1", 0.9, "AdamW's"),
        ("beta2", 0.95, "AdamW's"),
        ("eps", 1e-8, "AdamW's"),
        ("grad_clip", 1.0, "most that all gradients' norm may be; 0: any"),
        ("seed", 1337, "of weights, dropout and order of the data"),
        ("precision", "float32", "what tensors and products are made of"),
        ("resume", False, "go on from the last checkpoint in output_dir, if any"),
        ("init_from", "", "weights to begin with: a Hugging Face directory or a LiBai checkpoint"),
    ),
    "data and output": (
        ("data", "", "token file, folder or pattern; prepare.py makes one"),
        ("val_data", "", "to evaluate on; empty: PREFIX_valid.bin beside PREFIX.bin, if there"),
        ("token_dtype", "uint16", "of token files without a .json: uint16 or uint32"),
        ("packing", "stream", "documents: those packed in a row do not see each other"),
        ("dummy", False, "random tokens, no disk"),
        ("output_dir", "projects/Llama/output", "checkpoints, metrics and curves"),
        ("log_interval", 1, "steps between log lines"),
        ("save_interval", 1000, "steps between checkpoints"),
        ("eval_interval", 1000, "steps between evaluations; 0: none"),
        ("eval_iters", 100, "batches of an evaluation"),
        ("profile", 0, "say where the time of so many steps goes, by operator, and end; 0: train"),
        ("num_workers", 0, "processes that read data"),
        ("wandb_log", False, "metrics to a run of wandb too, offline"),
        ("wandb_project", "z2all", "whose run that is"),
        ("wandb_run_name", "", "its name; empty: that of output_dir"),
    ),
    "devices": (
        ("device", "", "by name; empty: the best there is"),
        ("graph", False, "nn.Graph in place of eager mode"),
        ("tensor_parallel", 1, "processes that share each layer"),
        ("pipeline_parallel", 1, "stages; what is left is data parallel"),
        ("sequence_parallel", False, "split norms over tensor parallelism too"),
        ("zero_stage", 0, "1 to 3: shard the optimizer's state, gradients, weights (graph)"),
        ("recompute", False, "keep no activations of blocks (graph)"),
        ("peak_tflops", 0.0, "of one device, for the MFU; 0: its table's, or measured once"),
    ),
    "fused operations": (
        ("use_flash", True, "attention without a matrix of time x time"),
        ("use_fused_rope", True, "rotary embedding in one pass"),
        ("use_fused_cross_entropy", True, "loss without the logits"),
        ("use_fused_rmsnorm", True, "norms in one pass"),
        ("use_fused_dropout_add_norm", True, "norms that drop out and add the branch"),
        ("use_fused_swiglu", True, "silu and product in one pass"),
        ("fused_adamw", True, "the optimizer's update in one pass"),
        ("attn_impl", "", "naive, chunked (use_flash, on any device) or fmha (CUDA's)"),
        ("disable", "", "operations to switch off, by name, with commas between"),
    ),
    "instead of training": (
        ("ablate", "", "table1, table2 or table3: each fused operation off by turns"),
        ("turns", 3, "times that --ablate runs each row, all rows in turns"),
        ("estimate", False, "parameters, memory and step time, without a step"),
        ("gpu", "A100", "whose data sheet --estimate takes"),
    ),
}


_DEFAULTS = {name: default for flags in _FLAGS.values() for name, default, _ in flags}
# What numbers must be at least where that is not 0; what whole ones may be at most where that is
# not an int32's largest; and float32's largest.
_LEAST = {
    **dict.fromkeys(("multiple_of", "num_layers", "hidden_size", "num_attention_heads"), 1),
    **dict.fromkeys(("num_key_value_heads", "batch_size", "max_iters", "log_interval"), 1),
    **dict.fromkeys(("gradient_accumulation_steps", "save_interval", "eval_iters"), 1),
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "turns"), 1),
    # One token has nothing before it to be predicted from.
    "max_seq_len": 2,
    "pad_token_id": -1,
}
_MOST, _MOST_FLOAT = {"seed": 2**63 - 1, "num_layers": 100_000}, 3.4028234e38


def build_parser() -> Parser:
    """The parser of pretrain.py."""
    parser = Parser(
        prog="pretrain.py",
        description="Train a Llama from scratch, with fused operations that can be switched off.",
        usage="%(prog)s [--key=value ...]",
        epilog="Other names are taken, too: "
        + ", ".join(f"--{alias} for --{name}" for name in ALIASES for alias in ALIASES[name])
        + ", and --dropout1 and --dropout2, if they are the same, for --dropout.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="z2all",
        help="sizes by name; flags beside it count more",
    )
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for name, default, text in flags:
            options: dict[str, Any] = {"type": type(default), "metavar": type(default).__name__}
            if isinstance(default, bool):
                options = {"type": _truth, "nargs": "?", "const": True, "metavar": "true|false"}
                text = f"{text} (default: {str(default).lower()})"
            group.add_argument(f"--{name}", default=default, help=text, **options)
            hidden = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            for alias in ALIASES.get(name, ()):
                group.add_argument(f"--{alias}", **hidden, **options)
    for name in _BRANCHES:
        parser.add_argument(f"--{name}", type=float, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags. UserError: one that does not exist (names the nearest), or a wrong value."""
    parser = build_parser()
    preset, _ = parser.parse_known_args([text for text in argv if text not in ("-h", "--help")])
    parser.set_defaults(**PRESETS[preset.preset])
    flags = parser.parse_args(argv)
    branches = [getattr(flags, name) for name in _BRANCHES]
    if branches != [None, None]:
        if branches[0] != branches[1]:
            raise UserError(
                "--dropout1 and --dropout2 differ, and both branches of a block have one rate "
                "here: give --dropout"
            )
        flags.dropout = branches[0]
    _check(flags)
    return flags


def _truth(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "false", "0", "no"):
        return text.lower() in ("true", "1", "yes")
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _check(flags: argparse.Namespace) -> None:
    try:
        flags.precision = canonical(flags.precision)
    except UserError as error:
        raise UserError(f"--precision: {error}") from error
    for name, choices in {
        "rope_scaling": ("", *_ROPE),
        "token_dtype": ("uint16", "uint32"),
        "packing": ("stream", "documents"),
        "attn_impl": ("", "naive", "chunked", "fmha"),
        "ablate": ("", "table1", "table2", "table3"),
        "zero_stage": (0, 1, 2, 3),
    }.items():
        value = getattr(flags, name)
        if value not in choices:
            known = ", ".join(str(choice) for choice in choices if choice != "")
            raise UserError(f"--{name}={value}: expected one of {known}")
    for name, default in _DEFAULTS.items():
        value, least = getattr(flags, name), _LEAST.get(name, 0)
        # nan compares with nothing, so it is not between them.
        most = _MOST_FLOAT if isinstance(default, float) else _MOST.get(name, 2**31 - 1)
        if type(default) in (int, float) and not least <= value <= most:
            raise UserError(f"--{name}={value} is not between {least} and {most}")
    if flags.min_lr > flags.learning_rate:
        raise UserError(f"--min_lr={flags.min_lr} is above --learning_rate={flags.learning_rate}")
    if flags.attn_impl == "fmha":
        raise UserError(
            "--attn_impl=fmha: OneFlow's fused attention has no gradient; take chunked or naive"
        )


def disabled(flags: argparse.Namespace) -> list[str]:
    """The operations that run as plain operators, by name."""
    names = [name.strip() for name in flags.disable.split(",") if name.strip()]
    for flag, operations in FUSED.items():
        naive = flag == "use_flash" and flags.attn_impl == "naive"
        if not getattr(flags, flag) or naive:
            names += operations
    return sorted(set(names))


def padded_vocabulary(flags: argparse.Namespace) -> int:
    """vocab_size as the model has it: a multiple of 8, without which products are slower."""
    return -(-flags.vocab_size // 8) * 8


def ffn_hidden_size(flags: argparse.Namespace) -> int:
    if flags.ffn_hidden_size:
        return int(flags.ffn_hidden_size)
    return -(-int(8 * flags.hidden_size / 3) // flags.multiple_of) * flags.multiple_of


def accumulation_steps(flags: argparse.Namespace, processes: int = 1) -> int:
    """Micro-batches per step of each of so many data-parallel processes. UserError where they
    cannot share them."""
    if flags.num_accumulation_steps:
        return int(flags.num_accumulation_steps)
    steps, rest = divmod(flags.gradient_accumulation_steps, processes)
    if rest:
        raise UserError(
            f"--gradient_accumulation_steps={flags.gradient_accumulation_steps} does not divide by "
            f"{processes} data-parallel processes, which share them: give a multiple, or "
            "--num_accumulation_steps, which each of them does"
        )
    return int(steps)


def overrides(flags: argparse.Namespace) -> list[str]:
    """The same as "key=value" texts for `tools/train_net.py`."""
    values = {key: getattr(flags, name) for name, key in _KEYS.items()}
    values["model.cfg.vocab_size"] = padded_vocabulary(flags)
    values["model.cfg.ffn_hidden_size"] = ffn_hidden_size(flags)
    values["optim.betas"] = [flags.beta1, flags.beta2]
    values["optim.params.clip_grad_max_norm"] = flags.grad_clip or None
    values["train.max_minutes"] = flags.max_minutes or None
    values["train.evaluation.enabled"] = flags.eval_interval != 0
    values["train.evaluation.eval_period"] = flags.eval_interval or 1
    values["train.amp.precision"] = flags.precision
    values["train.amp.enabled"] = flags.precision != "float32"
    values["train.num_accumulation_steps"] = accumulation_steps(flags)
    values["train.zero_optimization.enabled"] = flags.zero_stage > 0
    values["train.zero_optimization.stage"] = max(flags.zero_stage, 1)
    values["train.scheduler.decay_iters"] = flags.lr_decay_iters or flags.max_iters
    least = flags.min_lr or flags.learning_rate / 10
    values["train.scheduler.alpha"] = least / flags.learning_rate if flags.learning_rate else 0.0
    if flags.pad_token_id >= 0:
        values["model.cfg.pad_token_id"] = flags.pad_token_id
    if flags.wandb_log:
        values["train.logger.wandb"] = {"project": flags.wandb_project}
        if flags.wandb_run_name:
            values["train.logger.wandb"]["name"] = flags.wandb_run_name
    if flags.rope_scaling:
        scaling: dict[str, Any] = {"rope_type": flags.rope_scaling, "factor": flags.rope_factor}
        if flags.rope_scaling == "llama3":
            scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if flags.rope_original_len:
            scaling["original_max_position_embeddings"] = flags.rope_original_len
        values["model.cfg.rope_scaling"] = scaling
    return [f"{key}={_text(value)}" for key, value in values.items()]


def quoted(text: str) -> str:
    """A text that an override takes as it is; hydra reads a backslash as such but before quotes."""
    escaped = re.sub(r'(\\*)(?="|\Z)', r"\1\1", text).replace('"', r"\"")
    return f'"{escaped}"'


def _text(value: Any) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(inner)}" for key, inner in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return quoted(value) if isinstance(value, str) else str(value)
