"""LiBai's trainer with our data order, evaluation, checkpoints, weights, writers and seeding.

It overrides methods of LiBai's `DefaultTrainer`; LiBai is patched only where a device needs it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import command, distributed, precision
from oneflow_accel.agree import on_rank_0, whole
from oneflow_accel.errors import UserError

import oneflow as flow
from libai.config import LazyConfig, try_get_key
from libai.data.data_utils import compile_helper
from libai.engine import DefaultTrainer
from libai.engine import hooks as libai_hooks
from libai.engine import trainer as libai_trainer
from libai.engine.default import _check_batch_size
from libai.evaluation import print_csv_format
from libai.tokenizer import build_tokenizer
from libai.utils import distributed as dist
from libai.utils.events import EventStorage, EventWriter, get_event_storage
from libai.utils.logger import setup_logger
from omegaconf import DictConfig, ListConfig

from flow_train.checkpoint import libai_files, oneflow_files
from flow_train.checkpoint.libai_files import OptimizerCheckpoint
from flow_train.rng import get_rng_state, seed_of, set_rng_state
from flow_train.stopping import StopRequest
from libai_projects import weights
from libai_projects.engine import throughput
from libai_projects.engine.adapt import amp_precision
from libai_projects.engine.check_files import weights_format
from libai_projects.engine.checkpoints import BestCheckpointer, Checkpointer, PeriodicCheckpointer
from libai_projects.engine.data import use_ours
from libai_projects.engine.hooks import EarlyStop, EvalHook, PeriodicWriter, Profile
from libai_projects.engine.perplexity import evaluate_on
from libai_projects.engine.sparse_to_dense import SparseToDense, make_dense
from libai_projects.engine.writers import MetricsWriter
from libai_projects.models.families import table_of

logger = logging.getLogger("libai_projects")

# What a forward pass runs in: see oneflow_accel.precision.autocast.
Autocast = Callable[[], AbstractContextManager[Any]]


def set_up(cfg: DictConfig, resume: bool) -> None:
    """LiBai's `default_setup`: log, layout of the processes, config.yaml; options of collectives
    only where config and device have them. Raises UserError for train.rdma_enabled without RDMA."""
    output = Path(cfg.train.output_dir)
    if distributed.is_main():
        output.mkdir(parents=True, exist_ok=True)
    cfg.train.resume = resume
    log = setup_logger(str(output), distributed_rank=distributed.rank())
    log.info(
        "Rank of current process: %d. World size: %d", distributed.rank(), distributed.world_size()
    )
    dist.setup_dist_util(cfg.train.dist)
    _check_batch_size(cfg)
    if distributed.is_main():
        LazyConfig.save(cfg, str(output / "config.yaml"))
        log.info("Full config saved to %s", output / "config.yaml")
    if oneflow_accel.current_backend().collective_backend == "nccl":
        for key, use in (
            ("nccl_fusion_threshold_mb", flow.boxing.nccl.set_fusion_threshold_mbytes),
            ("nccl_fusion_max_ops", flow.boxing.nccl.set_fusion_max_ops_num),
        ):
            if cfg.train.get(key) is not None:
                use(cfg.train[key])
    if cfg.train.get("rdma_enabled"):
        devices = Path("/sys/class/infiniband")
        if not flow.sysconfig.with_rdma() or not devices.is_dir() or not any(devices.iterdir()):
            # Without the device oneflow would end the process.
            raise UserError(
                "train.rdma_enabled=True, but oneflow was built without RDMA or this machine has "
                f"no RDMA device ({devices} is empty): set it to False"
            )
        flow.env.init_rdma()
    # All processes look: if only one ended here, the others would wait for it.
    compile_helper()


class EagerTrainer(libai_trainer.EagerTrainer):
    """One iteration is one step of the optimizer, as in the graph, so that periods count the same
    in both and no checkpoint falls between two micro batches.

    Set `wants_norm` to have the norm of all gradients before clipping put down as "grad_norm"."""

    wants_norm = False
    autocast: Autocast = nullcontext

    def run_step(self, get_batch: Callable[..., Any]) -> None:
        assert self.model.training, "the model was changed to eval mode"
        data_time, sums = 0.0, {}
        for _ in range(self.grad_acc_steps):
            start = time.perf_counter()
            data = next(self._data_loader_iter)
            data = get_batch(data, getattr(self.data_loader, "mixup_func", None))
            data_time += time.perf_counter() - start
            with self.autocast():
                losses = self.model(**data)
            (sum(losses.values()) / self.grad_acc_steps).backward()
            for key, value in losses.items():
                value = value.detach()
                sums[key] = sums[key] + value if key in sums else value
        means = {key: value / self.grad_acc_steps for key, value in sums.items()}
        self.write_metrics(means, data_time)
        if self.wants_norm:
            norm = whole(_gradient_norm(self.model))
            if distributed.is_main():
                get_event_storage().put_scalar("grad_norm", float(norm))
        self.optimizer.clip_grad()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _gradient_norm(model: flow.nn.Module) -> flow.Tensor:
    """The norm of all gradients as if they were one vector; global, whole on the first stage."""
    found = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    replicated = [flow.sbp.broadcast] * len(found[0].sbp)
    norms = [flow.linalg.vector_norm(grad.to_global(sbp=replicated)) for grad in found]
    first = found[0].placement
    return flow.linalg.vector_norm(flow.stack([norm.to_global(placement=first) for norm in norms]))


@contextmanager
def _float16_alone(cfg: DictConfig) -> Iterator[None]:
    """LiBai takes train.amp.enabled for float16, with a scaled loss; other precisions are ours."""
    enabled = try_get_key(cfg, "train.amp.enabled", default=False)
    if enabled:
        cfg.train.amp.enabled = amp_precision(cfg) == "float16"
    try:
        yield
    finally:
        if enabled:
            cfg.train.amp.enabled = enabled


def _trace_in(graph: flow.nn.Graph, autocast: Autocast) -> None:
    """Have the forward pass of LiBai's training graph traced so, and the rest as LiBai has it."""

    def build(**inputs: Any) -> dict[str, flow.Tensor]:
        with autocast():
            losses = graph.model(**inputs)
        sum(losses.values()).backward()
        return losses

    graph.build = build


class Trainer(DefaultTrainer):
    """Trains a model of a checked LiBai config; `ended_early` is why a hook ends the run, else "".
    With `profile` so many steps of it are profiled, and no checkpoint is written."""

    def __init__(self, cfg: DictConfig, profile: int | None = None) -> None:
        # LiBai's own __init__ finds what to resume and makes its parts in one go, so skip it.
        libai_trainer.TrainerBase.__init__(self)
        self.cfg, self._profile = cfg, profile
        self.backend = oneflow_accel.current_backend()
        self.ended_early = ""
        self._early_stop: EarlyStop | None = None
        self._stop = StopRequest()
        self.tokenizer = self.build_tokenizer(cfg)
        self._find_start()
        self.train_loader, *evaluated = self.build_train_loader(cfg, self.tokenizer)
        self.test_loader = [loader for loader in evaluated if loader is not None]
        self.test_loader += self.build_test_loader(cfg, self.tokenizer)
        self.auto_scale_hyperparams(cfg, self.train_loader)
        # Whether sparse to dense is behind; the config still says how the run began.
        self.is_dense = bool(self._resumed.get("is_dense"))
        if self.is_dense:
            make_dense(cfg)
        self._trainer = self.checkpointer = None
        self.use_model(self.build_model(cfg))
        self.resume_or_load(cfg.train.resume)
        cfg.train.start_iter = self.start_iter
        # Samples of each run_step, in a graph and in eager mode.
        self.global_batch_size = cfg.train.global_batch_size
        self.max_iter = cfg.train.train_iter
        self.register_hooks(self.build_hooks())
        if cfg.graph.enabled and self.start_iter:
            # A graph draws its masks from the seed it is compiled with, at its first run. A resumed
            # one must not draw again those that the run began with.
            self._seed_for(self.start_iter)
            logger.info(
                "resumed under nn.Graph: with dropout the losses are not those of a run in one go, "
                "as the masks start anew; without it, or with graph.enabled=false, they are"
            )
        logger.info(self._describe())

    @classmethod
    def build_model(cls, cfg: DictConfig) -> flow.nn.Module:
        with _float16_alone(cfg):
            return super().build_model(cfg)

    @classmethod
    def build_graph(cls, cfg: DictConfig, *parts: Any, **options: Any) -> flow.nn.Graph:
        with _float16_alone(cfg):
            return super().build_graph(cfg, *parts, **options)

    def _find_start(self) -> None:
        """Look up where the run goes on, before the loader is made, which needs to know it."""
        cfg = self.cfg
        self._resume_from, self._resumed = "", {}
        if cfg.train.resume:
            self._resume_from = Checkpointer(None, cfg.train.output_dir).get_checkpoint_file()
            if not self._resume_from:
                text = "no checkpoint in %s yet: starting from the beginning"
                logger.info(text, cfg.train.output_dir)
        if self._resume_from:
            folder = Path(self._resume_from)
            self.start_iter = libai_files.iteration_of(folder.name) + 1
            self._resumed = _read_state(folder / "trainer")
        # LiBai's checkpoints do not store the samples consumed, so count the steps.
        before = self.start_iter * cfg.train.global_batch_size
        self._consumed_at_start = self._resumed.get("consumed_samples", before)
        cfg.dataloader.consumed_samples = self._consumed_at_start
        if try_get_key(cfg, "dataloader.train") is not None:
            cfg.dataloader.train.consumed_samples = self._consumed_at_start

    def use_model(self, model: flow.nn.Module) -> None:
        """Train `model` from here on, with an optimizer whose state is new; the data go on."""
        cfg, graph = self.cfg, None
        self.model = model
        self.optimizer = self.build_optimizer(cfg, model)
        self.lr_scheduler = self.build_lr_scheduler(cfg, self.optimizer)
        if cfg.graph.enabled:
            if self._trainer is not None:
                distributed.end_graph(self.graph_train)
                distributed.end_graph(self.graph_eval)
            graph = self.graph_train = self.build_graph(
                cfg, model, self.optimizer, self.lr_scheduler, is_train=True
            )
            self.graph_eval = self.build_graph(cfg, model, is_train=False)
            _trace_in(graph, self._autocast())
        parts = {
            # One form for both modes, so that each goes on from the other's checkpoints.
            "optimizer": OptimizerCheckpoint(model, self.optimizer, graph),
            # A graph has its own; this one is for the lr that LiBai's LRScheduler shows.
            "lr_scheduler": self.lr_scheduler,
        }
        if self._trainer is None:
            if graph is not None:
                self._trainer = libai_trainer.GraphTrainer(graph, self.train_loader)
            else:
                steps = cfg.train.num_accumulation_steps
                self._trainer = EagerTrainer(model, self.train_loader, self.optimizer, steps)
                self._trainer.autocast = self._autocast()
            precision.set_products(amp_precision(cfg))
            self.checkpointer = Checkpointer(model, cfg.train.output_dir, **parts)
            return
        model.train()
        self._trainer.model = model
        self._trainer.optimizer, self._trainer.graph = self.optimizer, graph
        self.checkpointer.model = model
        self.checkpointer.checkpointables.update(parts)

    def _autocast(self) -> Autocast:
        return partial(precision.autocast, self.backend, amp_precision(self.cfg))

    def _describe(self) -> str:
        train, sizes = self.cfg.train, self.cfg.train.dist
        weights = sum(weight.numel() for weight in self.model.parameters())
        mode = "nn.Graph" if self.cfg.graph.enabled else "eager"
        return (
            f"{type(self.model).__name__} of {weights:,} weights on {self.backend.name}, {mode}: "
            f"data {sizes.data_parallel_size} x tensor {sizes.tensor_parallel_size} x pipeline "
            f"{sizes.pipeline_parallel_size} processes, batch {train.global_batch_size} = "
            f"{train.train_micro_batch_size} x {sizes.data_parallel_size} x "
            f"{train.num_accumulation_steps} accumulation steps, {self.max_iter} iterations from "
            f"{self.start_iter} on"
        )

    def train(self) -> int:
        """Train to the last iteration, until a hook ends the run, or until SIGTERM or Ctrl-C, which
        write a checkpoint. Returns the exit code: 0, or a shell's for the signal."""
        if self.start_iter >= self.max_iter:
            # This is not an error: whatever restarts a run until it succeeds must see that it has.
            logger.info(
                "nothing to train: %s has all %d iterations; to go on, raise train.train_iter; "
                "--eval-only evaluates",
                self.cfg.train.output_dir,
                self.max_iter,
            )
            return 0
        code = 0
        with EventStorage(self.start_iter) as self.storage, self._stop.listening():
            try:
                self.before_train()
                # self.iter is max_iter for after_train where the run came to its end.
                self.iter = self.start_iter
                while self.iter < self.max_iter and not self.ended_early:
                    self.before_step()
                    self.run_step()
                    self.after_step()
                    if not self.ended_early and self._told_to_stop():
                        self._save_and_stop()
                        code = self._stop.exit_code
                        break
                    self.iter += 1
                if self.ended_early:
                    logger.info("stopped after %d iterations: %s", self.iter, self.ended_early)
            except (UserError, FloatingPointError, OSError):
                # The caller turns these errors into a message.
                raise
            except Exception as error:
                if command.sentence(error) is None:
                    logger.exception("training ended after %d iterations:", self.iter)
                raise
            finally:
                self.after_train()
        return code

    def _told_to_stop(self) -> bool:
        """All processes must stop at the same step, so they ask each other; only where log lines
        are due, so that other steps do not wait for it."""
        done = self.iter + 1
        if done == self.max_iter:
            return False
        if distributed.world_size() == 1:
            return self._stop.requested
        return done % self.cfg.train.log_period == 0 and self._stop.agreed()

    def _save_and_stop(self) -> None:
        for hook in self._hooks:
            if isinstance(hook, PeriodicWriter):
                hook.write()
            if isinstance(hook, PeriodicCheckpointer):
                hook.save_now()
        logger.info(
            "told to stop (%s) after %d iterations; go on with --resume",
            self._stop.name,
            self.iter + 1,
        )

    def run_step(self) -> None:
        """One iteration; in eager mode its dropout masks depend on the seed and its number only."""
        if not self.cfg.graph.enabled:
            self._seed_for(self.iter)
            done = self.iter + 1
            is_shown = done % self.cfg.train.log_period == 0 or done == self.max_iter
            self._trainer.wants_norm = is_shown
        # LiBai would count the loss of a step to the one before, unlike its time and learning rate.
        self.storage.iter = self.iter + 1
        super().run_step()

    def _seed_for(self, iteration: int) -> None:
        """Seed so that a resumed run draws in an iteration what the whole one drew."""
        seed = self.cfg.train.seed
        self.backend.manual_seed(seed_of(f"libai_projects {seed} iteration {iteration}"))

    def resume_or_load(self, resume: bool = True) -> None:
        """Take up the last checkpoint, or only weights (train.load_weight), or neither."""
        if not (resume and self._resume_from):
            if self.cfg.train.get("load_weight"):
                load_weights(self.model, self.cfg.train.load_weight)
            return
        loaded = self.checkpointer.load(self._resume_from)
        assert self.start_iter == loaded["iter"] + 1
        self.take_rates()
        states = self._resumed.get("rng")
        if states and len(states) == distributed.world_size():
            set_rng_state(states[distributed.rank()])
        elif states:
            logger.warning(
                "the checkpoint is of %d processes and this run has %d: random numbers (dropout) "
                "are not continued",
                len(states),
                distributed.world_size(),
            )

    def take_rates(self, state: dict[str, Any] | None = None) -> None:
        """Let the optimizer have the schedule's learning rates, at that state of the schedule."""
        if state is not None:
            self.lr_scheduler.load_state_dict(state)
        rates = self.lr_scheduler.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def trainer_state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides model, optimizer and schedule: the position in the data
        and the random generators. Collective; moves oneflow's generators on to a new stream, the
        one that a resumed run draws from."""
        steps = self.iter + 1 - self.start_iter
        return {
            "iteration": self.iter,
            "consumed_samples": self._consumed_at_start + steps * self.global_batch_size,
            "seed": try_get_key(self.cfg, "train.seed", default=None),
            "rng": distributed.all_gather_json(get_rng_state()),
            "is_dense": self.is_dense,
            "early_stop": self._early_stop.state() if self._early_stop else None,
        }

    @classmethod
    def build_tokenizer(cls, cfg: DictConfig) -> Any:
        """The tokenizer; its vocabulary is padded to one size for all tensor parallel sizes that
        divide make_vocab_size_divisible_by, so that a checkpoint of one layout fits another."""
        if try_get_key(cfg, "tokenization") is None:
            return None
        tokenizer = build_tokenizer(cfg.tokenization)
        if try_get_key(cfg, "model.cfg.vocab_size", default=None) is not None:
            multiple = math.lcm(
                cfg.tokenization.make_vocab_size_divisible_by, cfg.train.dist.tensor_parallel_size
            )
            cfg.model.cfg.vocab_size = tokenizer.padded_vocab_size(multiple)
        return tokenizer

    @classmethod
    def build_optimizer(cls, cfg: DictConfig, model: flow.nn.Module) -> flow.optim.Optimizer:
        """The optimizer; its settings are plain values, which a checkpoint can hold."""
        optimizer = super().build_optimizer(cfg, model)
        for group in optimizer.param_groups:
            for name, value in group.options.items():
                if isinstance(value, ListConfig):
                    group.options[name] = tuple(value)
        return optimizer

    @classmethod
    def build_train_loader(cls, cfg: DictConfig, tokenizer: Any = None) -> tuple[Any, Any, Any]:
        """Loaders for training, validation and test, or None; those to evaluate carry their split,
        which names their results."""
        use_ours(cfg.dataloader.train)
        loaders = super().build_train_loader(cfg, tokenizer)
        for loader, split in zip(loaders[1:], ("validation", "test"), strict=True):
            if loader is not None:
                loader.split_name = split
        return loaders

    @classmethod
    def build_test_loader(cls, cfg: DictConfig, tokenizer: Any = None) -> list[Any]:
        use_ours(try_get_key(cfg, "dataloader.test", default=None))
        return list(super().build_test_loader(cfg, tokenizer))

    @classmethod
    def build_evaluator(cls, cfg: DictConfig) -> Any:
        use_ours(cfg.train.evaluation.evaluator)
        return super().build_evaluator(cfg)

    @classmethod
    def auto_scale_hyperparams(cls, cfg: DictConfig, data_loader: Any) -> None:
        """Fill in the length of the run, and periods that are given in epochs."""
        # LiBai would count micro batches in eager mode, and say a warm-up that is not in force
        # where a schedule has one of its own.
        steps, cfg.train.num_accumulation_steps = cfg.train.num_accumulation_steps, 1
        theirs = logging.getLogger(DefaultTrainer.__module__)
        theirs.disabled = True
        super().auto_scale_hyperparams(cfg, data_loader)
        theirs.disabled = False
        cfg.train.num_accumulation_steps = steps
        warm_up = cfg.train.scheduler.get("warmup_iters", cfg.train.warmup_iter)
        logger.info("%d iterations, warm-up over %d of them", cfg.train.train_iter, warm_up)
        steps_per_epoch = len(data_loader.dataset) / cfg.train.global_batch_size
        for group, key_of_epochs, key_of_period in (
            ("checkpointer", "save_model_after_n_epoch", "period"),
            ("evaluation", "eval_after_n_epoch", "eval_period"),
        ):
            epochs = try_get_key(cfg, f"train.{group}.{key_of_epochs}", default=None)
            if epochs is None:
                continue
            if epochs <= 0:
                raise UserError(f"train.{group}.{key_of_epochs} is {epochs}; it must be above 0")
            cfg.train[group][key_of_period] = max(1, math.ceil(steps_per_epoch * epochs))

    @classmethod
    def test(
        cls, cfg: DictConfig, test_loaders: list[Any], model: Any, evaluator: Any = None
    ) -> dict[str, dict[str, float]]:
        """Evaluate a model on all processes; results by "validation" and "test", and of several
        other loaders by "test_0", ..."""
        batch_size = cfg.train.test_micro_batch_size * dist.get_data_parallel_size()
        evaluator = evaluator or cls.build_evaluator(cfg)
        batches, results = cfg.train.evaluation.eval_iter, {}
        for name, loader in zip(_split_names(test_loaders), test_loaders, strict=True):
            results[name] = evaluate_on(
                model, loader, batch_size, batches, cls.get_batch, evaluator
            )
            if distributed.is_main():
                logging.getLogger("libai.evaluation").info("Evaluation results for %s:", name)
                print_csv_format(results[name])
        return results

    def build_hooks(self) -> list[Any]:
        """LiBai's hooks in LiBai's order, ours in place of some, and what ends a run early."""
        train, evaluation = self.cfg.train, self.cfg.train.evaluation
        kept = try_get_key(train, "checkpointer.max_to_keep", default=None)
        fraction = try_get_key(self.cfg, "train.sparse_to_dense.fraction", default=None)
        hooks: list[Any] = [] if fraction is None else [SparseToDense(fraction)]
        hooks += [
            libai_hooks.IterationTimer(),
            libai_hooks.LRScheduler(),
        ]
        # What a checkpoint comes after is not lost where the run is killed behind it: evaluations,
        # the best model, the lines of its steps, and whether the run ends early.
        if evaluation.enabled:
            period = evaluation.eval_period
            metric = evaluation.get("eval_metric", "Acc@1")
            mode = evaluation.get("eval_mode", "max")
            hooks.append(EvalHook(period, self._evaluate))
            hooks.append(BestCheckpointer(period, self.checkpointer, metric, mode))
        if distributed.is_main():
            hooks.append(PeriodicWriter(self.build_writers(), train.log_period))
        if evaluation.enabled and (evaluation.get("patience") or train.get("max_minutes")):
            self._early_stop = EarlyStop(evaluation, train.get("max_minutes"))
            self._early_stop.load(self._resumed.get("early_stop"))
            hooks.append(self._early_stop)
        if self._profile is None:
            period = train.checkpointer.period
            hooks.append(PeriodicCheckpointer(self.checkpointer, period, max_to_keep=kept))
        else:
            hooks.append(Profile(self._profile, Path(train.output_dir)))
        return hooks

    def _evaluate(self) -> dict[str, dict[str, float]]:
        model = self.graph_eval if self.cfg.graph.enabled else self.model
        self._last_eval_results = self.test(self.cfg, self.test_loader, model)
        return self._last_eval_results

    def validation_loss(self) -> float | None:
        """The mean loss of a batch of the first split to evaluate; None without one, or on a rank
        that does not know it. Collective."""
        if not self.test_loader:
            return None
        cfg, model = self.cfg, self.graph_eval if self.cfg.graph.enabled else self.model
        size = cfg.train.test_micro_batch_size * dist.get_data_parallel_size()
        evaluator = self.build_evaluator(cfg)
        found = evaluate_on(model, self.test_loader[0], size, 1, self.get_batch, evaluator)
        self.model.train()
        return found.get("lm_loss")

    def build_writers(self) -> list[EventWriter]:
        speed = throughput.of_run(self.cfg, self.backend, self.global_batch_size)
        return [MetricsWriter(self.cfg, self.start_iter, self.max_iter, speed)]


def _read_state(folder: Path) -> dict[str, Any]:
    """What `trainer_state` gave, from a checkpoint's part; {} where a LiBai checkpoint has none."""
    return on_rank_0(lambda: oneflow_files.read_structure(folder) if folder.exists() else {})


def _split_names(loaders: list[Any]) -> list[str]:
    names = [getattr(loader, "split_name", None) for loader in loaders]
    alone = names.count(None) == 1 and "test" not in names
    unnamed = (f"test_{index}" for index in range(len(names)))
    return [name or ("test" if alone else next(unnamed)) for name in names]


def load_weights(model: flow.nn.Module, path: str) -> None:
    """Load a LiBai checkpoint or Hugging Face directory into a global model of any layout, which
    keeps its own vocabulary size. Raises UserError for a damaged directory or another model."""
    table = table_of(model)
    state, _ = weights.load(path, on_rank_0(lambda: weights_format(path)), table=table)
    weights.load_into(model, state, table=table)
    logger.info("loaded the weights of %s", path)
