"""Engines for inference on CPUs, given a model of PyTorch's."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.items import ONNX_RUNTIME, OPENVINO
from benchmarks.serve import Step


def openvino_step(model: nn.Module, batch: torch.Tensor, dtype: str) -> Step:
    """OpenVINO, for one batch after the other, with PyTorch's number of threads."""
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
    }
    converted = openvino.convert_model(model, example_input=batch, input=tuple(batch.shape))
    request = openvino.compile_model(converted, "CPU", settings).create_infer_request()
    images = batch.numpy()
    return lambda: request.infer([images], share_inputs=True, share_outputs=True)


def onnx_runtime_step(model: nn.Module, batch: torch.Tensor, dtype: str) -> Step:
    """ONNX Runtime with all its optimizations; float32 alone, as its CPU provider has no other."""
    import onnxruntime

    assert dtype == "float32"
    file = io.BytesIO()
    torch.onnx.export(model, (batch,), file, input_names=["images"], dynamo=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        file.getvalue(), options, providers=["CPUExecutionProvider"]
    )
    images = batch.numpy()
    return lambda: session.run(None, {"images": images})


MAKERS: dict[str, Callable[[nn.Module, torch.Tensor, str], Step]] = {
    OPENVINO: openvino_step,
    ONNX_RUNTIME: onnx_runtime_step,
}
