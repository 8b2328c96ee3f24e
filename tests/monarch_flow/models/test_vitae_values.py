"""ViTAE gives the published code's figures, and numpy's at float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.models import create_model
from tests.monarch_flow.models import numpy_vitae, seeded_vision, spec_fixture
from tests.tolerances import assert_close

# ../shared/docs/oracles/vitae_fixture.json, of an independent implementation that loads the
# published code's weights: first 8 logits of both images, standard deviation and mean of all
# logits, the largest one's place, and mean and standard deviation after the reduction cells and
# after the first normal cell.
FIXTURE: dict[str, dict[str, Any]] = {
    "Tiny": {
        "logits": [
            [1.23249, -0.583958, -2.247901, -1.29512, 0.557686, 1.256577, -2.320772, -1.513458],
            [1.252723, -0.63264, -2.317391, -1.307443, 0.55731, 1.287447, -2.356028, -1.522384],
        ],
        "std": 1.147206831943465,
        "mean": 0.003911560383858159,
        "argmax": 157,
        "stages": [
            (-0.0046497457842308776, 1.1715835167248758),
            (-0.03394873801663584, 0.8418263914002829),
            (0.06218413765267843, 0.2276994889788958),
            (0.061419806035999905, 0.3595154857930616),
        ],
    },
    "Tiny-Monarch": {
        "logits": [
            [1.147975, -0.364433, -1.471041, -0.872602, 0.715612, 0.938482, 0.465535, -0.023471],
            [1.208238, -0.345815, -1.522893, -0.901175, 0.65962, 1.032278, 0.521225, -0.102797],
        ],
        "std": 0.99137249155869,
        "mean": 0.0015311239478178322,
        "argmax": 133,
        "stages": [
            (-0.0046497456507903715, 1.1715835165097954),
            (-0.03394873951128365, 0.8418263858187548),
            (0.062184134055135176, 0.22769948004655338),
            (0.06085695358575259, 0.3367952256522254),
        ],
    },
    "Small": {
        "logits": [
            [0.388846, 1.717887, -1.498812, 0.432285, 0.932679, -1.380984, 0.756447, 0.397093],
            [0.378821, 1.705284, -1.490096, 0.4369, 0.917024, -1.38331, 0.759989, 0.39481],
        ],
        "std": 1.5311162870989659,
        "mean": 0.00479317781701684,
        "argmax": 394,
        "stages": [
            (-0.013393070155441488, 1.1543003364328979),
            (-0.00037703817274493246, 0.920867842842617),
            (0.3107409867105644, 0.632936184101112),
            (0.30424293460886737, 0.8387002459662943),
        ],
    },
    "Small-Monarch": {
        "logits": [
            [0.312999, 1.87089, -1.268458, 0.368937, 1.025575, -1.256744, 0.796017, 0.758001],
            [0.294949, 1.868647, -1.254056, 0.370844, 1.017203, -1.251513, 0.796955, 0.755098],
        ],
        "std": 1.6159855325741705,
        "mean": -0.0005879123785998672,
        "argmax": 619,
        "stages": [
            (-0.013393070202901102, 1.1543003364396343),
            (-0.0003770383538890541, 0.9208678420346508),
            (0.3107409844283244, 0.6329361841505148),
            (0.31307271228192524, 0.7874717780307102),
        ],
    },
}


def _fixture_model(case: str) -> nn.Module:
    size, _, monarch = case.partition("-")
    model = create_model(f"ViTAE_basic_{size}", mlp_cfg="monarch" if monarch else None)
    state = spec_fixture.state((k, tuple(v.shape)) for k, v in model.state_dict().items())
    model.load_state_dict({key: flow.tensor(array) for key, array in state.items()}, strict=True)
    return model.eval()


@pytest.mark.parametrize("case", list(FIXTURE))
def test_logits_and_stages_equal_the_published_codes_fixture(case: str) -> None:
    model, expected = _fixture_model(case), FIXTURE[case]
    outputs: list[np.ndarray] = []
    watched = [*(model.layers[stage] for stage in range(2)), model.layers[2].RC]
    for module in (*watched, model.layers[2].NC[0]):
        module.register_forward_hook(lambda module, args, out: outputs.append(out.numpy()))
    images = flow.tensor(spec_fixture.images())
    with flow.no_grad():
        logits = model(images).numpy().astype(np.float64)
    # The fixture's own figures are of float32 and have six decimals; the tolerance is its own.
    np.testing.assert_allclose(logits[:, :8], expected["logits"], rtol=0, atol=1e-4)
    assert abs(logits.std(ddof=1) - expected["std"]) < 1e-4
    assert abs(logits.mean() - expected["mean"]) < 1e-4
    assert logits.argmax(1).tolist() == [expected["argmax"]] * 2
    statistics = [
        (out.astype(np.float64).mean(), out.astype(np.float64).std(ddof=1)) for out in outputs
    ]
    np.testing.assert_allclose(statistics, expected["stages"], rtol=0, atol=1e-5)
    if case.startswith("Tiny"):
        _check_graph(model, images, logits)


def _check_graph(model: nn.Module, images: flow.Tensor, expected: np.ndarray) -> None:
    class Evaluation(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, images: flow.Tensor) -> flow.Tensor:
            return self.model(images)

    with flow.no_grad():
        assert_close(Evaluation()(images).numpy(), expected, reduced=100)


Forward = Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]
NARROW: dict[str, Any] = {
    "embed_dims": [8, 8, 12],
    "token_dims": [8, 16, 24],
    "depth": 2,
    "num_heads": 3,
    "conv_groups": 4,
    "num_classes": 6,
    "img_size": 32,
}
NARROW_PATCH: dict[str, Any] = {
    "embed_dim": 24,
    "patch_size": 8,
    "depth": 2,
    "num_heads": 3,
    "conv_groups": 4,
    "num_classes": 6,
    "img_size": (32, 16),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("ViTAE_basic_Tiny", NARROW),
    "Monarch": ("ViTAE_basic_Small", {**NARROW, "mlp_cfg": "monarch", "img_size": (32, 48)}),
    "patches": ("ViTAE_basic_Base", NARROW_PATCH),
    "patches, Monarch": ("ViTAE_basic_Base", {**NARROW_PATCH, "mlp_cfg": "monarch"}),
}
# Parts of each model by what their names contain; the empty one is all of it.
PARTS = ("", ".RC.attn", ".RC.PRM", ".RC.PCM", ".NC.0.", ".NC.1.PCM", ".mlp.", "_token")


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", list(CASES))
def test_logits_and_gradients_equal_numpy(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is random in training has its own tests.
    monkeypatch.setattr("monarch_flow.models.attention.DROPOUT", 0.0)
    kind, arguments = CASES[name]
    model = create_model(kind, **arguments).train(training)
    state = numpy_vitae.state((k, tuple(v.shape)) for k, v in model.state_dict().items())
    model.load_state_dict({key: flow.tensor(array) for key, array in state.items()}, strict=True)
    state = {key: array.astype(np.float64) for key, array in state.items()}
    function = numpy_vitae.patch_vitae if kind.endswith("Base") else numpy_vitae.vitae

    def forward(state: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
        return function(state, images, 2, 3, 4, training=training)

    shape = {"in_chans": 3, "img_size": model.img_size}
    images = seeded_vision.images(shape).astype(np.float64)
    logits = model(flow.tensor(images.astype(np.float32)))
    expected = forward(state, images)
    assert 0.1 < np.abs(expected).max() < 30
    assert_close(logits.numpy(), expected, reduced=1000)

    # The derivative along one random direction for each part, against a difference of numpy's.
    weights = seeded_vision.probe("logits", expected.shape)
    (logits * flow.tensor(weights.astype(np.float32))).sum().backward()
    parameters = dict(model.named_parameters())
    trained = {key: value for key, value in parameters.items() if value.requires_grad}
    assert all(value.grad is not None for value in trained.values())
    frozen = set(parameters) - set(trained)
    assert all(parameters[key].grad is None for key in frozen)
    assert len(frozen) == (0 if kind.endswith("Base") else 2)
    directions = {key: seeded_vision.probe(key, tuple(p.shape)) for key, p in trained.items()}
    for part in PARTS:
        chosen = {key for key in trained if part in key}
        if not chosen:
            continue
        found = sum((trained[key].grad.numpy() * directions[key]).sum() for key in chosen)
        step = 1e-5
        moved = [
            {k: a + sign * step * directions[k] if k in chosen else a for k, a in state.items()}
            for sign in (1, -1)
        ]
        ahead, behind = ((forward(values, images) * weights).sum() for values in moved)
        derivative = (ahead - behind) / (2 * step)
        assert abs(found - derivative) < 1e-4 * max(abs(derivative), 1.0), (part, found, derivative)
