"""From the model's scores to those that a token is chosen from."""

from __future__ import annotations

import numpy as np

from libai_projects.generation.draw import check_scores
from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.processors import build_processors
from libai_projects.generation.rows import Rows
from libai_projects.generation.warpers import build_warpers


class ScoreChain:
    """All that happens to the model's scores before a token is chosen."""

    def __init__(self, options: GenerationOptions, vocab_size: int) -> None:
        self._processors = build_processors(options, vocab_size)
        self._warpers = build_warpers(options)
        self._renormalize = options.renormalize_logits

    def __call__(self, rows: Rows, scores: np.ndarray) -> np.ndarray:
        """The scores (R, V) float32 to choose from; may write into `scores`."""
        for process in self._processors:
            scores = process(rows, scores)
        if self._warpers:
            check_scores(scores)
        for warp in self._warpers:
            scores = warp(scores)
        return log_softmax(scores) if self._renormalize else scores


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Log probabilities (R, V) of `scores` (R, V), in their dtype."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
