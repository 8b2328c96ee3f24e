"""llama.cpp, given a model of transformers'.

python -m benchmarks.peers.llama FOLDER FILE WEIGHTS    writes its file of weights
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.serve import Step

# What our dtypes of weights are called there.
_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
# What its numbers are in transformers' configs, where these have them.
_NUMBERS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "feed_forward_length": "intermediate_size",
    "layer_norm_rms_eps": "rms_norm_eps",
    "layer_norm_eps": "layer_norm_epsilon",
}


def write(path: Path, model: nn.Module, weights: str, folder: Path | None = None) -> None:
    """Write the file of a GPT-2 or Llama (rotary base 10,000), with GPT-2's vocabulary where a
    `folder` has its files."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    for to, name in _NUMBERS.items():
        if hasattr(config, name):
            getattr(writer, f"add_{to}")(getattr(config, name))
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
    writer.add_tokenizer_model("gpt2" if folder else "none")
    if folder:
        words = gguf.BpeVocab(folder)
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([text for text, *_ in words.all_tokens()])
        gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads}
    heads["k_proj"] = getattr(config, "num_key_value_heads", 0)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array, part = tensor.float().numpy(), name.split(".")[-2]
        if part in heads:
            # Rotated there are neighbours in a head, not numbers half a head apart.
            halves = array.reshape(heads[part], 2, -1, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if part in ("c_attn", "c_proj", "c_fc") and array.ndim == 2:
            array = np.ascontiguousarray(array.T)
        is_weight = array.ndim == 2 and part != "wpe"
        kind = gguf.GGMLQuantizationType[_TYPES[weights] if is_weight else "F32"]
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(to, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def decode(model: nn.Module, weights: str, prompt: int, tokens: int) -> Step:
    """As `ours.generation.decode`, one sequence; the cache is float32 or, as it has it, float16."""
    length, threads, cache = prompt + tokens, torch.get_num_threads(), llama_cpp.GGML_TYPE_F16
    if weights == "float32":
        cache = llama_cpp.GGML_TYPE_F32
    sizes = {"n_ctx": length, "n_batch": length, "n_threads": threads, "n_threads_batch": threads}
    types = {"type_k": cache, "type_v": cache, "flash_attn": True, "verbose": False}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model"
        write(file, model, weights)
        llama = llama_cpp.Llama(str(file), **sizes, **types)

    def read(ids: list[int]) -> int:
        llama.eval(ids)
        logits = llama_cpp.llama_get_logits(llama.ctx)
        return int(np.ctypeslib.as_array(logits, (llama.n_vocab(),)).argmax())

    first = read(np.random.default_rng(0).integers(0, llama.n_vocab(), prompt).tolist())

    def step() -> None:
        llama.n_tokens, last = prompt, first
        for _ in range(tokens):
            last = read([last])

    return step


if __name__ == "__main__":
    source, target, weights_dtype = sys.argv[1:]
    made = AutoModelForCausalLM.from_pretrained(source)
    write(Path(target), made, weights_dtype, Path(source))
