"""Makes transformers.npz: what transformers' Llamas of tiny_llama.py compute, train and generate.

Run it in .venv-peer (torch==2.13.0, transformers==5.23.0).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tiny_llama  # noqa: E402

STEPS = 4
PROMPTS = [[1, 2, 3], [5], [60, 7, 8, 9, 10, 7, 8]]
GENERATION = {
    "greedy": {"max_new_tokens": 24},
    "penalty": {"max_new_tokens": 24, "repetition_penalty": 1.5},
    "beams": {"max_new_tokens": 12, "num_beams": 3},
}


def build(case: str) -> transformers.LlamaForCausalLM:
    settings = tiny_llama.content(case)
    settings.pop("architectures")
    settings.pop("model_type")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**settings, attn_implementation="eager", eos_token_id=None)
    )
    state = {name: torch.tensor(array) for name, array in tiny_llama.weights(case).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def main() -> None:
    warnings.simplefilter("ignore")
    tokens = torch.tensor(tiny_llama.tokens())
    found: dict[str, np.ndarray] = {}
    for case in tiny_llama.CASES:
        model = build(case).eval()
        with torch.no_grad():
            # The last positions see all the others.
            found[f"{case}/logits"] = model(tokens[:, :-1]).logits[:, -4:].numpy()
        for name, options in GENERATION.items():
            for number, prompt in enumerate(PROMPTS):
                ids = model.generate(
                    torch.tensor([prompt]), do_sample=False, pad_token_id=0, **options
                )
                found[f"{case}/{name}/{number}"] = ids[0].numpy().astype(np.int16)
        model.train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1
        )
        losses = []
        for _ in range(STEPS):
            logits = model(tokens[:, :-1]).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[f"{case}/losses"] = np.array(losses)
    np.savez_compressed(HERE / "transformers.npz", **found)


if __name__ == "__main__":
    main()
