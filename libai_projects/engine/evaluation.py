"""--eval-only: the model on the validation and test data, without training."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0

from libai.config import try_get_key
from libai.evaluation import flatten_results_dict
from omegaconf import DictConfig

from flow_train.checkpoint import libai_files
from flow_train.files import replace_file
from libai_projects.engine.check_files import weights_format
from libai_projects.engine.sparse_to_dense import make_dense
from libai_projects.engine.trainer import Trainer, load_weights
from libai_projects.weights import load
from libai_projects.weights.monarch import KEYS

RESULT_NAME = "evaluation.json"

logger = logging.getLogger("libai_projects")


def weights_to_evaluate(cfg: DictConfig) -> str:
    """train.load_weight, else the last checkpoint in train.output_dir, which must be whole."""
    if cfg.train.load_weight:
        return str(cfg.train.load_weight)
    return on_rank_0(lambda: str(libai_files.last(Path(cfg.train.output_dir))))


def evaluate(cfg: DictConfig, weights: str) -> object:
    """Evaluate on the validation and test splits and on dataloader.test; every process calls it.

    Returns what was evaluated, the graph in graph mode: the caller decides when it is freed. Raises
    UserError where the weights are damaged or those of another model.
    """
    tokenizer = Trainer.build_tokenizer(cfg)
    _, validation, test = Trainer.build_train_loader(cfg, tokenizer)
    loaders = [loader for loader in (validation, test) if loader is not None]
    loaders += Trainer.build_test_loader(cfg, tokenizer)
    if try_get_key(cfg, "train.sparse_to_dense.fraction", default=None) is not None:
        _, found = load(weights, on_rank_0(lambda: weights_format(weights)))
        if not any(key in found for key in KEYS):
            make_dense(cfg)
    model = Trainer.build_model(cfg)
    load_weights(model, weights)
    if cfg.graph.enabled:
        model = Trainer.build_graph(cfg, model, is_train=False)
    results = flatten_results_dict(Trainer.test(cfg, loaders, model))
    if distributed.is_main():
        text = json.dumps({"weights": weights, **results}, indent=1, sort_keys=True)
        replace_file(Path(cfg.train.output_dir) / RESULT_NAME, text.encode())
        for name, value in results.items():
            logger.info("%s: %.6g", name, value)
    return model
