"""How a run trains: lengths, batch sizes, logs, checkpoints, evaluation, parallel layout."""

from libai.config import LazyCall
from libai.evaluation import PPLEvaluator
from libai.scheduler import WarmupExponentialLR

train = {
    "output_dir": "./output",
    # A checkpoint (or its model folder), or a Hugging Face directory; "" for random weights.
    "load_weight": "",
    # global = micro x data parallel x accumulation. Any two give the third.
    "train_micro_batch_size": 4,
    "global_batch_size": None,
    "num_accumulation_steps": None,
    "test_micro_batch_size": 4,
    # The run's length is the larger of the two.
    "train_iter": 10000,
    "train_epoch": 0,
    # Share of the run over which the learning rate rises.
    "warmup_ratio": 0.0,
    "scheduler": LazyCall(WarmupExponentialLR)(
        warmup_factor=0.0, gamma=1.0, warmup_method="linear", warmup_iter=0, max_iter=0
    ),
    # One of oneflow_accel.precision.PRECISIONS, where it is enabled.
    "amp": {"enabled": False, "precision": "float16"},
    "activation_checkpoint": {"enabled": False},
    "zero_optimization": {"enabled": False, "stage": 1},
    # Periods count steps; *_after_n_epoch, where set, counts epochs and takes its period's place.
    "checkpointer": {"period": 5000, "max_to_keep": 20, "save_model_after_n_epoch": None},
    "evaluation": {
        "enabled": True,
        "evaluator": LazyCall(PPLEvaluator)(),
        "eval_period": 5000,
        "eval_after_n_epoch": None,
        # Batches of each split per evaluation.
        "eval_iter": 250,
        # What checkpoints/best goes by: SPLIT/METRIC.
        "eval_metric": "validation/lm_loss_PPL",
        "eval_mode": "min",
        # Stop after so many evaluations in a row that were no better; null: never.
        "patience": None,
    },
    # Structured layers (model.cfg.mlp_cfg, ...) become dense after this share of the run.
    "sparse_to_dense": {"fraction": None},
    # Stop at the first evaluation after so many minutes; null: never.
    "max_minutes": None,
    "log_period": 20,
    # Besides metrics.jsonl and TensorBoard, {} or options: wandb={project: gpt2} (offline unless
    # mode=online); null: off.
    "logger": {"csv": None, "wandb": None},
    "seed": 1234,
    "start_iter": 0,
    "dist": {
        # null: all processes that the other two leave.
        "data_parallel_size": None,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "pipeline_num_layers": "${model.cfg.num_layers}",
        # A list with the stage of each layer; null shares them out evenly.
        "custom_pipeline_stage_id": None,
        # null: what the device layer chooses.
        "device_type": None,
    },
    # Options for the collectives of devices that have them.
    "rdma_enabled": False,
    "nccl_fusion_threshold_mb": 16,
    "nccl_fusion_max_ops": 24,
}
