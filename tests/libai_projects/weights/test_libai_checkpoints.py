"""LiBai checkpoints in and out, against what oneflow's own save and load make of them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager
from libai_projects import weights
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.libai_checkpoints import read_state
from libai_projects.weights.table import State
from tests.libai_projects import reference_gpt2

SHAPE = reference_gpt2.Shape(layers=2, width=16, heads=4, vocabulary=53, positions=12)
IDS = np.random.default_rng(1).integers(0, 53, (2, 12))


@pytest.fixture(scope="module")
def huggingface_state() -> dict[str, np.ndarray]:
    return reference_gpt2.random_state(SHAPE, scale=0.3)


def save_as_oneflow(state: dict[str, np.ndarray], folder: Path) -> Path:
    """The folder `model` of a checkpoint, as LiBai's Checkpointer writes it from global tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    device = flow.tensor([0.0]).device.type
    placement = flow.placement(device, [0])
    tensors = OrderedDict(
        (
            name,
            flow.nn.Parameter(
                flow.tensor(array).to_global(placement=placement, sbp=flow.sbp.broadcast)
            ),
        )
        for name, array in state.items()
    )
    flow.save(tensors, folder / "model", global_dst_rank=0)
    return folder / "model"


def transposed(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The layout of upstream LiBai, written out."""
    linear = ("query_key_value.weight", "dense.weight", "dense_h_to_4h.weight")
    linear += ("dense_4h_to_h.weight",)
    return {
        name: np.ascontiguousarray(array.T) if name.endswith(linear) else array
        for name, array in state.items()
    }


def assert_same_model(
    state: State, huggingface_state: dict[str, np.ndarray], heads: int = 4
) -> None:
    expected = reference_gpt2.forward(huggingface_state, IDS, heads)
    actual = reference_gpt2.forward(GPT2.to_huggingface(state, heads), IDS, heads)
    assert np.abs(actual - expected).max() < 1e-4


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", ["libai", "upstream"])
def test_reads_what_oneflow_wrote(
    tmp_path: Path, huggingface_state: dict[str, np.ndarray], kind: str, wrapped: bool
) -> None:
    state = reference_gpt2.to_libai(huggingface_state, 4, vocabulary=64)
    stored = transposed(state) if kind == "upstream" else state
    if not wrapped:
        stored = {name.removeprefix("GPT_model."): array for name, array in stored.items()}
        stored["transformer.layers.0.self_attention.bias"] = np.ones((1, 1, 12, 12), np.uint8)
    save_as_oneflow(stored, tmp_path / "model_0000003")
    # Either folder will do, and so will the other mode: shapes tell them apart.
    overrides = {"vocab_size_real": 53}
    for path, mode in (("model_0000003", kind), ("model_0000003/model", "libai")):
        loaded, config = weights.load(tmp_path / path, mode, overrides=overrides)
        assert loaded.keys() == state.keys()
        for name, array in state.items():
            wanted = array[:53] if name == GPT2.tokens else array
            np.testing.assert_array_equal(loaded[name], wanted, err_msg=name)
        assert_same_model(loaded, huggingface_state)
        assert config["ffn_hidden_size"] == 64
        assert (config["vocab_size"], config["vocab_size_real"]) == (53, 53)
        assert "num_attention_heads" not in config


def test_reads_a_checkpoint_of_a_run_here_by_all_its_names(
    tmp_path: Path, huggingface_state: dict[str, np.ndarray]
) -> None:
    state = reference_gpt2.to_libai(huggingface_state, 4)
    manager = CheckpointManager(tmp_path / "checkpoints")
    folder = manager.save(Checkpoint(state), step=3, best=True)
    manager.save(Checkpoint({"other": np.zeros(1)}), step=4)
    manager.close()
    (tmp_path / "config.yaml").write_text("model: {cfg: {num_attention_heads: 4}}\n")
    for path in (folder, folder / "model", folder.parent / "best"):
        loaded, config = weights.load(path, "libai")
        assert config["num_attention_heads"] == 4
        assert_same_model(loaded, huggingface_state)
    with pytest.raises(UserError, match=r"newest checkpoint is .*checkpoints/step-00000004"):
        weights.load(tmp_path, "libai")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"cannot read {folder}: {file} is damaged"):
        weights.load(folder, "libai")


def test_mixed_layouts_are_refused(
    tmp_path: Path, huggingface_state: dict[str, np.ndarray]
) -> None:
    state = reference_gpt2.to_libai(huggingface_state, 4)
    name = "GPT_model.transformer.layers.1.mlp.dense_4h_to_h.weight"
    state[name] = np.ascontiguousarray(state[name].T)
    save_as_oneflow(state, tmp_path)
    with pytest.raises(UserError, match="cannot be mixed"):
        weights.load(tmp_path, "libai")


def test_settings_of_the_run(tmp_path: Path, huggingface_state: dict[str, np.ndarray]) -> None:
    save_as_oneflow(reference_gpt2.to_libai(huggingface_state, 4), tmp_path / "model_final")
    (tmp_path / "config.yaml").write_text(
        "model:\n"
        "  _target_: projects.MagicPrompt.gpt2.GPT2ForPreTraining\n"
        "  cfg: {num_attention_heads: 4, layernorm_epsilon: 1.0e-06, bias_gelu_fusion: true,\n"
        "        hidden_layers: 7, amp_enabled: true, vocab_size: '${train.vocab}'}\n"
        "optim: !!python/object/apply:os.system ['touch code-of-the-yaml-ran']\n"
    )
    _, config = weights.load(tmp_path / "model_final" / "model", "libai")
    assert config["num_attention_heads"] == 4
    assert config["layernorm_epsilon"] == 1e-6
    assert config["activation"] == "gelu"
    assert config["num_layers"] == 2
    assert not Path("code-of-the-yaml-ran").exists()
    (tmp_path / "last_checkpoint").write_text("model_final")
    with pytest.raises(UserError, match=r"newest checkpoint is .*model_final"):
        weights.load(tmp_path, "libai")


@pytest.mark.parametrize(
    ("rows", "real"), [(50304, 50257), (50257, 50257), (53, 53), (64000, 64000)]
)
def test_padding_of_gpt2s_vocabulary_is_known(tmp_path: Path, rows: int, real: int) -> None:
    shape = reference_gpt2.Shape(layers=1, width=4, heads=2, vocabulary=rows, positions=4)
    state = reference_gpt2.to_libai(reference_gpt2.random_state(shape), 2)
    save_as_oneflow(state, tmp_path)
    loaded, config = weights.load(tmp_path, "libai")
    assert config["vocab_size_real"] == real
    assert loaded[GPT2.tokens].shape == (real, 4)


def test_oneflow_reads_what_is_written(
    tmp_path: Path, huggingface_state: dict[str, np.ndarray]
) -> None:
    state = reference_gpt2.to_libai(huggingface_state, 4)
    config = {"num_attention_heads": 4, "vocab_size": 53, "vocab_size_real": 53}
    generation = {"eos_token_id": 52}
    folder = tmp_path / "out"
    weights.save_libai(state, config, folder, vocabulary_rows=128, generation=generation)
    # LiBai's Checkpointer loads every entry of the folder, so there must be no other.
    assert [path.name for path in folder.iterdir()] == ["model"]
    tensors = flow.load(folder / "model", global_src_rank=0)
    assert list(tensors) == list(state)
    for name, array in state.items():
        stored = tensors[name].numpy()
        if name == GPT2.tokens:
            assert stored.shape == (128, 16)
            assert not stored[53:].any()
            stored = stored[:53]
        np.testing.assert_array_equal(stored, array, err_msg=name)
    again = weights.read(folder, "libai")
    assert again.generation == generation
    assert again.config["num_attention_heads"] == 4
    assert again.state[GPT2.tokens].shape == (53, 16)


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    numbers = np.array([[0.5, -3.25], [1e-3, 65504]], np.float32)
    tensors = {
        "half": flow.tensor(numbers).to(flow.float16),
        "double": flow.tensor(numbers.astype(np.float64)),
        "brain": flow.tensor(numbers),
    }
    flow.save(tensors, tmp_path / "model")
    # oneflow 0.9.0 does not save bfloat16; the format has it: the upper halves of float32.
    folder = next(path.parent for path in tmp_path.rglob("meta") if "kFloat\n" in path.read_text())
    (folder / "meta").write_text((folder / "meta").read_text().replace("kFloat", "kBFloat16"))
    (folder / "out").write_bytes((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())
    state = read_state(tmp_path / "model")
    np.testing.assert_array_equal(state["half"], numbers.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(state["double"], numbers)
    np.testing.assert_array_equal(state["brain"][0], [0.5, -3.25])
    np.testing.assert_allclose(state["brain"][1], numbers[1], rtol=2**-7)
    assert {array.dtype for array in state.values()} == {np.dtype(np.float32)}


def test_no_checkpoints(tmp_path: Path) -> None:
    """Damage: test_oneflow_files.py."""
    with pytest.raises(UserError, match="does not exist"):
        weights.load(tmp_path / "absent", "libai")
    with pytest.raises(UserError, match="no pickled_data"):
        weights.load(tmp_path, "libai")


def test_other_contents(tmp_path: Path) -> None:
    flow.save({"lr": 0.1}, tmp_path / "lr_scheduler")
    with pytest.raises(UserError, match="not its optimizer or schedule"):
        weights.load(tmp_path / "lr_scheduler", "libai")
    flow.save({"conv.weight": flow.ones(3)}, tmp_path / "other")
    with pytest.raises(UserError, match="not the weights of LiBai's GPT-2"):
        weights.load(tmp_path / "other", "libai")
    with pytest.raises(UserError, match="kind 'torch'"):
        weights.load(tmp_path / "other", "torch")
