"""What pieces of an engine do, as JSON: ours or, without patches 0020 and on, LiBai's own.

engine_facts.py FOLDER, run by test_engine_patches.py.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oneflow_accel  # noqa: F401 - before oneflow and libai, which it patches

import engine_trainer_facts
import numpy as np
import oneflow as flow

from tests.libai_projects.patches.partial_series import VARIABLE  # before libai

if os.environ.get(VARIABLE):
    from libai.data.build import build_nlp_train_val_test_loader
    from libai.data.data_utils import BlockIndexedDataset
    from libai.data.samplers import CyclicSampler
    from libai.engine.hooks import PeriodicCheckpointer
    from libai.evaluation import PPLEvaluator
    from libai.evaluation import inference_on_dataset as evaluate_on
    from libai.utils.checkpoint import Checkpointer
else:
    from libai_projects.engine.checkpoints import Checkpointer, PeriodicCheckpointer
    from libai_projects.engine.data import (
        BlockIndexedDataset,
        CyclicSampler,
        build_nlp_train_val_test_loader,
    )
    from libai_projects.engine.perplexity import PPLEvaluator, evaluate_on

FOLDER = Path(sys.argv[1])
PLACED = {"placement": flow.placement("cpu", [0]), "sbp": flow.sbp.broadcast}


def float_code() -> Any:
    from libai.data.data_utils import indexed_dataset

    return np.dtype(indexed_dataset.dtypes[6]).itemsize


class Sequences:
    """As much of an indexed dataset as BlockIndexedDataset uses."""

    def __init__(self, sizes: list[int], doc_idx: list[int]) -> None:
        self.sizes, self.doc_idx = np.array(sizes), np.array(doc_idx)
        tokens = np.arange(sum(sizes))
        self.parts = np.split(tokens, np.cumsum(sizes)[:-1])

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        part = self.parts[index][offset:]
        return part if length is None else part[:length]


def blocks(name: str, sizes: list[int], doc_idx: list[int], length: int) -> Any:
    dataset = BlockIndexedDataset(str(FOLDER / name), Sequences(sizes, doc_idx), length)
    return [[int(token) for token in dataset[i]] for i in range(len(dataset))]


def short_data() -> Any:
    """Two blocks of 4 fit into 9 tokens."""
    return blocks("short", [4, 5], [0, 1, 2], 4)


def sentences() -> Any:
    """Two documents of two sentences each."""
    return blocks("sentences", [4, 5, 4, 8], [0, 2, 4], 4)


def splits() -> Any:
    """Sizes of the splits of 20 samples by whole numbers."""
    loaders = build_nlp_train_val_test_loader(range(20), [[7, 3, 0]], [1.0], 4, 4, num_workers=0)
    return [len(loader.dataset) if loader is not None else 0 for loader in loaders]


def orders(consumed: int, ranks: int, count: int) -> list[list[int]]:
    taken = []
    for rank in range(ranks):
        sampler = iter(
            CyclicSampler(
                range(24),
                4 // ranks,
                shuffle=True,
                consumed_samples=consumed,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                seed=5,
            )
        )
        taken.append([next(sampler) for _ in range(count)])
    return [[row for part in parts for row in part] for parts in zip(*taken, strict=True)]


def resumed_order() -> Any:
    whole = orders(0, 2, 14)
    return [orders(4 * k, 2, 3) == whole[k : k + 3] for k in (1, 4, 6, 8)]


def order_of_layouts() -> Any:
    return orders(0, 1, 14) == orders(0, 2, 14) == orders(0, 4, 14)


def checkpointer(folder: str) -> Any:
    (FOLDER / folder).mkdir(exist_ok=True)
    return Checkpointer(flow.nn.Linear(2, 2).to_global(**PLACED), str(FOLDER / folder))


def last_checkpoint() -> Any:
    """What is to be resumed from after the last step and the best model were saved."""
    saver = checkpointer("last")
    for name in ("model_0000004", "model_final", "model_best"):
        saver.save(name)
    return (FOLDER / "last" / "last_checkpoint").read_text()


def kept() -> Any:
    periodic = PeriodicCheckpointer(checkpointer("kept"), 2, max_to_keep=2)
    periodic.trainer = SimpleNamespace(max_iter=100, start_iter=0, trainer_state=dict)
    periodic.before_train()
    for periodic.trainer.iter in range(8):
        periodic.after_step()
    return sorted(path.name for path in (FOLDER / "kept").glob("model*"))


def foreign_code() -> Any:
    saver = checkpointer("evil")
    saver.save("model_0000001")

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (FOLDER / "ran",))

    file = FOLDER / "evil" / "model_0000001" / "model" / "pickled_data"
    (file.parent / "checksums.json").unlink(missing_ok=True)
    file.write_bytes(pickle.dumps({"protocol_version": 1, "data": Evil()}))
    with suppress(Exception):
        saver.load(str(FOLDER / "evil" / "model_0000001"))
    return (FOLDER / "ran").exists()


def damaged() -> Any:
    """What is said about a checkpoint with half of a file, and one of another model."""
    saver = checkpointer("damaged")
    saver.save("model_0000001")
    saver.save("model_0000002")
    messages = []
    other = Checkpointer(flow.nn.Linear(3, 3).to_global(**PLACED), saver.save_dir)
    file = next((FOLDER / "damaged" / "model_0000002" / "model").glob("*/out"))
    for damage, loader in ((False, other), (True, saver)):
        if damage:
            file.write_bytes(file.read_bytes()[:-4])
        try:
            loader.resume_or_load("", resume=True)
            messages.append("loaded")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def model_folder() -> Any:
    saver = checkpointer("inner")
    saver.save("model_0000001")
    before = saver.model.weight.numpy()
    flow.nn.init.zeros_(saver.model.weight)
    saver.load(str(FOLDER / "inner" / "model_0000001" / "model"), checkpointables=[])
    return bool(np.array_equal(saver.model.weight.numpy(), before))


class Loader:
    def __init__(self, labels: np.ndarray) -> None:
        self.dataset = labels

    def __len__(self) -> int:
        return -(-len(self.dataset) // 4)

    def __iter__(self) -> Any:
        return (self.dataset[begin : begin + 4] for begin in range(0, len(self.dataset), 4))


class Counting(flow.nn.Module):
    """Gives the token t the logit weight[t]; as libai's GPT logits, with labels the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = flow.nn.Parameter(flow.tensor(np.linspace(-2, 2, 6, dtype=np.float32)))

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.weight.reshape(1, 1, 6).expand(*input_ids.shape, 6)
        if labels is None:
            return {"prediction_scores": logits}
        labels = labels.clamp(min=0).reshape(-1)
        losses = flow._C.sparse_softmax_cross_entropy(logits.reshape(-1, 6), labels)
        return {"lm_loss": losses.mean()}


class Losses(Counting):
    """The same, as a model that computes token losses itself; every third token counts."""

    returns_token_losses = True

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = super().forward(input_ids)["prediction_scores"]
        losses = flow._C.sparse_softmax_cross_entropy(logits.reshape(-1, 6), labels.reshape(-1))
        return {"token_losses": losses.reshape(*labels.shape), "token_mask": input_ids % 3 == 0}


def batch_of(rows: np.ndarray) -> Any:
    ids = flow.tensor(np.arange(rows.size).reshape(rows.shape), **PLACED)
    return {"input_ids": ids, "labels": flow.tensor(rows, **PLACED)}


def perplexity(model: flow.nn.Module, labels: np.ndarray) -> Any:
    model = model.to_global(**PLACED)
    return evaluate_on(model, Loader(labels), 4, 100, batch_of, PPLEvaluator())


LABELS = np.random.default_rng(1).integers(0, 6, size=(10, 5))


def perplexity_of_mean_losses() -> Any:
    """Of a model that returns means only: batches of 4, 4 and 2 rows."""
    evaluator = PPLEvaluator()
    for loss, rows in ((1.0, 4), (3.0, 4), (25.0, 2)):
        evaluator.process({"input_ids": flow.zeros(rows, 3)}, {"lm_loss": flow.tensor(loss)})
    return dict(evaluator.evaluate())


def perplexity_of_gpt() -> Any:
    """Of 10 rows: the last batch is half full; one label does not count."""
    labels = LABELS.copy()
    labels[2, 3] = -1
    return perplexity(Counting(), labels)


def perplexity_of_token_losses() -> Any:
    return perplexity(Losses(), LABELS)


def spaces() -> Any:
    """Tokens of texts with spaces around special tokens, by a tokenizer of characters."""
    from libai.tokenizer.tokenization_base import PreTrainedTokenizer

    class Characters(PreTrainedTokenizer):
        def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
            return list(text)

        @property
        def vocab_size(self) -> int:
            return 1

        def _convert_token_to_id(self, token: str) -> int:
            return 0

        def get_vocab(self) -> dict[str, int]:
            return {}

    tokenizer = Characters(eos_token="<e>")
    return [tokenizer.tokenize(text) for text in (" a dog", "a <e> b", "  ", "<e><e>a")]


FACTS: list[Callable[[], Any]] = [
    float_code,
    short_data,
    sentences,
    splits,
    resumed_order,
    order_of_layouts,
    last_checkpoint,
    kept,
    foreign_code,
    damaged,
    model_folder,
    perplexity_of_mean_losses,
    perplexity_of_gpt,
    perplexity_of_token_losses,
    spaces,
]


def main() -> None:
    facts = {}
    for fact in [*FACTS, *engine_trainer_facts.FACTS]:
        try:
            facts[fact.__name__] = fact()
        except Exception as error:
            facts[fact.__name__] = f"{type(error).__name__}: {error}"
    (FOLDER / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
