"""What weights of 16 and 8 bits, with a bfloat16 cache, change of models that have learned: a Llama
and a GPT-2 of 17.7 million parameters, trained on prompts as their pages have it.

They are trained once, in --folder; the same command goes on with a run that was stopped. Printed
are the perplexity of prompts that they did not see and the share of places there where the
likeliest next token is that of float32, the real tokens before it given.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from oneflow_accel import settings

import numpy as np

from benchmarks.precision import trained
from benchmarks.serving import DATA
from benchmarks.side_by_side import REPOSITORY
from flow_train import cli
from flow_train.compare.process import output_of
from flow_train.compare.rows import show
from libai_projects.inference.pipeline import TextGenerationPipeline

PROJECTS = REPOSITORY / "libai_projects" / "projects"
LENGTH = 128
LLAMA = (
    f"--max_seq_len={LENGTH} --vocab_size=0 --hidden_size=256 --ffn_hidden_size=704 --num_layers=6 "
    "--num_attention_heads=8 --num_key_value_heads=8 --tie_word_embeddings --dropout=0.1 "
    "--attention_dropout=0.1 --embedding_dropout=0.1 --batch_size=8 --learning_rate=1e-3 "
    "--gradient_accumulation_steps=1 --warmup_iters=100 --max_iters=2400 --eval_interval=100 "
    "--log_interval=20"
)
# Configs that generate, by model.
CONFIGS = {
    "Llama": PROJECTS / "Llama/configs/llama_inference.py",
    "GPT-2": PROJECTS / "MagicPrompt/configs/gpt2_inference.py",
}


def training(model: str, data: Path, out: Path, minutes: float) -> list[str]:
    """The command, without python."""
    if model == "Llama":
        own = [f"--data={data}.bin", f"--max_minutes={minutes}", f"--output_dir={out}"]
        return [str(PROJECTS / "Llama/pretrain.py"), *LLAMA.split(), *own, "--resume"]
    config = PROJECTS / "MagicPrompt/configs/gpt2_small_cpu.py"
    own = [f"train.output_dir={out}", f"train.max_minutes={minutes}", "--resume"]
    return [str(PROJECTS.parent / "tools/train_net.py"), str(config), *own]


def quality(model: Any, windows: np.ndarray) -> tuple[float, np.ndarray]:
    """Perplexity of windows of tokens, (windows, tokens), by a StepModel, and the likeliest token
    after each one but the last."""
    cache, losses, best = model.new_cache(), [], []
    for ids in windows:
        number, _ = cache.pages.add()
        step = model.plan(cache, [(number, ids[:-1].tolist())])
        step = replace(step, last=np.arange(len(ids) - 1))
        logits = model.run(step, cache)
        cache.pages.release(number)
        best.append(logits.argmax(-1))
        logits = logits - logits.max(-1, keepdims=True)
        sums = np.exp(logits).sum(-1, dtype=np.float64)
        losses.append(np.log(sums) - logits[np.arange(len(logits)), ids[1:]])
    return float(np.exp(np.mean(losses))), np.stack(best)


def _run() -> int:
    parser = cli.Parser(prog="python -m benchmarks.quantised", description=__doc__)
    kept = settings.CACHE.get()
    kept = Path.home() / ".cache" / "oneflow_accel" if kept in (None, "off") else kept
    text = "where runs are kept (default: %(default)s)"
    parser.add_argument("--folder", default=Path(kept) / "quantised", type=Path, help=text)
    parser.add_argument("--minutes", type=float, default=30.0, help="of training a model")
    options = parser.parse_args()
    folder, words = options.folder.resolve(), DATA / "gpt2_tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    data, prompts = folder / "tokens", DATA / "sd_prompts" / "diffusiondb.train.txt"
    # The configs read these.
    os.environ["LLAMA_TOKENIZER"] = str(words)
    os.environ["MAGICPROMPT_VOCAB"] = str(words / "vocab.json")
    os.environ["MAGICPROMPT_MERGES"] = str(words / "merges.txt")
    if not Path(f"{data}_valid.bin").exists():
        prepare = [sys.executable, str(PROJECTS / "Llama/prepare.py"), str(prompts)]
        prepare += ["--validation", str(prompts.with_name("diffusiondb.valid.txt"))]
        prepare += ["--tokenizer", str(words), "--output-prefix", str(data), "--overwrite"]
        output_of(prepare)
    tokens = np.fromfile(f"{data}_valid.bin", np.uint16).astype(np.int64)
    windows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    rows = [["model", "weights", "perplexity", "change", "same next token"]]
    for model, config in CONFIGS.items():
        out = folder / f"{model}-{options.minutes:g}-minutes"
        trained(training(model, data, out, options.minutes), str(data), out)
        best = out / "checkpoints" / "best"
        path = str(best if best.exists() else out)
        found = {}
        for weights in ("float32", "bfloat16", "int8"):
            made = TextGenerationPipeline(
                str(config), model_path=path, mode="auto", weights_dtype=weights
            )
            found[weights] = quality(made.model, windows)
        base, same = found["float32"]
        for weights, (perplexity, likeliest) in found.items():
            cells = [f"{perplexity:.2f}", f"{perplexity / base - 1:+.2%}"]
            rows.append([model, weights, *cells, f"{(likeliest == same).mean():.2%}"])
    show(f"{windows.size:,} tokens, {options.minutes:g} minutes", rows, left=rows[0][:2])
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("benchmarks.quantised", _run))
