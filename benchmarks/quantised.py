"""What weights of 16 and 8 bits, with a bfloat16 cache, change of a model that has learned.

    python -m benchmarks.quantised CONFIG --model DIR --tokens FILE

CONFIG is one that generates, DIR a run's, FILE what `prepare.py --validation` has held out. The
table has the file's perplexity, and the share of places where the likeliest next token is that of
float32, the real tokens before it given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from oneflow_accel.kernels.generation import WeightsDtype

import numpy as np

from flow_train import cli
from flow_train.compare.rows import show
from libai_projects.inference.pipeline import TextGenerationPipeline
from libai_projects.models.step_model import StepModel
from libai_projects.text.token_files import TokenWindows


def quality(model: StepModel, windows: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
    """Perplexity of windows of tokens, and the likeliest token after each one but the last."""
    cache, losses, best = model.new_cache(), [], []
    for ids in windows:
        number, _ = cache.pages.add()
        step = model.plan(cache, [(number, ids[:-1].tolist())])
        logits = model.run(replace(step, last=np.arange(len(ids) - 1)), cache)
        cache.pages.release(number)
        best.append(logits.argmax(-1))
        logits = logits - logits.max(-1, keepdims=True)
        sums = np.exp(logits).sum(-1, dtype=np.float64)
        losses.append(np.log(sums) - logits[np.arange(len(logits)), ids[1:]])
    return float(np.exp(np.mean(losses))), np.stack(best)


def _run() -> None:
    parser = cli.Parser(prog="python -m benchmarks.quantised", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="such as Llama's llama_inference.py")
    parser.add_argument("--model", required=True, metavar="DIR", help="of a run")
    parser.add_argument("--tokens", required=True, metavar="FILE", help="a .bin of prepare.py")
    parser.add_argument("--length", type=cli.at_least(1), default=128, help="of a window")
    options = parser.parse_args()
    tokens = TokenWindows(options.tokens, options.length)
    windows = [tokens.window(index) for index in range(len(tokens))]
    rows, found = [["weights", "perplexity", "change", "same next token"]], []
    for weights in get_args(WeightsDtype):
        where = {"model_path": options.model, "mode": "auto", "weights_dtype": weights}
        found.append(quality(TextGenerationPipeline(options.config, **where).model, windows))
        (base, same), (perplexity, likeliest) = found[0], found[-1]
        change, alike = f"{perplexity / base - 1:+.2%}", f"{(likeliest == same).mean():.2%}"
        rows.append([weights, f"{perplexity:.2f}", change, alike])
    show(f"{len(windows):,} windows of {options.length} tokens", rows)


if __name__ == "__main__":
    sys.exit(cli.run("benchmarks.quantised", _run))
