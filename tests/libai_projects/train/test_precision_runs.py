"""GPT-2 in bfloat16, `train.amp.precision`, eagerly and under nn.Graph; a run that changes it."""

from __future__ import annotations

from oneflow_accel import settings
from oneflow_accel.kernels import plugin

import numpy as np
import pytest

from tests.libai_projects.train.conftest import NO_DROPOUT, losses

pytestmark = pytest.mark.skipif(
    not plugin.state().loaded, reason="stock OneFlow has no bfloat16 on CPUs"
)
OPTIONS = (*NO_DROPOUT, "train.evaluation.enabled=false")
BFLOAT16 = ("train.amp.enabled=true", "train.amp.precision=bfloat16")


def test_losses_follow_float32_and_a_run_changes_its_precision(train, tmp_path):
    emulated = {settings.EMULATE_BFLOAT16.name: "1"}
    runs = {
        "float32": (),
        "eager": BFLOAT16,
        "graph": (*BFLOAT16, "graph.enabled=true"),
    }
    for name, options in runs.items():
        train(*OPTIONS, *options, out=tmp_path / name, env=emulated if options else None)
    expected = list(losses(tmp_path / "float32").values())
    eager, graph = (list(losses(tmp_path / name).values()) for name in ("eager", "graph"))
    assert len(expected) == len(eager) == len(graph) == 6
    np.testing.assert_allclose(eager, expected, rtol=5e-3)
    np.testing.assert_allclose(graph, eager, rtol=2e-3)
    assert eager != expected
    assert graph != expected
    # The same files: what bfloat16 began, float32 ends, and the other way round.
    more = ("--resume", "train.train_iter=8")
    train(*OPTIONS, *more, out=tmp_path / "eager")
    train(*OPTIONS, *BFLOAT16, *more, out=tmp_path / "float32", env=emulated)
    ends = [list(losses(tmp_path / name).values())[6:] for name in ("eager", "float32")]
    assert len(ends[0]) == len(ends[1]) == 2
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-2)
