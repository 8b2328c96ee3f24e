"""The training model against the float64 reference, on one process."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from libai.utils.registry import locate

from libai_projects.generation.interface import ModelState
from libai_projects.models.gpt2 import options as model_options
from libai_projects.models.gpt2.model import GPT2ForPreTraining, GPT2StepModel
from tests.launch import run_process
from tests.libai_projects import reference_gpt2
from tests.libai_projects.magicprompt.gpt2_models import logits, make, place
from tests.libai_projects.reference_gpt2 import Shape
from tests.tolerances import assert_close

SHAPE = Shape()
STATE = reference_gpt2.random_state(SHAPE)
IDS = np.random.default_rng(1).integers(0, SHAPE.vocabulary, (2, 21))
APART = {"attention_fusion": False}
UNFUSED = {**APART, "scale_mask_softmax_fusion": False}


@pytest.mark.parametrize(
    "options",
    [
        {},
        APART,
        UNFUSED,
        {"apply_query_key_layer_scaling": True},
        {"apply_query_key_layer_scaling": True, **APART},
        {"apply_query_key_layer_scaling": True, **UNFUSED},
    ],
    ids=str,
)
def test_logits_are_the_references(options: dict[str, bool]) -> None:
    expected = reference_gpt2.forward(STATE, IDS, SHAPE.heads)
    assert_close(logits(make(STATE, SHAPE, **options), IDS), expected, reduced=SHAPE.width)


@pytest.mark.parametrize("fused", [True, False])
def test_the_erf_form_of_gelu(fused: bool) -> None:
    model = make(STATE, SHAPE, activation="gelu", bias_gelu_fusion=fused)
    expected = reference_gpt2.forward(STATE, IDS, SHAPE.heads, gelu="erf")
    assert_close(logits(model, IDS), expected, reduced=SHAPE.width)


@pytest.mark.parametrize("fusions", [{}, APART, {**UNFUSED, "apply_query_key_layer_scaling": True}])
def test_relu_scores_by_layer_and_a_head_of_its_own(fusions: dict[str, bool]) -> None:
    state = {**STATE, "lm_head.weight": STATE["wte.weight"][::-1].copy()}
    options = {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}
    model = make(state, SHAPE, activation="relu", **options, **fusions)
    expected = reference_gpt2.forward(state, IDS, SHAPE.heads, gelu="relu", by_layer=True)
    assert_close(logits(model, IDS), expected, reduced=SHAPE.width)
    # Generation reads the same options.
    found = ModelState(GPT2StepModel(model), len(IDS)).read(IDS)
    assert_close(found, expected[:, -1], reduced=SHAPE.width)


def test_losses_in_training_and_evaluation() -> None:
    model = make(STATE, SHAPE)
    ids, labels = IDS[:, :-1], IDS[:, 1:].copy()
    labels[0, 5:] = -1
    expected = reference_gpt2.token_losses(
        reference_gpt2.forward(STATE, ids, SHAPE.heads), np.maximum(labels, 0)
    )
    counted = labels >= 0
    result = model(place(ids), place(labels))
    np.testing.assert_array_equal(result["token_mask"].numpy(), counted)
    assert_close(result["token_losses"].numpy(), expected * counted, reduced=SHAPE.width)
    loss = model.train()(place(ids), place(labels))["lm_loss"].numpy()
    assert_close(loss, expected[counted].mean(), reduced=SHAPE.width)
    assert float(model(place(ids), place(np.full_like(ids, -1)))["lm_loss"].numpy()) == 0


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_the_slopes_of_the_reference(fused: bool) -> None:
    """Along a random direction of each kind of parameter, by central differences in float64."""
    options = {} if fused else {**UNFUSED, "bias_dropout_fusion": False}
    model = make(STATE, SHAPE, **options).train()
    ids, labels = IDS[:, :-1], IDS[:, 1:]
    model(place(ids), place(labels))["lm_loss"].backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    rng = np.random.default_rng(2)
    names = [name for name in STATE if not name.startswith("h.1")]
    for name in names:
        direction = rng.standard_normal(STATE[name].shape)

        def loss(step: float, name: str = name, direction: np.ndarray = direction) -> float:
            moved = {**STATE, name: STATE[name].astype(np.float64) + step * direction}
            found = reference_gpt2.forward(moved, ids, SHAPE.heads)
            return float(reference_gpt2.token_losses(found, labels).mean())

        slope = (loss(1e-4) - loss(-1e-4)) / 2e-4
        ((target, converted),) = reference_gpt2.to_libai({name: direction}, SHAPE.heads).items()
        assert float((gradients[target] * converted).sum()) == pytest.approx(
            slope, rel=1e-3, abs=1e-5
        ), name


def test_padding_rows_of_the_vocabulary_change_nothing() -> None:
    plain = make(STATE, SHAPE)
    padded = make(STATE, SHAPE, vocab_size=128, vocab_size_real=SHAPE.vocabulary)
    both = [logits(model, IDS) for model in (plain, padded)]
    np.testing.assert_array_equal(both[1][..., : SHAPE.vocabulary], both[0])
    assert both[1][..., SHAPE.vocabulary :].max() < -1000
    ids, labels = place(IDS[:, :-1]), place(IDS[:, 1:])
    losses = [model.train()(ids, labels)["lm_loss"].numpy() for model in (plain, padded)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_initial_weights_have_the_scales_of_gpt2() -> None:
    flow.manual_seed(0)
    options = dict(make(STATE, SHAPE).GPT_model.options.__dict__)
    model = GPT2ForPreTraining({**options, "hidden_size": 256, "ffn_hidden_size": 1024})
    for name, parameter in model.named_parameters():
        values = parameter.numpy()
        if "layernorm" in name:
            np.testing.assert_array_equal(values, float(name.endswith("weight")))
        elif name.endswith("bias"):
            assert not values.any(), name
        else:
            scaled = name.endswith(("dense.weight", "dense_4h_to_h.weight"))
            sigma = 0.02 / np.sqrt(2 * SHAPE.layers) if scaled else 0.02
            assert values.std() == pytest.approx(sigma, rel=0.05), name


def test_more_tokens_than_positions_is_an_error() -> None:
    ids = np.zeros((1, SHAPE.positions + 1), dtype=np.int64)
    with pytest.raises(UserError, match="33 tokens, but the model has 32 positions"):
        logits(make(STATE, SHAPE), ids)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_attention_heads": 5}, "hidden_size=64 does not divide by .*num_attention_heads=5"),
        ({"activation": "silu"}, "activation='silu': it must be gelu_tanh, gelu or relu"),
        ({"vocab_size_real": 97}, "vocab_size_real=97 does not fit model.cfg.vocab_size=96"),
        ({"num_layers": None}, "model.cfg.num_layers is not set"),
    ],
)
def test_an_impossible_option_is_an_error(options: dict[str, object], text: str) -> None:
    with pytest.raises(UserError, match=text):
        make(STATE, SHAPE, **options)


def test_heads_that_do_not_divide_are_an_error() -> None:
    make(STATE, SHAPE)
    config = {
        "num_layers": 2,
        "vocab_size": 96,
        "hidden_size": 60,
        "ffn_hidden_size": 240,
        "num_attention_heads": 6,
    }
    with pytest.raises(
        UserError, match=r"=6 does not divide by .*=4; sizes that fit are 1, 2, 3, 6"
    ):
        model_options.from_config(config, tensor_parallel_size=4)


def test_a_fusion_that_cannot_be_is_said_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = make(STATE, SHAPE, activation="gelu_tanh", bias_gelu_fusion=True)
    assert "bias_gelu_fusion is on but the fused operator is the erf form" in caplog.text
    expected = reference_gpt2.forward(STATE, IDS, SHAPE.heads)
    assert_close(logits(model, IDS), expected, reduced=SHAPE.width)


def test_it_runs_without_the_plug_in(tmp_path: Path) -> None:
    cases = [
        {"evaluate": True},
        {"graph": True, "evaluate": True, "config": {"output_dropout_prob": 0.0}},
        {"generate": True},
    ]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    result = run_process(
        [Path(__file__).parents[1] / "layouts_worker.py", path], env={"ONEFLOW_ACCEL_PLUGIN": "off"}
    )
    assert result.returncode == 0, result.stdout[-3000:]
    eager, graph, generated = json.loads(path.with_suffix(".out").read_text())
    assert isinstance(eager, list), eager
    np.testing.assert_allclose(graph, eager, rtol=0, atol=1e-5)
    assert max(generated) < 1e-5


def test_config_of_an_earlier_run_names_the_model_where_it_was() -> None:
    was = "libai_projects.projects.MagicPrompt.gpt2.GPT2ForPreTraining"
    assert locate(was) is GPT2ForPreTraining
