"""RandAugment: pixels and meaning as timm's, frequencies as the description says."""

from __future__ import annotations

import math
from collections import Counter

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from PIL import Image

from flow_train.data.rand_augment import OPERATIONS, RandAugment, parse_rand_augment


class FixedSign:
    """A generator whose draws make every strength positive, or every one negative."""

    def __init__(self, sign: int) -> None:
        self._value = 0.75 if sign > 0 else 0.25

    def random(self) -> float:
        return self._value


def picture(golden, mode: str) -> Image.Image:
    height, width = golden["shape"]
    pixels = np.frombuffer(bytes.fromhex(golden["pictures"][mode]), dtype=np.uint8)
    return Image.fromarray(pixels.reshape((height, width) if mode == "L" else (height, width, 3)))


def test_operations_give_timms_pixels(timm_golden):
    golden = timm_golden["rand_augment"]
    fill = (124, 116, 104)
    for case in golden["cases"]:
        policy = RandAugment(
            inc=case["inc"],
            fill=fill if case["mode"] == "RGB" else (115,),
            interpolation=Image.Resampling[case["interpolation"].upper()],
        )
        image = picture(golden, case["mode"])
        result = policy.apply(case["name"], image, case["magnitude"], FixedSign(case["sign"]))
        assert result.mode == case["mode"]
        assert np.asarray(result).tobytes().hex() == case["pixels"], case
    seen = {(case["name"], case["inc"]) for case in golden["cases"]}
    # 15 operations, six of which have another strength in the set that grows.
    assert len(seen) == 21
    assert {name for name, _ in seen} == set(OPERATIONS)


def test_descriptions_mean_what_they_mean_to_timm(timm_golden):
    for text, expected in timm_golden["policies"].items():
        policy = parse_rand_augment(text)
        assert policy.n == expected["n"], text
        assert (policy.m, policy.p) == (expected["m"], expected["p"]), text
        assert min(policy.mstd, 1e9) == expected["mstd"], text
        assert policy.mmax == (expected["mmax"] or 10), text
        names = [name.removesuffix("Increasing") for name in expected["names"]]
        assert names == list(OPERATIONS), text
        grows = any(name.endswith("Increasing") for name in expected["names"])
        assert policy.inc == grows, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("randaug-m9", "auto_augment 'randaug-m9' is not known"),
        ("rand-m9-z3", "cannot read the part 'z3'"),
        ("rand-m", "cannot read the part 'm'"),
        ("rand-m9-m8", "cannot read the part 'm8'"),
        ("rand-inc2", "inc2 is out of range"),
        ("rand-n0", "n0 is out of range"),
        ("rand-n1.5", "n1.5 is out of range"),
        ("rand-p1.5", "p1.5 is out of range"),
        ("rand-w1", "w1 is out of range"),
        ("rand-w0-n14", "n14 is out of range"),
    ],
)
def test_wrong_descriptions_are_named(text, message):
    with pytest.raises(UserError, match=message):
        parse_rand_augment(text)


@pytest.mark.parametrize("text", ["rand-n2", "rand-n1-w0"])
def test_operations_are_drawn_evenly_or_by_their_weights(text):
    policy, rng = parse_rand_augment(text), np.random.default_rng(0)
    counts = Counter(name for _ in range(6000) for name in policy.draw_names(rng))
    draws = 6000 * policy.n
    for name, operation in OPERATIONS.items():
        p = operation.weight if "w0" in text else 1 / len(OPERATIONS)
        assert abs(counts[name] - draws * p) <= 4 * math.sqrt(draws * p * (1 - p)), name
    # By weights without repetition.
    three = parse_rand_augment("rand-n3-w0")
    assert all(len(set(three.draw_names(rng))) == 3 for _ in range(200))


def test_magnitudes():
    rng, draws = np.random.default_rng(0), 8000
    noisy = parse_rand_augment("rand-m5-mstd0.5")
    values = np.array([noisy.draw_magnitude(rng) for _ in range(draws)])
    assert values.mean() == pytest.approx(5, abs=4 * 0.5 / math.sqrt(draws))
    assert values.std() == pytest.approx(0.5, rel=0.05)
    # Cut off at 10: a half-normal below it, and half of the draws on it.
    cut = parse_rand_augment("rand-m10-mstd1")
    values = np.array([cut.draw_magnitude(rng) for _ in range(draws)])
    assert values.max() == 10
    assert (values == 10).mean() == pytest.approx(0.5, abs=0.03)
    # Uniform.
    uniform = parse_rand_augment("rand-m8-mstd101")
    values = np.array([uniform.draw_magnitude(rng) for _ in range(draws)])
    assert values.mean() == pytest.approx(4, abs=0.1)
    assert values.std() == pytest.approx(8 / math.sqrt(12), rel=0.03)
    # Above ten only where that is allowed.
    assert parse_rand_augment("rand-m15-n2").draw_magnitude(rng) == 10
    assert parse_rand_augment("rand-m15-mmax20").draw_magnitude(rng) == 15


def test_each_operation_comes_with_its_probability():
    class Counting(RandAugment):
        def apply(self, name, image, magnitude, rng):
            applied.append(name)
            return image

    applied: list[str] = []
    policy, rng = Counting(n=3, p=0.3), np.random.default_rng(0)
    for _ in range(3000):
        policy(Image.new("L", (2, 2)), rng)
    assert len(applied) / 9000 == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 9000))
