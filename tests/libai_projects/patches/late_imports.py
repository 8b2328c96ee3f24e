"""What libai has loaded when it is imported, and then its use; for test_late_imports.py."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

# First: it decides which patches libai gets.
import tests.libai_projects.patches.partial_series  # noqa: F401

# isort: split

import libai.engine
import libai.evaluation
import libai.models
import libai.tokenizer
import numpy as np
from libai.data import datasets

HEAVY = ("scipy.stats", "boto3", "botocore", "requests", "regex", "flowvision")


def regression() -> None:
    evaluator = libai.evaluation.RegEvaluator()
    # What its process() keeps; that one calls topk as oneflow 0.9.0 cannot.
    evaluator._predictions = [
        {"preds": [0, 2, 1], "labels": [0, 1, 2]},
        {"preds": [3], "labels": [3]},
    ]
    # No two are equal, so that ranks are the values.
    np.testing.assert_allclose(list(evaluator.evaluate().values()), [0.8] * 3)


def tokenizers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["a", "Ġ", "d", "o", "g", "do", "dog", "Ġdog", "<|endoftext|>"]
        vocabulary = json.dumps({word: number for number, word in enumerate(words)})
        Path(folder, "vocab.json").write_text(vocabulary)
        Path(folder, "merges.txt").write_text("#version\nd o\ndo g\nĠ dog\n")
        # Its files go through cached_path.
        tokenizer = libai.tokenizer.GPT2Tokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a dog") == ["a", "Ġdog"]
    some = SimpleNamespace(vocab_size=100)
    assert libai.tokenizer.T5Tokenizer._convert_token_to_id(some, "<extra_id_12>") == 87


def image_sets() -> None:
    import flowvision

    assert issubclass(datasets.CIFAR100Dataset, flowvision.datasets.CIFAR100)
    assert issubclass(datasets.ImageNetDataset, flowvision.datasets.ImageFolder)
    assert issubclass(datasets.MNISTDataset, flowvision.datasets.MNIST)
    assert not hasattr(datasets, "OtherDataset")


if __name__ == "__main__":
    print("loaded", *(name for name in HEAVY if name in sys.modules), flush=True)
    regression()
    tokenizers()
    image_sets()
    print("works")
