"""`pretrain.py --estimate`: parameters, FLOPs, memory and time of a step, without one, and how far
the performance diary agrees with itself.

Figures of GPUs are for one GPU, bfloat16 autocast over float32 weights, and operators as the diary
has them; no step has run there. The CPU's peak is that of this project, float32 and eager, and is
compared with real runs by `python -m benchmarks.memory`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oneflow_accel.errors import UserError, did_you_mean

from rich.console import Console
from rich.table import Table

from flow_train.metrics.work import FLOAT32, adamw_states, training_flops
from libai_projects.models.llama.options import LlamaOptions, from_config
from libai_projects.projects.Llama import diary
from libai_projects.projects.Llama import flags as flag_table
from libai_projects.weights.llama import LLAMA
from monarch_flow.layers import numbers_inside

_MIB, _GIB = 2**20, 2**30


class Gpu(NamedTuple):
    """TFLOP/s of dense products in bfloat16 (V100: float16) with sums in float32, GB/s and GiB of
    memory."""

    tflops: float
    bandwidth: float
    memory: int


# By the vendors' data sheets: NVIDIA V100 (SXM2), A100 (SXM), A800, H100 (SXM), H200; the GA102 and
# Ada white papers; Cambricon MLU370-X8.
GPUS = {
    "V100": Gpu(125, 900, 32),
    "A100": Gpu(312, 2039, 80),
    "A100-40": Gpu(312, 1555, 40),
    "A800": Gpu(312, 2039, 80),
    "RTX3090": Gpu(71, 936, 24),
    "RTX4090": Gpu(165.2, 1008, 24),
    "H100": Gpu(989.4, 3350, 80),
    "H200": Gpu(989.4, 4800, 141),
    "MLU370-X8": Gpu(96, 614.4, 48),
}
# What of a data sheet's rates large products and passes over memory are taken to reach.
PRODUCTS_REACH, MEMORY_REACH = 0.65, 0.8


class Operator(NamedTuple):
    """A row of the diary's ablation: what `flags.disabled` calls it, and the bytes it moves for
    each element, fused and plain, forward and backward, if every plain operator reads its inputs
    and writes its output. Elements are a norm's, a gate's, a query's or key's, a logit, a score or
    a parameter."""

    name: str
    fused: int
    plain: int


OPERATORS = {
    "flash": Operator("scaled_dot_product_attention", 0, 72),
    "rope": Operator("rope", 8, 36),
    "cross_entropy": Operator("linear_cross_entropy_mean", 6, 36),
    "rmsnorm": Operator("add_rms_norm", 28, 120),
    "swiglu": Operator("swiglu", 16, 28),
    "fused_adamw": Operator("adamw", 28, 88),
}

# The peak of --preset=tiny with two sequences (430 MB), less the tensors that cpu_peak counts:
# Python, OneFlow, LiBai, and matplotlib, which draws the curves.
CPU_PROCESS = 410_000_000
# A tensor may get a free piece of up to twice its size. What that adds to the blocks that tensors
# would need in a row: the mean over 12 runs of 37 to 125 million parameters, of 1.02 to 1.12.
CPU_REUSE = 1.065
# Categories of parameters by a part of their names.
_CATEGORIES = {
    "bias": "biases",
    "norm": "norms",
    "self_attention": "attention",
    "mlp": "MLP",
    "token_embeddings": "embedding",
    "lm_head": "head",
}
# Flags that change memory or time in ways that are not counted here.
_LEFT_OUT = (
    *("tensor_parallel", "pipeline_parallel", "zero_stage", "recompute", "graph", "dropout"),
    "attention_dropout",
)
# Of cross_entropy.cpp: logits that exist at a time.
CPU_LOGITS = 72 * _MIB


@dataclass(frozen=True)
class Job:
    """What is trained, `batch` sequences at a time and `steps` times for an update, with the
    operations `off` as plain operators."""

    options: LlamaOptions
    batch: int
    steps: int
    off: frozenset[str]

    @classmethod
    def of(cls, flags: flag_table.Options) -> Job:
        """UserError: sizes that no model has."""
        if flags.vocab_size < 1:
            raise UserError(f"--vocab_size={flags.vocab_size}: --estimate reads no data; say it")
        settings = flag_table.settings(flags).items()
        options = from_config({key.removeprefix("model.cfg."): value for key, value in settings})
        off = frozenset(flag_table.disabled(flags))
        return cls(options, flags.batch_size, flag_table.accumulation_steps(flags), off)

    def fuses(self, row: str) -> bool:
        """Whether it has a row of OPERATORS as one operator."""
        return OPERATORS[row].name not in self.off

    @property
    def rows(self) -> int:
        """Tokens at a time."""
        return self.batch * self.options.max_seq_length

    @property
    def tokens(self) -> int:
        """Of a step of one process."""
        return self.steps * self.rows

    @property
    def flops_per_token(self) -> int:
        """6 N + 12 layers x width x time, with all parameters in N."""
        return LLAMA.flops_per_token(vars(self.options))

    @property
    def share_computed(self) -> float:
        """Of `flops_per_token`, which has the embedding as a product."""
        looked_up = LLAMA.count(vars(self.options)) - LLAMA.product_weights(vars(self.options))
        return 1 - training_flops(looked_up) / self.flops_per_token

    @property
    def queries(self) -> int:
        """Columns of queries; their heads' outputs have as many."""
        return self.options.num_attention_heads * (self.options.head_size or 0)

    @property
    def keys(self) -> int:
        return (self.options.num_key_value_heads or 0) * (self.options.head_size or 0)

    @property
    def inner(self) -> int:
        return int(self.options.ffn_hidden_size or 0)

    @property
    def inside(self) -> tuple[int, int]:
        """Numbers that the structured layers of a block keep of a token, see `numbers_inside`, and
        those that batched products copy, before, between and after."""
        shapes, copied = LLAMA.block_shapes(vars(self.options)), 0
        for name, shape in shapes.items():
            if len(shape) == 3:
                blocks, outputs, inputs = shape
                copied += blocks * (outputs + (0 if name.endswith("blkdiag2") else inputs))
        return numbers_inside(shapes), copied

    @property
    def norms(self) -> int:
        return 2 * self.options.num_layers + 1

    @property
    def scores(self) -> int:
        """Of one layer's attention, those that the causal rule hides too."""
        return self.rows * self.options.num_attention_heads * self.options.max_seq_length


def _tensors(job: Job) -> list[tuple[str, int]]:
    """Category and elements of each parameter. A block's norms come first: CPU_REUSE was measured
    beside blocks of memory in this order."""
    sizes = vars(job.options)
    first, *last = LLAMA.shapes({**sizes, "num_layers": 0}).items()
    block = sorted(LLAMA.block_shapes(sizes).items(), key=lambda item: "norm" not in item[0])
    return [
        (next(category for part, category in _CATEGORIES.items() if part in name), math.prod(shape))
        for name, shape in (first, *block * job.options.num_layers, *last)
    ]


def parameters(job: Job) -> dict[str, tuple[int, int]]:
    """Numbers and tensors by category; weight decay is for all but "norms" and "biases"."""
    found: dict[str, tuple[int, int]] = {}
    for category, elements in _tensors(job):
        numbers, tensors = found.get(category, (0, 0))
        found[category] = numbers + elements, tensors + 1
    return found


def gpu_memory(job: Job) -> dict[str, int]:
    """Bytes on a GPU by category, those of what is switched off included, at the step's largest:
    the last backward pass begins."""
    o, rows, layers = job.options, job.rows, job.options.num_layers
    residual, states = 4 if o.residual_in_fp32 else 2, adamw_states(LLAMA.count(vars(o)))
    # Query, output, key, value, and the logarithm of the sum of exponentials.
    attention = 4 * (job.queries + job.keys) + 4 * o.num_attention_heads
    memory = {
        **{f"{name}, float32": size for name, size in states.items()},
        "weights, bfloat16 copies": 2 * LLAMA.product_weights(vars(o)),
        # The sum and the output of each, and a number for each row.
        "activations of norms": job.norms * rows * (o.hidden_size * (residual + 2) + 4),
        "activations of attention": layers * rows * attention,
        # Gate, up and their product.
        "activations of MLP": layers * rows * 6 * job.inner,
        "logits and their gradient, bfloat16": 4 * rows * o.vocab_size,
    }
    if job.inside[0]:
        memory["activations in structured layers"] = layers * rows * 2 * job.inside[0]
    for row, sizes in added_memory(job).items():
        if not job.fuses(row):
            memory[f"{row} switched off"] = sum(sizes)
    return memory


def added_memory(job: Job) -> dict[str, tuple[int, int]]:
    """Bytes that each operator switched off adds on a GPU: what the backward pass keeps, and what
    only a moment needs."""
    o, rows, layers = job.options, job.rows, job.options.num_layers
    # Probabilities in float32 and bfloat16, and keys and values repeated for each head of queries.
    repeated = 4 * rows * job.queries if job.keys != job.queries else 0
    return {
        "cross_entropy": (8 * rows * o.vocab_size, 0),
        "rmsnorm": (8 * rows * o.hidden_size * job.norms, 0),
        "swiglu": (4 * rows * job.inner * layers, 0),
        "flash": ((6 * job.scores + repeated) * layers, 12 * job.scores),
        "rope": (0, 0),
    }


def gpu_named(name: str) -> Gpu:
    """UserError for an unknown name, with those that are near."""
    known = {key.lower(): key for key in GPUS}
    plain = name.lower().replace(" ", "")
    if plain in known:
        return GPUS[known[plain]]
    hint = did_you_mean(plain, GPUS, f"there are {', '.join(GPUS)}", most=3)
    raise UserError(f"--gpu={name}: no data sheet of it here; {hint}")


def step_seconds(job: Job, gpu: Gpu, plain: Collection[str]) -> float:
    """Predicted seconds of a step with the rows `plain` of OPERATORS as plain operators: a
    roofline, products by their FLOPs and all else by the bytes it moves, one after the other.
    Starting operators takes no time here, and nothing runs at once."""
    o, layers, length = job.options, job.options.num_layers, job.options.max_seq_length
    weights, total = LLAMA.product_weights(vars(o)), LLAMA.count(vars(o))
    traffic = {row: each.plain if row in plain else each.fused for row, each in OPERATORS.items()}
    # Flash computes half of the scores, and those twice: 7 products in place of 12 / 2.
    attention = (12 if "flash" in plain else 7) * layers * job.queries * length
    elements = {
        "flash": layers * o.num_attention_heads * length,
        "rope": layers * (job.queries + job.keys),
        "cross_entropy": o.vocab_size,
        "rmsnorm": job.norms * o.hidden_size,
        "swiglu": layers * job.inner,
    }
    per_token = sum(count * traffic[row] for row, count in elements.items())
    # Each copy reads and writes bfloat16, forward and backward.
    per_token += 8 * layers * job.inside[1]
    # Weights to bfloat16, gradients to float32 and added up; the norm of gradients, and clipping.
    per_pass, per_step = 6 * weights + 18 * total, (12 + traffic["fused_adamw"]) * total
    flops = job.tokens * (training_flops(weights) + attention)
    moved = job.tokens * per_token + job.steps * per_pass + per_step
    rates = gpu.tflops * 1e12 * PRODUCTS_REACH, gpu.bandwidth * 1e9 * MEMORY_REACH
    return flops / rates[0] + moved / rates[1]


def cpu_peak(job: Job) -> dict[str, int]:
    """Bytes that one process takes at most when it trains on a CPU, in float32 and eager mode, by
    category, and their "total". Dropout and processes that read data are left out.

    Tensors of LiBai are global, for which OneFlow copies what would be a view of a local one: a
    query's reshape and permute, and attention's output.
    """
    weights = [FLOAT32 * count for _, count in _tensors(job)]
    saved = [FLOAT32 * count for count in _saved_on_cpu(job)]
    passing = _passing_on_cpu(job)
    tensors = {
        **adamw_states(LLAMA.count(vars(job.options))),
        "activations": sum(saved),
        "largest of a moment": passing,
    }
    blocks = _blocks(weights * 4) + _blocks(saved) + passing
    peak = {
        "process": CPU_PROCESS,
        **tensors,
        "copy for a checkpoint": max(weights),
        "allocator": round(CPU_REUSE * blocks) - sum(tensors.values()),
    }
    return {**peak, "total": sum(peak.values())}


def _saved_on_cpu(job: Job) -> list[int]:
    """Elements of each tensor that the backward pass keeps, in the order of the forward pass."""
    o, rows = job.options, job.rows
    wide, query, key = rows * o.hidden_size, rows * job.queries, rows * job.keys
    inner = rows * job.inner
    # Sum and output; plain, also the squares and what the weight multiplies.
    norm = [wide, wide, rows] if job.fuses("rmsnorm") else [wide] * 4
    first = [wide, wide, rows] if "rms_norm" not in job.off else [wide] * 4
    # Plain, the halves that are joined again.
    turned = [] if job.fuses("rope") else [query // 2] * 2 + [key // 2] * 2
    # Output and logarithms of sums; plain, weights, and keys and values for each head of queries.
    repeated = [query] * 2 if query != key else []
    kept = [query, rows * o.num_attention_heads] if job.fuses("flash") else [*repeated, job.scores]
    attention = [query, key, key, *turned, *kept]
    mlp = [inner] * (3 if job.fuses("swiglu") else 4)
    if job.inside[0]:
        mlp.append(rows * job.inside[0])
    found: list[int] = []
    for layer in range(o.num_layers):
        found += [*(norm if layer else first), *attention, query, *norm, *mlp]
    return [*found, *norm]


def _passing_on_cpu(job: Job) -> int:
    """Bytes of what exists for a moment, where it is most, while all of the above is kept."""
    o, logits, at_once = job.options, job.rows * job.options.vocab_size, 0
    head = o.vocab_size * o.hidden_size
    if job.fuses("cross_entropy"):
        # The weight's gradient, times its factor, and added to that of the passes before.
        last, at_once = 3 * head + job.rows * o.hidden_size, min(CPU_LOGITS, FLOAT32 * logits)
    else:
        # Logits, their log-softmax, a copy or gradient of one; and a gradient of the weight.
        last = 3 * logits + head
    # Gradients of the MLP's three tensors, or the scores and two more of their size.
    scores = 0 if job.fuses("flash") else 3 * job.scores
    return FLOAT32 * max(last, 3 * job.rows * job.inner, scores) + at_once


def _blocks(sizes: Iterable[int]) -> int:
    """Bytes of the blocks that OneFlow's allocator takes for tensors of these sizes, one after
    another: of 2 MiB for a piece below 1 MiB, of 20 MiB below 10 MiB, else of its size. A piece is
    split where it is twice as large as needed (oneflow/core/vm/bin_allocator.h)."""
    free: list[int] = []
    total = 0
    for size in sizes:
        need = -(-size // 512) * 512
        place = bisect_left(free, need)
        if place < len(free):
            piece = free.pop(place)
        else:
            large = -(-need // (2 * _MIB)) * 2 * _MIB
            piece = 2 * _MIB if need < _MIB else 20 * _MIB if need < 10 * _MIB else large
            total += piece
        if piece >= 2 * need or piece - need >= 128 * _MIB:
            insort(free, piece - need)
    return total


def report(flags: flag_table.Options) -> None:
    """Print it all. UserError: an unknown --gpu, or sizes that no model has."""
    gpu, job = gpu_named(flags.gpu), Job.of(flags)
    of_diary = diary.FLOPS_PER_TOKEN, diary.TOKENS, 4096
    # Whether the diary's figures are of this model and batch.
    shown = (job.flops_per_token, job.tokens, job.rows) == of_diary
    _print_parameters(job, gpu, shown)
    _print_memory(job, gpu, flags.gpu, shown)
    _print_times(job, gpu, flags.gpu, shown)
    title = "Peak of a process on a CPU, float32 and eager, predicted"
    rows = ((name, f"{size / 1e6:,.0f}") for name, size in cpu_peak(job).items())
    plain = flag_table.Options.model_fields
    given = [f"--{name}" for name in _LEFT_OUT if getattr(flags, name) != plain[name].default]
    text = f"Left out of account: {', '.join(given)}.\n" if given else ""
    _print(title, ("", "MB"), rows, text)
    _print_diary()


def _print(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], text: str = ""
) -> None:
    """A table, its first column to the left and numbers to the right, and a text below."""
    console, table = Console(highlight=False), Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if text:
        console.print(text)


def _mib(size: float) -> str:
    return f"{size / _MIB:,.0f}"


def _print_parameters(job: Job, gpu: Gpu, shown: bool) -> None:
    counts = parameters(job)
    every, plain = set(counts), {"norms", "biases"} & set(counts)
    chosen = {category: {category} for category in counts} | {
        "all": every,
        "all without input embedding": every - {"embedding"},
        "decayed": every - plain,
        "not decayed": plain,
    }
    rows = [
        (name, *(f"{sum(counts[category][part] for category in those):,}" for part in (0, 1)))
        for name, those in chosen.items()
    ]
    sizes = f"{job.steps} x {job.batch} x {job.options.max_seq_length}"
    lines = [
        f"FLOPs per token: 6 N + 12 layers x width x time = {job.flops_per_token:,}",
        f"Tokens per iteration: {sizes} = {job.tokens:,} per process",
    ]
    if shown:
        lines.append(
            f"The diary writes 262,144 beside the same product, which is {job.tokens:,}: with "
            f"262,144 its step of 3.17 s would be at {4 * diary.MFU_SECONDS / 3.17:.0f} % of the "
            "peak."
        )
    percent = 100 * job.flops_per_token * job.tokens / (gpu.tflops * 1e12)
    lines.append(f"MFU in %: {percent:.4f} / seconds of a step, at {gpu.tflops:g} TFLOP/s\n")
    _print("Parameters", ("", "numbers", "tensors"), rows, "\n".join(lines))


def _print_memory(job: Job, gpu: Gpu, name: str, shown: bool) -> None:
    memory = gpu_memory(job)
    total = memory["total"] = sum(memory.values())
    verdict = "fits in" if total <= gpu.memory * _GIB else "does not fit in"
    text = f"{total / _GIB:.1f} GiB {verdict} {name}'s {gpu.memory} GiB.\n"
    rows = ((category, _mib(size)) for category, size in memory.items())
    _print("Memory on a GPU, predicted", ("", "MiB"), rows, text)
    columns, text = ["switched off", "kept MiB", "for a moment MiB"], ""
    found = [[row, *map(_mib, sizes)] for row, sizes in added_memory(job).items()]
    if shown:
        mib = {row.name: 1000 * (row.memory or 0) for row in diary.TABLES["table1"]}
        columns.append("diary MiB")
        for cells in found:
            cells.append(f"{mib[f'w/o {cells[0]}'] - mib['use_all']:,.0f}")
        text = f"The diary's use_all takes {mib['use_all']:,.0f} MiB.\n"
    _print("What each adds", columns, found, text)


def _print_times(job: Job, gpu: Gpu, name: str, shown: bool) -> None:
    work = job.flops_per_token * job.tokens / (gpu.tflops * 1e10)
    cases: dict[str, list[str]] = {"all fused": [], **{f"w/o {row}": [row] for row in OPERATORS}}
    cases["naive"] = list(OPERATORS)
    measured = {row.name: row.seconds for row in diary.TABLES["table1"]}
    # Only the row beside the diary's table has a fused AdamW.
    measured |= {"all fused": measured["fused_adamw"], "w/o fused_adamw": measured["use_all"]}
    rows = []
    for case, plain in cases.items():
        seconds = step_seconds(job, gpu, plain)
        beside = [f"{measured[case]:.2f}"] if shown else []
        rows.append([case, f"{seconds:.2f}", f"{work / seconds:.1f}", *beside])
    _print(
        f"A step on {name}, predicted",
        ["", "s", "MFU %", *(["diary s, A800"] if shown else [])],
        rows,
        "A prediction from the data sheet: nothing was measured. Products are taken to reach "
        f"{PRODUCTS_REACH:.0%} of {gpu.tflops:g} TFLOP/s, all else {MEMORY_REACH:.0%} of "
        f"{gpu.bandwidth:g} GB/s; starting operators takes no time in it.\n",
    )


def _print_diary() -> None:
    found, wrong = [], []
    for table, row in [(table, row) for table, rows in diary.TABLES.items() for row in rows]:
        if row.seconds is None or row.mfu is None:
            continue
        least, most = diary.allowed_mfu(row.seconds)
        if not row.consistent:
            wrong.append(f"{table}, {row.name}")
        allowed = f"{least:.2f} to {most:.2f}{'' if row.consistent else ' [bold]no[/]'}"
        found.append((f"{table} {row.name}", f"{row.seconds:.2f}", f"{row.mfu:.2f}", allowed))
    columns, text = ("", "s", "MFU %", "its time allows %"), f"Not consistent: {'; '.join(wrong)}."
    _print("The diary's MFU beside its times", columns, found, text)
