"""A Llama that continues prompts; `pipeline.py` reads it.

A model brings its own sizes, paths come from arguments or the environment, so no edits are needed.
"""

import os

from libai.config import LazyCall

from libai_projects.configs import get_config
from libai_projects.text.tokenizer import open_tokenizer

model = get_config("common/models/llama.py").pretrain_model
# Training writes here; --model takes another place.
model.cfg.pretrained_model_path = os.environ.get("LLAMA_MODEL", "projects/Llama/output")

# tokenizer.json, tokenizer.model or their folder.
tokenization = dict(tokenizer=LazyCall(open_tokenizer)(path=os.environ.get("LLAMA_TOKENIZER", "")))

inference = get_config("common/inference.py")
generation, train = inference.generation, inference.train
# Every public name of this file is a key of the config.
del inference

project = {
    "how_to_train": "python projects/Llama/pretrain.py --help",
    "words": {"title": "Llama"},
}
