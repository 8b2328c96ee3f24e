"""Every option of every trainer in bfloat16: two steps whose losses are float32's but for rounding,
or, where nothing is trained, a run that ends well. Options that come together share a line."""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflow_accel import settings
from oneflow_accel.kernels import plugin

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from flow_train import sharding
from libai_projects.command.config import load_config
from libai_projects.projects.Llama import flags as llama_flags
from libai_projects.text.token_files import Description
from monarch_flow.config import SCHEMA
from resnet50_imagenet.options import build_parser as main_parser
from tests.launch import REPOSITORY, run_several
from tests.tolerances import TOLERANCES
from vit_10b.options import build_parser as vit_parser

pytestmark = pytest.mark.skipif(
    not plugin.state().loaded, reason="stock OneFlow has no bfloat16 on CPUs"
)
LIBAI = REPOSITORY / "libai_projects"
# Half of them with main.py, half with monarch_flow.
MODES = list(sharding.MODES)
VIT = "model.num_heads=4 model.patch_size=8"
BERT_CONFIG = "projects/BERT/configs/bert_pretraining.py"
GPT2_CONFIG = "projects/MagicPrompt/configs/gpt2_training.py"


@dataclass(frozen=True)
class Trainer:
    """`lines` are added to `words` by name and number of processes; {out} is the line's own folder,
    {plain} that of the float32 line `plain`, {images} has pictures. `options` are all that there
    are, `crossed` those that a line gives; `apart` does not touch what is computed."""

    module: str
    words: str
    bfloat16: str
    options: Callable[[], set[str]]
    crossed: Callable[[Sequence[str]], set[str]]
    apart: str
    lines: dict[tuple[str, int], str]


def of_parser(make: Callable[[], argparse.ArgumentParser]) -> dict[str, Any]:
    """What Trainer asks of a command line with options: those whose values a line changes."""

    def options() -> set[str]:
        return {action.dest for action in make()._actions} - {"help"}

    def crossed(words: Sequence[str]) -> set[str]:
        parser = make()
        found = vars(parser.parse_args(words))
        default = parser.get_default
        return {name for name, value in found.items() if str(value) != str(default(name))}

    return {"options": options, "crossed": crossed}


def _leaves(values: Any, path: str = "") -> Iterator[str]:
    if isinstance(values, DictConfig | dict) and values:
        for name in values:
            yield from _leaves(values[name], f"{path}{name}.")
    else:
        yield path[:-1]


def of_keys(words: Sequence[str]) -> set[str]:
    plain = [word.replace("{", "").replace("}", "") for word in words]
    given = OmegaConf.from_dotlist([word for word in plain if "=" in word and word[0] != "-"])
    return set(_leaves(OmegaConf.to_container(given, resolve=False)))


def monarch_keys() -> set[str]:
    names = {name for name, _ in SCHEMA.fields()}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def gpt2_keys() -> set[str]:
    cfg = OmegaConf.to_container(load_config(str(LIBAI / GPT2_CONFIG)), resolve=False)
    return {name for name in _leaves(cfg) if not name.endswith("_target_")}


TRAINERS = {
    "main": Trainer(
        "resnet50_imagenet.main",
        "{images} -a squeezenet1_1 --image-size 32 -b 16 -j 0 --lr 0.001 --seed 3 -p 1 --epochs 1 "
        "--output-dir {out}",
        "--precision bfloat16",
        **of_parser(main_parser),
        lines={
            ("plain", 1): "",
            ("frozen", 1): "-a shufflenet_v2_x0_5 --freeze-bn --wd 0.01 --momentum 0.5 "
            "--channels-last --clip-grad 0.5 --smoothing 0.1 --model-ema --model-ema-decay 0.9 "
            "--grad-accum-steps 2 --epochs 2 --profile 1",
            ("mixed", 1): "--aa rand-m9-mstd0.5-inc1 --reprob 0.5 --mixup 0.8 --cutmix 1 "
            "--mixup-prob 0.9 --mixup-switch-prob 0.6 --mixup-mode elem --scale 0.5 1 --hflip 0.3 "
            "--optimizer adamw --scheduler cosine --epochs 2",
            ("resumed", 1): "--resume {plain} --epochs 2",
            ("weights", 1): "--weights {plain}/checkpoints/step-00000002/model.safetensors "
            "--reset-head",
            ("in-place", 1): "-a mobilenet_v3_small --lr 0.0001",
            ("evaluated", 1): "-e --resume {plain} --predictions {out}/table.csv",
            ("measured", 1): "--benchmark",
            ("graph", 1): "-a resnet18 --conv-cfg monarch --graph --channels-last --model-ema "
            "--grad-accum-steps 2 --clip-grad 0.5 --epochs 2",
            **{
                (mode, 2): "-a resnet18 --freeze-bn --model-ema --clip-grad 0.5 "
                f"--multiprocessing-distributed --fsdp {mode}"
                for mode in MODES[::2]
            },
            ("reduced", 2): "--multiprocessing-distributed --reduce-dtype bfloat16",
        },
        apart="dummy device fold bf16 amp precision save_freq rank world_size dist_* gpu max_steps "
        "start_epoch pretrained",
    ),
    "vit_10b": Trainer(
        "vit_10b.run_vit_training",
        "--data_dir {images} --image_size 16 --patch_size 8 --embed_dim 32 --num_heads 2 "
        "--num_blocks 2 --batch_size 8 --num_workers 0 --num_epochs 1 --warmup_steps 1 "
        "--log_step_interval 1 --seed 3 --lr 0.002 --ckpt_dir {out}",
        "--precision bfloat16",
        **of_parser(vit_parser),
        lines={
            ("plain", 2): "",
            ("flat", 2): "--pos_dropout 0.1 --att_dropout 0.1 --mlp_dropout 0.1 --init timm "
            "--flatten_parameters --shard_multiple 8 --prefetch --mlp_ratio 2 --profile 1 "
            "--gather_dtype bfloat16 --clip_grad_norm 0.1 --weight_decay 0.5",
            ("rows", 2): "--shard_group 1 --prefetch --no_grad_ckpt --no_reshard_after_forward",
            ("whole", 2): "--run_without_fsdp",
            ("factored", 2): "--mlp_cfg=monarch --attnlinear_cfg=blockdiag --attnproj_cfg=monarch "
            "--sparse_to_dense=0.5 --num_epochs 2",
            ("resumed", 2): "--resume auto --ckpt_dir {plain} --num_epochs 2",
        },
        apart="fake_data num_classes max_steps shard_on_cpu mark_step_after_forward precision "
        "resume_epoch reshard *_interval device dry_run largest num_devices device_memory",
    ),
    "monarch": Trainer(
        "monarch_flow.train",
        "experiment=imagenet/vit/vit-s datamodule.data_dir={images} datamodule.image_size=32 "
        "model.embed_dim=64 model.depth=2 datamodule.batch_size=16 train.global_batch_size=16 "
        "datamodule.num_workers=0 seed=1 trainer.max_epochs=1 trainer.log_every_n_steps=1 "
        "test_after_training=false callbacks.macs=null callbacks.ema=null logger.tensorboard=null "
        "optimizer.lr=1e-3 scheduler.warmup_t=0 trainer.precision=32 run_dir={out}",
        "trainer.precision=bf16",
        monarch_keys,
        of_keys,
        lines={
            ("plain", 1): VIT,
            ("dropout", 1): f"{VIT} model.drop_rate=0.1 model.attn_drop_rate=0.1 "
            "model.drop_path_rate=0.2 model.qkv_bias=true model.norm_eps=1e-4 model.mlp_ratio=2 "
            "optimizer.betas=[0.8,0.9] optimizer.eps=1e-4 "
            "optimizer.amsgrad=true optimizer.weight_decay=0.1 trainer.gradient_clip_val=0.5 "
            "optimizer_param_grouping.bias_weight_decay=true "
            "optimizer_param_grouping.normalization_weight_decay=true "
            "trainer.accumulate_grad_batches=2 datamodule.batch_size=8 callbacks.ema.decay=0.9 "
            "callbacks.ema.use_num_updates=true callbacks.norm_monitor.layer_norm_only=true "
            "trainer.profile=1",
            ("sgd", 1): f"{VIT} optimizer=sgd optimizer.name=sgd optimizer.momentum=0.9 "
            "optimizer.nesterov=false optimizer.dampening=0.1 optimizer.maximize=true "
            "train.loss_fn.label_smoothing=0.2 train.loss_fn_val.label_smoothing=0.1",
            ("mixed", 1): f"{VIT} datamodule.mixup.mixup_alpha=0.8 "
            "datamodule.mixup.cutmix_alpha=1 datamodule.mixup.cutmix_minmax=[0.2,0.8] "
            "datamodule.mixup.prob=0.9 datamodule.mixup.switch_prob=0.6 "
            "datamodule.mixup.mode=pair datamodule.mixup.correct_lam=false "
            "datamodule.mixup.label_smoothing=0.1",
            ("layers", 1): f"{VIT} model.mlp_cfg=monarch model.attnlinear_cfg=blockdiag "
            "train.sparse_to_dense.fraction=0.5 trainer.max_epochs=2 "
            "trainer.limit_train_batches=1",
            ("low-rank", 1): f"{VIT} model.mlp_cfg=low_rank model.attnlinear_cfg=fbbfly",
            ("projected", 1): f"{VIT} model.mlp_cfg=monarch train.init_from.path={{plain}} "
            "train.init_from.project=true train.init_from.reset_head=true",
            ("mixer", 1): "experiment=imagenet/mixer/mixers model.patch_size=8 "
            "model.token_mlp_cfg=monarch model.token_ratio=1 model.channel_ratio=2",
            ("t2t", 1): "experiment=imagenet/t2tvit/t2tvit7 model.num_heads=2 "
            "model.tokens_type=performer",
            ("tokens", 1): "experiment=imagenet/t2tvit/t2tvit7t model.num_heads=2 "
            "model.t2tattn1_cfg.local_context=7 model.t2tattn1_cfg.nb_features=6 "
            "model.t2tattn2_cfg.local_context=3 model.t2tattn2_cfg.nb_features=4",
            ("vitae", 1): "experiment=imagenet/vitae/tiny model.embed_dim=null model.num_heads=2 "
            "model.embed_dims=[8,8,16] model.token_dims=[8,8,32] model.conv_groups=4",
            ("resumed", 1): f"{VIT} resume={{plain}} trainer.max_epochs=2",
            ("evaluated", 1): f"{VIT} eval.ckpt={{plain}} eval.results_file={{out}}-figures",
            ("graph", 1): f"{VIT} trainer.graph=true trainer.gradient_clip_val=0.5 "
            "datamodule.batch_size=8",
            **{
                (mode, 2): f"{VIT} trainer.fsdp={mode} datamodule.batch_size=8 "
                "model.mlp_cfg=monarch callbacks.norm_monitor={}"
                for mode in MODES[1::2]
            },
            ("reduced", 2): f"{VIT} trainer.reduce_dtype=bfloat16 datamodule.batch_size=8",
        },
        apart="mode name work_dir verbose callbacks.early* "
        "callbacks.initial* callbacks.lear* callbacks.model* callbacks.params* "
        "callbacks.speed* datamodule.* eval.* logger.* model.img_size model.in_chans model.name "
        "model.num_classes scheduler.* train.init_from.use_ema train.*.name train.lr_base* "
        "train.scheduler_interval trainer.accelerator trainer.check* trainer.devices "
        "trainer.fast_dev_run trainer.limit_val* trainer.m??_*",
    ),
    "gpt2": Trainer(
        "libai_projects.tools.train_net",
        f"--config-file {LIBAI / GPT2_CONFIG} --dummy train.output_dir={{out}} train.train_iter=2 "
        "train.train_epoch=0 train.log_period=1 train.evaluation.eval_period=2 "
        "train.evaluation.eval_iter=1 graph.enabled=false model.cfg.num_layers=2 "
        "model.cfg.hidden_size=64 model.cfg.ffn_hidden_size=128 model.cfg.num_attention_heads=4 "
        "model.cfg.max_seq_length=32 model.cfg.vocab_size=250 model.cfg.vocab_size_real=250 "
        "dataloader.train.num_workers=0 train.global_batch_size=4 optim.lr=1e-3 "
        "train.amp.enabled=false model.cfg.embedding_dropout_prob=0 "
        "model.cfg.attention_dropout_prob=0 model.cfg.output_dropout_prob=0",
        "train.amp.enabled=true train.amp.precision=bfloat16",
        gpt2_keys,
        of_keys,
        lines={
            ("plain", 1): "",
            ("composed", 1): "model.cfg.bias_gelu_fusion=false model.cfg.bias_dropout_fusion=false "
            "model.cfg.scale_mask_softmax_fusion=false model.cfg.attention_fusion=false "
            "model.cfg.attention_dropout_prob=0.1",
            ("otherwise", 1): "model.cfg.embedding_dropout_prob=0.1 "
            "model.cfg.attention_dropout_prob=0.1 model.cfg.output_dropout_prob=0.1 "
            "model.cfg.apply_query_key_layer_scaling=true model.cfg.tie_word_embeddings=false "
            "model.cfg.scale_attn_by_inverse_layer_idx=true "
            "model.cfg.activation=gelu model.cfg.layernorm_epsilon=1e-4 "
            "model.cfg.initializer_range=0.03 model.cfg.use_scaled_init_for_output_weights=false "
            "optim.betas=[0.8,0.9] optim.eps=1e-6 optim.weight_decay=0.1 "
            "optim.do_bias_correction=false optim.params.clip_grad_max_norm=0.5 "
            "optim.params.clip_grad_norm_type=1.0 optim.params.weight_decay_bias=0.1 "
            "optim.params.weight_decay_norm=0.1",
            ("accumulated", 1): "train.num_accumulation_steps=2 train.train_micro_batch_size=2 "
            "model.cfg.mlp_cfg=monarch model.cfg.attnlinear_cfg=blockdiag "
            "model.cfg.attnproj_cfg=monarch train.sparse_to_dense.fraction=0.5",
            ("bert", 1): f"--config-file {LIBAI / BERT_CONFIG} train.num_accumulation_steps=2 "
            "train.train_micro_batch_size=2 model.cfg.mlp_cfg=blockdiag "
            "train.sparse_to_dense.fraction=0.5",
            ("split", 2): "train.dist.tensor_parallel_size=2",
            ("zero", 2): "graph.enabled=true train.num_accumulation_steps=2 "
            "train.train_micro_batch_size=1 "
            "train.zero_optimization.enabled=true train.zero_optimization.stage=2 "
            "train.activation_checkpoint.enabled=true",
        },
        apart="dataloader.* graph.debug graph.*.is_train model.cfg.amp_enabled tokenization.* "
        "train.amp.precision train.checkpointer.* train.dist.* train.evaluation.* "
        "train.load_weight train.logger.* train.max_minutes train.nccl* train.rdma* "
        "train.scheduler.* train.seed train.start_iter train.test_micro* train.warmup_ratio",
    ),
    "llama": Trainer(
        "libai_projects.projects.Llama.pretrain",
        "--preset=tiny --dummy --batch_size=2 --gradient_accumulation_steps=1 --max_iters=2 "
        "--max_seq_len=32 --warmup_iters=0 --num_workers=0 --learning_rate=1e-3 "
        "--output_dir={out}",
        "--precision=bfloat16",
        **of_parser(llama_flags.build_parser),
        lines={
            ("plain", 1): "",
            ("composed", 1): "--use_flash=false --use_fused_rope=false "
            "--use_fused_cross_entropy=false --use_fused_rmsnorm=false "
            "--use_fused_dropout_add_norm=false --use_fused_swiglu=false --fused_adamw=false",
            ("naive", 1): "--attn_impl=naive --disable=swiglu,rope --attention_dropout=0.1",
            ("angles", 1): "--rope_scaling=llama3 --rope_factor=4 --rope_original_len=16 "
            "--rope_theta=5000 --rope_interleaved --attention_bias --tie_word_embeddings "
            "--rms_norm_eps=1e-4 --initializer_range=0.03",
            ("residual", 1): "--residual_in_fp32=false --sequence_first --dropout=0.1 --profile=1 "
            "--attention_dropout=0.1 --embedding_dropout=0.1 --weight_decay=0.2 --beta1=0.8 "
            "--beta2=0.9 --eps=1e-6 --grad_clip=0.5 --gradient_accumulation_steps=2 --batch_size=1",
            ("factored", 1): "--mlp_cfg=monarch --attnlinear_cfg=blockdiag --attnproj_cfg=monarch "
            "--sparse_to_dense=0.5",
            ("packed", 1): "--dummy=false --data={images}/tokens.bin --packing=documents",
            ("resumed", 1): "--resume --output_dir={plain} --max_iters=3",
            ("zero", 2): "--graph --zero_stage=2 --recompute --batch_size=1 "
            "--gradient_accumulation_steps=2",
            ("tensor", 2): "--tensor_parallel=2 --sequence_parallel",
        },
        apart="ablate turns warm_up estimate gpu device precision dropout? pipeline_parallel "
        "eval_* log_* save_* *lr* seed init_from max_minutes multiple_of num_* hidden_size ffn_* "
        "vocab_size peak_tflops pad_token_id token_dtype val_data wandb_*",
    ),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches of sixteen pictures to train on and one to validate, and tokens."""
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for kind in ("a", "b"):
            folder = root / split / kind
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 255, size=(40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    # Tokens of documents that end at 0.
    random.integers(0, 20, 400, dtype=np.uint16).tofile(root / "tokens.bin")
    Description("uint16", 400, 20, 512, "none", eod_id=0).write(root / "tokens.bin")
    return root


def losses(out: Path) -> dict[tuple[str, int], float]:
    """By split and step."""
    file = out / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {
        (line["split"], line["step"]): line["values"]["loss"]
        for line in lines
        if line["split"] in ("train", "val") and "loss" in line["values"]
    }


@pytest.mark.release
@pytest.mark.parametrize("name", TRAINERS)
def test_options_in_bfloat16(name, images, tmp_path, monkeypatch):
    monkeypatch.setenv(settings.EMULATE_BFLOAT16.name, "1")
    trainer, expected = TRAINERS[name], {}
    starts: dict[int, list[list[str]]] = {}
    for (line, processes), more in trainer.lines.items():
        # These are compared with float32's `plain`.
        alone = trainer.module.startswith("libai") and processes > 1
        expected[line] = "plain" if alone else line
        for precision, words in (("float32", ""), ("bfloat16", trainer.bfloat16))[alone:]:
            text = f"{trainer.words} {more} {words}"
            out, plain = (tmp_path / precision / each for each in (line, "plain"))
            for key, path in {"images": images, "out": out, "plain": plain}.items():
                text = text.replace(f"{{{key}}}", str(path))
            starts.setdefault(processes, []).append(text.split())
    for processes, lines in starts.items():
        result = run_several(trainer.module, lines, processes, timeout=300)
        assert result.returncode == 0, result.stdout[-5000:]
    for line, other in expected.items():
        exact, rounded = losses(tmp_path / "float32" / other), losses(tmp_path / "bfloat16" / line)
        # `plain` was gone on with.
        assert rounded.keys() <= exact.keys(), line
        assert bool(rounded) == bool(exact), line
        gaps = [abs(value / exact[key] - 1) for key, value in rounded.items()]
        assert not gaps or 0 < max(gaps) < TOLERANCES["bfloat16"].rtol, (line, exact, rounded)


@pytest.mark.parametrize("name", TRAINERS)
def test_no_option_is_left_out(name):
    trainer = TRAINERS[name]
    crossed = set().union(
        *(trainer.crossed(f"{trainer.words} {line}".split()) for line in trainer.lines.values())
    )
    left = trainer.options() - crossed
    for pattern in trainer.apart.split():
        found = set(fnmatch.filter(left, pattern))
        assert found, f"{pattern} is no option, or is crossed"
        left -= found
    assert not left, sorted(left)
