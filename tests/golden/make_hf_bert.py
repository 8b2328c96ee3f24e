"""Makes tests/data/hf_bert/: a small random BERT as transformers writes it, and what it computes.

Run it in the environment of requirements/peer.txt: python tests/golden/make_hf_bert.py
expected.npz holds input_ids of two pairs of sentences, of which the second is padded, with
attention_mask and token_type_ids, both heads' logits, labels of the masked places, and the loss.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForPreTraining

FOLDER = Path(__file__).resolve().parent.parent / "data" / "hf_bert"
IDS, MASK, PAD = 61, 4, 0


def build() -> BertForPreTraining:
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=24,
        vocab_size=IDS,
    )
    model = BertForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases off their neutral values: one that is left out shows.
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, IDS, (2, 20))
    labels = torch.full_like(ids, -100)
    for row, place in ((0, 3), (0, 11), (1, 5), (1, 12)):
        labels[row, place], ids[row, place] = ids[row, place], MASK
    mask, types = torch.ones_like(ids), torch.zeros_like(ids)
    types[:, 9:] = 1
    mask[1, 14:], ids[1, 14:], types[1, 14:] = 0, PAD, 0
    order = torch.tensor([0, 1])
    names = ("input_ids", "attention_mask", "token_type_ids", "labels", "next_sentence_label")
    return dict(zip(names, (ids, mask, types, labels, order), strict=True))


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    model, given = build(), inputs()
    with torch.no_grad():
        out = model(**given)
    model.save_pretrained(FOLDER)
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    logits = {"logits": out.prediction_logits.numpy(), "order": out.seq_relationship_logits.numpy()}
    np.savez_compressed(FOLDER / "expected.npz", **arrays, **logits, loss=out.loss.numpy())


if __name__ == "__main__":
    main()
