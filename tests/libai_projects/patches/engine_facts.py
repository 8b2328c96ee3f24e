"""What pieces of an engine do, as JSON: ours or, without patches 0020 and on, LiBai's own.

engine_facts.py FOLDER, run by test_engine_patches.py.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oneflow_accel  # noqa: F401 - before oneflow and libai, which it patches

import numpy as np
import oneflow as flow

from tests.libai_projects.patches.partial_series import VARIABLE  # before libai

if os.environ.get(VARIABLE):
    from libai.data.build import build_nlp_train_val_test_loader
    from libai.data.data_utils import BlockIndexedDataset
    from libai.data.samplers import CyclicSampler
    from libai.engine import default_setup
    from libai.evaluation import PPLEvaluator
    from libai.evaluation import inference_on_dataset as evaluate_on

    def set_up(cfg: Any, resume: bool) -> None:
        default_setup(cfg, Namespace(resume=resume, config_file=""))
else:
    from libai_projects.engine.parts import set_up
    from libai_projects.text.loaders import (
        BlockIndexedDataset,
        CyclicSampler,
        build_nlp_train_val_test_loader,
    )
    from libai_projects.text.perplexity import PPLEvaluator, evaluate_on

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


def setup(**train: Any) -> list[float]:
    from omegaconf import OmegaConf

    told: list[float] = []
    nccl = flow.boxing.nccl
    nccl.set_fusion_threshold_mbytes = nccl.set_fusion_max_ops_num = told.append
    layout = {f"{kind}_parallel_size": 1 for kind in ("data", "tensor", "pipeline")}
    train = {
        "train_micro_batch_size": 1,
        "output_dir": str(FOLDER / "setup"),
        "dist": layout,
        **train,
    }
    set_up(OmegaConf.create({"train": train}), resume=False)
    return told


def options_of_nccl() -> Any:
    """On this device, which has no NCCL, without options and with them; then on one that has it."""
    from oneflow_accel.backends.cpu import CpuBackend

    options = {"nccl_fusion_threshold_mb": 32, "nccl_fusion_max_ops": 8}
    told = [setup(), setup(**options)]
    CpuBackend.collective_backend = "nccl"
    try:
        return [*told, setup(), setup(**options)]
    finally:
        CpuBackend.collective_backend = "ccl"


def rdma() -> Any:
    started: list[bool] = []
    flow.env.init_rdma = lambda: started.append(True)
    flow.sysconfig.with_rdma = lambda: False
    setup(rdma_enabled=False)
    try:
        setup(rdma_enabled=True)
    except Exception as error:
        return [started, f"{type(error).__name__}: {error}"]
    return [started, ""]


FACTS: list[Callable[[], Any]] = [
    float_code,
    short_data,
    sentences,
    splits,
    resumed_order,
    order_of_layouts,
    perplexity_of_mean_losses,
    perplexity_of_gpt,
    perplexity_of_token_losses,
    spaces,
    options_of_nccl,
    rdma,
]


def main() -> None:
    facts = {}
    for fact in FACTS:
        try:
            facts[fact.__name__] = fact()
        except Exception as error:
            facts[fact.__name__] = f"{type(error).__name__}: {error}"
    (FOLDER / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
