"""Every parallel layout trains and generates as one process does (libai_spec 2.7): GPT-2 and BERT,
also with Monarch and block-diagonal layers, and the Llama."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oneflow_accel.kernels import plugin

import numpy as np
import pytest

from tests.launch import run_distributed, run_process
from tests.libai_projects.magicprompt.gpt2_models import BLOCKS, MONARCH

WORKER = Path(__file__).parent / "layouts_worker.py"
REFERENCE = Path(__file__).parent / "patches" / "tiny_gpt_losses.json"
# Float32, and sums in another order.
TOLERANCE = 1e-5
# A fixture starts many runs, twice where the first start hangs.
pytestmark = pytest.mark.timeout(900)
UNFUSED = {
    "attention_fusion": False,
    "scale_mask_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_gelu_fusion": False,
}
BLOCK_MLP, MONARCH_MLP = {"mlp_cfg": "blockdiag"}, {"mlp_cfg": "monarch"}
APART = {"attention_fusion": False}
# Rows that tensor parallelism adds to the vocabulary; they change no loss.
PADDED = {"vocab_size": 98, "vocab_size_real": 96}
DROPOUT = {"embedding_dropout_prob": 0.1, "attention_dropout_prob": 0.1, "output_dropout_prob": 0.1}
RESIDUAL = {**DROPOUT, "attention_dropout_prob": 0.0}
# 64 -> 64: 6 does not divide it.
SPLIT_BLOCKS = {**BLOCKS, "attnproj_cfg": {"_target_": "blockdiag", "nblocks": 6}}
KEPT = {"recompute": False, "reshard_after_forward": False}
OVERLAPPED = {"graph": True, "accumulation": 2, "checkpointing": True}


def gpt2(**case: Any) -> dict[str, Any]:
    return case


def monarch(**case: Any) -> dict[str, Any]:
    return {"config": MONARCH, **case}


def blocks(**case: Any) -> dict[str, Any]:
    return {"config": SPLIT_BLOCKS, **case}


def libai(**case: Any) -> dict[str, Any]:
    """LiBai's own GPT: its losses are those of one in PyTorch, float64 (tiny_gpt_losses.json)."""
    return {"model": "libai", "evaluate": True, **case}


def llama(**case: Any) -> dict[str, Any]:
    return {"model": "llama", **case}


def bert(**case: Any) -> dict[str, Any]:
    return {"model": "bert", **case}


# 6 divides the inner width and not the outer one, 64.
FACTORS = {"mlp_cfg": {"_target_": "monarch", "nblocks": 6}, "attnproj_cfg": "monarch"}
FACTORS["attnlinear_cfg"] = "blockdiag"


def factored(*more: dict[str, Any], **case: Any) -> dict[str, Any]:
    """A Llama whose layers are all structured."""
    return llama(config=dict(ChainMap(*more, FACTORS)), **case)


def dropped(config: dict[str, Any], **case: Any) -> dict[str, Any]:
    return {"seed": 5, "config": config, **case}


TIED = {"tie_word_embeddings": True}
OTHER = {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}
OVER_TIME = {"sequence_parallel": True}
FIRST = {"sequence_first": True}
FUSED = {"bias_gelu_fusion": True, "bias_dropout_fusion": True, "scale_mask_softmax_fusion": True}
SCALED = {**FUSED, "apply_query_key_layer_scaling": True}
BFLOAT16, INT8 = {"weights_dtype": "bfloat16"}, {"weights_dtype": "int8"}
# By the number of processes; a name begins with the one process's case that it has to equal.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "gpt2": gpt2(evaluate=True),
        "gpt2, graph": gpt2(graph=True, accumulation=4, checkpointing=True, evaluate=True),
        "gpt2, unfused": gpt2(config=UNFUSED),
        "gpt2, softmax fused": gpt2(config=APART),
        "other gpt2": gpt2(config=OTHER),
        "dropout": dropped(DROPOUT),
        "dropout, again": dropped(DROPOUT),
        "another seed": {**dropped(DROPOUT), "seed": 6},
        # Attention by one operator draws other masks of its weights.
        "dropout apart": dropped({**DROPOUT, **APART}),
        "dropout apart, unfused": dropped({**DROPOUT, **UNFUSED}),
        "graph with dropout": dropped(DROPOUT, graph=True),
        # A layer draws the same masks again.
        "graph with dropout, checkpointing": dropped(DROPOUT, graph=True, checkpointing=True),
        "residual dropout": dropped(RESIDUAL, graph=True),
        "monarch": monarch(evaluate=True),
        "blocks": blocks(evaluate=True),
        "bert": bert(evaluate=True),
        "bert, unfused": bert(config=UNFUSED),
        "bert, graph": bert(graph=True, accumulation=4, checkpointing=True, evaluate=True),
        "blocks bert": bert(config=BLOCK_MLP, evaluate=True),
        "monarch bert": bert(config=MONARCH_MLP),
        "llama": llama(evaluate=True),
        "llama that learns": llama(steps=20, evaluate=True),
        "llama, time first": llama(config=FIRST),
        "factored llama": factored(evaluate=True),
        "factored llama that learns": factored(steps=20, evaluate=True),
        "factored llama, graph": factored(FIRST, **OVERLAPPED),
        "tied llama": llama(config=TIED),
        "libai, fused": libai(config=SCALED),
        "packed llama": llama(documents=3),
        "packed llama, graph": llama(documents=3, **OVERLAPPED),
    },
    2: {
        "gpt2, graph, pipeline": gpt2(pipeline=2, **OVERLAPPED),
        "other gpt2, pipeline": gpt2(pipeline=2, config=OTHER),
        "other gpt2, tensor, padded": gpt2(tensor=2, config={**OTHER, **PADDED}),
        "gpt2, sharded": gpt2(data=2, sharded={}, evaluate=True),
        "gpt2, sharded, weights kept": gpt2(data=2, sharded=KEPT),
        "gpt2, sharded flat": gpt2(data=2, sharded={"flatten": True}),
        "sharded with dropout": dropped(DROPOUT, data=2, sharded={"recompute": False}),
        # The masks are drawn twice.
        "sharded with dropout, recomputed": dropped(DROPOUT, data=2, sharded={}),
        "gpt2, tensor, padded": gpt2(tensor=2, config={**UNFUSED, **PADDED}),
        # What is broadcast has the same masks on every process.
        "residual dropout, tensor": dropped(RESIDUAL, graph=True, tensor=2),
        "gpt2, generate, tensor": gpt2(tensor=2, generate=True),
        "monarch, graph, tensor": monarch(graph=True, tensor=2, evaluate=True),
        "monarch, generate, tensor": monarch(tensor=2, generate=True),
        "monarch, generate bfloat16, tensor": monarch(tensor=2, generate=True, **BFLOAT16),
        "bert, data": bert(data=2, evaluate=True),
        "bert, tensor, padded": bert(tensor=2, config={**UNFUSED, **PADDED}),
        "bert, graph, ZeRO 2": bert(graph=True, data=2, zero=2),
        "blocks bert, tensor": bert(tensor=2, config=BLOCK_MLP, evaluate=True),
        "monarch bert, tensor": bert(tensor=2, config=MONARCH_MLP),
        "llama, generate, pipeline": llama(pipeline=2, generate=True),
        "llama, data": llama(data=2, evaluate=True),
        "llama, tensor over time": llama(tensor=2, evaluate=True, config=OVER_TIME),
        "llama, tensor over time first": llama(tensor=2, config={**OVER_TIME, **FIRST}),
        "packed llama, tensor": llama(tensor=2, documents=3),
        "factored llama, generate, tensor": factored(tensor=2, generate=True),
        "monarch, sharded": monarch(data=2, sharded={}, evaluate=True),
        "factored llama, tensor over time first": factored(OVER_TIME, FIRST, tensor=2),
        # The fused loss has another form there.
        "factored llama, graph, ZeRO 3": factored(graph=True, data=2, zero=3, evaluate=True),
        "tied llama, graph, pipeline": llama(pipeline=2, config=TIED, **OVERLAPPED),
        "libai, data": libai(data=2),
        "libai, tensor, fused": libai(tensor=2, config=SCALED),
        "libai, pipeline of 3 and 1 layers": libai(pipeline=2, stages=[0, 0, 0, 1]),
        "libai, graph, pipeline": libai(pipeline=2, **OVERLAPPED),
    },
    4: {
        "gpt2, data, tensor": gpt2(data=2, tensor=2, evaluate=True),
        "gpt2, graph, tensor, pipeline": gpt2(graph=True, tensor=2, pipeline=2, accumulation=2),
        "gpt2, generate, tensor, pipeline": gpt2(tensor=2, pipeline=2, generate=True),
        "gpt2, generate int8, pipeline": gpt2(pipeline=2, tensor=2, generate=True, **INT8),
        "llama, generate int8, tensor": llama(data=2, tensor=2, generate=True, **INT8),
        "monarch, tensor, pipeline": monarch(tensor=2, pipeline=2),
        "blocks, data, tensor": blocks(data=2, tensor=2, evaluate=True),
        "bert, data, tensor": bert(data=2, tensor=2, evaluate=True),
        "bert, graph, tensor, pipeline": bert(graph=True, tensor=2, pipeline=2, accumulation=2),
        "blocks bert, tensor, pipeline": bert(tensor=2, pipeline=2, config=BLOCK_MLP),
        "llama, data, tensor over time": llama(data=2, tensor=2, config=OVER_TIME),
        "factored llama, data, tensor": factored(data=2, tensor=2, evaluate=True),
        "factored llama, generate bfloat16, tensor, pipeline": factored(
            tensor=2, pipeline=2, generate=True, **BFLOAT16
        ),
    },
}
LIKE = {
    name: name.partition(", ")[0]
    for cases in CASES.values()
    for name in cases
    if ", " in name and "generate" not in name
}
NEEDS_PLUGIN = "dropout apart, unfused"
# An nn.Graph takes seconds to compile, and four processes share two cores.
LONG = {name for n in CASES for name, case in CASES[n].items() if n == 4 or case.get("graph")}
RELEASE = LONG - {
    *("gpt2, graph", "graph with dropout", "gpt2, graph, pipeline", "monarch, graph, tensor"),
    *("factored llama, graph, ZeRO 3", "gpt2, data, tensor", "gpt2, graph, tensor, pipeline"),
}
LEARNING = {"gpt2": (6, 0), "monarch": (6, 0), "bert": (6, 0), "llama that learns": (20, 0.5)}
LEARNING["factored llama that learns"] = (20, 0.1)
OTHERS = {"dropout", "another seed", "graph with dropout", "sharded with dropout"}
OTHERS |= {"packed llama", "llama"}


def marked(names: Iterable[str]) -> list[Any]:
    """Parameters of a test, those of RELEASE marked."""
    return [
        pytest.param(name, marks=pytest.mark.release if name in RELEASE else ()) for name in names
    ]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    """What the chosen tests ask for, in one start for each number of processes."""
    chosen = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["name"] for item in chosen if hasattr(item, "callspec")}
    if any(item.name == "test_what_differs" for item in chosen):
        wanted |= LEARNING.keys() | OTHERS
    wanted |= {LIKE.get(name, name) for name in wanted}
    reference = json.loads(REFERENCE.read_text())
    found = {"libai": [*reference["losses"], reference["evaluation"]]}
    for processes, all_cases in CASES.items():
        cases = {name: case for name, case in all_cases.items() if name in wanted}
        if not cases:
            continue
        folder = tmp_path_factory.mktemp("layouts")
        path = folder / "cases.json"
        path.write_text(json.dumps(list(cases.values())))
        command, environment = [WORKER, path], {"ONEFLOW_ACCEL_THREADS": "1"}
        if processes == 1:
            result = run_process(command, timeout=200, env=environment)
        else:
            result = run_distributed(command, processes, timeout=280, env=environment, cwd=folder)
        assert result.returncode == 0, result.stdout[-3000:]
        values = json.loads(path.with_suffix(".out").read_text())
        found |= dict(zip(cases, values, strict=True))
    return found


def values(runs: dict[str, Any], name: str) -> np.ndarray:
    # Or it is the text of what went wrong.
    assert isinstance(runs[name], list), runs[name]
    return np.array(runs[name])


@pytest.mark.parametrize("name", marked(LIKE))
def test_a_layout_trains_as_one_process(runs: dict[str, Any], name: str) -> None:
    if name == NEEDS_PLUGIN and not plugin.state().loaded:
        pytest.skip("no CPU plug-in")
    found, expected = values(runs, name), values(runs, LIKE[name])
    assert len(found) >= 6
    np.testing.assert_allclose(found, expected[: len(found)], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name", marked(name for cases in CASES.values() for name in cases if "generate" in name)
)
def test_a_layout_generates_as_the_reference(runs: dict[str, Any], name: str) -> None:
    # Logits of about 1, of weights and activations of 8 bits.
    low = "bfloat16" in name or "int8" in name
    assert values(runs, name).max() < (0.1 if low else TOLERANCE)


def test_what_differs(runs: dict[str, Any]) -> None:
    """Models learn, so that equal losses are not those of one that stands still."""
    for name, (steps, by) in LEARNING.items():
        losses = values(runs, name)
        # After the steps, that of the first batch again.
        assert losses[steps] < losses[0] - by
    plain = values(runs, "gpt2")[:6]
    dropout = values(runs, "dropout")
    for other in (plain, values(runs, "another seed")):
        assert abs(dropout - other).max() > 1e-3
    for name in ("graph with dropout", "sharded with dropout"):
        assert abs(values(runs, name) - plain).max() > 1e-3
    # What is packed with a document does not change it, but it sees less.
    assert abs(values(runs, "packed llama") - values(runs, "llama")[:6]).max() > 1e-3
