r"""Trains a vision transformer of 10 billion parameters, or of any size, cut over processes.

    python3 -m oneflow.distributed.launch --nproc_per_node 4 vit_10b/run_vit_training.py \
        --data_dir DIR
    python3 vit_10b/run_vit_training.py --dry_run --num_devices 128

`--help` lists every option with its default; README.md says how a run is launched on many hosts.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

try:
    import oneflow_accel
except ImportError as error:
    sys.exit(
        f"{error}. run_vit_training.py runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )
from oneflow_accel import command, distributed, launched, layouts, precision, watchdog
from oneflow_accel.agree import everywhere, plain_values, require_same
from oneflow_accel.backends import Backend
from oneflow_accel.collectives import Mesh
from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.folders import AUTO_RESUME, require_model
from flow_train.config import keys
from flow_train.data.augment import build_train_transform
from flow_train.data.images import (
    ImageFolder,
    ImageLoader,
    SyntheticImages,
    contents,
    require_same_classes,
)
from flow_train.data.transforms import IMAGENET, EvalTransform
from flow_train.hooks import Hook, ModelCheckpoint
from flow_train.loop import Data, RunIdentity
from flow_train.metrics.profile import ProfileSteps
from flow_train.optim import CrossEntropy, Schedule, build_schedule
from flow_train.options import TrainerOptions
from flow_train.session import Recipe, Session
from flow_train.sharding import fully_shard, shard_unit
from flow_train.task import ImageTask
from monarch_flow.engine.sparse_to_dense import SparseToDense
from monarch_flow.engine.weights import DENSE, phase_of
from monarch_flow.projection import densify_model
from vit_10b.model import BLOCK_EPS, LAST_EPS, Shape, ViT
from vit_10b.options import LAYERS, Options, parse_options, shape_of
from vit_10b.plan import GIB, Plan, largest_models, report, require_memory

logger = logging.getLogger("oneflow_accel")

# Options whose values may differ between hosts.
_OF_A_HOST = ("data_dir", "ckpt_dir", "num_workers", "device_memory")
# The image and class counts of --fake_data.
TRAIN_IMAGES, VAL_IMAGES = 1_281_167, 50_000
BETAS, EPS = (0.9, 0.999), 1e-8


class FakeImages(SyntheticImages):
    """Black images of class 0."""

    def __init__(self, images: int, shape: Shape) -> None:
        super().__init__(images, (shape.image_size, shape.image_size, 3), shape.num_classes)
        self.root = "--fake_data"
        self.labels[:], self._pixels[:] = 0, 0


Dataset = ImageFolder | FakeImages


def run(argv: Sequence[str]) -> int:
    """Do what the command line says and return 0; UserError for anything the user can mend."""
    options, backend, limit = everywhere(lambda: _settled(argv))
    if options.dry_run:
        world = options.num_devices or distributed.world_size()
        plan = Plan.of(options, _largest(options), world)
        if distributed.is_main():
            text = report(plan, limit, told=options.device_memory is not None)
            print(largest_models(plan) if options.largest else text)
        return 0
    with watchdog.guard():
        _train(options, backend)
    return 0


def _settled(argv: Sequence[str]) -> tuple[Options, Backend, float | None]:
    """What the command line says, the device, and its memory, which the run needs no more of."""
    options = parse_options(argv)
    backend = oneflow_accel.select_device(options.device)
    reason = precision.why_not(backend, options.precision)
    if reason is not None:
        raise UserError(f"--precision {options.precision}: {backend.name} cannot do this: {reason}")
    limit = _memory(options, backend)
    if not options.dry_run:
        # The classes of a folder are not known yet; they make no difference that matters.
        require_memory(Plan.of(options, _largest(options), distributed.world_size()), limit)
    return options, backend, limit


def _largest(options: Options) -> Shape:
    """The model as the run ends with it."""
    shape = shape_of(options)
    return shape if options.sparse_to_dense is None else _dense(shape)


def _dense(shape: Shape) -> Shape:
    return dataclasses.replace(shape, **dict.fromkeys(LAYERS))


def _memory(options: Options, backend: Backend) -> float | None:
    """Bytes that a process may take; None where nobody knows."""
    if options.device_memory is not None:
        return float(options.device_memory * GIB)
    total = backend.properties().total_memory
    if total is None:
        return None
    # Processes of a node share its memory where tensors are in it.
    sharers = distributed.local_world_size() if backend.supports("host_memory") else 1
    return total / sharers


def _train(options: Options, backend: Backend) -> None:
    backend.take_own_device()
    typed = {f"--{name}": value for name, value in options.model_dump().items()}
    require_same({**plain_values(typed, _OF_A_HOST), "device": backend.name})
    # A profile is not a run: it writes a trace, and no more.
    profile = ProfileSteps(options.profile, options.ckpt_dir) if options.profile else None
    with _session(options, backend, keeps=profile is None) as run:
        # A folder that is not free is found before the model is made, which takes long.
        run.claim()
        train, val = everywhere(lambda: _datasets(options))
        require_same({**contents(train, "train"), **contents(val, "val")})
        shape = shape_of(options, len(train.classes))
        if run.resumed is not None:
            require_model(run.resumed, shape.name, shape.num_classes)
        dense = run.resumed is not None and run.resumed.state.get("phase") == DENSE
        cuts = None if options.run_without_fsdp else _cuts(options)
        model = _build(options, shape, backend, cuts, dense=dense)
        if run.resumed is not None and cuts is not None:
            fully_shard(model).load(run.resumed.model)
        elif run.resumed is not None:
            layouts.load_standard_state_dict(model, dict(run.resumed.model), strict=True)
        loader = partial(_loader, options, seed=run.seed)
        data = Data(loader(train, train=True), loader(val, train=False))
        _describe(options, _dense(shape) if dense else shape, model, train, val)
        names = train.classes if isinstance(train, ImageFolder) else []
        task = ImageTask(CrossEntropy(), num_classes=shape.num_classes, classes=names)
        recipe = Recipe(
            partial(_optimizer, options),
            _schedule(options, len(data.train)),
            _trainer_options(options, profile),
            {"profile": profile} if profile else _hooks(options),
            cuts,
        )
        run.fit(model, task, data, recipe)


def _hooks(options: Options) -> dict[str, Hook]:
    keeping = keys.ModelCheckpoint(
        save_top_k=0,
        every_n_epochs=options.ckpt_epoch_interval,
        every_n_train_steps=options.ckpt_step_interval,
    )
    share = options.sparse_to_dense
    first: dict[str, Hook] = {} if share is None else {"sparse_to_dense": SparseToDense(share)}
    return {**first, "model_checkpoint": ModelCheckpoint(keeping)}


def _session(options: Options, backend: Backend, *, keeps: bool) -> Session:
    given = {**options.model_dump(mode="json"), "norm_eps": {"blocks": BLOCK_EPS, "norm": LAST_EPS}}
    whole = options.run_without_fsdp
    return Session(
        options.ckpt_dir,
        RunIdentity(shape_of(options).name, given, phase_of),
        AUTO_RESUME if options.resume_epoch else options.resume,
        backend=backend,
        seed=options.seed,
        seed_option="--seed ",
        resume_option="--resume auto",
        keeps=keeps,
        by_all=not whole,
        mesh=None if whole else Mesh.of(options.shard_group),
        whole=(),
        reshard=options.reshard or whole,
        epoch=options.resume_epoch or None,
    )


def _trainer_options(options: Options, profile: ProfileSteps | None) -> TrainerOptions:
    return TrainerOptions(
        max_epochs=options.num_epochs,
        max_steps=options.max_steps or (profile.all_steps if profile else None),
        clip=options.clip_grad_norm if options.clip_grad_norm > 0 else None,
        precision=options.precision,
        log_every=options.log_step_interval,
        check_val_every=options.test_epoch_interval,
        per_step=True,
        way_on="continue with --resume auto",
        way_to_more="for more ask for more --num_epochs",
    )


def _datasets(options: Options) -> tuple[Dataset, Dataset]:
    """Training and validation images."""
    if options.fake_data:
        shape = shape_of(options)
        return FakeImages(TRAIN_IMAGES, shape), FakeImages(VAL_IMAGES, shape)
    root = options.data_dir
    if not root.exists():
        raise UserError(
            f"there is no folder {root}; name the one that holds train/CLASS/IMAGE and "
            "val/CLASS/IMAGE with --data_dir, or try --fake_data"
        )
    train, val = ImageFolder(root / "train"), ImageFolder(root / "val")
    require_same_classes(train, val)
    return train, val


def _cuts(options: Options) -> dict[str, Any]:
    """What `fully_shard` takes."""
    return {
        "mesh": Mesh.of(options.shard_group),
        "reshard_after_forward": options.reshard_after_forward,
        "recompute": options.grad_ckpt,
        "flatten": options.flatten_parameters,
        "multiple": options.shard_multiple,
        "gather_dtype": getattr(flow, options.gather_dtype),
        "prefetch": options.prefetch,
    }


def _build(
    options: Options, shape: Shape, backend: Backend, cuts: dict[str, Any] | None, *, dense: bool
) -> ViT:
    """The model on the device, its structured layers made dense where it is a `dense` one; no
    process holds more than one whole block at a time, unless there are no `cuts`."""

    def made(name: str, block: nn.Module) -> None:
        if dense:
            densify_model(block)
        if cuts is not None:
            shard_unit(name, block, **cuts)
        block.to(backend.device())
        logger.info("built ViT block %s", name.rpartition(".")[2])

    model = ViT(
        shape,
        dropouts=(options.pos_dropout, options.att_dropout, options.mlp_dropout),
        timm_init=options.init == "timm",
        made=made,
    )
    if cuts is not None:
        fully_shard(model, **cuts)
    model.to(backend.device())
    # What the whole blocks took.
    backend.empty_cache()
    return model


def _optimizer(options: Options, model: nn.Module) -> flow.optim.Optimizer:
    # One group: biases and norms are decayed too.
    decay = options.weight_decay
    return flow.optim.AdamW(
        model.parameters(), lr=options.lr, betas=BETAS, eps=EPS, weight_decay=decay
    )


def _schedule(options: Options, steps_per_epoch: int) -> Schedule:
    """Linear from 0 in the first step, then half a cosine to 0 at the end of all epochs."""
    steps = steps_per_epoch * options.num_epochs
    if options.warmup_steps >= steps:
        raise UserError(
            f"--warmup_steps {options.warmup_steps}: the run has {steps} steps; give fewer"
        )
    rising, falling = options.warmup_steps, steps - options.warmup_steps
    cosine = {"name": "cosine", "t_initial": falling, "warmup_t": rising, "warmup_prefix": True}
    return build_schedule(cosine, options.lr)


def _loader(options: Options, dataset: Dataset, *, train: bool, seed: int) -> ImageLoader:
    size = options.image_size
    config: dict[str, Any] = {"interpolation": "bicubic"}
    transform = build_train_transform(size, IMAGENET, config) if train else EvalTransform(size)
    world = distributed.world_size()
    return ImageLoader(
        dataset,
        batch_size=options.batch_size // world,
        transform=transform,
        workers=options.num_workers,
        seed=seed,
        train=train,
        rank=distributed.rank(),
        world_size=world,
    )


def _describe(options: Options, shape: Shape, model: ViT, train: Dataset, val: Dataset) -> None:
    """What a run says once, before it begins."""
    given = "  ".join(f"{name}={value}" for name, value in options.model_dump().items())
    logger.info("%s", given)
    sizes = (
        f"{len(train)} training and {len(val)} validation images of {len(train.classes)} classes"
    )
    logger.info("%s: %s", train.root, sizes)
    logger.info("%s", model)
    logger.info(
        "%d parameters, %d of each of the %d processes; AdamW, learning rate %g, weight decay %g",
        shape.parameters,
        sum(value.numel() for value in model.parameters()),
        distributed.world_size(),
        options.lr,
        options.weight_decay,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; user errors become one line on stderr and a non-zero exit code."""
    command.log_to_stdout()
    logger.setLevel(logging.INFO if launched.rank() == 0 else logging.WARNING)
    arguments = sys.argv[1:] if argv is None else argv
    smaller = "take a smaller --batch_size, or more processes; --dry_run says what each needs"
    return command.run("run_vit_training.py", lambda: run(arguments), smaller)


if __name__ == "__main__":
    sys.exit(main())
