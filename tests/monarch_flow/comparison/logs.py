"""Metric logs of made-up runs, as the engine writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flow_train.metrics.log import JSONL_NAME, RunLog

# Of one epoch: (steps, images per second) of each log line; a step has 10 images.
SPEEDS = ((1, 20.0), (4, 100.0), (3, 110.0), (2, 50.0))
STEPS = sum(steps for steps, _ in SPEEDS)
DENSE = {"params_trainable": 4000, "gmacs": 2.0}
MONARCH = {"params_trainable": 1500, "gmacs": 1.25}


def write_log(
    folder: Path,
    validated: Sequence[float],
    *,
    initial: float | None = None,
    tested: float | None = None,
    switch: int | None = None,
    waiting: float = 0.0,
    on_validation: bool | None = None,
    gmacs: float = 1.0,
) -> Path:
    """Write FOLDER/metrics.jsonl of a run with an epoch for each of the accuracies `validated`.

    At epoch `switch` layers become dense, twice as slow; `waiting` is the share of a step spent
    on images; `on_validation` None is a log that does not say; `gmacs` multiplies the models' MACs.
    """
    log = RunLog(folder)
    dense, monarch = ({**model, "gmacs": gmacs * model["gmacs"]} for model in (DENSE, MONARCH))
    log.log(0, dense if switch is None else monarch, split="model")
    if initial is not None:
        log.log(0, {"acc1": initial}, split="val")
    step = 0
    for epoch, accuracy in enumerate(validated):
        if epoch == switch:
            log.log(step, dense, split="model")
            log.log(step, {"loss_before": 1.0, "loss_after": 1.0}, split="switch")
        slower = 2 if switch is not None and epoch >= switch else 1
        for steps, rate in SPEEDS:
            step += steps
            seconds = 10 * slower / rate
            values = {"loss": 1.0, "acc1": accuracy - 1, "epoch": step / STEPS}
            values |= {"images_per_second": rate / slower, "step_seconds": seconds}
            log.log(step, {**values, "data_seconds": waiting * seconds})
        log.log(step, {"loss": 1.1, "acc1": accuracy}, split="val")
    if tested is not None:
        said = {} if on_validation is None else {"on_validation_images": float(on_validation)}
        log.log(step, {"loss": 1.1, "acc1": tested, **said}, split="test")
    log.close()
    return folder / JSONL_NAME
