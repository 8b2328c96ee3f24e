"""GPT-2 124M that continues prompts; `pipeline.py` reads it.

A model brings its own sizes, paths come from arguments or the environment, so no edits are needed.
"""

import os

from libai.config import LazyCall

from libai_projects.configs import get_config
from libai_projects.text.tokenizer import GPT2Tokenizer

model = get_config("common/models/gpt.py").pretrain_model
# Training writes here; --model takes another place.
model.cfg.pretrained_model_path = os.environ.get(
    "MAGICPROMPT_MODEL", "projects/MagicPrompt/oneflow_magicprompt"
)

tokenization = dict(
    tokenizer=LazyCall(GPT2Tokenizer)(
        vocab_file=os.environ.get("MAGICPROMPT_VOCAB", "./magicprompt/vocab.json"),
        merges_file=os.environ.get("MAGICPROMPT_MERGES", "./magicprompt/merges.txt"),
    )
)

inference = get_config("common/inference.py")
generation, train = inference.generation, inference.train
# Every public name of this file is a key of the config.
del inference

project = {
    "how_to_train": (
        "bash tools/train.sh tools/train_net.py projects/MagicPrompt/configs/gpt2_training.py 1"
    ),
    "words": {
        "title": "MagicPrompt",
        "task": "Type a few words. The model turns them into prompts for an image generator.",
        "example": "a cute pig",
        "text": "prompt",
    },
}
