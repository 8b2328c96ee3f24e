"""What an eager step refuses when it is made."""

from __future__ import annotations

from oneflow_accel import current_backend
from oneflow_accel.backends.base import Support
from oneflow_accel.errors import UserError

import oneflow as flow
import pytest
from oneflow import nn

from flow_train.optim import CrossEntropy
from flow_train.steps.eager import EagerStep
from flow_train.task import ImageTask


def test_groups_with_rates_of_their_own() -> None:
    first, second = model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.2}]
    with pytest.raises(ValueError, match="learning rates of their own"):
        EagerStep(model, current_backend(), flow.optim.SGD(groups), ImageTask(CrossEntropy()))


@pytest.mark.parametrize("setting", [{"precision": "bfloat16"}, {"clip": 1.0}])
def test_what_the_device_cannot_do_is_said_without_a_command_s_own_words(
    setting: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = current_backend()
    monkeypatch.setattr(type(backend), "supports", lambda self, feature: Support(False, "no such"))
    model, task = nn.Linear(2, 2), ImageTask(CrossEntropy())
    with pytest.raises(UserError, match=r": cpu cannot do this \(no such\); ") as caught:
        EagerStep(model, backend, flow.optim.SGD(model.parameters()), task, **setting)
    assert "trainer." not in str(caught.value)
