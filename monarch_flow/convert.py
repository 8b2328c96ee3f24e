"""Converts weights: dense to structured layers, structured to dense, published T2T-ViT to ours.

    python -m monarch_flow.convert project vit.safetensors vit-monarch.safetensors --config monarch
    python -m monarch_flow.convert densify runs/vit-monarch/checkpoints vit-dense.safetensors
    python -m monarch_flow.convert t2t 81.7_T2T_ViTt_14.pth.tar t2t.safetensors

`--help` after a command lists its options. Nothing in an input file is ever run, and no input is
ever written to.
"""

from __future__ import annotations

import argparse
import logging
import re
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from oneflow_accel import command
from oneflow_accel.command import Parser
from oneflow_accel.errors import UserError

import numpy as np
import safetensors
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flow_train.checkpoint.folders import (
    Checkpoint,
    CheckpointManager,
    read_checkpoint,
    require_no_other_run,
)
from flow_train.checkpoint.torch_files import narrow_to_bfloat16
from flow_train.checkpoint.weights import bfloat16_names, read_weights
from flow_train.files import replace_file, writing
from flow_train.optim import EMA_PREFIX, averages_in
from monarch_flow.layers import LinearConfig
from monarch_flow.layers.config import compiled
from monarch_flow.models.t2t_vit import t2t_names
from monarch_flow.projection.state_dicts import (
    LayerReport,
    Rule,
    densify_training_state,
    densify_weights,
    format_table,
    join_split_attention,
    project_weights,
    split_packed_attention,
)
from monarch_flow.projection.structures import (
    LayerSpec,
    find_layers,
    joined,
    layers_from_json,
    layers_to_json,
)

SUFFIX = ".safetensors"
# The key of the structured layers' description: in the metadata of a safetensors file, and in a
# checkpoint's state.
LAYERS = "monarch_flow.layers"


@dataclass
class Source:
    """What was read.

    Attributes:
        layers: structured layers by module name as the file describes them; None where it does not.
        checkpoint: the training checkpoint, where it is one.
        bfloat16: names of the arrays that are bfloat16 in the file, and float32 here.
    """

    path: Path
    weights: dict[str, np.ndarray]
    layers: dict[str, LayerSpec] | None = None
    checkpoint: Checkpoint | None = field(default=None, repr=False)
    bfloat16: frozenset[str] = frozenset()

    def keeps_bfloat16(self, name: str) -> bool:
        """Whether a converted array should be bfloat16: as in the file, and a new name as the
        others of its layer, or else as most of the file's."""
        if name in self.weights:
            return name in self.bfloat16
        layer = name.rpartition(".")[0]
        owners = (key.rpartition(".")[::2] for key in self.weights)
        inside = [joined(of, kind) for of, kind in owners if of == layer and kind != "bias"]
        floats = [key for key in inside or self.weights if self.weights[key].dtype.kind == "f"]
        return 2 * len(self.bfloat16.intersection(floats)) > len(floats)


def read_source(path: Path, *, averaged: bool = True) -> Source:
    """Read a file of `torch.save` or safetensors, or a training checkpoint or run by its folder.

    `averaged` takes the moving averages of a file that has both; a training checkpoint is read
    whole. Raises UserError where it is not there, damaged, or of another format.
    """
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    bfloat16: frozenset[str] = frozenset()
    if path.is_dir() or path.name in ("latest", "best"):
        checkpoint = read_checkpoint(path)
        weights, described = dict(checkpoint.model), checkpoint.state.get(LAYERS)
    else:
        checkpoint = None
        weights = read_weights(path, averaged=averaged)
        bfloat16 = bfloat16_names(path, averaged=averaged)
        described = _metadata(path).get(LAYERS)
    try:
        layers = None if described is None else layers_from_json(described)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return Source(path, weights, layers, checkpoint, bfloat16)


def check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise UserError where the result may not be written, before minutes of work.

    The source is never written to. `target` is a safetensors file, which `overwrite` may replace,
    or the folder of a new checkpoint.
    """
    same = target.exists() and source.exists() and target.samefile(source)
    if same or target.resolve() == source.resolve():
        raise UserError(f"{target} is the input itself, which is never overwritten; name another")
    if target.resolve() in source.resolve().parents:
        raise UserError(f"{target} contains the input; name another place")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target} is a folder that holds something; name a new one, or a file")
    if target.is_file() and not overwrite:
        raise UserError(f"{target} exists; name another file, or replace it with --overwrite")
    if target.suffix == SUFFIX and not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent} to write {target.name} to")


def write_weights(
    path: Path,
    weights: dict[str, np.ndarray],
    layers: dict[str, LayerSpec] | None = None,
    *,
    bfloat16: Collection[str] = (),
) -> None:
    """Write a safetensors file, in one step; its metadata describes the structured layers.

    `bfloat16` names the arrays to store as such, which numpy does not have. Raises UserError where
    writing fails.
    """
    metadata = {"format": "pt", **({LAYERS: layers_to_json(layers)} if layers else {})}
    kept = {
        name: narrow_to_bfloat16(array) if name in bfloat16 else np.asarray(array, order="C")
        for name, array in weights.items()
    }
    # The tensors point into `kept`, which must live until they are written.
    tensors = {
        name: safetensors.TensorSpec(
            dtype="bfloat16" if name in bfloat16 else array.dtype.name,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in kept.items()
    }
    with writing(path):
        replace_file(path, bytes(safetensors.serialize(tensors, metadata)))


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a new folder; returns its own folder there. Raises UserError."""
    step = checkpoint.state.get("step", 0)
    manager = CheckpointManager(folder)
    try:
        require_no_other_run(folder)
        manager.claim()
        return manager.save(checkpoint, step=step if isinstance(step, int) else 0)
    finally:
        manager.close()


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file that has been read; nothing for another file."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] != b"{" or len(head) < 9 or struct.unpack("<Q", head[:8])[0] == 0:
        return {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except safetensors.SafetensorError:
        return {}


# The published configs replace the MLPs of the vision models (in ViTAE those of its normal
# cells).
INCLUDE = r"^(blocks|layers\.\d+\.NC)\.\d+\.(mlp|mlp_channels)\.fc[12]$"
DTYPES = ("keep", "float32", "float64")
# The config group whose files `--config` knows by name.
_GROUP = "configs/model/vitmlp_cfg"

logger = logging.getLogger("oneflow_accel")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. UserError: it is wrong."""
    parser = Parser(
        prog="python -m monarch_flow.convert",
        description="Convert weights. IN is a .pth, .pth.tar or .safetensors file, or the folder "
        "of a training checkpoint; OUT a .safetensors file or, where IN is one, a new folder "
        "for one.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    project = _command(
        commands,
        "project",
        "dense layers to the nearest structured ones, by singular value decompositions",
    )
    project.add_argument(
        "--config",
        required=True,
        metavar="NAME_OR_YAML",
        help="the layer: a short name (monarch, blockdiag, low_rank, fbbfly, pixelfly), the name "
        "of a config of the group model/vitmlp_cfg, a YAML file, or YAML itself, such as "
        "'{_target_: monarch_flow.layers.MonarchLinear, nblocks: 8}'; with linear1_cfg and "
        "linear2_cfg in it each is for the layers named fc1 and fc2",
    )
    project.add_argument(
        "--include",
        default=INCLUDE,
        metavar="REGEX",
        help="which layers: those in whose name it is found (default: %(default)s)",
    )
    project.add_argument(
        "--exclude", metavar="REGEX", help="and which of them stay dense (default: none)"
    )
    project.add_argument(
        "--split-qkv",
        action="store_true",
        help="first split packed attention (qkv) into q_proj, k_proj and v_proj, as models with "
        "attnlinear_cfg have it (default: leave it packed)",
    )
    densify = _command(commands, "densify", "structured layers to the dense ones that do the same")
    densify.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="REGEX=OUTxIN",
        help="true sizes of layers that are padded, where IN does not say them (files written by "
        "`project` do); default: no padding. May be given several times",
    )
    densify.add_argument(
        "--join-qkv",
        action="store_true",
        help="then join q_proj, k_proj and v_proj of attention into a packed layer (qkv), as dense "
        "models without attnlinear_cfg have it (default: leave them apart)",
    )
    _command(commands, "t2t", "a published T2T-ViT checkpoint to the names of monarch_flow.models")
    return parser.parse_args(argv)


def _command(commands: Any, name: str, text: str) -> Parser:
    parser = commands.add_parser(name, help=text, description=f"Convert {text}.")
    parser.add_argument("source", type=Path, metavar="IN", help="file or folder to read")
    parser.add_argument("target", type=Path, metavar="OUT", help="file or folder to write")
    parser.add_argument(
        *("--dtype", "--precision"),
        choices=DTYPES,
        default="keep",
        help="of the weights written; sums are always made in float64 (default: %(default)s)",
    )
    parser.add_argument(
        "--no-ema",
        dest="ema",
        action="store_false",
        help="of a file or checkpoint that has both take the weights of the last step, and not "
        "their moving average (default: the average, as evaluation does)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file OUT (default: refuse)"
    )
    return parser


def run(options: argparse.Namespace) -> str:
    """Convert, and say what was done; UserError where the input or output cannot be used."""
    rules = layer_rules(options) if options.command == "project" else []
    check_target(options.source, options.target, overwrite=options.overwrite)
    source = read_source(options.source, averaged=options.ema)
    if source.checkpoint is None and options.target.suffix != SUFFIX:
        raise UserError(f"{options.target}: weights are written to a file that ends in {SUFFIX}")
    source = replace(source, weights=_cast(_chosen(source, options), options.dtype))
    if options.command == "t2t":
        return _write(options, source, Checkpoint(t2t_names(source.weights)), {}, [])
    if options.command == "project":
        return _project(source, options, rules)
    return _densify(source, options)


def _chosen(source: Source, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """The weights to convert; a file made of a checkpoint gets the moving averages, where there
    are any and they are wanted."""
    weights = source.weights
    if source.checkpoint is not None and options.target.suffix == SUFFIX:
        averages = averages_in(source.checkpoint.optimizer) if options.ema else {}
        if averages:
            logger.warning("%s: the moving averages of the weights are taken", source.path)
        weights = {**weights, **averages}
    if options.command == "project" and options.split_qkv:
        weights = split_packed_attention(weights)
    return weights


def _project(source: Source, options: argparse.Namespace, rules: list[Rule]) -> str:
    """The optimizer starts afresh: two factors have other coordinates than a dense weight, whose
    moments do not say how fast each should move."""
    weights, layers, reports = project_weights(source.weights, rules)
    averages = averages_in(source.checkpoint.optimizer) if source.checkpoint else {}
    if averages:
        split = split_packed_attention(averages) if options.split_qkv else averages
        averages = project_weights(split, rules)[0]
    # Buffers such as layouts are not parameters.
    kept = {EMA_PREFIX + name: array for name, array in averages.items() if array.dtype.kind == "f"}
    name = source.checkpoint.name if source.checkpoint else ""
    state = {LAYERS: layers_to_json(layers)}
    return _write(options, source, Checkpoint(weights, kept, state, name), layers, reports)


def _densify(source: Source, options: argparse.Namespace) -> str:
    layers = find_layers(source.weights) if source.layers is None else source.layers
    layers = {prefix: _sized(prefix, spec, options.size) for prefix, spec in layers.items()}
    if not layers and not options.join_qkv:
        raise UserError(f"{source.path} has no structured layers; it is dense already")
    if source.checkpoint is None or options.target.suffix == SUFFIX:
        dense, reports = densify_weights(source.weights, layers)
        return _write(options, source, Checkpoint(_joined(dense, options)), {}, reports)
    checkpoint = source.checkpoint
    try:
        new = densify_training_state(source.weights, checkpoint.optimizer, layers)
    except UserError as error:
        if not checkpoint.optimizer:
            raise
        new = densify_training_state(source.weights, {}, layers)
        logger.warning("the optimizer's state is left out: %s", error)
    state = {key: value for key, value in checkpoint.state.items() if key != LAYERS}
    whole = Checkpoint(_joined(new.model, options), new.optimizer, state, checkpoint.name)
    if options.join_qkv:
        whole.optimizer = join_split_attention(whole.optimizer)
    return _write(options, source, whole, {}, new.reports)


def _joined(weights: dict[str, np.ndarray], options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Pack attention's projections, where that is asked for."""
    if not options.join_qkv:
        return weights
    packed = join_split_attention(weights)
    if len(packed) == len(weights):
        raise UserError("--join-qkv: there are no dense layers q_proj, k_proj and v_proj to join")
    return packed


def _write(
    options: argparse.Namespace,
    source: Source,
    checkpoint: Checkpoint,
    layers: dict[str, LayerSpec],
    reports: list[LayerReport],
) -> str:
    where = target = options.target
    narrow: set[str] = set()
    if target.suffix == SUFFIX:
        if options.dtype == "keep" and source.bfloat16:
            floats = [name for name, array in checkpoint.model.items() if array.dtype.kind == "f"]
            narrow = {name for name in floats if source.keeps_bfloat16(name)}
        write_weights(target, dict(checkpoint.model), layers, bfloat16=narrow)
    else:
        where = write_checkpoint(target, checkpoint)
    arrays = checkpoint.model.items()
    dtypes = sorted({"bfloat16" if name in narrow else str(a.dtype) for name, a in arrays})
    numbers = sum(array.size for _, array in arrays)
    text = f"{where}: {len(checkpoint.model)} arrays, {numbers:,} numbers ({', '.join(dtypes)})"
    # Files do not keep an order.
    reports = sorted(reports, key=lambda report: _natural(report.name))
    return f"{format_table(reports)}\n{text}" if reports else text


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def layer_rules(options: argparse.Namespace) -> list[Rule]:
    """Which layer for which names; UserError where an expression or the config is wrong."""
    for option in ("include", "exclude"):
        try:
            compiled(getattr(options, option) or "")
        except UserError as error:
            raise UserError(f"--{option} {error}") from error
    config = _read_config(options.config)
    if isinstance(config, Mapping):
        for key in ("model", "mlp_cfg"):
            if key in config and config[key] is None:
                raise UserError(f"--config {options.config}: {key} is null, so all stays dense")
            config = config[key] if isinstance(config.get(key), Mapping) else config
        pair = {"fc1": "linear1_cfg", "fc2": "linear2_cfg"}
        if any(key in config for key in pair.values()):
            return [
                (_pattern(options, rf"\b{name}"), LinearConfig.of(config.get(key)))
                for name, key in pair.items()
            ]
    return [(_pattern(options, ""), LinearConfig.of(config))]


def _pattern(options: argparse.Namespace, ending: str) -> str:
    """One expression for names that have `include`, not `exclude`, and this ending."""
    if not options.exclude and not ending:
        return options.include
    without = f"(?!.*?(?:{options.exclude}))" if options.exclude else ""
    return f"^{without}(?=.*?(?:{options.include})).*{ending}$"


def _read_config(text: str) -> Any:
    """What `--config` names: a mapping, or a short name as it is."""
    try:
        if text.lstrip().startswith("{"):
            return _resolved(OmegaConf.create(text))
        if text.endswith((".yaml", ".yml")):
            return _resolved(OmegaConf.load(text))
        try:
            LinearConfig.of(text)
        except UserError as error:
            shipped = files("monarch_flow").joinpath(f"{_GROUP}/{text}.yaml")
            if not shipped.is_file():
                raise UserError(f"--config {text}: {error}; nor is it a YAML file") from error
            return _resolved(OmegaConf.create(shipped.read_text()))
        return text
    except OSError as error:
        raise UserError(f"--config {text}: {error.strerror or error}") from error
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"--config {text}: it cannot be read as YAML: {error}") from error


def _resolved(config: Any) -> Any:
    """The content as plain values. A file of the group belongs under `model` and may refer to
    itself from there."""
    content = OmegaConf.to_container(config, resolve=False)
    has_root = isinstance(content, Mapping) and "model" in content
    whole = OmegaConf.create(content if has_root else {"model": content})
    OmegaConf.resolve(whole)
    return OmegaConf.to_container(whole)["model"]  # type: ignore[index,call-overload]


def _sized(prefix: str, spec: LayerSpec, sizes: Sequence[str]) -> LayerSpec:
    for text in sizes:
        match = re.fullmatch(r"(.+)=(\d+)x(\d+)", text)
        if match is None:
            raise UserError(f"--size {text}: expected REGEX=OUTxIN, such as fc1=2304x768")
        if compiled(match[1]).search(prefix):
            size = int(match[2]), int(match[3])
            if size[0] > spec.out_features or size[1] > spec.in_features or min(size) < 1:
                raise UserError(
                    f"--size {text}: {prefix} has room for {spec.out_features}x{spec.in_features}"
                )
            return replace(spec, out_features=size[0], in_features=size[1])
    return spec


def _cast(weights: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    if dtype == "keep":
        return weights
    return {
        name: array.astype(dtype) if array.dtype.kind == "f" else array
        for name, array in weights.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; user errors become text on stderr and a non-zero exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    arguments = sys.argv[1:] if argv is None else argv
    return command.run("convert", lambda: print(run(parse_arguments(arguments))))


if __name__ == "__main__":
    sys.exit(main())
