"""Published weights in our model give transformers' logits, and go back unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.launch import REPOSITORY, run_distributed

GOLDEN = REPOSITORY / "tests" / "data" / "hf_gpt2"
CAPP = REPOSITORY.parent / "shared" / "data" / "models" / "capp_gpt2_64d"


def test_logits_in_two_layouts(tmp_path: Path) -> None:
    models = {GOLDEN / "safetensors": GOLDEN / "expected.npz"}
    if CAPP.is_dir():
        models[CAPP] = CAPP / "reference.npz"
    program = REPOSITORY / "tests" / "libai_projects" / "weights" / "logits_of_layouts.py"
    given = [f"huggingface={folder}={reference}" for folder, reference in models.items()]
    result = run_distributed([program, tmp_path, "2,1 1,2", *given], 2, timeout=100)
    assert result.returncode == 0, result.stdout
    for folder in models:
        golden = load_file(folder / "model.safetensors")
        for layout in ("2-1", "1-2"):
            name = tmp_path / f"{folder.name}-{layout}"
            with np.load(f"{name}.npz") as arrays:
                actual, expected = arrays["actual"], arrays["expected"]
            vocabulary = expected.shape[-1]
            assert np.abs(actual[..., :vocabulary] - expected).max() < 1e-4
            # Padding is masked: no token of it is ever chosen.
            assert actual.shape[-1] == 128
            assert actual[..., vocabulary:].max() < -1e3
            exported = load_file(name / "model.safetensors")
            assert exported.keys() == golden.keys()
            for key, array in golden.items():
                np.testing.assert_array_equal(exported[key], array, err_msg=key)
