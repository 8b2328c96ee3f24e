"""Importing libai loads nothing heavy that few programs use; what uses it still works."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import libai.evaluation
import libai.tokenizer
import numpy as np
from libai.data import datasets

from tests.launch import run_process

HEAVY = ("scipy.stats", "boto3", "botocore", "requests", "regex", "flowvision")
IMPORTS = f"""
import sys
import oneflow_accel
import libai.engine, libai.evaluation, libai.models, libai.tokenizer
from libai.data import datasets
print("loaded", [name for name in {HEAVY} if name in sys.modules])
"""


def test_heavy_packages_are_loaded_where_they_are_used() -> None:
    process = run_process(["-c", IMPORTS])
    assert process.returncode == 0, process.stdout
    assert "loaded []" in process.stdout


def test_correlations_need_scipy() -> None:
    evaluator = libai.evaluation.RegEvaluator()
    # What its process() keeps; that one calls topk as oneflow 0.9.0 cannot.
    evaluator._predictions = [
        {"preds": [0, 2, 1], "labels": [0, 1, 2]},
        {"preds": [3], "labels": [3]},
    ]
    # No two are equal, so that ranks are the values.
    np.testing.assert_allclose(list(evaluator.evaluate().values()), [0.8] * 3)


def test_a_tokenizer_is_read_from_its_files(tmp_path: Path) -> None:
    words = ["a", "Ġ", "d", "o", "g", "do", "dog", "Ġdog", "<|endoftext|>"]
    vocabulary = json.dumps({word: number for number, word in enumerate(words)})
    (tmp_path / "vocab.json").write_text(vocabulary)
    (tmp_path / "merges.txt").write_text("#version\nd o\ndo g\nĠ dog\n")
    # Its files go through cached_path.
    tokenizer = libai.tokenizer.GPT2Tokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.tokenize("a dog") == ["a", "Ġdog"]
    some = SimpleNamespace(vocab_size=100)
    assert libai.tokenizer.T5Tokenizer._convert_token_to_id(some, "<extra_id_12>") == 87


def test_image_sets_are_flowvisions() -> None:
    import flowvision

    assert issubclass(datasets.CIFAR100Dataset, flowvision.datasets.CIFAR100)
    assert issubclass(datasets.ImageNetDataset, flowvision.datasets.ImageFolder)
    assert issubclass(datasets.MNISTDataset, flowvision.datasets.MNIST)
    assert not hasattr(datasets, "OtherDataset")
