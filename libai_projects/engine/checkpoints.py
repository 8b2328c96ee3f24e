"""LiBai's checkpointers: checkpoints are whole or not there, and reading one runs no code in it.

`flow_train.checkpoint.libai_files` has their form, and what all trainers here share.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import CheckpointError

import numpy as np
from libai.engine import hooks
from libai.utils import checkpoint
from libai.utils.checkpoint import _filter_reused_missing_keys
from omegaconf import OmegaConf

from flow_train.checkpoint import libai_files, oneflow_files
from flow_train.files import remove_folder, writing

logger = logging.getLogger("libai_projects")

T = TypeVar("T")


class Checkpointer(checkpoint.Checkpointer):
    """Saves and loads a model and what else a run needs, with LiBai's arguments. Every process
    calls each method; an error on one is an error on all."""

    def save(self, name: str, **extra: Any) -> None:
        """Write a checkpoint with the parts of `extra`. `last_checkpoint` names it only if it has a
        number, since a run resumes from no other. A CheckpointError leaves earlier ones whole."""
        if not self.save_to_disk:
            return
        parts = {"model": self.model.state_dict()}
        parts |= {key: part.state_dict() for key, part in self.checkpointables.items()} | extra
        # The checkpoint's name holds the iteration already.
        parts.pop("iteration", None)
        directory, temporary = Path(self.save_dir), None
        # LiBai's names count from 0: the state after 40 iterations is model_0000039.
        number = libai_files.iteration_of(name)
        after = "" if number is None else f" after {number + 1} iterations"
        logger.info("Saving checkpoint%s to %s", after, directory / name)
        # Only rank 0 writes. What fails there must fail everywhere, or the others would wait for
        # it in the next collective operation.
        try:
            temporary = self._on_rank_0(lambda: libai_files.begin(directory, name))
            for key, value in parts.items():
                oneflow_files.save(_plain(value), temporary / key)
            self._on_rank_0(lambda: libai_files.commit(temporary, name))
        except CheckpointError as error:
            raise CheckpointError(
                f"no checkpoint {name} was saved, earlier ones are as before: {error}"
            ) from error
        finally:
            # The folder is still there only if something failed: commit renames it.
            if temporary is not None and distributed.is_main():
                shutil.rmtree(temporary, ignore_errors=True)
        if number is not None:
            self.tag_last_checkpoint(name)

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """The same as `on_rank_0`; what the disk refuses is a CheckpointError, too."""
        return on_rank_0(writing(Path(self.save_dir), CheckpointError)(action))

    def load(self, path: str, checkpointables: Sequence[str] | None = None) -> dict[str, Any]:
        """Load the checkpoint in folder `path`, or of the "model" folder in it; "" loads nothing.

        `checkpointables` are the parts besides the model; None takes all, as a resumed run needs.
        Returns the parts that nothing has taken, and "iter", its number or 0. Raises
        CheckpointError where it is damaged or lacks what was asked for.
        """
        if not path:
            return {}
        logger.info("Loading checkpoint from %s", path)
        # Loading only weights needs no other part, which may be of another optimizer.
        weights_only = checkpointables is not None and len(checkpointables) == 0
        found = self._load_file(path, ["model"] if weights_only else None)
        incompatible = self._load_model(found)
        self._log_incompatible_keys(incompatible)
        lacking = {key for key, _, _ in incompatible.incorrect_shapes}
        lacking |= set(_filter_reused_missing_keys(self.model, incompatible.missing_keys))
        if lacking and checkpointables is None:
            raise CheckpointError(
                f"{path} is of another model: {len(lacking)} parameters are not in it or have "
                f"another shape there, such as {sorted(lacking)[0]}; resume with the "
                "configuration it was trained with"
            )
        for key in self.checkpointables if checkpointables is None else checkpointables:
            # LiBai saves the optimizer of a graph as part of "graph".
            part = "graph" if key == "optimizer" and key not in found else key
            if part not in found:
                raise CheckpointError(
                    f"{path} holds no {key}, only weights: start from them with "
                    "train.load_weight, without --resume"
                )
            self.checkpointables[key].load_state_dict(found.pop(part))
        return found

    def has_checkpoint(self) -> bool:
        return self.get_checkpoint_file() != ""

    def get_checkpoint_file(self) -> str:
        """The newest checkpoint, "" without one; a CheckpointError names the newest whole one."""
        found = self._on_rank_0(lambda: libai_files.last(Path(self.save_dir)))
        return "" if found is None else str(found)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        self._on_rank_0(lambda: libai_files.tag(Path(self.save_dir), last_filename_basename))

    def _load_file(self, path: str, parts: Sequence[str] | None = None) -> dict[str, Any]:
        folder = Path(path)

        def names() -> list[str]:
            if (folder / oneflow_files.PICKLE).is_file():
                # The path may be the "model" folder of a checkpoint.
                oneflow_files.check(folder)
                return []
            libai_files.verify(folder, parts)
            return list(parts or sorted(entry.name for entry in folder.iterdir()))

        found = self._on_rank_0(names)
        data = {name: oneflow_files.load(folder / name) for name in found}
        data = data or {"model": oneflow_files.load(folder)}
        return {**data, "iter": libai_files.iteration_of(folder.name) or 0}


def _plain(value: Any) -> Any:
    """The value, with the types that configs and numpy bring made plain: only those are loaded."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(entry) for entry in value)
    return value


def evaluates(trainer: Any, period: int) -> bool:
    """Whether the iteration that has been done ends with an evaluation."""
    done = trainer.iter + 1
    return bool(done == trainer.max_iter or (period > 0 and done % period == 0))


class PeriodicCheckpointer(hooks.PeriodicCheckpointer):
    """Saves every `period` iterations and at the end, with the trainer's state, and deletes all but
    the newest `max_to_keep`. Arguments are LiBai's."""

    def before_train(self) -> None:
        super().before_train()
        # A resumed run counts the checkpoints that it finds; later ones are of other runs.
        self.recent_checkpoints = [
            folder
            for iteration, folder in libai_files.numbered(Path(self.checkpointer.save_dir)).items()
            if iteration < self.trainer.start_iter and folder.name == self._name(iteration)
        ]
        self._saved = -1

    def after_step(self) -> None:
        iteration = self.trainer.iter
        if (iteration + 1) % self.period == 0:
            self.save_now()
        if iteration >= self.max_iter - 1:
            self.checkpointer.save(f"{self.file_prefix}_final", trainer=self._state(iteration))

    def save_now(self) -> None:
        """Save the state after the present iteration, unless that is done."""
        iteration = self.trainer.iter
        if self._saved == iteration:
            return
        self.checkpointer.save(self._name(iteration), trainer=self._state(iteration))
        self._saved = iteration
        if self.max_to_keep is None:
            return
        saved = Path(self.checkpointer.save_dir) / self._name(iteration)
        # A resumed run may save a checkpoint again that it found.
        self.recent_checkpoints = [p for p in self.recent_checkpoints if p != saved] + [saved]
        while len(self.recent_checkpoints) > self.max_to_keep:
            oldest = self.recent_checkpoints.pop(0)
            if distributed.is_main() and oldest.is_dir():
                remove_folder(oldest)

    def _name(self, iteration: int) -> str:
        return f"{self.file_prefix}_{iteration:07d}"

    def _state(self, iteration: int) -> dict[str, Any]:
        """The trainer's state; called once, for an iteration that is saved: it moves the
        generators."""
        known, state = getattr(self, "_known", (-1, {}))
        if known != iteration:
            state = self.trainer.trainer_state()
            self._known = iteration, state
        return state


class BestCheckpointer(hooks.BestCheckpointer):
    """Saves the best model by a result of the evaluation; a resumed run knows the earlier best."""

    def before_train(self) -> None:
        if self.trainer.start_iter == 0 or not distributed.is_main():
            return
        folder = Path(self._checkpointer.save_dir) / self._file_prefix / "best"
        try:
            best = oneflow_files.read_structure(folder)
            known = best["metric"] == self._val_metric
            if known and best["iteration"] < self.trainer.start_iter:
                self.best_metric, self.best_iter = float(best["value"]), int(best["iteration"])
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            logger.info("No best metric of an earlier run is known: %s", error)

    def _best_checking(self) -> None:
        found = self._latest() if distributed.is_main() else None
        is_better = False
        if distributed.is_main() and found is None:
            logger.warning(
                "train.evaluation.eval_metric=%s is no result of the evaluation, so no best model "
                "is saved; results are %s",
                self._val_metric,
                ", ".join(name for name in self.trainer.storage.latest() if "/" in name),
            )
        elif found is not None:
            is_better = self.best_metric is None or self._compare(found[0], self.best_metric)
            is_better = is_better and self._update_best(*found)
            text = "Saved best model" if is_better else "Not saved as best model"
            logger.info("%s: %s is %.5f @ iteration %d", text, self._val_metric, *found)
        if on_rank_0(lambda: is_better):
            best = {"metric": self._val_metric, "value": self.best_metric}
            self._checkpointer.save(self._file_prefix, best=best | {"iteration": self.best_iter})

    def _latest(self) -> tuple[float, int] | None:
        """Value and iteration of the metric: under its full name, else of the validation split."""
        latest = self.trainer.storage.latest()
        named = [name for name in latest if name.endswith(f"/{self._val_metric}")]
        first = [self._val_metric, f"validation/{self._val_metric}"]
        for name in first + (named if len(named) == 1 else []):
            if name in latest:
                return latest[name]
        return None

    def after_step(self) -> None:
        if evaluates(self.trainer, self._period):
            self._best_checking()

    def after_train(self) -> None:
        """LiBai's evaluates the last step here, behind its checkpoint."""
