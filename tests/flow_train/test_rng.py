"""A restored state continues every generator bit for bit."""

from __future__ import annotations

import json
import random

from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
import pytest

from flow_train.rng import get_rng_state, named_generator, set_rng_state


def draw() -> dict[str, list]:
    """Numbers from every generator, and from every kind of oneflow's random operations."""
    return {
        "python": [random.random(), random.gauss(0, 1), random.getrandbits(100)],
        "numpy": np.random.standard_normal(3).tolist() + np.random.permutation(9).tolist(),
        "randn": flow.randn(5).numpy().tolist(),
        "rand": flow.rand(5).numpy().tolist(),
        "randint": flow.randint(0, 1000, (5,)).numpy().tolist(),
        "randperm": flow.randperm(20).numpy().tolist(),
        "dropout": flow.nn.functional.dropout(flow.ones(32), 0.5).numpy().tolist(),
        "init": flow.nn.init.kaiming_normal_(flow.zeros(4, 4)).numpy().tolist(),
    }


@pytest.mark.parametrize("seed", [0, 2**62 + 3])
def test_restored_run_draws_what_the_live_one_does(seed):
    random.seed(1)
    np.random.seed(2)
    flow.manual_seed(seed)
    first = get_rng_state()
    draw()  # Leaves all generators in the middle of a block, with half a pair of Gaussians.
    second = json.loads(json.dumps(get_rng_state()))
    live = draw()
    for _ in range(2):
        draw()
        set_rng_state(second)
        assert draw() == live
    # Killed after the first checkpoint, resumed, and past the second: as if nothing happened.
    set_rng_state(first)
    draw()
    assert json.loads(json.dumps(get_rng_state())) == second
    assert draw() == live


def test_each_checkpoint_begins_another_stream():
    flow.manual_seed(5)
    draws = [flow.randn(4).numpy().tolist()]
    for _ in range(3):
        get_rng_state()
        draws.append(flow.randn(4).numpy().tolist())
    assert len({tuple(numbers) for numbers in draws}) == 4


@pytest.mark.parametrize("state", [{}, {"python": [3, [1, 2], None]}])
def test_malformed_state_is_a_checkpoint_error(state):
    with pytest.raises(CheckpointError, match="random generators"):
        set_rng_state(state)


def test_named_generators_depend_on_seed_and_name_only():
    first = named_generator(3, "weight").standard_normal(5)
    flow.manual_seed(7)
    np.random.random(3)
    np.testing.assert_array_equal(named_generator(3, "weight").standard_normal(5), first)
    for seed, name in ((4, "weight"), (3, "bias")):
        assert not np.isclose(named_generator(seed, name).standard_normal(5), first).any()
