"""Yarn and longrope as transformers has them (golden/make_rope_golden.py), and wrong settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from omegaconf import OmegaConf

from libai_projects.models.llama.rotary import Rotary

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rope.json").read_text())
SIZE, POSITIONS = GOLDEN["head_size"], GOLDEN["positions"]
FACTORS = {"short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0]}


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_frequencies_are_transformers(name: str) -> None:
    case = GOLDEN["cases"][name]
    given = dict(case["parameters"])
    theta = given.pop("rope_theta")
    rotary = Rotary.of(SIZE, theta, given, POSITIONS)
    original = given["original_max_position_embeddings"]
    for length, kind in ((original, "short"), (original + 1, "long")):
        np.testing.assert_allclose(rotary.frequencies(length), case[kind], rtol=1e-6)
        assert rotary.varies(length) == (case["short"] != case["long"] and length > original)
    cosines, sines = rotary.tables(5, length=original)
    factor = case["attention_factor"]
    angles = np.arange(5)[:, None] * np.array(case["short"])
    np.testing.assert_allclose(cosines, factor * np.cos(angles), rtol=1e-5)
    np.testing.assert_allclose(sines, factor * np.sin(angles), rtol=1e-5, atol=1e-7)
    # config.json says it again, and a config of LiBai's has lists of its own kind.
    settings = OmegaConf.create(json.loads(json.dumps(rotary.settings())))
    assert Rotary.of(SIZE, theta, settings, POSITIONS) == rotary


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        ({"type": "yarn"}, "'yarn' lacks factor"),
        ({"type": "yarn", "factor": 2.0, "beta_fst": 3}, "no beta_fst; did you mean beta_fast"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": 1.0}, "beta_fast must be above beta_slow"),
        ({"type": "longrope", "short_factor": [1.0, 1.0]}, "'longrope' lacks long_factor"),
        ({"type": "longrope", **FACTORS, "long_factor": [1.0]}, "long_factor is .*expected 2 num"),
        ({"type": "longrope", **FACTORS, "long_factor": "ab"}, "long_factor is 'ab'"),
        ({"type": "longrope", **FACTORS, "short_factor": [1.0, -1]}, "2 numbers above 0"),
        ({"type": "longrope", **FACTORS, "attention_factor": 0}, "expected a number above 0"),
    ],
)
def test_wrong_settings_of_angles(scaling: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Rotary.of(4, 1e4, scaling, 64)
