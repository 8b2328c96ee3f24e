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
SHORT = [1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0]
LONG = [1.0, 1.4, 2.1, 3.0, 4.2, 5.5, 6.75, 8.25]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
CASES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, other bounds": {
        **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128},
        **{"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5, "rope_theta": 500.0},
    },
    "longrope": {**LONGROPE, "factor": 8.0, "original_max_position_embeddings": 32},
    "longrope, factor by lengths": {**LONGROPE, "original_max_position_embeddings": 64},
    "longrope, given": {
        **{**LONGROPE, "factor": 4.0, "attention_factor": 1.25},
        "original_max_position_embeddings": 64,
    },
}


def main() -> None:
    found: dict[str, Any] = {}
    for name, given in CASES.items():
        parameters = {"rope_theta": 10000.0, **given}
        config = transformers.LlamaConfig(
            hidden_size=HEADS * HEAD_SIZE,
            num_attention_heads=HEADS,
            max_position_embeddings=POSITIONS,
            rope_parameters=parameters,
        )
        compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        original = parameters["original_max_position_embeddings"]
        short, factor = compute(config, "cpu", seq_len=original)
        long, _ = compute(config, "cpu", seq_len=original + 1)
        found[name] = {
            "head_size": HEAD_SIZE,
            "positions": POSITIONS,
            "parameters": parameters,
            "short": [float(each) for each in short],
            "long": [float(each) for each in long],
            "attention_factor": float(factor),
        }
    path = Path(__file__).resolve().with_name("rope.json")
    golden = {"transformers": transformers.__version__, "cases": found}
    path.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
