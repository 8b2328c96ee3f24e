"""Every parallel layout trains and generates as one process does (libai_spec 2.7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oneflow_accel.kernels import plugin

import numpy as np
import pytest

from tests.launch import run_distributed, run_process
from tests.modes import some

WORKER = Path(__file__).parent / "gpt2_worker.py"
STEPS = 6
DROPOUT = {"embedding_dropout_prob": 0.1, "attention_dropout_prob": 0.1, "output_dropout_prob": 0.1}
UNFUSED = {
    "attention_fusion": False,
    "scale_mask_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_gelu_fusion": False,
}
# Rows that tensor parallelism adds to the vocabulary; they change no loss.
PADDED = {"vocab_size": 98, "vocab_size_real": 96}
# Float32, and sums in another order.
TOLERANCE = 1e-5
# A fixture starts many runs, twice where the first start hangs.
pytestmark = pytest.mark.timeout(600)
needs_plugin = pytest.mark.skipif(not plugin.state().loaded, reason="no CPU plug-in")


class Runs:
    def __init__(self, folder: Path, processes: int, cases: dict[str, dict[str, Any]]) -> None:
        path = folder / f"cases{processes}.json"
        path.write_text(json.dumps(list(cases.values())))
        environment = {"ONEFLOW_ACCEL_THREADS": "1"}
        if processes == 1:
            result = run_process([WORKER, path], timeout=200, env=environment)
        else:
            result = run_distributed(
                [WORKER, path], processes, timeout=280, env=environment, cwd=folder
            )
        assert result.returncode == 0, result.stdout[-3000:]
        found = json.loads(path.with_suffix(".out").read_text())
        self._found = dict(zip(cases, found, strict=True))

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._found[name]
        assert isinstance(found, list), found
        return np.array(found)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    cases: dict[str, dict[str, Any]] = {
        "eager": {"evaluate": True},
        "graph": {"graph": True, "evaluate": True},
        "eager, accumulation": {"accumulation": 4},
        "graph, accumulation": {"graph": True, "accumulation": 4},
        "graph, checkpointing": {"graph": True, "checkpointing": True},
        "eager, unfused": {"config": UNFUSED},
        "graph, softmax fused": {"graph": True, "config": {"attention_fusion": False}},
        "eager, erf": {"config": {"activation": "gelu"}},
        "eager, erf, unfused": {"config": {"activation": "gelu", **UNFUSED}},
    }
    for mode in ("eager", "graph"):
        base = {"graph": mode == "graph", "seed": 5, "config": DROPOUT}
        cases[f"{mode}, dropout"] = base
        cases[f"{mode}, dropout again"] = base
        cases[f"{mode}, dropout, another seed"] = {**base, "seed": 6}
        cases[f"{mode}, dropout, unfused"] = {**base, "config": {**DROPOUT, **UNFUSED}}
        # Attention by one operator draws other masks of its weights.
        apart = {**DROPOUT, "attention_fusion": False}
        cases[f"{mode}, dropout, attention apart"] = {**base, "config": apart}
    cases["graph, dropout, checkpointing"] = {**cases["graph, dropout"], "checkpointing": True}
    residual = {**DROPOUT, "attention_dropout_prob": 0.0}
    cases["graph, residual dropout"] = {"graph": True, "seed": 5, "config": residual}
    return Runs(tmp_path_factory.mktemp("one"), 1, cases)


TWO: dict[str, dict[str, Any]] = {
    "DP2": {"data": 2, "evaluate": True},
    "TP2": {"tensor": 2, "evaluate": True},
    "PP2": {"pipeline": 2, "evaluate": True},
    "TP2, unfused, padded": {"tensor": 2, "config": {**UNFUSED, **PADDED}},
    "DP2, accumulation": {"data": 2, "accumulation": 2},
    "graph, TP2": {"graph": True, "tensor": 2, "checkpointing": True, "evaluate": True},
    "graph, PP2": {"graph": True, "pipeline": 2, "evaluate": True},
    "graph, PP2, accumulation": {
        "graph": True,
        "pipeline": 2,
        "accumulation": 2,
        "checkpointing": True,
    },
    "graph, DP2, ZeRO 1, padded": {
        "graph": True,
        "data": 2,
        "zero": 1,
        "config": {"attention_fusion": False, **PADDED},
    },
    "graph, DP2, ZeRO 3": {"graph": True, "data": 2, "zero": 3, "evaluate": True},
}
TWO = some(
    TWO,
    "DP2, accumulation",
    "graph, PP2, accumulation",
    "graph, DP2, ZeRO 3",
)
TWO_MORE: dict[str, dict[str, Any]] = {
    "TP2, dropout": {"tensor": 2, "seed": 5, "config": DROPOUT},
    "TP2, dropout again": {"tensor": 2, "seed": 5, "config": DROPOUT},
    "graph, TP2, residual dropout": {
        "graph": True,
        "tensor": 2,
        "seed": 5,
        "config": {**DROPOUT, "attention_dropout_prob": 0.0},
    },
    "generate, DP2": {"data": 2, "generate": True},
    "generate, TP2": {"tensor": 2, "generate": True},
    "generate, PP2": {"pipeline": 2, "generate": True},
}
TWO_MORE = some(
    TWO_MORE,
    "TP2, dropout",
    "TP2, dropout again",
    "graph, TP2, residual dropout",
    "generate, TP2",
)
FOUR: dict[str, dict[str, Any]] = {
    "DP4": {"data": 4},
    "TP4": {"tensor": 4},
    "DP2 x TP2": {"data": 2, "tensor": 2, "evaluate": True},
    "DP2 x PP2": {"data": 2, "pipeline": 2, "evaluate": True},
    "TP2 x PP2": {"tensor": 2, "pipeline": 2, "evaluate": True},
    "graph, TP2 x PP2, accumulation": {
        "graph": True,
        "tensor": 2,
        "pipeline": 2,
        "accumulation": 2,
    },
    "graph, DP2 x PP2, ZeRO 1": {"graph": True, "data": 2, "pipeline": 2, "zero": 1},
}
FOUR = some(FOUR, "DP2 x TP2", "graph, TP2 x PP2, accumulation")
FOUR_MORE: dict[str, dict[str, Any]] = {
    "generate, TP4": {"tensor": 4, "generate": True},
    "generate, DP2 x TP2": {"data": 2, "tensor": 2, "generate": True},
    "generate, TP2 x PP2": {"tensor": 2, "pipeline": 2, "generate": True},
}
FOUR_MORE = some(FOUR_MORE, "generate, TP2 x PP2")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("two"), 2, {**TWO, **TWO_MORE})


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("four"), 4, {**FOUR, **FOUR_MORE})


def assert_same(found: np.ndarray, reference: np.ndarray) -> None:
    np.testing.assert_allclose(found, reference[: len(found)], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        "graph",
        "eager, accumulation",
        "graph, accumulation",
        "graph, checkpointing",
        "eager, unfused",
        "graph, softmax fused",
    ],
)
def test_one_process_has_one_loss_curve(one: Runs, name: str) -> None:
    assert one["eager"][STEPS - 1] < one["eager"][0]
    assert_same(one[name], one["eager"])


def test_the_erf_form_is_another_model_fused_or_not(one: Runs) -> None:
    assert_same(one["eager, erf, unfused"], one["eager, erf"])
    assert abs(one["eager, erf"] - one["eager"][:STEPS]).max() > TOLERANCE


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_one(one: Runs, two: Runs, name: str) -> None:
    assert_same(two[name], one["eager"])


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_as_one(one: Runs, four: Runs, name: str) -> None:
    assert_same(four[name], one["eager"])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_dropout_follows_the_seed(one: Runs, mode: str) -> None:
    found = one[f"{mode}, dropout"]
    np.testing.assert_array_equal(found, one[f"{mode}, dropout again"])
    assert abs(found - one[f"{mode}, dropout, another seed"]).max() > 1e-3
    assert abs(found - one["eager"][:STEPS]).max() > 1e-3


@needs_plugin
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_fused_dropout_drops_the_same(one: Runs, mode: str) -> None:
    assert_same(one[f"{mode}, dropout, unfused"], one[f"{mode}, dropout, attention apart"])


def test_a_checkpointed_layer_draws_the_same_masks_again(one: Runs) -> None:
    assert_same(one["graph, dropout, checkpointing"], one["graph, dropout"])


def test_dropout_follows_the_seed_on_two_processes(two: Runs) -> None:
    np.testing.assert_array_equal(two["TP2, dropout"], two["TP2, dropout again"])


def test_broadcast_activations_drop_the_same_on_every_process(one: Runs, two: Runs) -> None:
    assert_same(two["graph, TP2, residual dropout"], one["graph, residual dropout"])


@pytest.mark.parametrize("name", [name for name in TWO_MORE if "generate" in name])
def test_two_processes_generate_as_the_reference(two: Runs, name: str) -> None:
    assert two[name].max() < TOLERANCE


@pytest.mark.parametrize("name", FOUR_MORE)
def test_four_processes_generate_as_the_reference(four: Runs, name: str) -> None:
    assert four[name].max() < TOLERANCE
