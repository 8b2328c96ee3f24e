"""llama.cpp, given a model of transformers': its file of weights, and tokens one after the other.

    python -m benchmarks.peers.llama FOLDER FILE WEIGHTS

writes the file of a folder, with the vocabulary that is in it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from torch import nn

from benchmarks.serve import Step

# What ours is called there; the cache beside them is float32 or, as llama.cpp has it, float16.
_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
# A sequence's share of the cache is a multiple of so many tokens.
_CELLS = 256


def write(path: Path, model: nn.Module, weights: str, vocabulary: Path | None = None) -> None:
    """Write the file of a GPT-2 or Llama with `weights` of ours' names; without the folder of a
    `vocabulary` it has token ids alone."""
    config, is_llama = model.config, model.config.model_type == "llama"
    writer = gguf.GGUFWriter(path, config.model_type)
    sizes = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "head_count": config.num_attention_heads,
    }
    heads = {"q_proj": config.num_attention_heads}
    if is_llama:
        heads["k_proj"] = config.num_key_value_heads
        sizes["feed_forward_length"] = config.intermediate_size
        sizes["head_count_kv"] = config.num_key_value_heads
        sizes["layer_norm_rms_eps"] = config.rms_norm_eps
        sizes["rope_dimension_count"] = config.hidden_size // config.num_attention_heads
        sizes["rope_freq_base"] = config.rope_parameters["rope_theta"]
    else:
        sizes["feed_forward_length"] = config.n_inner or 4 * config.hidden_size
        sizes["layer_norm_eps"] = config.layer_norm_epsilon
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    _write_vocabulary(writer, vocabulary)
    arch = gguf.MODEL_ARCH.LLAMA if is_llama else gguf.MODEL_ARCH.GPT2
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array, part = tensor.float().numpy(), name.split(".")[-2]
        if part in heads:
            # Neighbours of a head are turned there, numbers half a head apart here.
            halves = array.reshape(heads[part], 2, -1, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if part in ("c_attn", "c_proj", "c_fc") and array.ndim == 2:
            array = np.ascontiguousarray(array.T)
        own = _TYPES[weights] if array.ndim == 2 and part != "wpe" else "F32"
        kind = gguf.GGMLQuantizationType[own]
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(to, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: gguf.GGUFWriter, folder: Path | None) -> None:
    """GPT-2's of vocab.json and merges.txt."""
    writer.add_tokenizer_model("none" if folder is None else "gpt2")
    if folder is None:
        return
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    end = ids["<|endoftext|>"]
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if id == end else kinds.NORMAL for id in range(len(ids))])
    writer.add_token_merges([line for line in merges if line and not line.startswith("#version")])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


class Sequences:
    """Some sequences of a model in llama.cpp, with a cache of `length` tokens for each."""

    def __init__(self, file: Path, weights: str, count: int, length: int) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = count * -(-length // _CELLS) * _CELLS
        settings.n_seq_max = count
        settings.n_batch = max(length, count)
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        if weights == "float32":
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        llama_cpp.llama_backend_init()
        of_a_model = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), of_a_model)
        self._context = llama_cpp.llama_init_from_model(model, settings)
        self._batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        self._words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def read(self, tokens: Sequence[tuple[int, int, int]], wanted: int) -> np.ndarray:
        """Read (token, position, sequence); (wanted, vocabulary) float32 logits of the last ones,
        which the next call overwrites."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, (token, position, sequence) in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = row >= len(tokens) - wanted
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (wanted, self._words))

    def cut(self, sequence: int, length: int) -> None:
        """Forget what is beyond this length."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, sequence, length, -1)


def decode(model: nn.Module, weights: str, batch: int, prompt: int, tokens: int) -> Step:
    """As `ours.generation.decode`."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, prompt)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "model", model, weights)
        sequences = Sequences(Path(folder) / "model", weights, batch, prompt + tokens)
    first = [
        sequences.read([(id, at, row) for at, id in enumerate(line)], 1).argmax()
        for row, line in enumerate(ids)
    ]

    def step() -> None:
        last = first
        for row in range(batch):
            sequences.cut(row, prompt)
        for at in range(prompt, prompt + tokens):
            last = sequences.read([(id, at, row) for row, id in enumerate(last)], batch).argmax(-1)

    return step


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM

    source, target, kind = sys.argv[1:]
    write(Path(target), AutoModelForCausalLM.from_pretrained(source), kind, Path(source))
