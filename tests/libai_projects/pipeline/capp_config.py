"""gpt2_inference.py with the words of ../shared/data/models/capp_gpt2_64d."""

import os
from pathlib import Path

from libai.config import LazyCall, LazyConfig
from pipeline_fakes import WordTokenizer

import libai_projects

_base = LazyConfig.load(
    str(Path(libai_projects.__file__).parent / "projects/MagicPrompt/configs/gpt2_inference.py")
)
model, generation, train = _base.model, _base.generation, _base.train
tokenization = {
    "tokenizer": LazyCall(WordTokenizer)(
        mapping_file=os.path.join(os.environ["CAPP_MODEL"], "token_mappings.json")
    )
}
