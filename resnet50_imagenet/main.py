r"""Trains, evaluates or benchmarks an image classifier on ImageNet.

    python3 main.py -a resnet50 --channels-last DIR
    python3 -m oneflow.distributed.launch --nproc_per_node 4 main.py \
        --multiprocessing-distributed DIR

`python3 main.py --help` lists every option with its default.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

try:
    import oneflow_accel
except ImportError as error:
    sys.exit(
        f"{error}. main.py runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )
from oneflow_accel import command, distributed, launched, layouts, precision, watchdog
from oneflow_accel.agree import everywhere, on_rank_0, plain_values, require_same
from oneflow_accel.backends import Backend
from oneflow_accel.collectives import Mesh
from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn

from flow_train import optim
from flow_train.checkpoint.folders import Checkpoint
from flow_train.checkpoint.shards import MODEL
from flow_train.config import keys
from flow_train.data.augment import build_train_transform
from flow_train.data.images import (
    ImageFolder,
    ImageLoader,
    SyntheticImages,
    contents,
    require_same_classes,
)
from flow_train.data.mixup import MixBatch, build_mixup
from flow_train.data.transforms import IMAGENET, EvalTransform, Transform
from flow_train.hooks import Hook, ModelCheckpoint, MovingAverage, Run
from flow_train.loop import Data, RunIdentity
from flow_train.metrics.console import evaluation_lines
from flow_train.metrics.profile import ProfileSteps
from flow_train.options import TrainerOptions
from flow_train.session import Recipe, Session
from flow_train.sharding import sharding_options
from flow_train.task import ImageTask
from monarch_flow.layers import LinearConfig
from resnet50_imagenet import launching
from resnet50_imagenet.inference import Predictions, graph_forward, inference_model, measure_forward
from resnet50_imagenet.models import (
    averaged,
    check_image_size,
    create_model,
    load_weights,
    make_structured,
    pretrained_file,
    restore_model,
    up_to_date,
)
from resnet50_imagenet.options import DATA_VARIABLE, Options, parse_options

Dataset = ImageFolder | SyntheticImages

logger = logging.getLogger("oneflow_accel")

# The image and class counts of --dummy.
IMAGENET_TRAIN_IMAGES = 1_281_167
IMAGENET_VAL_IMAGES = 50_000
IMAGENET_CLASSES = 1000
EVALUATED_BATCHES_PER_LINE = 50
# Options whose values may differ between the machines of a job.
OF_A_MACHINE = ("data", "workers", "output-dir", "weights", "predictions", "resume")
OF_A_MACHINE += ("rank", "gpu", "dist-url")


def run(argv: Sequence[str]) -> int:
    """Do what the command line says and return 0; UserError for anything the user can mend."""
    options, backend = everywhere(lambda: _settled(argv))
    with watchdog.guard():
        return _run(options, backend)


def _settled(argv: Sequence[str]) -> tuple[Options, Backend]:
    """What the command line says, and the device, both checked; starts one process for each device
    where that is asked for."""
    options = parse_options(argv)
    backend = oneflow_accel.select_device(options.device)
    launching.check_distributed_options(options, backend)
    if launching.needs_launcher(options, backend):
        launching.relaunch(options, backend, argv)
    _check_device(options, backend)
    return options, backend


def _run(options: Options, backend: Backend) -> int:
    typed = {f"--{name.replace('_', '-')}": value for name, value in options.model_dump().items()}
    require_same({**plain_values(typed, OF_A_MACHINE), "device": backend.name})
    mesh = sharding_options(options.fsdp)["mesh"] if options.fsdp else None
    whole: tuple[str, ...] = (MODEL,)
    if options.evaluate:
        # Each process may have the shards that it wrote.
        mesh, whole = Mesh.of(), (MODEL, optim.EMA)
    trains = not (options.evaluate or options.benchmark)
    with Session(
        options.output_dir,
        RunIdentity(options.arch),
        options.resume,
        backend=backend,
        # An evaluation has no order of images to keep.
        seed=None if options.evaluate and options.resume else options.seed,
        seed_option="--seed ",
        resume_option="--resume auto" if trains else None,
        keeps=not options.profile,
        by_all=options.fsdp is not None,
        mesh=mesh,
        whole=whole,
    ) as run:
        if options.evaluate and options.resume and run.resumed is None:
            raise UserError(f"-e --resume auto: there is no checkpoint in {options.output_dir} yet")
        options.seed = run.seed
        train, val = everywhere(lambda: _datasets(options))
        require_same({**contents(train, "train"), **contents(val, "val")})
        if options.benchmark:
            _benchmark(options, backend, val)
        elif options.evaluate:
            _evaluate(options, backend, val, run.resumed)
        else:
            assert train is not None
            _train(options, run, train, val)
    return 0


def _evaluate(options: Options, backend: Backend, val: Dataset, resumed: Checkpoint | None) -> None:
    num_classes = len(val.classes)
    model = _model(options, backend, val)
    if options.model_ema and not (resumed and optim.averages_in(resumed.optimizer)):
        raise UserError("--model-ema: there are no moving averages to evaluate: leave it out")
    if resumed is not None:
        restore_model(model, averaged(resumed), options.arch, num_classes, _names(val))
    loader = _loader(options, val, train=False)
    model = inference_model(model, backend, options.precision, fold=options.fold)
    forward = graph_forward(model) if options.graph else model
    predictions = Predictions(options.predictions, val) if options.predictions else None
    task = ImageTask(keep=predictions.add if predictions is not None else None)
    with evaluation_lines(loader, "val", EVALUATED_BATCHES_PER_LINE) as watch:
        accuracy = task.evaluate(forward, loader, backend, watch=watch)
    if distributed.is_main():
        print(accuracy)
    accuracy.check()
    if predictions is not None:
        predictions.write()


def _benchmark(options: Options, backend: Backend, val: Dataset) -> None:
    """Print a line on the forward pass, or one for each layout and precision that there is."""
    layouts, names = [options.channels_last], [options.precision]
    if options.benchmark == "all":
        layouts = [False, True] if backend.supports("nhwc") else [False]
        names = ["float32", "bfloat16"] if backend.supports("bfloat16_inference") else ["float32"]
    for channels_last, name in product(layouts, names):
        options.channels_last, options.precision = channels_last, name
        model = _model(options, backend, val)
        model = inference_model(model, backend, name, fold=options.fold)
        images = next(iter(_loader(options, val, train=False))).images
        rate = measure_forward(model, images, backend, name)
        print(f"{'NHWC' if channels_last else 'NCHW'} {name:8} {rate}", flush=True)


def _train(options: Options, run: Session, train: Dataset, val: Dataset) -> None:
    num_classes, names = len(train.classes), _names(train)
    model = _model(options, run.backend, val)
    if run.resumed is not None:
        restore_model(model, run.resumed, options.arch, num_classes, names)
        run.resumed = up_to_date(run.resumed)
    data = Data(
        _loader(options, train, train=True, num_classes=num_classes),
        _loader(options, val, train=False),
    )
    run.identity = RunIdentity(options.arch, options.model_dump(mode="json"))
    task = ImageTask(optim.CrossEntropy(options.smoothing), num_classes=num_classes, classes=names)
    keeper = ModelCheckpoint(keys.ModelCheckpoint(every_n_train_steps=options.save_freq))
    recipe = _recipe(options, keeper)
    trainer = run.fit(model, task, data, recipe, start=options.start_epoch)
    if not options.profile:
        best = keeper.best_value
        found = "no epoch was validated" if best is None else f"best Acc@1 {best:.2f}"
        logger.info("done: %d steps, %s", trainer.position.step, found)


def _recipe(options: Options, keeper: ModelCheckpoint) -> Recipe:
    profile = ProfileSteps(options.profile, options.output_dir) if options.profile else None
    settings = TrainerOptions(
        max_epochs=options.epochs,
        max_steps=options.max_steps or (profile.all_steps if profile else None),
        accumulate=options.grad_accum_steps,
        clip=options.clip_grad,
        precision=options.precision,
        reduce_dtype=options.reduce_dtype,
        graph=options.graph,
        fsdp=options.fsdp,
        log_every=options.print_freq,
        way_on="continue with --resume auto",
        way_to_more="for more ask for more --epochs",
    )
    hooks: dict[str, Hook | None] = {
        "ema": MovingAverage(options.model_ema_decay) if options.model_ema else None,
        "freeze_bn": FreezeBatchNorm() if options.freeze_bn else None,
        "profile": profile,
        # Last, so that a checkpoint has the other hooks' state.
        "model_checkpoint": keeper,
    }
    wanted = {key: hook for key, hook in hooks.items() if hook is not None}
    return Recipe(partial(_optimizer, options), _schedule(options), settings, wanted)


class FreezeBatchNorm(Hook):
    """--freeze-bn: batch normalization keeps its running statistics, and uses them."""

    def on_step_start(self, trainer: Run) -> None:
        for module in trainer.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def _schedule(options: Options) -> Callable[[float], float]:
    """The learning rate by epoch."""
    if options.scheduler == "step":
        return partial(optim.step_decay, options.lr)
    length = max(1, options.epochs)
    given = {"name": options.scheduler, "t_initial": length, "t_total": length}
    return optim.build_schedule(given, options.lr)


def _optimizer(options: Options, model: nn.Module) -> flow.optim.Optimizer:
    if options.optimizer != "sgd":
        given = {"name": options.optimizer, "lr": options.lr, "weight_decay": options.weight_decay}
        return optim.build_optimizer(model, given)
    lr, momentum, decay = options.lr, options.momentum, options.weight_decay
    return flow.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)


def _check_device(options: Options, backend: Backend) -> None:
    plain = options.optimizer == "sgd" and options.momentum == 0
    wanted = {"graph": options.graph, "plain_sgd": plain}
    reason = precision.why_not(backend, options.precision)
    if reason is not None and not (options.evaluate or options.benchmark):
        raise UserError(f"--precision {options.precision}: {backend.name} cannot do this: {reason}")
    wanted |= {"nhwc": options.channels_last, "gradient_clipping": options.clip_grad is not None}
    for feature, asked in wanted.items():
        support = backend.supports(feature)
        if asked and not support:
            raise UserError(f"{backend.name} cannot do this: {support.reason}")
    if options.gpu is not None:
        try:
            backend.set_device(options.gpu)
        except ValueError as error:
            raise UserError(f"--gpu {options.gpu}: {error}") from error
    else:
        backend.take_own_device()


def _names(data: Dataset) -> list[str]:
    return data.classes if isinstance(data, ImageFolder) else []


def _datasets(options: Options) -> tuple[Dataset | None, Dataset]:
    """Training images (None where only evaluating) and validation images."""
    if options.dummy or options.benchmark:
        shape = (options.image_size, options.image_size, 3)
        train, val = (
            SyntheticImages(images, shape, IMAGENET_CLASSES, options.seed)
            for images in (IMAGENET_TRAIN_IMAGES, IMAGENET_VAL_IMAGES)
        )
        return train, val
    root = Path(options.data)
    if not root.exists():
        raise UserError(
            f"no image data at {root / 'val'}: there is no folder {root}; name the one that holds "
            f"train/CLASS/IMAGE and val/CLASS/IMAGE, main.py DIR, or set {DATA_VARIABLE}=DIR"
        )
    val = ImageFolder(root / "val")
    if options.evaluate:
        return None, val
    train = ImageFolder(root / "train")
    require_same_classes(train, val)
    return train, val


def _model(options: Options, backend: Backend, val: Dataset) -> nn.Module:
    num_classes = len(val.classes)
    model = create_model(options.arch, num_classes)
    weights = options.weights
    if options.pretrained:
        weights = on_rank_0(lambda: pretrained_file(options.arch))
    if weights is not None:
        load_weights(model, weights, options.arch, num_classes, reset_head=options.reset_head)
    model, trains = model.to(backend.device()), not (options.evaluate or options.benchmark)
    check_image_size(model, backend, options.arch, options.image_size, train=trains)
    if options.channels_last:
        model = layouts.to_channels_last(model, backend)
    structured = LinearConfig.of(options.conv_cfg)
    if not structured.is_dense:
        loader = _loader(options, val, train=False)
        make_structured(model, structured, next(iter(loader)).images if weights else None)
    return model


def _loader(
    options: Options, dataset: Dataset, *, train: bool, num_classes: int = 0
) -> ImageLoader:
    processes = distributed.local_world_size()
    if options.batch_size % processes:
        raise UserError(
            f"-b {options.batch_size} is not a multiple of the {processes} processes of this node"
        )
    transform, mix = EvalTransform(options.image_size), None
    if train:
        transform, mix = _augmentation(options, num_classes)
    return ImageLoader(
        dataset,
        batch_size=options.batch_size // processes,
        transform=transform,
        finish=mix,
        workers=options.workers,
        seed=options.seed,
        train=train,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        channels_last=options.channels_last,
    )


def _augmentation(options: Options, num_classes: int) -> tuple[Transform, MixBatch | None]:
    config = {"scale": options.scale, "hflip": options.hflip, "re_prob": options.reprob}
    config |= {"interpolation": "bilinear", "re_mode": "const"}
    if options.aa:
        config["auto_augment"] = options.aa
    transform = build_train_transform(options.image_size, IMAGENET, config)
    mixing = {
        "mixup_alpha": options.mixup,
        "cutmix_alpha": options.cutmix,
        "prob": options.mixup_prob,
        "switch_prob": options.mixup_switch_prob,
        "mode": options.mixup_mode,
    }
    mixup = build_mixup(mixing, num_classes)
    if mixup is None:
        return transform, None
    rank, last = distributed.rank(), options.channels_last
    return transform, MixBatch(mixup, options.seed, rank, channels_last=last)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; user errors become one line on stderr and a non-zero exit code."""
    command.log_to_stdout()
    logger.setLevel(logging.INFO if launched.rank() == 0 else logging.WARNING)
    arguments = sys.argv[1:] if argv is None else argv
    smaller = "take a smaller -b, more --grad-accum-steps, --precision bfloat16 or --fsdp"
    return command.run("main.py", lambda: run(arguments), smaller)


if __name__ == "__main__":
    sys.exit(main())
