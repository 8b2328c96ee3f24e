"""The learning rate of each epoch."""

from __future__ import annotations

import pytest

from flow_train.optim import step_decay


def test_divides_by_ten_every_thirty_epochs():
    rates = [step_decay(0.1, epoch) for epoch in (0, 29, 30, 59, 60, 89)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001], rel=1e-12)


def test_other_interval_and_factor():
    assert [step_decay(8.0, epoch, every=2, factor=0.5) for epoch in range(6)] == [8, 8, 4, 4, 2, 2]


@pytest.mark.parametrize(("epoch", "every"), [(-1, 30), (0, 0)])
def test_senseless_arguments_are_refused(epoch, every):
    with pytest.raises(ValueError, match="epoch must be"):
        step_decay(0.1, epoch, every=every)
