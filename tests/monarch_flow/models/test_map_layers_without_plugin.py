"""Without the plug-in the layers of maps evaluate as OneFlow's own do on (N, C, H, W)."""

from __future__ import annotations

from tests.launch import run_process

CODE = """
import oneflow_accel
import oneflow as flow
import numpy as np
from monarch_flow.models import create_model
from monarch_flow.models.vitae import MapBatchNorm2d

flow.manual_seed(0)
ours, stock = MapBatchNorm2d(6), flow.nn.BatchNorm2d(6)
for value in (ours.weight, ours.bias, ours.running_mean, ours.running_var):
    flow.nn.init.uniform_(value, 0.5, 2)
stock.load_state_dict(ours.state_dict())
x = flow.randn(2, 5, 4, 6)
actual = ours.eval()(x).numpy()
expected = stock.eval()(x.permute(0, 3, 1, 2).contiguous()).permute(0, 2, 3, 1).numpy()
np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
model = create_model("ViTAE_basic_Tiny", num_classes=5, img_size=32).eval()
assert model(flow.randn(1, 3, 32, 32)).numpy().shape == (1, 5)
print("equal")
"""


def test_evaluation() -> None:
    result = run_process(["-c", CODE], env={"ONEFLOW_ACCEL_PLUGIN": "off"})
    assert result.returncode == 0, result.stdout
    assert "equal" in result.stdout
