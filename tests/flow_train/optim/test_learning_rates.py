"""Learning rates against timm's scheduler and the values of the upstream runs."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import pytest

from flow_train.optim import build_schedule

# monarch_spec.md 4.6: base 1e-3, epochs.
VIT_S = {"t_initial": 300, "lr_min": 1e-5, "warmup_t": 10, "warmup_lr_init": 1e-6}
CHECKS = {
    0: 1e-6,
    1: 1.009e-4,
    5: 5.005e-4,
    9: 9.001e-4,
    10: 9.97288e-4,
    50: 9.33683e-4,
    150: 5.05e-4,
    250: 7.6317e-5,
    299: 1.00271e-5,
    **dict.fromkeys(range(300, 310), 1e-05),
}


def test_values_of_the_upstream_run():
    schedule = build_schedule({**VIT_S, "cycle_limit": 1, "cooldown": 10}, 1e-3)
    for epoch, expected in CHECKS.items():
        assert schedule(epoch) == pytest.approx(expected, rel=1e-5), epoch


def test_equal_to_timm(timm_golden):
    assert len(timm_golden["schedules"]) == 4
    for case in timm_golden["schedules"]:
        schedule = build_schedule(case["config"], case["base_lr"])
        for t, expected in case["lr"].items():
            assert schedule(int(t)) == pytest.approx(expected, rel=1e-9, abs=1e-15), (t, case)


def test_per_step_is_the_same_function_of_a_finer_time():
    steps = 7
    scaled = {**VIT_S, "t_initial": 300 * steps, "warmup_t": 10 * steps}
    by_epoch, by_step = build_schedule(VIT_S, 1e-3), build_schedule(scaled, 1e-3)
    for epoch in (0, 3, 10, 77, 299, 304):
        assert by_step(epoch * steps) == pytest.approx(by_epoch(epoch), rel=1e-12)
    # Epochs need not be whole.
    assert by_epoch(50 + 3 / steps) == pytest.approx(by_step(50 * steps + 3), rel=1e-12)


def test_linear():
    schedule = build_schedule(
        {"name": "linear", "t_total": 100, "warmup_t": 20, "lr_min": 0.1}, 1.1
    )
    values = [schedule(t) for t in (0, 10, 20, 60, 100, 1000)]
    assert values == pytest.approx([0, 0.55, 1.1, 0.6, 0.1, 0.1])


def test_constant():
    schedule = build_schedule({"name": "constant", "warmup_t": 4, "warmup_lr_init": 0.1}, 0.5)
    assert [schedule(t) for t in (0, 2, 4, 10_000)] == pytest.approx([0.1, 0.3, 0.5, 0.5])
    assert build_schedule(None, 0.5)(3) == 0.5


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
        ({"t_initial": "long"}, r"scheduler\.t_initial='long'"),
        ({**VIT_S, "cycle_limit": 1.5}, r"cycle_limit=1\.5: it must be a whole number"),
        ({**VIT_S, "warmup_prefix": 1}, r"warmup_prefix=1: it must be true or false"),
        ({"t_initial": True}, r"t_initial=true: it must be a number"),
    ],
)
def test_wrong_configurations_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_schedule(config, 1e-3)
