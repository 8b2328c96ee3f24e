"""Makes transformers.json and warped.npz: what transformers generates with a tiny GPT-2.

Run it in .venv-peer (pip install torch==2.13.0 transformers==5.23.0). Weights, prompts' model and
scores come from tiny_gpt2.py, in float64 for the model; transformers itself turns logits into
float32. Prompts go in one by one, save where a case says "batch".
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers.generation import logits_process

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tiny_gpt2  # noqa: E402

PROMPTS = [[1, 2, 3], [5], [60, 7, 8, 9, 10, 7, 8], [33, 44, 33, 44, 33]]
# Tokens that may follow, for the cases that name such a function.
PREFIX_FUNCTIONS = {"even": list(range(0, tiny_gpt2.VOCABULARY, 2)), "few": [10, 11, 24]}
END, ENDS, NEVER = 24, [24, 87], None

# The end alone, which is left out, and what the model would write, of one token and of several.
WORDS = [[END], [80], [41, 41], [28, 41, 15], [7, 8, 9]]

BASE: dict[str, Any] = {"max_length": 30, "pad_token_id": 0, "eos_token_id": END}
GREEDY = {
    "plain": {},
    "no end": {"eos_token_id": NEVER},
    "several ends": {"eos_token_id": ENDS},
    "new tokens": {"max_new_tokens": 9},
    "repetition penalty": {"repetition_penalty": 1.7},
    "repetition reward": {"repetition_penalty": 0.7, "eos_token_id": NEVER},
    "no repeated token": {"no_repeat_ngram_size": 1, "eos_token_id": NEVER},
    "no repeated bigram": {"no_repeat_ngram_size": 2, "eos_token_id": NEVER, "max_length": 60},
    "no repeated trigram": {"no_repeat_ngram_size": 3, "eos_token_id": NEVER, "max_length": 60},
    "min length": {"min_length": 25},
    "min length, several ends": {"min_length": 25, "eos_token_id": ENDS},
    "min new tokens": {"min_new_tokens": 15},
    "min new tokens and length": {"min_new_tokens": 6, "min_length": 25, "eos_token_id": ENDS},
    "bad words": {"bad_words_ids": WORDS, "max_length": 50},
    "bad words, no end": {"bad_words_ids": WORDS, "eos_token_id": NEVER, "max_length": 60},
    "suppressed tokens": {"suppress_tokens": list(range(40, 90))},
    "suppressed end": {"suppress_tokens": ENDS, "eos_token_id": ENDS},
    "prefix function": {"prefix_allowed_tokens_fn": "even"},
    "narrow prefix function": {"prefix_allowed_tokens_fn": "few", "no_repeat_ngram_size": 2},
    "nothing left of a prefix function": {
        "prefix_allowed_tokens_fn": "few",
        "no_repeat_ngram_size": 1,
        "eos_token_id": NEVER,
    },
    "padding that is also a word": {
        "no_repeat_ngram_size": 1,
        "eos_token_id": NEVER,
        "pad_token_id": 80,
    },
    "forced bos": {"forced_bos_token_id": 77},
    "forced eos": {"forced_eos_token_id": END, "eos_token_id": ENDS, "min_length": 30},
    "forced other token": {"forced_eos_token_id": [90, 12], "eos_token_id": NEVER},
    "remove invalid values": {"remove_invalid_values": True, "no_repeat_ngram_size": 2},
    "length decay": {"exponential_decay_length_penalty": [5, 1.3], "eos_token_id": 41},
    "gentle length decay": {"exponential_decay_length_penalty": [2, 1.02], "eos_token_id": 41},
    "length decay after min length": {
        "exponential_decay_length_penalty": [2, 1.3],
        "min_length": 17,
    },
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.3},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_length": 12,
        "forced_bos_token_id": 3,
        "forced_eos_token_id": END,
        "remove_invalid_values": True,
        "exponential_decay_length_penalty": [4, 1.05],
        "renormalize_logits": True,
    },
}
BEAMS = {
    "2": {"num_beams": 2},
    "4": {"num_beams": 4, "num_return_sequences": 4},
    "5, two returns": {"num_beams": 5, "num_return_sequences": 2},
    "early": {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    "never": {"num_beams": 4, "num_return_sequences": 4, "early_stopping": "never"},
    "long": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 2.5},
    "long, never": {
        "num_beams": 3,
        "num_return_sequences": 3,
        "length_penalty": 2.0,
        "early_stopping": "never",
        "eos_token_id": ENDS,
    },
    "nothing left of a prefix function for some beams": {
        "num_beams": 4,
        "num_return_sequences": 2,
        "prefix_allowed_tokens_fn": "few",
        "no_repeat_ngram_size": 2,
        "eos_token_id": NEVER,
        "max_new_tokens": 8,
    },
    "very long": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 9.0},
    "short": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": -1.0},
    "no penalty": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0},
    "no end": {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": NEVER},
    "several ends": {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": ENDS},
    "several ends, early": {
        "num_beams": 3,
        "num_return_sequences": 3,
        "eos_token_id": [24, 87, 41],
        "early_stopping": True,
    },
    "min length": {"num_beams": 3, "num_return_sequences": 3, "min_length": 20},
    "min new tokens": {"num_beams": 3, "num_return_sequences": 3, "min_new_tokens": 12},
    "bad words": {"num_beams": 4, "num_return_sequences": 4, "bad_words_ids": WORDS},
    "suppressed tokens": {"num_beams": 3, "suppress_tokens": list(range(40, 90))},
    "no repeated bigram": {"num_beams": 4, "num_return_sequences": 4, "no_repeat_ngram_size": 2},
    "repetition penalty": {"num_beams": 4, "num_return_sequences": 4, "repetition_penalty": 1.5},
    "forced eos": {"num_beams": 3, "num_return_sequences": 3, "forced_eos_token_id": 7},
    "prefix function": {
        "num_beams": 3,
        "num_return_sequences": 3,
        "prefix_allowed_tokens_fn": "even",
    },
    "nothing left of a prefix function": {
        "num_beams": 2,
        "num_return_sequences": 2,
        "prefix_allowed_tokens_fn": "few",
        "no_repeat_ngram_size": 1,
        "max_length": 11,
    },
    "length decay": {
        "num_beams": 3,
        "num_return_sequences": 3,
        "exponential_decay_length_penalty": [3, 1.2],
    },
    "renormalize": {
        "num_beams": 3,
        "num_return_sequences": 3,
        "renormalize_logits": True,
        "repetition_penalty": 1.3,
    },
    "100 beams": {"num_beams": 100, "num_return_sequences": 5, "max_length": 12},
}
BATCHES = {
    "greedy": {"max_new_tokens": 20},
    "greedy, never ending": {"max_new_tokens": 20, "eos_token_id": NEVER},
    "repetition penalty": {"max_new_tokens": 20, "repetition_penalty": 1.4},
    "beams": {"max_new_tokens": 20, "num_beams": 3, "num_return_sequences": 2},
}
# One token, parts of several, an end within a token, one that begins in the prompt or is all in it.
STOPS = [["wa"], ["awag"], ["eguho", "xyz"], ["aw"], ["jov", "cal", "cov"], ["luj", "gu"]]
WARPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "temperature": [("Temperature", {"temperature": 0.7})],
    "top_k 1": [("TopK", {"top_k": 1})],
    "top_k 40": [("TopK", {"top_k": 40})],
    "top_k 5000": [("TopK", {"top_k": 5000})],
    "top_p 0.1": [("TopP", {"top_p": 0.1})],
    "top_p 0.9": [("TopP", {"top_p": 0.9})],
    "top_p 0.999": [("TopP", {"top_p": 0.999})],
    "top_p 0.1 keep 3": [("TopP", {"top_p": 0.1, "min_tokens_to_keep": 3})],
    "min_p 0.3": [("MinP", {"min_p": 0.3})],
    "min_p 0.01": [("MinP", {"min_p": 0.01})],
    "min_p 1 keep 3": [("MinP", {"min_p": 1.0, "min_tokens_to_keep": 3})],
    "typical 0.2": [("Typical", {"mass": 0.2})],
    "typical 0.9": [("Typical", {"mass": 0.9})],
    "typical 0.995": [("Typical", {"mass": 0.995})],
    "typical 0.01 keep 2": [("Typical", {"mass": 0.01, "min_tokens_to_keep": 2})],
    "all": [
        ("Temperature", {"temperature": 1.3}),
        ("TopK", {"top_k": 200}),
        ("TopP", {"top_p": 0.95}),
        ("Typical", {"mass": 0.8}),
    ],
}


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = tiny_model()
    cases = []
    for name, options in GREEDY.items():
        cases.append(run(model, f"greedy: {name}", options, PROMPTS))
    for name, options in BEAMS.items():
        cases.append(run(model, f"beams: {name}", options, PROMPTS))
    for name, options in BATCHES.items():
        cases.append(run(model, f"batch: {name}", options, PROMPTS, batch=True))
    golden = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "prefix_functions": PREFIX_FUNCTIONS,
        "cases": cases,
        "stops": [stopped(model, prompt, stops) for stops in STOPS for prompt in PROMPTS],
    }
    text = json.dumps(golden, separators=(",", ":")).replace('{"name"', '\n{"name"')
    (HERE / "transformers.json").write_text(text + "\n")

    values = torch.from_numpy(tiny_gpt2.scores(4, 3001))
    warped = {}
    for name, steps in WARPS.items():
        result = values
        for kind, arguments in steps:
            result = getattr(logits_process, f"{kind}LogitsWarper")(**arguments)(None, result)
        probabilities = torch.softmax(result, dim=-1).numpy()
        row, token = np.nonzero(np.isfinite(result.numpy()))
        warped[f"{name}/kept"] = np.stack([row, token]).astype(np.int16)
        warped[f"{name}/probability"] = probabilities[row, token]
    np.savez_compressed(HERE / "warped.npz", **warped)


def tiny_model() -> Any:
    config = transformers.GPT2Config(
        vocab_size=tiny_gpt2.VOCABULARY,
        n_positions=tiny_gpt2.POSITIONS,
        n_embd=tiny_gpt2.WIDTH,
        n_layer=tiny_gpt2.LAYERS,
        n_head=tiny_gpt2.HEADS,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    state = {
        f"transformer.{name}": torch.from_numpy(value).double()
        for name, value in tiny_gpt2.weights().items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) == {"lm_head.weight"}, missing
    return model


def stopped(model: Any, prompt: list[int], stops: list[str]) -> dict[str, Any]:
    """What is generated until a stop string is in the text."""
    vocabulary = {word: number for number, word in enumerate(tiny_gpt2.WORDS)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="ba"))
    library.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library)
    output = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_length=30,
        pad_token_id=0,
        stop_strings=stops,
        tokenizer=tokenizer,
    )
    return {"name": stops, "prompt": prompt, "sequence": output[0].tolist()}


def run(
    model: Any, name: str, options: dict[str, Any], prompts: list[list[int]], batch: bool = False
) -> dict[str, Any]:
    given = {**BASE, **options}
    if "max_new_tokens" in given:
        del given["max_length"]
    arguments = dict(given)
    extra = {}
    if function := arguments.pop("prefix_allowed_tokens_fn", None):
        extra["prefix_allowed_tokens_fn"] = lambda number, ids: PREFIX_FUNCTIONS[function]
    if given["eos_token_id"] is None:
        arguments["pad_token_id"] = 0
    config = transformers.GenerationConfig(
        do_sample=False, return_dict_in_generate=True, output_scores=True, **arguments
    )
    sequences, scores = [], []
    width = max(map(len, prompts))
    for group in [prompts] if batch else [[prompt] for prompt in prompts]:
        longest = max(map(len, group))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in group])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in group])
        with torch.no_grad():
            output = model.generate(ids, attention_mask=mask, generation_config=config, **extra)
        sequences += [row.tolist() for row in output.sequences]
        if config.num_beams is not None and config.num_beams > 1:
            scores += [round(float(score), 6) for score in output.sequences_scores]
    assert not batch or len(sequences[0]) >= width
    return {
        "name": name,
        "batch": batch,
        "prompts": prompts,
        "options": given,
        "sequences": sequences,
        "scores": scores,
    }


if __name__ == "__main__":
    main()
