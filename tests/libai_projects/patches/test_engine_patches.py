"""What our engine and its data do otherwise than LiBai's."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.errors import DataError, UserError

import numpy as np
import oneflow as flow
import pytest
from libai.data.data_utils import helpers, indexed_dataset
from libai.tokenizer.tokenization_base import PreTrainedTokenizer
from omegaconf import OmegaConf

from libai_projects.engine import parts
from libai_projects.text.indexed_dataset import get_indexed_dataset
from libai_projects.text.loaders import (
    BlockIndexedDataset,
    CyclicSampler,
    build_nlp_train_val_test_loader,
)
from libai_projects.text.perplexity import PPLEvaluator, evaluate_on
from tests.libai_projects.patches.engine_run import write_dataset

PLACED = {"placement": flow.placement("cpu", [0]), "sbp": flow.sbp.broadcast}


def test_code_6_is_a_float_of_4_bytes() -> None:
    assert np.dtype(indexed_dataset.dtypes[6]).itemsize == 4


def documents(seed: int, count: int, shortest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 60000, size=rng.integers(shortest, 40)) for _ in range(count)]


class Numbers:
    """Sequences of such sizes that count 0, 1, 2, ... from one to the next."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes
        self._parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])

    def __getitem__(self, index: int) -> np.ndarray:
        return self._parts[index]


@pytest.mark.parametrize("length", [1, 16, 100])
def test_blocks_begin_where_libais_helper_says_and_one_more(length: int) -> None:
    sizes = np.array([len(document) for document in documents(3, 120, 1)], np.int64)
    dataset = BlockIndexedDataset("x", Numbers(sizes), length)
    theirs = helpers.build_sample_idx(
        np.arange(len(sizes) + 1, dtype=np.int64), sizes, length, int(sizes.sum())
    )
    begins = np.cumsum(sizes) - sizes
    firsts = [int(dataset[number][0]) for number in range(len(dataset))]
    # A sample of theirs reaches from one row to the next.
    assert firsts[: len(theirs) - 1] == [int(begins[row] + off) for row, off in theirs[:-1]]
    assert len(dataset) == (sizes.sum() - 1) // length


def test_blocks_hold_all_tokens_in_order(tmp_path: Path) -> None:
    texts = documents(1, 50, 0)
    write_dataset(tmp_path / "x", texts)
    indexed = get_indexed_dataset(str(tmp_path / "x"), "mmap", True)
    dataset = BlockIndexedDataset(str(tmp_path / "x"), indexed, 16)
    tokens = np.concatenate(texts)
    assert len(dataset) == (len(tokens) - 1) // 16
    for number in range(len(dataset)):
        assert np.array_equal(dataset[number], tokens[number * 16 : number * 16 + 17])


def test_too_little_text_says_how_much_it_takes(tmp_path: Path) -> None:
    write_dataset(tmp_path / "x", [np.arange(16)])
    indexed = get_indexed_dataset(str(tmp_path / "x"), "mmap", True)
    with pytest.raises(DataError, match=r"has 16 tokens, and one sample takes 17"):
        BlockIndexedDataset(str(tmp_path / "x"), indexed, 16)
    assert len(BlockIndexedDataset(str(tmp_path / "x"), indexed, 15)) == 1


def test_splits_can_be_whole_numbers() -> None:
    loaders = build_nlp_train_val_test_loader(range(20), [[7, 3, 0]], [1.0], 4, 4, num_workers=0)
    sizes = [len(loader.dataset) if loader is not None else 0 for loader in loaders]
    assert sizes == [14, 6, 0]


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


def test_samples_are_the_same_in_every_layout_and_after_a_stop() -> None:
    whole = orders(0, 2, 14)
    assert orders(0, 1, 14) == whole == orders(0, 4, 14)
    # Each epoch of 6 batches has all samples, in an order of its own.
    epochs = [np.ravel(whole[begin : begin + 6]).tolist() for begin in (0, 6)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0] != epochs[1]
    for step in (1, 4, 6, 8):
        assert orders(4 * step, 2, 3) == whole[step : step + 3]


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


LABELS = np.random.default_rng(1).integers(0, 6, size=(10, 5))


def check_perplexity(model: flow.nn.Module, labels: np.ndarray, counted: np.ndarray) -> None:
    found = evaluate_on(model.to_global(**PLACED), Loader(labels), 4, 100, batch_of, PPLEvaluator())
    logits = np.linspace(-2, 2, 6, dtype=np.float32).astype(np.float64)
    mean = (math.log(np.exp(logits).sum()) - logits[LABELS])[counted].mean()
    assert found["lm_loss"] == pytest.approx(mean, rel=1e-6)
    assert found["lm_loss_PPL"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert found["lm_loss_tokens"] == counted.sum()


def test_perplexity_of_logits_counts_each_token_and_no_padding() -> None:
    """Of 10 rows: the last batch is half full; one label does not count."""
    labels, counted = LABELS.copy(), np.ones(LABELS.shape, bool)
    labels[2, 3], counted[2, 3] = -1, False
    check_perplexity(Counting(), labels, counted)


def test_perplexity_of_token_losses_follows_their_mask() -> None:
    # Input ids of a batch count its tokens; the last one has rows 8 and 9.
    ids = np.concatenate([np.arange(20), np.arange(20), np.arange(10)]).reshape(10, 5)
    check_perplexity(Losses(), LABELS, ids % 3 == 0)


def test_perplexity_is_exp_of_a_mean_and_not_a_mean_of_exp() -> None:
    """Of a model that returns means only: batches of 4, 4 and 2 rows."""
    evaluator = PPLEvaluator()
    for loss, rows in ((1.0, 4), (3.0, 4), (25.0, 2)):
        evaluator.process({"input_ids": flow.zeros(rows, 3)}, {"lm_loss": flow.tensor(loss)})
    assert dict(evaluator.evaluate()) == {
        "lm_loss_PPL": pytest.approx(math.exp((4 * 1 + 4 * 3 + 2 * 25) / 10))
    }


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


def test_spaces_around_special_tokens_are_kept() -> None:
    tokenizer = Characters(eos_token="<e>")
    assert tokenizer.tokenize(" a dog") == list(" a dog")
    assert tokenizer.tokenize("a <e> b") == ["a", " ", "<e>", " ", "b"]
    assert tokenizer.tokenize("  ") == [" ", " "]
    assert tokenizer.tokenize("<e><e>a") == ["<e>", "<e>", "a"]


def test_options_of_collectives_only_where_config_and_device_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    for name in ("set_fusion_threshold_mbytes", "set_fusion_max_ops_num"):
        monkeypatch.setattr(flow.boxing.nccl, name, told.append)
    monkeypatch.setattr(flow.env, "init_rdma", lambda: told.append("rdma"))
    monkeypatch.setattr(flow.sysconfig, "with_rdma", lambda: False)
    monkeypatch.setattr(parts, "setup_logger", lambda *_, **__: logging.getLogger(__name__))

    def set_up(**train: Any) -> None:
        layout = {f"{kind}_parallel_size": 1 for kind in ("data", "tensor", "pipeline")}
        train |= {"train_micro_batch_size": 1, "output_dir": str(tmp_path), "dist": layout}
        parts.set_up(OmegaConf.create({"train": train}), resume=False)

    options = {"nccl_fusion_threshold_mb": 32, "nccl_fusion_max_ops": 8}
    set_up(**options, rdma_enabled=False)
    monkeypatch.setattr(CpuBackend, "collective_backend", "nccl")
    set_up()
    assert told == []
    set_up(**options)
    assert told == [32, 8]
    with pytest.raises(UserError, match=r"train\.rdma_enabled=True, but oneflow was built without"):
        set_up(rdma_enabled=True)
    assert told == [32, 8]
