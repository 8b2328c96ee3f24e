"""DropPath: whole samples, the right share of them, seeds, nn.Graph."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from monarch_flow.layers import DropPath


def test_drops_whole_samples_and_scales_the_others() -> None:
    flow.manual_seed(0)
    layer, x = DropPath(0.3), flow.rand(4000, 3, 2) + 1
    factor = layer(x).numpy() / x.numpy()
    assert (np.ptp(factor.reshape(4000, 6), axis=1) < 1e-6).all()
    kept = factor[:, 0, 0] > 0
    np.testing.assert_allclose(factor[kept, 0, 0], 1 / 0.7, rtol=1e-6)
    # Four standard deviations.
    assert abs(kept.mean() - 0.7) < 4 * np.sqrt(0.3 * 0.7 / 4000)


def test_gradient_goes_through_kept_samples() -> None:
    flow.manual_seed(1)
    x = flow.ones(64, 3, requires_grad=True)
    y = DropPath(0.5)(x)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy())
    assert 0 < (y.numpy() == 0).sum() < 192


def test_ends_and_evaluation() -> None:
    """In graphs: test_random_factors.py."""
    x = flow.rand(5, 4)
    np.testing.assert_array_equal(DropPath(0.0)(x).numpy(), x.numpy())
    assert not DropPath(1.0)(x).numpy().any()
    assert DropPath(0.9).eval()(x) is x
    for p in (-0.1, 1.1):
        with pytest.raises(UserError, match="between 0 and 1"):
            DropPath(p)


def test_a_global_batch() -> None:
    x = flow.ones(16, 3).to_global(flow.placement("cpu", [0]), flow.sbp.split(0))
    y = DropPath(0.5)(x)
    assert y.is_global
    assert set(np.unique(y.numpy())) <= {0.0, 2.0}
