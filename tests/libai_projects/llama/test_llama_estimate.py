"""`pretrain.py --estimate`: closed formulas beside the figures of the performance diary, and sizes
beside a real model's."""

from __future__ import annotations

import oneflow_accel  # noqa: F401 - before oneflow
from oneflow_accel.errors import UserError

import oneflow as flow
import pytest
from libai.utils import distributed as dist
from omegaconf import OmegaConf

from libai_projects.models.llama.model import LlamaForPreTraining
from libai_projects.projects.Llama import diary, estimate
from libai_projects.projects.Llama import flags as flag_table

FLAGS = flag_table.parse([])
Z2ALL = estimate.Job.of(FLAGS)
# Of published models: config.json's sizes give these, and their authors state them.
PUBLISHED = {"tinyllama": 1_100_048_384, "llama2_7b": 6_738_415_616, "llama3_8b": 8_030_261_248}


def job(*arguments: str) -> estimate.Job:
    return estimate.Job.of(flag_table.parse(arguments))


def total(counts: dict[str, tuple[int, int]], *without: str) -> tuple[int, int]:
    """Numbers and tensors of all other categories."""
    kept = [count for category, count in counts.items() if category not in without]
    return sum(numbers for numbers, _ in kept), sum(tensors for _, tensors in kept)


def test_parameters_of_the_diary() -> None:
    counts = estimate.parameters(Z2ALL)
    assert total(counts) == (1_255_499_776, 201)
    assert total(counts, "norms") == (1_255_407_616, 156)
    assert counts["norms"] == (92_160, 45)
    assert total(counts, "embedding")[0] == 1_123_772_416


@pytest.mark.parametrize("preset", PUBLISHED)
def test_parameters_of_published_models(preset: str) -> None:
    assert total(estimate.parameters(job(f"--preset={preset}")))[0] == PUBLISHED[preset]


def test_mfu_of_the_diary() -> None:
    flops, tokens = Z2ALL.flops_per_token, Z2ALL.tokens
    assert (flops, tokens) == (8_640_294_912, 65_536)
    assert 100 * flops * tokens / 312e12 == pytest.approx(181.4905, abs=5e-5)


def test_memory_that_operators_add() -> None:
    mib = {
        row: tuple(size / 2**20 for size in sizes)
        for row, sizes in estimate.added_memory(Z2ALL).items()
    }
    assert mib == {
        "cross_entropy": (2010, 0),
        "rmsnorm": (2880, 0),
        "swiglu": (1936, 0),
        "flash": (34_496, 3072),
        "rope": (0, 0),
    }
    rows = {row.name: row.memory or 0 for row in diary.TABLES["table1"]}
    for row, (saved, transient) in mib.items():
        found = 1000 * (rows[f"w/o {row}"] - rows["use_all"])
        assert saved + transient == pytest.approx(found, rel=0.03, abs=40)


def test_memory_of_the_diary() -> None:
    memory = estimate.gpu_memory(Z2ALL)
    assert memory["weights, float32"] + memory["AdamW's moments, float32"] == 12 * 1_255_499_776
    assert memory["weights, bfloat16 copies"] == 2 * 1_123_680_256
    assert sum(memory.values()) / 2**20 == pytest.approx(27_870, rel=0.02)
    plain = estimate.gpu_memory(job("--use_flash=false", "--use_fused_swiglu=false"))
    added = sum(plain.values()) - sum(memory.values())
    assert added == (1936 + 34_496 + 3072) * 2**20


def test_time_is_a_roofline() -> None:
    gpu = estimate.gpu_named("a100")
    fused = estimate.step_seconds(Z2ALL, gpu, ())
    # No faster than the products alone at the peak.
    assert fused > 65_536 * 6 * 1_123_680_256 / 312e12
    naive = estimate.step_seconds(Z2ALL, gpu, estimate.OPERATORS)
    for row in estimate.OPERATORS:
        assert fused < estimate.step_seconds(Z2ALL, gpu, [row]) < naive
    twice = estimate.Gpu(2 * gpu.tflops, 2 * gpu.bandwidth, gpu.memory)
    assert estimate.step_seconds(Z2ALL, twice, ()) == pytest.approx(fused / 2)


def test_unknown_gpu() -> None:
    with pytest.raises(UserError, match=r"--gpu=A1000: .* did you mean A100"):
        estimate.gpu_named("A1000")
    with pytest.raises(UserError, match=r"there are V100, A100"):
        estimate.gpu_named("abacus")


def test_sizes_that_no_model_has() -> None:
    with pytest.raises(UserError, match="does not divide by"):
        job("--num_key_value_heads=5")
    with pytest.raises(UserError, match="--vocab_size=0"):
        job("--vocab_size=0")


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    estimate.report(FLAGS)
    text = capsys.readouterr().out
    assert "1,255,499,776" in text
    assert "8,640,294,912" in text
    assert "16 x 2 x 2048 = 65,536" in text
    assert "262,144" in text
    assert "181.4905" in text
    assert "fits in A100's 80 GiB" in text
    assert "prediction" in text
    # Of another shape, nothing of the diary's stands beside it; and this one is too large.
    estimate.report(flag_table.parse(["--preset=llama3_8b", "--gpu=RTX4090", "--recompute"]))
    text = capsys.readouterr().out
    assert "does not fit in RTX4090's 24 GiB" in text
    assert "diary writes" not in text
    assert "Left out of account: --recompute" in text


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "tie_word_embeddings": True}])
def test_sizes_of_a_real_model(options: dict[str, bool]) -> None:
    arguments = ["--preset=tiny", *(f"--{name}" for name in options)]
    flags = flag_table.parse(arguments)
    layout = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    dist.setup_dist_util(OmegaConf.create(layout))
    sizes = ("num_layers", "hidden_size", "vocab_size", "num_attention_heads")
    cfg = {name: getattr(flags, name) for name in (*sizes, "num_key_value_heads")}
    model = LlamaForPreTraining({**cfg, "max_seq_length": flags.max_seq_len, **options})
    weights = list(model.parameters())
    sized = estimate.Job.of(flags)
    assert total(estimate.parameters(sized)) == (sum(w.numel() for w in weights), len(weights))
    for weight in weights:
        weight.grad = flow.zeros_like(weight)
    optimizer = flow.optim.AdamW(weights)
    optimizer.step()
    moments = [
        moment
        for state in optimizer.state_dict()["state"].values()
        if isinstance(state, dict)
        for moment in state.values()
    ]
    peak = estimate.cpu_peak(sized)
    assert peak["weights"] == sum(w.numel() * w.element_size() for w in weights)
    assert peak["AdamW's moments"] == sum(m.numel() * m.element_size() for m in moments)
    assert peak["total"] == sum(size for name, size in peak.items() if name != "total")


def test_what_a_plain_operator_keeps_on_a_cpu() -> None:
    """By formulas, of 12 layers with 2,048 tokens of 4 sequences, in float32."""
    sizes = ["--preset=small", "--batch_size=4", "--max_seq_len=512"]
    fused = estimate.cpu_peak(job(*sizes))
    for flag, kept in {
        "--use_fused_swiglu=false": 2048 * 2048,
        # Weights of 12 heads, and keys and values as wide as queries; no output of the operator,
        # and no logarithms.
        "--use_flash=false": 4 * 12 * 512**2 + 2048 * (2 * 768 - 768 - 12),
    }.items():
        plain = estimate.cpu_peak(job(*sizes, flag))
        assert plain["activations"] - fused["activations"] == 12 * 4 * kept
