"""--freeze-bn."""

from __future__ import annotations

from oneflow import nn

from flow_train.hooks import Hook
from flow_train.loop import Trainer


class FreezeBatchNorm(Hook):
    """Batch normalization keeps its running statistics, and uses them."""

    def on_step_start(self, trainer: Trainer) -> None:
        for module in trainer.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
