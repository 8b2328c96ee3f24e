"""Makes tests/data/hf_gpt2/: a small random GPT-2 as transformers and torch write it, with logits.

Run it in the environment of requirements/peer.txt: python tests/golden/make_hf_gpt2.py
With `--check FOLDER REFERENCE.npz` it loads a folder that we have written, as `transformers` does,
and prints the largest difference of its logits to those in the file (with their input_ids).

Folders: safetensors/ (save_pretrained), sharded/ (the same in three files), bin/ (pytorch_model.bin
of torch.save), bin_sharded/ (two of them, with an index), bfloat16/. expected.npz holds input_ids,
the logits, and those of the model that has been rounded to bfloat16 and widened again.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

FOLDER = Path(__file__).resolve().parent.parent / "data" / "hf_gpt2"


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=4,
        n_inner=40,
        n_positions=24,
        vocab_size=61,
        bos_token_id=60,
        eos_token_id=60,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases off their neutral values: one that is left out shows.
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def save_bin(state: dict[str, torch.Tensor], config: Path, folder: Path, shards: int) -> None:
    folder.mkdir()
    shutil.copy(config, folder)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    weight_map = {}
    names = list(state)
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = {name: state[name].clone() for name in names[number::shards]}
        torch.save(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    model = build()
    ids = torch.randint(0, 61, (2, 24))
    with torch.no_grad():
        arrays = {"input_ids": ids.numpy(), "logits": model(ids).logits.numpy()}
    model.save_pretrained(FOLDER / "safetensors")
    model.save_pretrained(FOLDER / "sharded", max_shard_size="12KB")
    config = FOLDER / "safetensors" / "config.json"
    # As GPT2LMHeadModel had it for years: the head and the causal masks in the file.
    state = dict(model.state_dict())
    for layer in range(2):
        mask = torch.tril(torch.ones(24, 24, dtype=torch.uint8)).view(1, 1, 24, 24)
        state[f"transformer.h.{layer}.attn.bias"] = mask
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_bin(state, config, FOLDER / "bin", shards=1)
    save_bin(state, config, FOLDER / "bin_sharded", shards=2)
    model.bfloat16().save_pretrained(FOLDER / "bfloat16")
    with torch.no_grad():
        arrays["bfloat16_logits"] = model.float()(ids).logits.numpy()
    np.savez_compressed(FOLDER / "expected.npz", **arrays)


def check(folder: str, reference: str) -> None:
    model, told = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    print({key: sorted(map(str, value)) for key, value in told.items() if value})
    with np.load(reference) as arrays, torch.no_grad():
        logits = model.eval().float()(torch.tensor(arrays["input_ids"])).logits.numpy()
        print("largest difference of logits:", np.abs(logits - arrays["logits"]).max())


if __name__ == "__main__":
    check(*sys.argv[2:]) if sys.argv[1:2] == ["--check"] else main()
