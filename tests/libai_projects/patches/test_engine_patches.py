"""What our engine does otherwise than LiBai's: each fact without patches from 0020 on, and with.

Two processes tell all facts; the patches below 0020, without which nothing runs, are there in both.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import run_process
from tests.libai_projects.patches.partial_series import VARIABLE

SCRIPT = Path(__file__).with_name("engine_facts.py")
ENV = {"ONEFLOW_ACCEL_DEVICE": "cpu", "ONEFLOW_ACCEL_THREADS": "1"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    told = []
    for before in ("0020", ""):
        folder = tmp_path_factory.mktemp("facts")
        process = run_process([SCRIPT, folder], timeout=100, env={**ENV, VARIABLE: before})
        assert process.returncode == 0, process.stdout
        told.append(json.loads((folder / "facts.json").read_text()))
    return {name: (told[0][name], told[1][name]) for name in told[1]}


def test_code_6_is_a_float_of_4_bytes(facts: dict[str, tuple[Any, Any]]) -> None:
    assert facts["float_code"] == (8, 4)


def test_all_blocks_of_a_small_dataset_are_used(facts: dict[str, tuple[Any, Any]]) -> None:
    one, two = [0, 1, 2, 3, 4], [4, 5, 6, 7, 8]
    assert facts["short_data"] == ([one], [one, two])


def test_all_sentences_of_a_document_are_used(facts: dict[str, tuple[Any, Any]]) -> None:
    stock, patched = facts["sentences"]
    assert stock == [[0, 1, 2, 3, 9]]
    assert patched == [list(range(begin, begin + 5)) for begin in range(0, 20, 4)]


def test_splits_can_be_whole_numbers(facts: dict[str, tuple[Any, Any]]) -> None:
    stock, patched = facts["splits"]
    assert "Cannot cast" in stock
    assert patched == [14, 6, 0]


def test_a_resumed_run_takes_the_samples_of_an_uninterrupted_one(
    facts: dict[str, tuple[Any, Any]],
) -> None:
    stock, patched = facts["resumed_order"]
    assert stock != [True] * 4
    assert patched == [True] * 4


def test_layouts_take_the_same_samples(facts: dict[str, tuple[Any, Any]]) -> None:
    assert facts["order_of_layouts"] == (False, True)


def token_losses(labels: np.ndarray) -> np.ndarray:
    logits = np.linspace(-2, 2, 6, dtype=np.float32).astype(np.float64)
    return math.log(np.exp(logits).sum()) - logits[labels]


LABELS = np.random.default_rng(1).integers(0, 6, size=(10, 5))


def test_perplexity_of_logits_counts_each_token_and_no_padding(
    facts: dict[str, tuple[Any, Any]],
) -> None:
    stock, patched = facts["perplexity_of_gpt"]
    assert "there is no device" in stock
    counted = np.ones(LABELS.shape, bool)
    counted[2, 3] = False
    mean = token_losses(LABELS)[counted].mean()
    assert patched["lm_loss"] == pytest.approx(mean, rel=1e-6)
    assert patched["lm_loss_PPL"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert patched["lm_loss_tokens"] == 49


def test_perplexity_of_token_losses_follows_their_mask(facts: dict[str, tuple[Any, Any]]) -> None:
    stock, patched = facts["perplexity_of_token_losses"]
    assert "Error" in stock
    # Input ids of a batch count its tokens; the last one has rows 8 and 9.
    ids = np.concatenate([np.arange(20), np.arange(20), np.arange(10)]).reshape(10, 5)
    mean = token_losses(LABELS)[ids % 3 == 0].mean()
    assert patched["lm_loss"] == pytest.approx(mean, rel=1e-6)
    assert patched["lm_loss_tokens"] == (ids % 3 == 0).sum()


def test_perplexity_is_exp_of_a_mean_and_not_a_mean_of_exp(
    facts: dict[str, tuple[Any, Any]],
) -> None:
    stock, patched = facts["perplexity_of_mean_losses"]
    # The stock one also cuts losses off at 20.
    stock_mean = (math.exp(1) + math.exp(3) + math.exp(20)) / 3
    assert stock == {"lm_loss_PPL": pytest.approx(stock_mean)}
    assert patched == {"lm_loss_PPL": pytest.approx(math.exp((4 * 1 + 4 * 3 + 2 * 25) / 10))}


def test_nccl_gets_options_that_are_set_where_it_runs(facts: dict[str, tuple[Any, Any]]) -> None:
    stock, patched = facts["options_of_nccl"]
    assert stock[0] == [16, 24]
    assert patched == [[], [], [], [32, 8]]


def test_rdma_is_off_unless_asked_for(facts: dict[str, tuple[Any, Any]]) -> None:
    started, message = facts["rdma"][1]
    assert started == []
    assert message.startswith("UserError: train.rdma_enabled=True, but oneflow was built without")


def test_spaces_around_special_tokens_are_kept(facts: dict[str, tuple[Any, Any]]) -> None:
    stock, patched = facts["spaces"]
    assert stock[0] == list("a dog")
    assert stock[2] == ["<e>"]
    assert patched == [list(" a dog"), ["a", " ", "<e>", " ", "b"], [" ", " "], ["<e>", "<e>", "a"]]
