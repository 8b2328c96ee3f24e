"""ViTAE's forward pass in float64 numpy, from vitae_spec.md, 1.3 to 1.7, and seeded weights."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tests.golden import seeded_weights
from tests.monarch_flow.models import numpy_vision, seeded_vision
from tests.monarch_flow.models.numpy_vision import State, gelu, layer_norm, linear

# Kernel, stride and dilations of the stages, and the strides of the convolutions beside them.
STAGES = ((7, 4, (1, 2, 3, 4), (2, 2, 1)), (3, 2, (1, 2, 3), (2, 1, 1)), (3, 2, (1, 2), (2, 1, 1)))


def state(named_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """As `seeded_vision.state`, batch norms included: scales and variances around 1."""
    arrays = {}
    for name, shape in named_shapes:
        if name.endswith("num_batches_tracked"):
            arrays[name] = np.array(100, dtype=np.int64)
        elif name.endswith("running_var") or (name.endswith(".weight") and len(shape) == 1):
            arrays[name] = seeded_weights.uniform(name, shape, 0.5, 1.5)
        elif name.endswith("running_mean"):
            arrays[name] = seeded_weights.uniform(name, shape, -0.3, 0.3)
        else:
            arrays |= seeded_vision.state([(name, shape)])
    return arrays


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def convolution(
    state: State,
    name: str,
    x: np.ndarray,
    *,
    stride: int = 1,
    padding: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> np.ndarray:
    """(N, C, H, W) to (N, out, H', W'), with a bias."""
    weight = state[f"{name}.weight"]
    out, per_group, kernel, _ = weight.shape
    reach = (kernel - 1) * dilation + 1
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (reach, reach), axis=(2, 3))
    windows = windows[:, :, ::stride, ::stride, ::dilation, ::dilation]
    batch, _, rows, columns = windows.shape[:4]
    grouped = windows.reshape(batch, groups, per_group, rows, columns, kernel, kernel)
    weight = weight.reshape(groups, out // groups, per_group, kernel, kernel)
    y = np.einsum("ngchwij,gocij->ngohw", grouped, weight, optimize=True)
    return y.reshape(batch, out, rows, columns) + state[f"{name}.bias"][:, None, None]


def batch_norm(state: State, name: str, x: np.ndarray, training: bool) -> np.ndarray:
    if training:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    else:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    scale = state[f"{name}.weight"] / np.sqrt(variance + 1e-5)
    shift = state[f"{name}.bias"] - scale * mean
    return x * scale[:, None, None] + shift[:, None, None]


def as_tokens(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1).transpose(0, 2, 1)


def as_map(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return x.transpose(0, 2, 1).reshape(len(x), -1, rows, columns)


def reduction(
    state: State, name: str, x: np.ndarray, stage: int, training: bool
) -> tuple[np.ndarray, int, int]:
    """Tokens, rows and columns."""
    kernel, stride, dilations, strides = STAGES[stage]
    branches = []
    for index, dilation in enumerate(dilations):
        padding = int(np.ceil(((kernel - 1) * dilation + 1 - stride) / 2))
        place = {"stride": stride, "padding": padding, "dilation": dilation}
        branches.append(gelu(convolution(state, f"{name}.PRM.convs.{index}.0", x, **place)))
    whole = np.concatenate(branches, axis=1)
    tokens, grid = as_tokens(whole), whole.shape[2:]
    if f"{name}.attn.w" in state:
        local = silu(convolution(state, f"{name}.PCM.0", x, stride=strides[0]))
        local = convolution(state, f"{name}.PCM.2", local, stride=strides[1])
        local = silu(batch_norm(state, f"{name}.PCM.3", local, training))
        local = silu(convolution(state, f"{name}.PCM.5", local, stride=strides[2]))
        tokens = numpy_vision.token_performer(state, f"{name}.attn", tokens, as_tokens(local))
    return tokens, *grid


def cell_branch(state: State, name: str, x: np.ndarray, groups: int, training: bool) -> np.ndarray:
    x = convolution(state, f"{name}.0", x, groups=groups)
    x = silu(batch_norm(state, f"{name}.1", x, training))
    x = convolution(state, f"{name}.3", x, groups=groups)
    if f"{name}.4.weight" in state:
        x = silu(batch_norm(state, f"{name}.4", x, training))
        x = silu(convolution(state, f"{name}.6", x, groups=groups))
    return x


def normal_cell(
    state: State,
    name: str,
    x: np.ndarray,
    grid: tuple[int, int],
    heads: int,
    groups: int,
    training: bool,
) -> np.ndarray:
    # A class token, where there is one, is the first.
    extra = x.shape[1] - grid[0] * grid[1]
    on_map = as_map(x[:, extra:], *grid)
    local = as_tokens(cell_branch(state, f"{name}.PCM", on_map, groups, training))
    width = x.shape[-1]
    parts = np.split(
        linear(state, f"{name}.attn.qkv", layer_norm(state, f"{name}.norm1", x, 1e-6)), 3, axis=-1
    )
    mixed = numpy_vision.attend(*parts, heads=heads, scale=(width // heads) ** -0.5)
    x = x + linear(state, f"{name}.attn.proj", mixed)
    x = x + np.pad(local, ((0, 0), (extra, 0), (0, 0)))
    return x + numpy_vision.mlp(state, f"{name}.mlp", layer_norm(state, f"{name}.norm2", x, 1e-6))


def vitae(
    state: State, images: np.ndarray, depth: int, heads: int, groups: int, training: bool = False
) -> np.ndarray:
    """The logits; in training without dropout and stochastic depth."""
    x = images
    for stage in range(3):
        tokens, rows, columns = reduction(state, f"layers.{stage}.RC", x, stage, training)
        x = as_map(tokens, rows, columns)
    for index in range(depth):
        name = f"layers.2.NC.{index}"
        tokens = normal_cell(state, name, tokens, (rows, columns), heads, groups, training)
    return linear(state, "head", tokens.mean(1))


def patch_vitae(
    state: State, images: np.ndarray, depth: int, heads: int, groups: int, training: bool = False
) -> np.ndarray:
    """The same of the models with a class token."""
    side = state["layers.0.RC.PRM.proj.weight"].shape[-1]
    grid = (images.shape[2] // side, images.shape[3] // side)
    tokens = numpy_vision.embed(state, "layers.0.RC.PRM", images)
    first = np.broadcast_to(state["layers.0.RC.cls_token"], (len(tokens), 1, tokens.shape[-1]))
    x = np.concatenate([first, tokens], axis=1) + state["layers.0.RC.pos_embed"]
    for index in range(depth):
        x = normal_cell(state, f"layers.2.NC.{index}", x, grid, heads, groups, training)
    return linear(state, "head", layer_norm(state, "fc_norm", x[:, 1:].mean(1), 1e-6))
