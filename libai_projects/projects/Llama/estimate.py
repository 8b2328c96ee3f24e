"""`pretrain.py --estimate`: parameters, FLOPs, memory and time of a step, without one, and how far
the performance diary agrees with itself.

Figures of GPUs are for one GPU, bfloat16 autocast over float32 weights, and operators as the diary
has them; no step has run there. The CPU's peak is that of this project, float32 and eager, and is
compared with real runs by `python -m benchmarks.memory`.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oneflow_accel.errors import UserError, nearest

from rich.console import Console
from rich.table import Table

from libai_projects.models.llama import options as model_options
from libai_projects.models.llama.options import ModelOptions
from libai_projects.projects.Llama import diary
from libai_projects.projects.Llama import flags as flag_table

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
# Flags that change memory or time in ways that are not counted here, and what leaves all as it is.
_LEFT_OUT = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "zero_stage": 0,
    "recompute": False,
    "graph": False,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
# Of cross_entropy.cpp: logits that exist at a time.
CPU_LOGITS = 72 * _MIB


@dataclass(frozen=True)
class Job:
    """What is trained, `batch` sequences at a time and `steps` times for an update, with the
    operations `off` as plain operators."""

    options: ModelOptions
    batch: int
    steps: int
    off: frozenset[str]

    @classmethod
    def of(cls, flags: argparse.Namespace) -> Job:
        """UserError: sizes that no model has."""
        if flags.vocab_size < 1:
            raise UserError(f"--vocab_size={flags.vocab_size}: --estimate reads no data; say it")
        names = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
        cfg = {name: getattr(flags, name) for name in names}
        cfg["vocab_size"] = flag_table.padded_vocabulary(flags)
        cfg["ffn_hidden_size"] = flag_table.ffn_hidden_size(flags)
        cfg["max_seq_length"] = flags.max_seq_len
        for name in ("attention_bias", "tie_word_embeddings", "residual_in_fp32"):
            cfg[name] = getattr(flags, name)
        options = model_options.from_config(cfg)
        off = frozenset(flag_table.disabled(flags))
        return cls(options, flags.batch_size, flag_table.accumulation_steps(flags), off)

    @property
    def time(self) -> int:
        return self.options.max_seq_length

    @property
    def rows(self) -> int:
        """Tokens at a time."""
        return self.batch * self.time

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
    def norms(self) -> int:
        return 2 * self.options.num_layers + 1

    @property
    def head(self) -> int:
        """Numbers of the weight that makes logits."""
        return self.options.vocab_size * self.options.hidden_size

    @property
    def scores(self) -> int:
        """Of one layer's attention, those that the causal rule hides too."""
        return self.batch * self.options.num_attention_heads * self.time**2


def _tensors(job: Job) -> list[tuple[str, int]]:
    """Category and elements of each parameter, in the model's order."""
    o, hidden = job.options, job.options.hidden_size
    found = [("embedding", job.head)]
    for _ in range(o.num_layers):
        found += [("norms", hidden)] * 2
        for columns in (job.queries, job.keys, job.keys):
            found.append(("attention", hidden * columns))
            found += [("biases", columns)] * o.attention_bias
        found.append(("attention", job.queries * hidden))
        found += [("biases", hidden)] * o.attention_bias
        found += [("MLP", hidden * job.inner)] * 3
    found.append(("norms", hidden))
    return found if o.tie_word_embeddings else [*found, ("head", job.head)]


def parameters(flags: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Numbers and tensors by category; weight decay is for all but "norms" and "biases"."""
    found: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for category, elements in _tensors(Job.of(flags)):
        found[category] += elements
        tensors[category] += 1
    return {category: (found[category], tensors[category]) for category in found}


def flops_per_token(flags: argparse.Namespace) -> int:
    """6 N + 12 layers x width x time (Chowdhery et al. 2022, appendix B), all parameters in N."""
    job = Job.of(flags)
    total = sum(elements for _, elements in _tensors(job))
    return 6 * total + 12 * job.options.num_layers * job.queries * job.time


def tokens_per_step(flags: argparse.Namespace) -> int:
    """Of one process."""
    job = Job.of(flags)
    return job.steps * job.rows


def gpu_memory(flags: argparse.Namespace) -> dict[str, int]:
    """Bytes on a GPU by category, those of what is switched off included, at the step's largest:
    the last backward pass begins."""
    job = Job.of(flags)
    o, rows, layers = job.options, job.rows, job.options.num_layers
    elements = sum(count for _, count in _tensors(job))
    residual = 4 if o.residual_in_fp32 else 2
    memory = {
        "weights, float32": 4 * elements,
        "gradients, float32": 4 * elements,
        "AdamW's moments, float32": 8 * elements,
        "weights, bfloat16 copies": 2 * _product_weights(job),
        # The sum and the output of each, and a number for each row.
        "activations of norms": job.norms * rows * (o.hidden_size * (residual + 2) + 4),
        # Query, output, key, value, and the logarithm of the sum of exponentials.
        "activations of attention": layers
        * rows
        * (4 * (job.queries + job.keys) + 4 * o.num_attention_heads),
        # Gate, up and their product.
        "activations of MLP": layers * rows * 6 * job.inner,
        "logits and their gradient, bfloat16": 4 * rows * o.vocab_size,
    }
    for row, (saved, transient) in added_memory(flags).items():
        if OPERATORS[row].name in job.off:
            memory[f"{row} switched off"] = saved + transient
    return memory


def added_memory(flags: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Bytes that each operator switched off adds on a GPU: what the backward pass keeps, and what
    only a moment needs."""
    job = Job.of(flags)
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


def _product_weights(job: Job) -> int:
    """Numbers of the weights that tokens are multiplied with."""
    matrices = sum(count for kind, count in _tensors(job) if kind in ("attention", "MLP"))
    return matrices + job.head


def gpu_named(name: str) -> Gpu:
    """UserError for an unknown name, with those that are near."""
    known = {key.lower(): key for key in GPUS}
    plain = name.lower().replace(" ", "")
    if plain in known:
        return GPUS[known[plain]]
    near = nearest(plain, GPUS, most=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(GPUS)}"
    raise UserError(f"--gpu={name}: no data sheet of it here; {hint}")


def step_seconds(flags: argparse.Namespace, gpu: Gpu, off: Iterable[str]) -> float:
    """Predicted seconds of a step with the rows `off` of OPERATORS as plain operators: a roofline,
    products by their FLOPs and all else by the bytes it moves, one after the other. Starting
    operators takes no time here, and nothing runs at once."""
    job, plain = Job.of(flags), set(off)
    o, layers = job.options, job.options.num_layers
    scores = layers * o.num_attention_heads * job.time
    # Flash computes half of the scores, and those twice: 7 products in place of 12 / 2.
    attention = (12 if "flash" in plain else 7) * layers * job.queries * job.time
    elements = {
        "flash": scores,
        "rope": layers * (job.queries + job.keys),
        "cross_entropy": o.vocab_size,
        "rmsnorm": job.norms * o.hidden_size,
        "swiglu": layers * job.inner,
    }
    per_token = sum(count * _traffic(row, plain) for row, count in elements.items())
    total = sum(count for _, count in _tensors(job))
    # Weights to bfloat16, gradients to float32 and added up; the norm of gradients, and clipping.
    per_pass = 6 * _product_weights(job) + 18 * total
    per_step = (12 + _traffic("fused_adamw", plain)) * total
    tokens = job.steps * job.rows
    flops = tokens * (6 * _product_weights(job) + attention)
    moved = tokens * per_token + job.steps * per_pass + per_step
    rates = gpu.tflops * 1e12 * PRODUCTS_REACH, gpu.bandwidth * 1e9 * MEMORY_REACH
    return flops / rates[0] + moved / rates[1]


def _traffic(row: str, plain: set[str]) -> int:
    return OPERATORS[row].plain if row in plain else OPERATORS[row].fused


def inconsistent() -> list[tuple[str, str]]:
    """Table and row of the diary's times that cannot have the MFU beside them."""
    return [
        (table, row.name)
        for table, rows in diary.TABLES.items()
        for row in rows
        if not row.consistent
    ]


def cpu_peak(flags: argparse.Namespace) -> dict[str, int]:
    """Bytes that one process takes at most when it trains on a CPU, in float32 and eager mode, by
    category, and their "total". Dropout and processes that read data are left out.

    Tensors of LiBai are global, for which OneFlow copies what would be a view of a local one: a
    query's reshape and permute, and attention's output.
    """
    job = Job.of(flags)
    weights = [4 * count for _, count in _tensors(job)]
    saved, size = [4 * count for count in _saved_on_cpu(job)], sum(weights)
    passing = 4 * _passing_on_cpu(job)
    if OPERATORS["cross_entropy"].name not in job.off:
        passing += min(CPU_LOGITS, 4 * job.rows * job.options.vocab_size)
    tensors = 4 * size + sum(saved) + passing
    peak = {
        "process": CPU_PROCESS,
        "weights": size,
        "gradients": size,
        "AdamW's moments": 2 * size,
        "activations": sum(saved),
        "largest of a moment": passing,
        "copy for a checkpoint": max(weights),
    }
    blocks = _blocks(weights * 4) + _blocks(saved) + passing
    peak["allocator"] = round(CPU_REUSE * blocks) - tensors
    return {**peak, "total": sum(peak.values())}


def _saved_on_cpu(job: Job) -> list[int]:
    """Elements of each tensor that the backward pass keeps, in the order of the forward pass."""
    o, rows = job.options, job.rows
    fused = {row: operator.name not in job.off for row, operator in OPERATORS.items()}
    wide, query, key = rows * o.hidden_size, rows * job.queries, rows * job.keys
    inner = rows * job.inner
    # Sum and output; plain, also the squares and what the weight multiplies.
    norm = [wide, wide, rows] if fused["rmsnorm"] else [wide] * 4
    first = [wide, wide, rows] if "rms_norm" not in job.off else [wide] * 4
    # Plain, the halves that are joined again.
    turned = [] if fused["rope"] else [query // 2] * 2 + [key // 2] * 2
    # Output and logarithms of sums; plain, weights, and keys and values for each head of queries.
    repeated = [query] * 2 if query != key else []
    kept = [query, rows * o.num_attention_heads] if fused["flash"] else [*repeated, job.scores]
    attention = [query, key, key, *turned, *kept]
    mlp = [inner] * (3 if fused["swiglu"] else 4)
    found: list[int] = []
    for layer in range(o.num_layers):
        found += [*(norm if layer else first), *attention, query, *norm, *mlp]
    return [*found, *norm]


def _passing_on_cpu(job: Job) -> int:
    """Elements that exist for a moment, where they are most, while all of the above are kept."""
    o = job.options
    if OPERATORS["cross_entropy"].name in job.off:
        # Logits, their log-softmax, a copy or gradient of one; and a gradient of the weight.
        head = 3 * job.rows * o.vocab_size + job.head
    else:
        # The weight's gradient, times its factor, and added to that of the passes before.
        head = 3 * job.head + job.rows * o.hidden_size
    # Gradients of the MLP's three tensors, or the scores and two more of their size.
    plain = OPERATORS["flash"].name in job.off
    return max(head, 3 * job.rows * job.inner, 3 * job.scores if plain else 0)


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


def report(flags: argparse.Namespace) -> None:
    """Print it all. UserError: an unknown --gpu, or sizes that no model has."""
    gpu, console = gpu_named(flags.gpu), Console(highlight=False)
    same = flops_per_token(flags) == diary.FLOPS_PER_TOKEN
    # Whether the diary's figures are of this model and batch.
    shown = same and (tokens_per_step(flags), Job.of(flags).rows) == (diary.TOKENS, 4096)
    _print_parameters(console, flags, gpu, shown)
    _print_memory(console, flags, gpu, shown)
    _print_times(console, flags, gpu, shown)
    peak = cpu_peak(flags)
    title = "Peak of a process on a CPU, float32 and eager, predicted"
    _print(console, title, ("", "MB"), [(name, f"{n / 1e6:,.0f}") for name, n in peak.items()])
    given = [name for name, plain in _LEFT_OUT.items() if getattr(flags, name) != plain]
    if given:
        console.print(f"Left out of account: {', '.join(f'--{name}' for name in given)}.\n")
    _print_diary(console)


def _print(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """The first column to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _mib(size: float) -> str:
    return f"{size / _MIB:,.0f}"


def _print_parameters(console: Console, flags: argparse.Namespace, gpu: Gpu, shown: bool) -> None:
    counts = parameters(flags)
    plain = {"norms", "biases"} & set(counts)
    chosen = {
        **{category: {category} for category in counts},
        "all": set(counts),
        "all without input embedding": set(counts) - {"embedding"},
        "decayed": set(counts) - plain,
        "not decayed": plain,
    }
    rows = [
        (name, *(f"{sum(counts[category][part] for category in those):,}" for part in (0, 1)))
        for name, those in chosen.items()
    ]
    _print(console, "Parameters", ("", "numbers", "tensors"), rows)
    flops, tokens = flops_per_token(flags), tokens_per_step(flags)
    job = Job.of(flags)
    console.print(
        f"FLOPs per token: 6 N + 12 layers x width x time = {flops:,}\n"
        f"Tokens per iteration: {job.steps} x {job.batch} x {job.time} = {tokens:,} per process"
    )
    if shown:
        console.print(
            f"The diary writes 262,144 beside the same product, which is {tokens:,}: with 262,144 "
            f"its step of 3.17 s would be at {4 * diary.MFU_SECONDS / 3.17:.0f} % of the peak."
        )
    percent = 100 * flops * tokens / (gpu.tflops * 1e12)
    console.print(f"MFU in %: {percent:.4f} / seconds of a step, at {gpu.tflops:g} TFLOP/s\n")


def _print_memory(console: Console, flags: argparse.Namespace, gpu: Gpu, shown: bool) -> None:
    memory = gpu_memory(flags)
    total = sum(memory.values())
    rows = [(category, _mib(size)) for category, size in memory.items()]
    _print(console, "Memory on a GPU, predicted", ("", "MiB"), [*rows, ("total", _mib(total))])
    verdict = "fits in" if total <= gpu.memory * _GIB else "does not fit in"
    console.print(f"{total / _GIB:.1f} GiB {verdict} {flags.gpu}'s {gpu.memory} GiB.\n")
    columns, found = ["switched off", "kept MiB", "for a moment MiB"], []
    diary_mib = {row.name: 1000 * (row.memory or 0) for row in diary.TABLES["table1"]}
    for row, sizes in added_memory(flags).items():
        more = f"{diary_mib[f'w/o {row}'] - diary_mib['use_all']:,.0f}"
        found.append([row, *map(_mib, sizes), *([more] if shown else [])])
    _print(console, "What each adds", [*columns, "diary MiB"] if shown else columns, found)
    if shown:
        console.print(f"The diary's use_all takes {diary_mib['use_all']:,.0f} MiB.\n")


def _print_times(console: Console, flags: argparse.Namespace, gpu: Gpu, shown: bool) -> None:
    columns = ["", "s", "MFU %", *(["diary s, A800"] if shown else [])]
    work = flops_per_token(flags) * tokens_per_step(flags) / (gpu.tflops * 1e10)
    cases: dict[str, list[str]] = {"all fused": []}
    cases |= {f"w/o {row}": [row] for row in OPERATORS} | {"naive": list(OPERATORS)}
    measured = {row.name: row.seconds for row in diary.TABLES["table1"]}
    # Only the row beside the diary's table has a fused AdamW.
    measured |= {"all fused": measured["fused_adamw"], "w/o fused_adamw": measured["use_all"]}
    rows = []
    for name, off in cases.items():
        seconds = step_seconds(flags, gpu, off)
        beside = [f"{measured[name]:.2f}"] if shown else []
        rows.append([name, f"{seconds:.2f}", f"{work / seconds:.1f}", *beside])
    _print(console, f"A step on {flags.gpu}, predicted", columns, rows)
    console.print(
        "A prediction from the data sheet: nothing was measured. Products are taken to reach "
        f"{PRODUCTS_REACH:.0%} of {gpu.tflops:g} TFLOP/s, all else {MEMORY_REACH:.0%} of "
        f"{gpu.bandwidth:g} GB/s; starting operators takes no time in it.\n"
    )


def _print_diary(console: Console) -> None:
    found = []
    for name, rows in diary.TABLES.items():
        for row in rows:
            if row.seconds is None or row.mfu is None:
                continue
            # Both are cut off after two decimals.
            times = row.seconds + 0.01, row.seconds
            least, most = (int(100 * diary.MFU_SECONDS / time) / 100 for time in times)
            allowed = f"{least:.2f} to {most:.2f}{'' if row.consistent else ' [bold]no[/]'}"
            found.append((f"{name} {row.name}", f"{row.seconds:.2f}", f"{row.mfu:.2f}", allowed))
    columns = ("", "s", "MFU %", "its time allows %")
    _print(console, "The diary's MFU beside its times", columns, found)
    wrong = "; ".join(f"{table}, {row}" for table, row in inconsistent())
    console.print(f"Not consistent: {wrong}.")
