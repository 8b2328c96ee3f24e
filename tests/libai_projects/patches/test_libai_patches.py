"""What each patch of libai's models and layers mends, and that no patched file names a device."""

from __future__ import annotations

import ast
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from oneflow_accel import current_backend
from oneflow_accel.errors import UserError
from oneflow_accel.patching.series import apply_hunks, join, load_series, patch_root, source_lines

import numpy as np
import oneflow as flow
import pytest
from libai.utils import distributed
from omegaconf import DictConfig, OmegaConf
from oneflow import nn

from tests.launch import run_process
from tests.libai_projects.layouts_worker import Case, build
from tests.libai_projects.patches.other_models import MODELS, losses

WITHOUT_PLUGIN = {"ONEFLOW_ACCEL_PLUGIN": "off"}


def raises(text: str, function: Callable[[], object], error: type[Exception] = UserError) -> None:
    with pytest.raises(error, match=text):
        function()


def set_up(**settings: object) -> DictConfig:
    """The layout of one process, or of as many as are pretended."""
    layout = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "pipeline_num_layers": 2}
    config = OmegaConf.create({**layout, **settings})
    distributed.setup_dist_util(config)
    return config


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    yield
    set_up()


def whole(values: np.ndarray) -> flow.Tensor:
    return flow.tensor(values, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)


@contextmanager
def pretended(rank: int, processes: int) -> Iterator[None]:
    """A process among others, as far as flow.env tells."""
    with (
        mock.patch.object(flow.env, "get_rank", return_value=rank),
        mock.patch.object(flow.env, "get_world_size", return_value=processes),
        mock.patch.object(flow.env, "get_node_size", return_value=1),
    ):
        yield


def tiny_gpt() -> nn.Module:
    return build(Case(model="libai"))


def adamw(model: nn.Module) -> tuple[flow.optim.Optimizer, object]:
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, flow.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=1)


def test_no_runtime_make() -> None:
    from libai.data import data_utils

    compile_helper = data_utils.compile_helper
    compile_helper()
    helpers = data_utils.helpers
    del data_utils.helpers
    with mock.patch.dict(sys.modules, {"libai.data.data_utils.helpers": None}):
        raises("install it again", compile_helper, RuntimeError)
    data_utils.helpers = helpers


def test_graph_proxy_api() -> None:
    from libai.models.utils import GraphBase
    from oneflow.nn.graph import GraphModule

    set_up()
    model = tiny_gpt()
    graph = GraphBase(
        model,
        *adamw(model),
        activation_checkpoint=True,
        grad_acc_steps=2,
        zero_optim=True,
        zero_stage=2,
    )
    layers = graph.model.GPT_model.transformer.layers
    for layer in layers:
        assert layer.to(GraphModule).activation_checkpointing
        assert layer.to(GraphModule).stage_id == 0
    assert graph.model.loss_func.to(GraphModule).stage_id == 0
    model = tiny_gpt()
    graph = GraphBase(model, *adamw(model), grad_acc_steps=1)
    assert graph.model.loss_func.to(GraphModule).stage_id is None


def test_device_type() -> None:
    config = set_up()
    assert config.device_type == current_backend().name
    assert distributed.get_layer_placement(0).type == current_backend().name
    tensor = distributed.ttol(whole(np.ones(3)), ranks=[0])
    assert tensor.numpy().tolist() == [1, 1, 1]
    raises("no device is called 'no-such-device'", lambda: set_up(device_type="no-such-device"))


def test_layer_norm_device() -> None:
    from libai.layers import LayerNorm

    set_up()
    x = np.random.default_rng(0).normal(3, 2, (4, 6, 8)).astype(np.float32)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    for affine in (True, False):
        y = LayerNorm(8, elementwise_affine=affine)(whole(x))
        np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-5)


def test_graph_variables() -> None:
    from libai.models.gpt_model import CasualMask

    set_up(pipeline_num_layers=4)
    # The mask was kept, and as long as 1024 tokens only.
    mask = CasualMask()(whole(np.zeros((1, 1030), np.int64)))
    assert mask.shape == (1, 1, 1030, 1030)
    np.testing.assert_array_equal(mask.numpy()[0, 0], np.tri(1030))
    mask = CasualMask()(whole(np.zeros((1, 2), np.int64)), past_length=3)
    assert mask.numpy()[0, 0].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    for name, make in MODELS.items():
        model, inputs = make()
        in_graph = losses(model, inputs, graph=True)
        assert not kept_tensors(model), name
        eager = losses(make()[0], inputs, graph=False)
        np.testing.assert_allclose(in_graph, eager, rtol=0, atol=1e-5, err_msg=name)
        assert in_graph[-1] < in_graph[0], name


def kept_tensors(model: nn.Module) -> list[str]:
    """Tensors of a model that are neither parameters nor buffers: a graph would capture them."""
    return [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, flow.Tensor)
    ]


def test_data_parallel_rank() -> None:
    with pretended(0, 8):
        set_up(tensor_parallel_size=2, pipeline_parallel_size=2)
    ranks = distributed.get_dist_util()
    for layer in (0, 1):
        # Rows are data-parallel ranks, columns tensor-parallel ones.
        for row, members in enumerate(ranks.get_layer_ranks(layer)):
            for rank in members:
                with pretended(rank, 8):
                    assert distributed.get_data_parallel_rank() == row


def test_dropout() -> None:
    from libai.layers import MLP

    set_up()
    layers = [MLP(8, 8, output_dropout_prob=0.5).dropout for _ in range(2)]

    class Graph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers

        def build(self, x: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
            return self.first(x), self.second(x)

    graphs = []

    def masks(seed: int) -> list[list[float]]:
        flow.manual_seed(seed)
        # Kept: oneflow now and then aborts where a graph ends as the next one begins.
        graphs.append(Graph())
        return [y.numpy().tolist() for y in graphs[-1](whole(np.ones(1000, np.float32)))]

    first = masks(1)
    assert masks(1) == first, "the masks do not follow the seed"
    assert masks(2) != first, "the masks do not depend on the seed"
    assert first[0] != first[1], "two layers have the same mask"
    assert set(first[0]) == {0, 2}
    assert 400 < np.count_nonzero(first[0]) < 600
    if current_backend().supports("fused_transformer"):
        fused = MLP(8, 8, output_dropout_prob=0.5, bias_dropout_fusion=True)
        x = whole(np.ones((4, 8), np.float32))
        assert not (fused.eval()(x).numpy() == 0).any(), "values were dropped in evaluation"


def test_fused_operators() -> None:
    from libai.layers import MLP, MultiheadAttention

    set_up()
    generator = np.random.default_rng(0)
    x = whole(generator.normal(size=(2, 5, 8)).astype(np.float32))
    mask = whole(np.tri(5, dtype=np.int8)[None, None].repeat(2, 0))
    outputs = []
    for fuse in (False, True, None):
        flow.manual_seed(1)
        attention = MultiheadAttention(
            8,
            2,
            bias_dropout_fusion=fuse,
            scale_mask_softmax_fusion=fuse,
            apply_query_key_layer_scaling=True,
            layer_idx=1,
        )
        mlp = MLP(8, 16, bias_gelu_fusion=fuse, bias_dropout_fusion=fuse)
        outputs.append(mlp(attention(x, attention_mask=mask)).numpy())
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(outputs[2], outputs[0], rtol=0, atol=1e-6)


def test_layouts() -> None:
    from libai.layers import MLP, MultiheadAttention

    wrong: list[tuple[dict[str, object], str]] = [
        ({"tensor_parallel_size": 3}, "4 processes cannot be laid out as tensor parallel size 3"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        (
            {"pipeline_parallel_size": 2, "pipeline_num_layers": 5},
            "5 layers .*custom_pipeline_stage_id=.0,0,0,1,1.",
        ),
        ({"pipeline_parallel_size": 2, "pipeline_num_layers": None}, "set train.dist.pipeline_num"),
        ({"pipeline_parallel_size": 2, "custom_pipeline_stage_id": [0]}, "1 entries for 2 layers"),
        ({"pipeline_parallel_size": 2, "custom_pipeline_stage_id": [1, 0]}, "must go up from 0 to"),
        ({"pipeline_parallel_size": 2, "custom_pipeline_stage_id": [0, 0]}, "name each of the 2"),
    ]
    with pretended(0, 4):
        for settings, text in wrong:
            raises(text, lambda settings=settings: set_up(**settings))
        # Sizes are cut to what there are processes for.
        config = set_up(tensor_parallel_size=2, pipeline_parallel_size=8)
        assert (config.pipeline_parallel_size, config.data_parallel_size) == (2, 1)
        assert distributed.get_pipeline_parallel_size() == 2
        stages = [0, 0, 1]
        set_up(pipeline_parallel_size=2, custom_pipeline_stage_id=stages, pipeline_num_layers=None)
        ranks = distributed.get_dist_util()
        assert [ranks.get_layer_stage_id(i) for i in (0, 1, 2, -1)] == [0, 0, 1, 1]
        assert [ranks.get_layer_ranks(i) for i in (1, 2)] == [[0, 1], [2, 3]]
        raises("has a layer 3, but .* is 3", lambda: ranks.get_layer_ranks(3))
        set_up(tensor_parallel_size=4)
        raises("attention heads .6. cannot be", lambda: MultiheadAttention(12, 6))
        raises("hidden size .12. is not a multiple", lambda: MultiheadAttention(12, 5))
        raises("output features .* .6. cannot be divided", lambda: MLP(8, 6))


def test_polynomial_schedule() -> None:
    from libai.scheduler import WarmupPolynomialLR

    optimizer = flow.optim.SGD([nn.Parameter(flow.ones(1))], lr=1.0)
    schedule = WarmupPolynomialLR(
        optimizer, max_iter=10, warmup_factor=0.0, warmup_iter=0, end_learning_rate=0.2, power=2.0
    )
    rates = []
    for _ in range(5):
        rates.append(schedule.get_last_lr()[0])
        schedule.step()
    expected = 0.8 * (1 - np.arange(5) / 10) ** 2 + 0.2
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_a_warm_up_of_several_rates() -> None:
    from libai.config import LazyCall
    from libai.scheduler import WarmupCosineAnnealingLR, WarmupCosineLR

    from libai_projects.engine import parts

    groups = [{"params": [nn.Parameter(flow.ones(1))], "lr": lr} for lr in (0.1, 0.4, 0.0)]
    schedule = WarmupCosineLR(flow.optim.SGD(groups, lr=0.1), 10, warmup_factor=0.0, warmup_iter=5)
    for factor in (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5 + 0.5 * np.cos(0.6 * np.pi)):
        np.testing.assert_allclose(schedule.get_last_lr(), [0.1 * factor, 0.4 * factor, 0])
        schedule.step()
    floor = LazyCall(WarmupCosineAnnealingLR)(
        max_iter=9, warmup_factor=0.0, warmup_iter=5, eta_min=0.01
    )
    cfg = OmegaConf.create({"train": {"scheduler": floor}})
    raises("no multiple of each rate", lambda: parts._make_schedule(cfg, schedule.optimizer))


def test_config_folder(tmp_path: Path) -> None:
    from libai.config import get_config

    file = tmp_path / "configs/common/answer.py"
    file.parent.mkdir(parents=True)
    file.write_text("answer = dict(value=42)\n")
    with mock.patch("importlib.resources.files", return_value=tmp_path):
        assert get_config("common/answer.py").answer.value == 42
        raises("no config common/other.py", lambda: get_config("common/other.py"), RuntimeError)


def test_ignored_labels() -> None:
    from libai.models.gpt_model import GPTLoss

    set_up()
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(2, 3, 7))
    labels = np.array([[1, -1, 3], [-1, -100, 0]])
    chosen = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    each = np.log(np.exp(logits).sum(-1)) - chosen
    loss = GPTLoss()(whole(logits.astype(np.float32)), whole(labels))["lm_loss"]
    np.testing.assert_allclose(loss.numpy(), each[labels >= 0].mean(), rtol=1e-6)
    none = GPTLoss()(whole(logits.astype(np.float32)), whole(np.full((2, 3), -1)))["lm_loss"]
    assert none.numpy() == 0


def test_device_gaps() -> None:
    from libai.models.utils import GraphBase

    set_up()
    model = tiny_gpt()
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("libai.utils.distributed").addHandler(handler)
    graph = GraphBase(model, *adamw(model), fp16=True)
    assert not graph.config.proto.enable_auto_mixed_precision
    assert any("mixed precision is switched off" in text for text in warnings)
    lacks = {"graph_adamw": "no kernel"}
    with mock.patch.object(type(current_backend()), "_why_not", lambda self, name: lacks.get(name)):
        raises("no kernel; set graph.enabled=False", lambda: GraphBase(model, *adamw(model)))
        GraphBase(model, is_train=False)


def test_yaml_without_code(tmp_path: Path) -> None:
    import yaml
    from libai.config import LazyConfig

    file, ran = tmp_path / "config.yaml", tmp_path / "ran"
    LazyConfig.save(OmegaConf.create({"train": {"betas": [0.9, 0.95]}}), str(file))
    assert LazyConfig.load(str(file)) == {"train": {"betas": [0.9, 0.95]}}
    file.write_text(f"train: !!python/object/apply:os.mkdir [{ran}]\n")
    with suppress(yaml.YAMLError):
        LazyConfig.load(str(file))
    assert not ran.exists(), "the config ran code"


def test_stock_kernels_run_without_fusion() -> None:
    names = "layer_norm_device or fused_operators or dropout"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", names]
    process = run_process(command, env=WITHOUT_PLUGIN)
    assert process.returncode == 0, process.stdout
    assert "3 passed" in process.stdout


def patched_sources() -> Iterator[tuple[str, str]]:
    """Path and text of each Python file of libai, with all patches."""
    patches = load_series(patch_root(), "libai", "0.1.1")
    for file in importlib.metadata.files("libai") or []:
        if file.suffix == ".py":
            path = str(file)
            lines = source_lines(Path(str(file.locate())).read_text("utf-8"))
            for patch in patches:
                if path in patch.hunks:
                    lines = apply_hunks(lines, patch.hunks[path], label=patch.label, path=path)
            yield path, join(lines)


def test_no_patched_file_names_a_device() -> None:
    found = []
    for path, text in patched_sources():
        for node in ast.walk(ast.parse(text)):
            named = isinstance(node, ast.Constant) and node.value in ("cuda", "mlu", "gpu")
            if named or (isinstance(node, ast.Attribute) and node.attr == "cuda"):
                found.append(f"{path}: {ast.unparse(node)}")
    assert not found
