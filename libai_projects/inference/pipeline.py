"""A model and its tokenizer by a config, in any parallel layout, that continues prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import distributed
from oneflow_accel.agree import everywhere, on_rank_0, plain_values, require_same
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.generation import CacheDtype, WeightsDtype

from libai.config import instantiate
from libai.utils import distributed as dist
from omegaconf import DictConfig, OmegaConf

from flow_train.checkpoint.folders import checkpoint_folder
from libai_projects import weights
from libai_projects.command.check_files import OF_A_MACHINE
from libai_projects.command.checks import check_model
from libai_projects.command.config import apply_overrides, load_config
from libai_projects.generation import GenerationOptions
from libai_projects.inference.options import MODES, check_stages, choose_layout
from libai_projects.inference.text_pipeline import TextPipeline, Words
from libai_projects.models.families import family_of
from libai_projects.models.step_model import StepModel
from libai_projects.text.tokenizer import open_tokenizer
from libai_projects.weights import monarch
from libai_projects.weights.libai_checkpoints import detect_mode, find_model
from libai_projects.weights.table import initial_weights

# Beside a Hugging Face model.
_TOKENIZER_FILES = {"vocab_file": "vocab.json", "merges_file": "merges.txt", "path": "."}
_NO_MODEL = (
    "there is no model yet: train one ({how}), name one with --model PATH, or see random weights "
    "at work with --mode random"
)


class TextGenerationPipeline(TextPipeline):
    """A model and its tokenizer by a config; every process of a job makes one.

    What is None is the config's, else by the number of processes (`inference.layout`), by the
    device layer, or by the files of a Hugging Face model.

    Args:
        config_file: a LiBai config such as configs/gpt2_inference.py, or the config.yaml of a run.
        pipeline_stage_id: the stage of each layer; None shares the layers out evenly.
        model_path: None takes the config's `model.cfg.pretrained_model_path`.
        tokenizer: tokenizer.json, tokenizer.model or their folder; None takes the config's, or the
            one beside a Hugging Face model.
        mode: "huggingface" (a folder with config.json and weights), "libai" (a checkpoint, its
            `model` folder, or a run's output folder), "random" (for tests) or "auto", by the path.
        weights_dtype, cache_dtype: what weights, and keys and values, are rounded to; see
            `models.step_model.StepModel`.
        overrides: "key=value" texts that change the config.
        generation: options of `GenerationOptions` that differ from the config's.

    Raises UserError, the same on every process, where a file is damaged, a value cannot be used, or
    the layout does not fit; NotImplementedError for another mode.
    """

    def __init__(
        self,
        config_file: str,
        data_parallel: int | None = None,
        tensor_parallel: int | None = None,
        pipeline_parallel: int | None = None,
        pipeline_stage_id: Sequence[int] | None = None,
        pipeline_num_layers: int | None = None,
        model_path: str | None = None,
        mode: str = "libai",
        device: str | None = None,
        *,
        vocab_file: str | None = None,
        merges_file: str | None = None,
        tokenizer: str | None = None,
        weights_dtype: WeightsDtype = "float32",
        cache_dtype: CacheDtype | None = None,
        overrides: Sequence[str] = (),
        **generation: object,
    ) -> None:
        if mode not in MODES:
            raise NotImplementedError(f"mode {mode!r}: expected one of {', '.join(MODES)}")

        def read() -> DictConfig:
            cfg = apply_overrides(load_config(config_file), overrides, config_file)
            sizes = cfg.train.dist
            for key, value in {
                "data_parallel_size": data_parallel,
                "tensor_parallel_size": tensor_parallel,
                "pipeline_parallel_size": pipeline_parallel,
                "custom_pipeline_stage_id": check_stages(pipeline_stage_id),
                "pipeline_num_layers": pipeline_num_layers,
                "device_type": device,
            }.items():
                # One by one: an update of the whole node would drop its other keys.
                if value is not None:
                    sizes[key] = value
            # A run's config has the device that it ran on, which may not be here.
            sizes.device_type = oneflow_accel.select_device(sizes.get("device_type")).name
            # A wrong option is found before the model is built.
            GenerationOptions.from_config(cfg.get("generation"), **generation)
            return cfg

        cfg = everywhere(read)
        require_same(plain_values(OmegaConf.to_container(cfg, resolve=True), OF_A_MACHINE))
        # The first process reads the model for all; the tokenizer is each one's own.
        kind, path = on_rank_0(lambda: _model(cfg, model_path, mode))
        given = {"vocab_file": vocab_file, "merges_file": merges_file, "path": tokenizer}
        built = everywhere(lambda: _tokenizer(cfg, given, path))
        if distributed.world_size() > 1:
            words = json.dumps([built.decode([token]) for token in range(built.vocab_size)])
            require_same({"the tokenizer's words": sha256(words.encode()).hexdigest()})
        dtypes = {"weights_dtype": weights_dtype, "cache_dtype": cache_dtype}
        step_model = _build(cfg, kind, path, built, dtypes)
        super().__init__(
            step_model,
            built,
            name="random weights" if path is None else model_name(path),
            words=Words(**cfg.get("project", {}).get("words", {})),
            options={**(cfg.get("generation") or {}), **generation},
        )
        self.check_options(generation)
        self.cfg = cfg


def _model(cfg: DictConfig, model_path: str | None, mode: str) -> tuple[str, Path | None]:
    """Kind and place of the weights; no place for random ones."""
    if mode == "random":
        return mode, None
    given = model_path or cfg.model.cfg.get("pretrained_model_path")
    if not given or (model_path is None and not Path(given).exists()):
        how = cfg.get("project", {}).get("how_to_train", "see the README")
        raise UserError(_NO_MODEL.format(how=how))
    kind = detect_mode(Path(given)) if mode == "auto" else mode
    return kind, find_model(Path(given)) if kind == "libai" else Path(given)


def model_name(path: Path) -> str:
    """What clients call the model: a checkpoint of a run has the name of the run's folder."""
    place = path.resolve()
    run = place.parents[min(1, len(place.parents) - 1)]
    return run.name if place.parent == checkpoint_folder(run) else place.name


# What a Llama's pretrain.py rounds a vocabulary up to.
PADDED_TO = 8


def _tokenizer(cfg: DictConfig, given: dict[str, str | None], model: Path | None) -> object:
    files = cfg.tokenization.tokenizer
    if "vocab_file" in files and not (given["vocab_file"] or given["merges_file"]):
        # GPT-2's, for which a tokenizer.json does as well.
        path, lacking = given["path"], not Path(files.vocab_file).exists()
        if lacking and model is not None and not (model / "vocab.json").exists():
            path = path or (str(model) if (model / "tokenizer.json").is_file() else None)
        if path is not None:
            return open_tokenizer(path)
    for key, path in given.items():
        if key not in files:
            if path is not None:
                option = "--tokenizer" if key == "path" else f"--{key.replace('_', '-')}"
                raise UserError(f"this config's tokenizer takes no {option}: leave it out")
            continue
        if path is not None:
            files[key] = path
        elif model is not None and not (files[key] and Path(files[key]).exists()):
            beside = model / _TOKENIZER_FILES[key]
            files[key] = str(beside) if beside.exists() else files[key]
    return instantiate(files)


def _build(
    cfg: DictConfig, kind: str, path: Path | None, tokenizer: object, dtypes: dict[str, Any]
) -> StepModel:
    """Build the model in its layout, load its weights and make it step. Collective."""
    model_cfg, sizes, family = cfg.model.cfg, cfg.train.dist, family_of(cfg.model._target_)
    table = family.table
    if path is None:
        rows = real = tokenizer.vocab_size
        state: dict[str, Any] = {}
    else:
        state, found = weights.load(path, kind, table=table)
        if "num_attention_heads" not in found and found["hidden_size"] != model_cfg.hidden_size:
            raise UserError(
                f"{path} does not tell how many attention heads its model has: give "
                f"model.cfg.num_attention_heads=N model.cfg.hidden_size={found['hidden_size']}"
            )
        # The weights, not the config, say which layers are Monarch layers.
        model_cfg.update({**dict.fromkeys(monarch.KEYS), **found})
        rows = real = found["vocab_size_real"]
        if rows % PADDED_TO == 0 and 0 < rows - tokenizer.vocab_size < PADDED_TO:
            # Trained with rows of no token.
            real = tokenizer.vocab_size
    stages, pipeline = sizes.get("custom_pipeline_stage_id"), sizes.get("pipeline_parallel_size")
    if stages and pipeline is None and distributed.world_size() > 1:
        pipeline = len(set(stages))
    layout = choose_layout(
        distributed.world_size(),
        data=sizes.get("data_parallel_size"),
        tensor=sizes.get("tensor_parallel_size"),
        pipeline=pipeline,
    )
    sizes.data_parallel_size = layout.data
    sizes.tensor_parallel_size = layout.tensor
    sizes.pipeline_parallel_size = layout.pipeline
    check_model(cfg, layout)
    if sizes.get("pipeline_num_layers") is None:
        sizes.pipeline_num_layers = model_cfg.num_layers
    # Padding rows make the vocabulary divide; the logits leave them out.
    model_cfg.vocab_size = -(-rows // layout.tensor) * layout.tensor
    model_cfg.vocab_size_real = real
    dist.setup_dist_util(sizes)
    model = instantiate(cfg.model)
    model.eval()
    if path is None and distributed.is_main():
        state = dict(initial_weights(table, {**model_cfg, "vocab_size": real}, cfg.train.seed))
    weights.load_into(model, state, table=table)
    return family.steps(model, **dtypes)
