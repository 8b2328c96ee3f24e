"""The schema of a run: its keys with types, ranges and meanings.

The training keys are flow_train's and the values are in configs/*.yaml. A key that no file and no
override sets has the default given in a schema; a key without one must be set.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from flow_train.config import keys
from flow_train.config.keys import Above0, Below1, Count, Fraction, PathText, Positive
from flow_train.config.schema import Group, Schema, Text


def _resume(value: Any) -> Any:
    return {"True": "auto", "False": None}.get(str(value), value)


Resume = Annotated[PathText | None, BeforeValidator(_resume)]
# A mapping with a `_target_`, which monarch_flow.layers checks, or one of its short names.
Layers = dict[str, Any] | str
# One number for each of the three stages of a ViTAE.
Widths = Annotated[list[Positive], Field(min_length=3, max_length=3)]


class Evaluation(Group):
    ckpt: PathText | None = Field(description="evaluate this checkpoint and do not train")
    run_val: bool = Field(description="evaluate on the validation images")
    run_test: bool = Field(description="evaluate on the test images")
    use_ema: bool = Field(
        description="of a checkpoint with both, the weights' moving averages; false: the last ones"
    )
    real_labels: PathText | None = Field(
        description="real.json, to count by ImageNet's reassessed labels too"
    )
    class_map: PathText | None = Field(
        None, description="as datamodule.class_map, for images of a part of the model's classes"
    )
    results_file: PathText | None = Field(description="write the figures to this file, as JSON")


class SparseToDense(Group):
    fraction: Fraction | None = Field(
        None,
        description="share of the epochs after which structured layers become dense; null: never",
    )


class InitFrom(Group):
    path: PathText | None = Field(description="start with this checkpoint's weights")
    project: bool = Field(description="project its dense weights onto the structured layers")
    use_ema: bool = Field(description="take their moving averages where it has them")
    reset_head: bool = Field(description="leave out its classifier, to train on other classes")


class Train(Group):
    global_batch_size: Positive = Field(description="images per optimizer step, all processes")
    lr_base: Above0 | None = Field(
        None, description="learning rate for lr_base_size images per step; optimizer.lr follows"
    )
    lr_base_size: Positive = Field(512, description="images that lr_base is for")
    loss_fn: keys.LossFunction
    loss_fn_val: keys.LossFunction
    scheduler_interval: Literal["epoch", "step"] = Field(
        description="the scheduler's unit of time, and when the learning rate moves"
    )
    sparse_to_dense: SparseToDense
    init_from: InitFrom


class Model(Group):
    """Each model says which of these it takes; those that are set go to create_model."""

    name: Text = Field(description="a model of monarch_flow.models")
    num_classes: Positive | None = Field(None, description="null: as many as the data has")
    img_size: Positive | None = None
    in_chans: Positive | None = None
    patch_size: Positive | None = None
    embed_dim: Positive | None = None
    embed_dims: Widths | None = None
    token_dims: Widths | None = None
    conv_groups: Positive | None = None
    depth: Positive | None = None
    num_heads: Positive | None = None
    mlp_ratio: Above0 | None = None
    token_ratio: Above0 | None = None
    channel_ratio: Above0 | None = None
    qkv_bias: bool | None = None
    tokens_type: Literal["performer", "transformer"] | None = None
    norm_eps: Above0 | None = None
    attn_drop_rate: Below1 | None = None
    drop_rate: Below1 = 0.0
    drop_path_rate: Below1 = 0.0
    mlp_cfg: Layers | None = Field(
        None, description="layers of the MLPs, in a mixer of those over channels; null: dense"
    )
    token_mlp_cfg: Layers | None = Field(None, description="the same of a mixer's MLPs over tokens")
    attnlinear_cfg: Layers | None = Field(None, description="layer of the projections to q, k, v")


class Config(Group):
    seed: Count | None = Field(description="of every random generator; null draws one")
    name: Text = Field(description="of the run; its folder is run_dir")
    work_dir: PathText = Field(description="holds the folders of all runs")
    run_dir: PathText = Field(description="the run's folder: config, metrics, checkpoints")
    mode: Literal["default", "debug", "exp", "smoke", "eval"]
    resume: Resume = Field(
        description="auto goes on where run_dir left off; or a checkpoint, also timm's .pth.tar"
    )
    test_after_training: bool
    verbose: bool = Field(description="log more")
    eval: Evaluation
    trainer: keys.Trainer
    train: Train
    datamodule: keys.Datamodule
    model: Model
    optimizer: keys.Optimizer
    optimizer_param_grouping: keys.ParameterGrouping
    scheduler: keys.Scheduler | None = Field(description="null: the learning rate stays")
    callbacks: keys.Callbacks
    logger: keys.Logger


SCHEMA = Schema(Config, open_groups=("model", "optimizer", "scheduler"))
