"""Makes rope.json: frequencies and attention factors of transformers' ROPE_INIT_FUNCTIONS, for
sequences within the original length and beyond.

Run it in .venv-peer (torch==2.13.0, transformers==5.23.0).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HEADS, HEAD_SIZE, POSITIONS = 2, 16, 256
ORIGINAL = "original_max_position_embeddings"
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0],
    "long_factor": [1.0, 1.4, 2.1, 3.0, 4.2, 5.5, 6.75, 8.25],
}
BOUNDS = {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5, "rope_theta": 500.0}
CASES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64},
    "yarn, other bounds": {"rope_type": "yarn", "factor": 16.0, ORIGINAL: 128, **BOUNDS},
    "longrope": {**LONGROPE, "factor": 8.0, ORIGINAL: 32},
    "longrope, factor by lengths": {**LONGROPE, ORIGINAL: 64},
    "longrope, given": {**LONGROPE, "factor": 4.0, "attention_factor": 1.25, ORIGINAL: 64},
}


def main() -> None:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        parameters = {"rope_theta": 10000.0, **case}
        config = transformers.LlamaConfig(
            hidden_size=HEADS * HEAD_SIZE,
            num_attention_heads=HEADS,
            max_position_embeddings=POSITIONS,
            rope_parameters=dict(parameters),
        )
        compute, original = ROPE_INIT_FUNCTIONS[case["rope_type"]], case[ORIGINAL]
        (short, factor), (long, _) = (
            compute(config, "cpu", seq_len=length) for length in (original, original + 1)
        )
        found[name] = {
            "parameters": parameters,
            "short": [float(each) for each in short],
            "long": [float(each) for each in long],
            "attention_factor": float(factor),
        }
    golden = {"transformers": transformers.__version__, "head_size": HEAD_SIZE}
    golden |= {"positions": POSITIONS, "cases": found}
    text = json.dumps(golden, separators=(",", ":")).replace('{"parameters"', '\n{"parameters"')
    Path(__file__).resolve().with_name("rope.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
