"""The random factors of dropout and drop path for training steps under nn.Graph.

A graph takes them as inputs (`flow_train.steps.random_factors` says why), as many and as large
as the model's forward pass asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from oneflow_accel.backends.base import Backend

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.steps.model_copy import copy_model
from flow_train.steps.random_factors import DRAWS_FACTORS, Site, recorded_sites

logger = logging.getLogger("oneflow_accel")


class StepFactors:
    """Draws what the eager step with the same seed would draw, for a model as trained, local to
    this process; it is copied and left as it is."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self._sites: list[Site] | None = None

    def draw(self, batches: Sequence[np.ndarray]) -> list[list[flow.Tensor]]:
        """The factors of each batch, in the order in which the model asks for them. The batches are
        images of this process, (N, C, H, W), all of one shape and always the same. RuntimeError if
        the model asks for factors whose first axis is not the batch."""
        if self._sites is None:
            self._sites = self._find(batches[0])
        device = self._backend.device()
        return [[site.draw(device) for site in self._sites] for _ in batches]

    def _find(self, images: np.ndarray) -> list[Site]:
        """Find the sites by one forward pass of a copy in training mode."""
        if not any(hasattr(module, DRAWS_FACTORS) for module in self._model.modules()):
            return []
        device = self._backend.device()
        # Run a copy, because running statistics move.
        model = copy_model(self._model).train()
        with flow.no_grad(), recorded_sites(device) as sites:
            model(flow.tensor(images, device=device))
        for site in sites:
            if site.shape[0] % len(images):
                raise RuntimeError(
                    f"random factors of shape {site.shape} for {len(images)} images: the first "
                    "axis has to be the batch, or nn.Graph cannot split it"
                )
        numbers = sum(int(np.prod(site.shape)) for site in sites)
        logger.info(
            "nn.Graph: %d random factors at %d places of the model are inputs, %.1f MB per batch",
            numbers,
            len(sites),
            numbers * 4 / 1e6,
        )
        return sites
