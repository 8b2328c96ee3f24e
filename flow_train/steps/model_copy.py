"""Copies of models."""

from __future__ import annotations

import copy

from oneflow import nn


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy that trains the same parameters. `copy.deepcopy` of oneflow 0.9.0 makes every
    parameter one that requires a gradient, even a performer's random projection, which is never
    trained."""
    copied = copy.deepcopy(model)
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return copied
