"""The flags of pretrain.py, --key=value each, and what they are in a LiBai config."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from oneflow_accel.errors import UserError

from pydantic import Field, model_validator

from flow_train.cli import Parser
from flow_train.config.flags import Flags, flag
from flow_train.config.keys import Fraction, Precision, Seed
from monarch_flow.config import Layers

_SIZES = (
    *("vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_seq_len", "rope_theta"),
)
# _SIZES by name: published models', and two to try things out. z2all is the diary's, and what the
# flags are without one.
PRESETS: dict[str, tuple[float, ...]] = {
    "z2all": (64320, 2048, 5632, 22, 32, 8, 2048, 1e4),
    "small": (32000, 768, 2048, 12, 12, 4, 1024, 1e4),
    "tiny": (512, 128, 0, 2, 4, 2, 128, 1e4),
    "tinyllama": (32000, 2048, 5632, 22, 32, 4, 2048, 1e4),
    "llama2_7b": (32000, 4096, 11008, 32, 32, 32, 4096, 1e4),
    "llama3_8b": (128256, 4096, 14336, 32, 32, 8, 8192, 5e5),
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
# Where a flag goes in the config as it is: the first under its own name.
_OF_MODEL = (
    *("vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads"),
    *(
        "num_key_value_heads",
        "rope_theta",
        "rope_interleaved",
        "attention_bias",
        "tie_word_embeddings",
    ),
    *("initializer_range", "residual_in_fp32", "sequence_first", "sequence_parallel"),
    *("mlp_cfg", "attnlinear_cfg", "attnproj_cfg"),
)
_KEYS = {name: f"model.cfg.{name}" for name in _OF_MODEL} | {
    "max_seq_len": "model.cfg.max_seq_length",
    "rms_norm_eps": "model.cfg.rms_norm_epsilon",
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
    "sparse_to_dense": "train.sparse_to_dense.fraction",
}

_INT32, _FLOAT32 = 2**31 - 1, 3.4028234e38
Count = Annotated[int, Field(ge=0, le=_INT32)]
Positive = Annotated[int, Field(ge=1, le=_INT32)]
Amount = Annotated[float, Field(ge=0, le=_FLOAT32)]


class Options(Flags):
    """The command line; `names` have what llm-zero2all, its forerunners and other commands call a
    flag, too."""

    joint: ClassVar[str] = "_"
    switches: ClassVar[bool] = True

    preset: Literal["z2all", "small", "tiny", "tinyllama", "llama2_7b", "llama3_8b"] = flag("z2all")
    "sizes by name; flags beside it count more"

    vocab_size: Count = flag(64320, "N", group=("model",))
    "tokens, padded to a multiple of 8; 0: the data's"
    hidden_size: Positive = flag(
        2048, "N", "width", names="--hidden_size --hidden_dim --dim --n_embd"
    )
    ffn_hidden_size: Count = flag(5632, "N", names="--ffn_hidden_size --intermediate_size")
    "inner width; 0: 8/3 of the width, rounded up to multiple_of"
    multiple_of: Positive = flag(256, "N", "what ffn_hidden_size=0 is rounded up to")
    num_layers: Annotated[int, Field(ge=1, le=100_000)] = flag(
        22, "N", "blocks", names="--num_layers --n_layers --n_layer"
    )
    num_attention_heads: Positive = flag(32, "N", names="--num_attention_heads --n_heads --n_head")
    "heads of queries"
    num_key_value_heads: Positive = flag(8, "N", names="--num_key_value_heads --n_kv_heads")
    "heads of keys and values, which query heads share"
    # One token has nothing before it to be predicted from.
    max_seq_len: Annotated[int, Field(ge=2, le=_INT32)] = flag(
        2048, "N", "tokens of a sequence", names="--max_seq_len --block_size"
    )
    rms_norm_eps: Amount = flag(1e-5, "X", "added to the mean square")
    rope_theta: Amount = flag(1e4, "X", "base of the angles")
    rope_scaling: Literal["", "linear", "dynamic", "llama3", "yarn"] = flag("", "NAME")
    "linear, dynamic, llama3 or yarn; empty: none"
    rope_factor: Amount = flag(2.0, "X", "by how much rope_scaling stretches positions")
    rope_original_len: Count = flag(0, "N", "positions before rope_scaling; 0: max_seq_len")
    rope_interleaved: bool = flag(False, text="turn neighbours, as Meta's weights have it")
    attention_bias: bool = flag(False, text="biases of queries, keys, values and the output")
    tie_word_embeddings: bool = flag(False, text="one weight for embedding and logits")
    mlp_cfg: Layers | None = flag(None, "LAYER")
    "monarch, blockdiag or {_target_: monarch, nblocks: 8} in the feed-forward network"
    attnlinear_cfg: Layers | None = flag(None, "LAYER", "the same of queries, keys and values")
    attnproj_cfg: Layers | None = flag(None, "LAYER", "the same after attention")
    initializer_range: Amount = flag(0.02, "X", "standard deviation of weights")
    pad_token_id: Annotated[int, Field(ge=-1, le=_INT32)] = flag(-1, "ID")
    "token whose embedding begins as 0; -1: the data's, if it has one"
    residual_in_fp32: bool = flag(True, text="keep the residual in float32 under mixed precision")
    sequence_first: bool = flag(False, text="activations (time, batch, hidden)")
    dropout: Amount = flag(0.0, "P", "of each branch, before it is added")
    dropout1: Amount | None = flag(None, "P", "with --dropout2, if they are the same: --dropout")
    dropout2: Amount | None = flag(None, "P", "see --dropout1")
    attention_dropout: Amount = flag(0.0, "P", "of attention's weights")
    embedding_dropout: Amount = flag(0.0, "P", "of embeddings")

    batch_size: Positive = flag(2, "N", group=("training",))
    "sequences at once, per data-parallel process"
    gradient_accumulation_steps: Positive = flag(
        16, "N", names="--gradient_accumulation_steps --grad_accum"
    )
    "of these per step, data-parallel processes together"
    num_accumulation_steps: Count = flag(0, "N", "the same of one process; 0: its share of those")
    max_iters: Positive = flag(100000, "N", "steps of the optimizer")
    max_minutes: Amount = flag(0.0, "X", "end at the first evaluation after so long; 0: never")
    learning_rate: Amount = flag(4e-4, "LR", "the largest", names="--learning_rate --lr")
    min_lr: Amount = flag(0.0, "LR", "the last; 0: a tenth of the largest")
    warmup_iters: Count = flag(2000, "N", "steps over which it rises")
    sparse_to_dense: Fraction | None = flag(None, "X")
    "share of the run after which monarch or blockdiag layers become dense"
    lr_decay_iters: Count = flag(0, "N", "steps after which it is the last; 0: max_iters")
    weight_decay: Amount = flag(0.1, "X", "of weights of two axes or more")
    beta1: Amount = flag(0.9, "X", "AdamW's")
    beta2: Amount = flag(0.95, "X", "AdamW's")
    eps: Amount = flag(1e-8, "X", "AdamW's")
    grad_clip: Amount = flag(1.0, "X", "most that all gradients' norm may be; 0: any")
    seed: Seed = flag(1337, "N", "of weights, dropout and order of the data")
    precision: Precision = flag("float32", "NAME", names="--precision --dtype")
    "what tensors and products are made of"
    resume: bool = flag(False, text="go on from the last checkpoint in output_dir, if any")
    init_from: str = flag("", "PATH")
    "weights to begin with: a Hugging Face directory or a LiBai checkpoint"

    data: str = flag("", "PATH", names="--data --train_bin_dir", group=("data and output",))
    "token file, folder or pattern; prepare.py makes one"
    val_data: str = flag("", "PATH", names="--val_data --valid_bin_dir")
    "to evaluate on; empty: PREFIX_valid.bin beside PREFIX.bin, if there"
    token_dtype: Literal["uint16", "uint32"] = flag(
        "uint16", None, "of token files without a .json"
    )
    packing: Literal["stream", "documents"] = flag("stream")
    "documents: those packed in a row do not see each other"
    dummy: bool = flag(False, text="random tokens, no disk")
    output_dir: str = flag("projects/Llama/output", "DIR", names="--output_dir --out_dir")
    "checkpoints, metrics and curves"
    log_interval: Positive = flag(1, "N", "steps between log lines")
    save_interval: Positive = flag(1000, "N", "steps between checkpoints")
    eval_interval: Count = flag(1000, "N", "steps between evaluations; 0: none")
    eval_iters: Positive = flag(100, "N", "batches of an evaluation")
    profile: Count = flag(0, "N")
    "say where the time of so many steps goes, by operator, and end; 0: train"
    num_workers: Count = flag(0, "N", "processes that read data")
    wandb_log: bool = flag(False, text="metrics to a run of wandb too, offline")
    wandb_project: str = flag("z2all", "NAME", "whose run that is")
    wandb_run_name: str = flag("", "NAME", "its name; empty: that of output_dir")

    device: str = flag("", "NAME", "by name; empty: the best there is", group=("devices",))
    graph: bool = flag(False, text="nn.Graph in place of eager mode", names="--graph --compile")
    tensor_parallel: Positive = flag(1, "N", "processes that share each layer")
    pipeline_parallel: Positive = flag(1, "N", "stages; what is left is data parallel")
    sequence_parallel: bool = flag(False, text="split norms over tensor parallelism too")
    zero_stage: Annotated[int, Field(ge=0, le=3)] = flag(0, "N")
    "1 to 3: shard the optimizer's state, gradients, weights (graph)"
    recompute: bool = flag(False, text="keep no activations of blocks (graph)")
    peak_tflops: Amount = flag(0.0, "X")
    "of one device, for the MFU; 0: its table's, or measured once"

    use_flash: bool = flag(True, group=("fused operations",))
    "attention without a matrix of time x time"
    use_fused_rope: bool = flag(True, text="rotary embedding in one pass")
    use_fused_cross_entropy: bool = flag(True, text="loss without the logits")
    use_fused_rmsnorm: bool = flag(True, text="norms in one pass")
    use_fused_dropout_add_norm: bool = flag(True, text="norms that drop out and add the branch")
    use_fused_swiglu: bool = flag(True, text="silu and product in one pass")
    fused_adamw: bool = flag(True, text="the optimizer's update in one pass")
    attn_impl: Literal["", "naive", "chunked", "fmha"] = flag("", "NAME")
    "naive, chunked (use_flash, on any device) or fmha (CUDA's)"
    disable: str = flag("", "NAMES", "operations to switch off, by name, with commas between")

    ablate: Literal["", "table1", "table2", "table3"] = flag(
        "", "TABLE", group=("instead of training",)
    )
    "table1, table2 or table3: each fused operation off by turns"
    turns: Positive = flag(3, "N", "times that --ablate runs each row, all rows in turns")
    warm_up: Count = flag(5, "N", "first iterations of a row of --ablate that do not count")
    estimate: bool = flag(False, text="parameters, memory and step time, without a step")
    gpu: str = flag("A100", "NAME", "whose data sheet --estimate takes")

    @model_validator(mode="before")
    @classmethod
    def _of_preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        sizes = PRESETS[given.get("preset", "z2all")]
        return {**dict(zip(_SIZES, sizes, strict=True)), **given}

    @model_validator(mode="after")
    def _check(self) -> Options:
        if self.dropout1 != self.dropout2:
            raise ValueError(
                "--dropout1 and --dropout2 differ, and both branches of a block have one rate "
                "here: give --dropout"
            )
        if self.dropout1 is not None:
            self.dropout = self.dropout1
        if self.min_lr > self.learning_rate:
            raise ValueError(
                f"--min_lr={self.min_lr} is above --learning_rate={self.learning_rate}"
            )
        if self.attn_impl == "fmha":
            raise ValueError(
                "--attn_impl=fmha: OneFlow's fused attention has no gradient; take chunked or naive"
            )
        return self


def build_parser() -> Parser:
    """The parser of pretrain.py."""
    parser = Parser(
        prog="pretrain.py",
        description="Train a Llama from scratch, with fused operations that can be switched off.",
        usage="%(prog)s [--key=value ...]",
        allow_abbrev=False,
    )
    Options.add_to(parser)
    return parser


def parse(argv: Sequence[str]) -> Options:
    """The flags. UserError: one that does not exist (names the nearest), or a wrong value."""
    return Options.parse(build_parser(), argv)


def disabled(flags: Options) -> list[str]:
    """The operations that run as plain operators, by name."""
    names = [name.strip() for name in flags.disable.split(",") if name.strip()]
    for switch, operations in FUSED.items():
        naive = switch == "use_flash" and flags.attn_impl == "naive"
        if not getattr(flags, switch) or naive:
            names += operations
    return sorted(set(names))


def padded_vocabulary(flags: Options) -> int:
    """vocab_size as the model has it: a multiple of 8, without which products are slower."""
    return -(-flags.vocab_size // 8) * 8


def accumulation_steps(flags: Options, processes: int = 1) -> int:
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


def settings(flags: Options) -> dict[str, Any]:
    """What the flags are in the config, by key."""
    values = {key: getattr(flags, name) for name, key in _KEYS.items()}
    values["model.cfg.vocab_size"] = padded_vocabulary(flags)
    if not flags.ffn_hidden_size:
        inner = -(-int(8 * flags.hidden_size / 3) // flags.multiple_of) * flags.multiple_of
        values["model.cfg.ffn_hidden_size"] = inner
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
    return values


def overrides(flags: Options) -> list[str]:
    """The same as "key=value" texts for `tools/train_net.py`."""
    return [f"{key}={_text(value)}" for key, value in settings(flags).items()]


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
