"""Learning rates against timm's scheduler."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import pytest

from flow_train.optim import build_schedule, step_decay

# monarch_spec.md 4.6: base 1e-3, epochs.
VIT_S = {"t_initial": 300, "lr_min": 1e-5, "warmup_t": 10, "warmup_lr_init": 1e-6}


def test_equal_to_timm(timm_golden):
    assert len(timm_golden["schedules"]) == 4
    for case in timm_golden["schedules"]:
        schedule = build_schedule(case["config"], case["base_lr"])
        for t, expected in case["lr"].items():
            assert schedule(int(t)) == pytest.approx(expected, rel=1e-9, abs=1e-15), (t, case)


def test_per_step_is_the_same_function_of_a_finer_time():
    scaled = {**VIT_S, "t_initial": 300 * 7, "warmup_t": 10 * 7}
    by_epoch, by_step = build_schedule(VIT_S, 1e-3), build_schedule(scaled, 1e-3)
    for epoch in (0, 3, 10, 50 + 3 / 7, 299, 304):
        assert by_step(round(epoch * 7)) == pytest.approx(by_epoch(epoch), rel=1e-12)


def test_linear_and_constant():
    linear = {"name": "linear", "t_total": 100, "warmup_t": 20, "lr_min": 0.1}
    values = [build_schedule(linear, 1.1)(t) for t in (0, 10, 20, 60, 100, 1000)]
    assert values == pytest.approx([0, 0.55, 1.1, 0.6, 0.1, 0.1])
    constant = build_schedule({"name": "constant", "warmup_t": 4, "warmup_lr_init": 0.1}, 0.5)
    assert [constant(t) for t in (0, 2, 4, 10_000)] == pytest.approx([0.1, 0.3, 0.5, 0.5])
    assert build_schedule(None, 0.5)(3) == 0.5


def test_step_decay():
    rates = [step_decay(0.1, epoch) for epoch in (0, 29, 30, 59, 60, 89)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001], rel=1e-12)
    assert [step_decay(8.0, epoch, every=2, factor=0.5) for epoch in range(4)] == [8, 8, 4, 4]
    for epoch, every in ((-1, 30), (0, 0)):
        with pytest.raises(ValueError, match="epoch must be"):
            step_decay(0.1, epoch, every=every)


def test_names_from_elsewhere():
    target = {"_target_": "timm.scheduler.CosineLRScheduler", "t_in_epochs": True, **VIT_S}
    rates = [build_schedule(VIT_S, 1e-3)(epoch) for epoch in range(320)]
    for config in (target, {**VIT_S, "k_decay": None}):
        assert list(map(build_schedule(config, 1e-3), range(320))) == rates


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "cosin"}, r"scheduler\.name='cosin': it must be cosine, linear or constant"),
        ({**VIT_S, "warmup": 3}, r"scheduler\.warmup; did you mean scheduler\.warmup_t\?"),
        ({"lr_min": 1e-5}, r"scheduler: t_initial is missing"),
        ({"name": "linear"}, r"scheduler: t_total is missing"),
        ({"name": "linear", "t_total": 3, "warmup_t": 3}, "must be above warmup_t"),
        ({"t_initial": 0}, r"scheduler\.t_initial=0: it must be a number above 0"),
        ({**VIT_S, "cycle_limit": 1.5}, r"cycle_limit=1\.5: it must be a whole number"),
        ({**VIT_S, "warmup_prefix": 1}, r"warmup_prefix=1: it must be true or false"),
    ],
)
def test_wrong_configurations_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_schedule(config, 1e-3)
