"""Weights of language models between Hugging Face, LiBai 0.1.1 and upstream LiBai.

    state, config = weights.load(path, "huggingface")    # or "libai", "upstream"
    weights.load_into(model, state)
    weights.save_huggingface(model, cfg, folder)

State dicts are numpy, float32, under LiBai 0.1.1's names and in its layout: see `table`.
"""

from libai_projects.weights.libai_checkpoints import save_libai
from libai_projects.weights.loading import gather_state, load, load_into, read, save_huggingface

__all__ = ["gather_state", "load", "load_into", "read", "save_huggingface", "save_libai"]
