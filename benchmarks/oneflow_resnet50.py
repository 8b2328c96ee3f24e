"""OneFlow's side of benchmarks/resnet50.py: one model in one process, steps on request.

Reads a number of steps from each line of stdin, runs them, and prints the seconds they took.
"""

from __future__ import annotations

import argparse
import sys
import time

import oneflow_accel
from oneflow_accel import layouts

import numpy as np
import oneflow as flow

from resnet50_imagenet.benchmark import forward_graph
from resnet50_imagenet.execution import EagerStep, GraphStep
from resnet50_imagenet.models import create_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--mode", choices=["train", "forward"], required=True)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--graph", action="store_true")
    options = parser.parse_args()

    backend = oneflow_accel.select_device()
    backend.manual_seed(0)
    model = create_model("resnet50", 1000)
    shape = (options.batch, 3, 224, 224)
    if options.channels_last:
        model = layouts.to_channels_last(model, backend)
        shape = (options.batch, 224, 224, 3)
    random = np.random.default_rng(0)
    images = random.standard_normal(shape, dtype=np.float32)
    labels = random.integers(1000, size=options.batch)

    if options.mode == "train":
        step_class = GraphStep if options.graph else EagerStep
        step = step_class(
            model,
            backend,
            lr=0.001,
            momentum=0.9,
            weight_decay=1e-4,
            steps_per_epoch=1000,
            freeze_bn=False,
        )
        step.set_training_mode()

        def run() -> None:
            step.step(images, labels, epoch=0)
    else:
        batch = flow.tensor(images, device=backend.device())
        model.eval()
        forward = forward_graph(model) if options.graph else model

        def run() -> None:
            with flow.no_grad():
                forward(batch)

    print(f"ready oneflow {flow.__version__}", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            run()
        backend.synchronize()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
