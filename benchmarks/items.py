"""What `make bench` measures: names, shapes and the ratio that each row has to reach.

Pure Python: both sides read it, ours (Python 3.10) and the peers' (Python 3.11).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

# What PyTorch's models run in. A row is against the fastest of its peers.
EAGER, COMPILED = "PyTorch", "torch.compile"
# Engines for inference alone, which take a model of PyTorch's.
OPENVINO, ONNX_RUNTIME = "OpenVINO", "ONNX Runtime"
# One for text, compiled by `make llama`: only who asks for its rows has it.
LLAMA_CPP = "llama.cpp"
BEST = (EAGER, COMPILED)


@dataclass(frozen=True)
class Item:
    """One row of the table.

    Attributes:
        name: unique; how both sides are asked for it.
        group: row of the issue's table; what `--only` takes.
        kind: which maker builds it on either side.
        params: arguments of the maker.
        bar: ratio (ours / peer, in throughput) that it has to reach, None where it has none.
        against: another item of ours to divide by, in place of the peer.
        peers: which of EAGER, COMPILED, OPENVINO, ONNX_RUNTIME and LLAMA_CPP have such a thing.
        stock: False where stock OneFlow, up to 600 times slower, is not worth the wait.
        precision: "float32"; "bfloat16" where both sides compute so, by autocast or, in inference,
            in the whole model.
        parts: what a step does this often, such as one token for each sequence: figures are of one.
    """

    name: str
    group: str
    kind: str
    params: dict[str, Any] = field(default_factory=dict)
    bar: float | None = None
    against: str | None = None
    peers: tuple[str, ...] = (EAGER,)
    stock: bool = True
    precision: str = "float32"
    parts: int = 1


# (rows of the activation, in, out) of linear layers.
_LINEAR = {
    "ViT-S qkv": (1576, 384, 1152),
    "ViT-S proj": (1576, 384, 384),
    "ViT-S fc1": (1576, 384, 1536),
    "ViT-S fc2": (1576, 1536, 384),
    "GPT-2 qkv": (512, 768, 2304),
    "GPT-2 proj": (512, 768, 768),
    "GPT-2 fc": (512, 768, 3072),
    "GPT-2 proj2": (512, 3072, 768),
    "GPT-2 head": (512, 768, 50257),
    "ResNet50 fc": (8, 2048, 1000),
}
# GPT-2's head for a few rows.
_HEAD = (16, 768, 50257)
# (batch * heads, tokens, head width) of attention.
_ATTENTION = {"ViT-S": (48, 197, 64), "GPT-2": (24, 256, 64)}
# ResNet50's convolutions by (size, in, out, kernel, stride), He et al. 2015, table 1 (v1.5).
RESNET50_CONVOLUTIONS = (
    (224, 3, 64, 7, 2),
    (56, 64, 64, 1, 1),
    (56, 64, 64, 3, 1),
    (56, 64, 256, 1, 1),
    (56, 256, 64, 1, 1),
    (56, 256, 128, 1, 1),
    (56, 128, 128, 3, 2),
    (28, 128, 512, 1, 1),
    (56, 256, 512, 1, 2),
    (28, 512, 128, 1, 1),
    (28, 128, 128, 3, 1),
    (28, 512, 256, 1, 1),
    (28, 256, 256, 3, 2),
    (14, 256, 1024, 1, 1),
    (28, 512, 1024, 1, 2),
    (14, 1024, 256, 1, 1),
    (14, 256, 256, 3, 1),
    (14, 1024, 512, 1, 1),
    (14, 512, 512, 3, 2),
    (7, 512, 2048, 1, 1),
    (14, 1024, 2048, 1, 2),
    (7, 2048, 512, 1, 1),
    (7, 512, 512, 3, 1),
)


# The preset "small" of Llama's pretrain.py, by transformers' names.
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def _gemm() -> Iterator[Item]:
    for name, (rows, inner, outer) in _LINEAR.items():
        for part in ("forward", "data grad", "weight grad"):
            params = {"rows": rows, "inner": inner, "outer": outer, "part": part}
            yield Item(f"gemm {name} {part}", "gemm", "linear", params, 0.97)
    # Where PyTorch's MKL was ahead on an Intel CPU. Those of (rows, in, out) are linear layers.
    for rows, inner, outer in ((1024, 768, 3072), (1576, 384, 1536), (1024, 1024, 1024), _HEAD):
        params = {"rows": rows, "inner": inner, "outer": outer, "part": "forward"}
        yield Item(f"gemm {rows} x {inner} x {outer}", "gemm", "linear", params, 0.97)
    params = {"batch": 96, "tokens": 197, "width": 64, "part": "scores"}
    yield Item("gemm 96 x 197 x 64 x 197", "gemm", "batched_matmul", params, 0.97)


def _attention_parts() -> Iterator[Item]:
    for name, (batch, tokens, width) in _ATTENTION.items():
        shape = {"batch": batch, "tokens": tokens, "width": width}
        for part in ("scores", "values"):
            params = {**shape, "part": part}
            yield Item(f"bmm {name} {part}", "batched", "batched_matmul", params, 1.0)
        rows = {"shape": (batch * tokens, tokens)}
        yield Item(f"softmax {name}", "batched", "softmax", rows, 1.0)
    for name, shape in (("ViT-S", (8, 197, 1536)), ("GPT-2", (2, 256, 3072))):
        for form in ("none", "tanh"):
            params = {"shape": shape, "approximate": form}
            title = "gelu" if form == "none" else "gelu tanh"
            yield Item(f"{title} {name}", "batched", "gelu", params, 1.0)
    for name, shape in (("ViT-S", (8, 197, 384)), ("GPT-2", (2, 256, 768))):
        yield Item(f"layer norm {name}", "batched", "layer_norm", {"shape": shape}, 1.0)
    yield Item("cross entropy GPT-2", "batched", "cross_entropy", {"shape": (512, 50257)}, 1.0)
    for name, (batch, heads, tokens, causal) in {
        "ViT-S": (8, 6, 197, False),
        "GPT-2": (2, 12, 256, True),
    }.items():
        params = {"batch": batch, "heads": heads, "tokens": tokens, "causal": causal}
        yield Item(f"attention {name}", "batched", "attention", params, 1.0)


def _memory_bound() -> Iterator[Item]:
    # (N, T, C) of float32: 1, 4 and 20 MB.
    for megabytes, shape in ((1, (4, 170, 384)), (4, (8, 340, 384)), (20, (8, 1700, 384))):
        for kind in ("relu", "add", "bias_add", "permute"):
            name = f"{kind} {megabytes} MB"
            yield Item(name, "memory", kind, {"shape": shape}, 0.9)
    yield Item("dropout ViT-S", "memory", "dropout", {"shape": (8, 197, 384)})


def _convolutions() -> Iterator[Item]:
    for size, inner, outer, kernel, stride in RESNET50_CONVOLUTIONS:
        for part in ("forward", "data grad", "weight grad"):
            if inner == 3 and part == "data grad":
                continue  # The images need no gradient.
            params = {"batch": 8, "size": size, "inner": inner, "outer": outer}
            params |= {"kernel": kernel, "stride": stride, "part": part}
            name = f"conv {size}x{size} {inner}->{outer} k{kernel} s{stride} {part}"
            yield Item(name, "conv", "conv", params, 0.95)


def _optimizers() -> Iterator[Item]:
    for optimizer in ("SGD", "AdamW"):
        for model, millions in (("resnet50", 25), ("gpt2", 124)):
            params = {"optimizer": optimizer, "model": model}
            name = f"{optimizer} {millions} M parameters"
            yield Item(name, "optimizer", "optimizer", params, 1.0)
    yield Item("clip_grad_norm_ 124 M parameters", "optimizer", "clip", {"model": "gpt2"})


def _models() -> Iterator[Item]:
    yield from _ways("ResNet50 forward b8", "resnet50", "resnet50_forward", {"batch": 8}, 1.2)
    yield from _inference("ResNet50 inference b8", "resnet50", "resnet50_inference", 1.3)
    yield from _ways("ResNet50 train b16", "resnet50", "resnet50_train", {"batch": 16}, 1.0)
    yield Item("ResNet50 train b16 nn.Graph", "resnet50", "resnet50_train_graph", {"batch": 16})
    yield from _ways("ViT-S/16 forward b8", "vit", "vit_forward", {"batch": 8}, 1.0)
    yield from _ways("ViT-S/16 train b8", "vit", "vit_train", {"batch": 8}, 1.0)
    text = {"batch": 2, "tokens": 256}
    yield from _ways("GPT-2 forward 2x256", "gpt2", "gpt2_forward", text, 1.0)
    yield from _ways("GPT-2 train 2x256", "gpt2", "gpt2_train", text, 1.1)
    # 124 M parameters beside transformers' Llama.
    text = {"batch": 1, "tokens": 1024}
    yield from _ways("Llama train 1x1024", "llama", "llama_train", text, 1.2, stock=False)
    yield from _inference("ViT-S/16 inference b8", "vit", "vit_inference", 1.0)


# Sequences, tokens of each that were read before, new ones, and the bar of int8 beside
# transformers at its best.
_TEXTS = {
    "GPT-2": (
        *((1, 64, 64, 1.0), (1, 64, 256, 1.0), (1, 960, 64, 1.0)),
        *((8, 64, 64, 1.6), (8, 64, 256, 1.6), (32, 64, 64, 2.0)),
    ),
    "Llama": ((1, 64, 64, 1.1), (8, 64, 64, 1.5)),
}
# With a context of 1,024 tokens in place of 64; by dtype of weights.
_LONG_TEXT_BARS = {"float32": 1 / 1.25, "bfloat16": None, "int8": 1 / 1.45}


def _generation() -> Iterator[Item]:
    """Greedy decoding, a new token of each sequence; with weights of 16 and 8 bits the cache is
    bfloat16. llama.cpp, whose 8 bits are Q8_0, has rows of its own, of one sequence."""
    for model, weights in itertools.product(_TEXTS, _LONG_TEXT_BARS):
        for batch, prompt, tokens, bar in _TEXTS[model]:
            name = f"{model} greedy b{batch}, {weights}, {prompt} + {tokens} tokens"
            params = {"model": model, "weights": weights, "batch": batch}
            params |= {"prompt": prompt, "tokens": tokens}
            row = partial(Item, kind="decode", params=params, stock=False, parts=tokens)
            yield row(name, "generation", bar=bar if weights == "int8" else 1.0)
            if batch == 1:
                bar = 1.0 if model == "GPT-2" else None
                yield row(f"{name}, llama.cpp", LLAMA_CPP, bar=bar, peers=(LLAMA_CPP,))
            if prompt == 960:
                short = name.replace("960 +", "64 +")
                bar = _LONG_TEXT_BARS[weights]
                yield row(f"{name}, ours", "generation", bar=bar, against=short, peers=())


def _ways(
    name: str, group: str, kind: str, params: dict[str, Any], bar: float, stock: bool = True
) -> Iterator[Item]:
    """In either precision, beside PyTorch's model as it is and compiled; `bar` is that of
    bfloat16."""
    yield Item(name, group, kind, params, 1.0, peers=BEST, stock=stock)
    settings: dict[str, Any] = {"precision": "bfloat16", "stock": False}
    yield Item(f"{name}, bf16", group, kind, params, bar, peers=BEST, **settings)
    over = {"bar": 1.3, "against": name, "peers": (), "precision": "bfloat16"}
    yield Item(f"{name}, bf16 over float32", group, kind, params, stock=False, **over)


def _inference(name: str, group: str, kind: str, bar: float) -> Iterator[Item]:
    """As we ship it, beside PyTorch and, in rows of their own, beside engines."""
    engines = {"float32": (OPENVINO, ONNX_RUNTIME), "bfloat16": (OPENVINO,)}
    for precision, others in engines.items():
        title = name if precision == "float32" else f"{name} bf16"
        params = {"batch": 8, "dtype": precision}
        stock = precision == "float32"
        settings: dict[str, Any] = {"precision": precision}
        yield Item(title, group, kind, params, bar, peers=BEST, stock=stock, **settings)
        title = f"{title}, engines"
        yield Item(title, "engines", kind, params, 0.9, peers=others, stock=False, **settings)
    over = {"against": name, "peers": (), "precision": "bfloat16"}
    yield Item(f"{name} bf16 over float32", group, kind, params, 1.6, **over)


def _ways_to_run() -> Iterator[Item]:
    """Prepared for inference, under nn.Graph, or both: none may be slower than the eager model."""
    for model, group in (("ResNet50", "resnet50"), ("ViT-S/16", "vit")):
        for ending, precision in (("", "float32"), (", bf16", "bfloat16")):
            name, kind = f"{model} forward b8{ending}", f"{group}_forward"
            over = {"bar": 0.98, "against": name, "peers": (), "precision": precision}
            for way in ("prepared", "nn.Graph", "prepared nn.Graph"):
                params = {"batch": 8, "way": way}
                yield Item(f"{name}, {way}", "ways", kind, params, stock=False, **over)


# In and out of the first layer of an MLP of ViT-B, both blocks of four.
_MONARCH = {"inner": 768, "outer": 3072}
# Rows of the table; batches of a sweep, where small ones show what Monarch costs.
_MONARCH_ROWS = (197, 1576, 6304)
_MONARCH_BATCHES = (1, 4, 16, 64, 256)
# Training ViT-S on 256 images at a time takes more memory than machines of this size have.
_MONARCH_TRAINED_BATCHES = _MONARCH_BATCHES[:-1]
# The group of the sweep; its items are called "dense WHAT, batch N" and "Monarch WHAT, batch N".
BATCHES = "monarch-batches"


def _beside_dense(
    name: str,
    group: str,
    kind: str,
    params: dict[str, Any],
    bar: float | None = None,
    bar_over_dense: float | None = None,
    **settings: Any,
) -> Iterator[Item]:
    """A dense item, the Monarch one in its place, and that one over our own dense one where it has
    a bar."""
    dense, monarch = f"dense {name}", f"Monarch {name}"
    with_monarch = {**params, "monarch": True}
    yield Item(dense, group, kind, {**params, "monarch": False}, **settings)
    yield Item(monarch, group, kind, with_monarch, bar, **settings)
    if bar_over_dense is not None:
        over = {**settings, "bar": bar_over_dense, "against": dense, "peers": ()}
        yield Item(f"{monarch}, ours", group, kind, with_monarch, **over)


def _monarch() -> Iterator[Item]:
    for rows in _MONARCH_ROWS:
        name, params = f"768->3072 train, {rows} rows", {"rows": rows, **_MONARCH}
        over_dense = 2.4 if rows == 1576 else None
        yield from _beside_dense(name, "monarch", "layer_train", params, 1.2, over_dense)
    kind, params = "monarch_vit_train", {"batch": 8}
    mixed: dict[str, Any] = {"precision": "bfloat16", "stock": False}
    yield from _beside_dense("vit-s train b8", "monarch", kind, params, 1.1, 1.35)
    yield from _beside_dense("vit-s train b8, bf16", "monarch", kind, params, 1.2, 1.2, **mixed)
    for part in ("forward", "train"):
        for rows in _MONARCH_BATCHES:
            name = f"768->3072 {part}, batch {rows}"
            params = {"rows": rows, **_MONARCH}
            yield from _beside_dense(name, BATCHES, f"layer_{part}", params, stock=False)
    for part, batches in (("forward", _MONARCH_BATCHES), ("train", _MONARCH_TRAINED_BATCHES)):
        for batch in batches:
            kind, name = f"monarch_vit_{part}", f"vit-s {part}, batch {batch}"
            yield from _beside_dense(name, BATCHES, kind, {"batch": batch}, stock=False)


# Model in monarch_flow, what the rows call it, batch, side of an image.
_VITAE = (
    ("ViTAE_basic_Tiny", "vitae-tiny", 8, 224),
    ("ViTAE_basic_Tiny", "vitae-tiny", 32, 96),
    ("ViTAE_basic_Small", "vitae-small", 8, 224),
)


def _vitae() -> Iterator[Item]:
    for model, title, batch, size in _VITAE:
        name = f"{title} train b{batch}, {size} px"
        params = {"model": model, "batch": batch, "size": size}
        if title == "vitae-tiny" and size == 224:
            settings = {"bar": 1.2, "precision": "bfloat16", "stock": False}
            dense = {**params, "monarch": False}
            yield Item(f"dense {name}, bf16", "vitae", "vitae_train", dense, **settings)
        # Most of the step is not an MLP, so that the bar is low.
        yield from _beside_dense(
            name, "vitae", "vitae_train", params, bar_over_dense=1.05, stock=False
        )
    # PyTorch has its whole model in the row's dtype.
    for batch, dtype in ((1, "float32"), (8, "float32"), (8, "bfloat16")):
        name = f"vitae-tiny inference b{batch}" + (" bf16" if dtype == "bfloat16" else "")
        params = {"model": "ViTAE_basic_Tiny", "batch": batch, "size": 224, "dtype": dtype}
        settings = {"stock": False, "precision": dtype}
        yield from _beside_dense(name, "vitae", "vitae_inference", params, **settings)


def _small() -> Iterator[Item]:
    """Their milliseconds say what one operation takes: the first is 100 of them."""
    chain = {"operations": 100, "numbers": 16}
    mlp = {"batch": 16, "inner": 32, "hidden": 64, "outer": 10}
    yield Item("100 additions to 16 numbers", "small", "chain", chain)
    yield Item("item() of a number", "small", "item", {})
    yield Item("sum().item() of a million numbers", "small", "sum_item", {"numbers": 1_000_000})
    yield Item("MLP 32-64-10 train b16", "small", "mlp_train", mlp, 0.67)


def all_items() -> list[Item]:
    """Every row, in the order of the table."""
    groups = (_gemm, _attention_parts, _memory_bound, _convolutions, _optimizers, _models)
    groups = (*groups, _generation, _ways_to_run, _monarch, _vitae, _small)
    return [item for group in groups for item in group()]


def chosen_items(groups: Sequence[str] | None, text: str | None) -> list[Item]:
    """The items of these groups (None: all but LLAMA_CPP) whose names contain a text, and those
    that they are divided by."""
    chosen = [
        item
        for item in all_items()
        if (item.group != LLAMA_CPP if groups is None else item.group in groups)
        and (text is None or text in item.name)
    ]
    names = {item.name for item in chosen} | {item.against for item in chosen}
    return [item for item in all_items() if item.name in names]
