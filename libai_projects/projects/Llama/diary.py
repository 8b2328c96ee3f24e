"""The figures of the performance diary: one A800-80G (312 TFLOP/s in bfloat16), 65,536 tokens a
step, the model of `--preset=z2all`.

Source: github.com/Gstdioh/llm-zero2all, model/README.md. Times and MFU are printed there with two
decimals and what follows cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

from flow_train.metrics.work import training_flops, transformer_macs

# 16 gradient accumulation steps x 1 process x 2 sequences x 2048 tokens. The diary's own line says
# 262,144, four times that, with which a step of 3.17 s would be at 229 % of the peak.
TOKENS = 65_536
PEAK = 312e12
PARAMETERS = 1_255_499_776
# With all parameters in N.
FLOPS_PER_TOKEN = training_flops(transformer_macs(PARAMETERS, layers=22, width=2048, tokens=2048))
# MFU in % is this over the seconds of a step.
MFU_SECONDS = 100 * FLOPS_PER_TOKEN * TOKENS / PEAK


def allowed_mfu(seconds: float) -> tuple[float, float]:
    """The least and the largest that the diary can have beside a time: both are cut off there."""
    least, most = MFU_SECONDS / (seconds + 0.01), MFU_SECONDS / seconds
    return int(100 * least) / 100, int(100 * most) / 100


@dataclass(frozen=True)
class Row:
    """One measurement: seconds of a step, MFU in %, memory in the diary's GB (MiB / 1000). None is
    a row that ended in an error there."""

    name: str
    seconds: float | None
    mfu: float | None
    memory: float | None

    @property
    def consistent(self) -> bool:
        """Whether some time that is printed as `seconds` has an MFU that is printed as `mfu`."""
        if self.seconds is None or self.mfu is None:
            return True
        least, most = allowed_mfu(self.seconds)
        return least <= self.mfu <= most


# Rows by the names that the ablation has for them; PyTorch 1.12, 2.0, and 2.0 with torch.compile.
TABLES: dict[str, tuple[Row, ...]] = {
    "table1": (
        Row("naive", 9.85, 18.41, 71.32),
        Row("use_all", 3.23, 56.06, 27.87),
        Row("w/o flash", 8.69, 20.87, 65.43),
        Row("w/o rope", 3.51, 51.70, 27.90),
        Row("w/o cross_entropy", 3.37, 53.70, 29.83),
        Row("w/o rmsnorm", 3.78, 47.94, 30.68),
        Row("w/o swiglu", 3.60, 50.39, 29.79),
        # Beside the table: use_all with Apex's fused AdamW.
        Row("fused_adamw", 3.17, 57.47, 27.89),
    ),
    "table2": (
        Row("naive", 9.72, 18.66, 72.85),
        Row("use_all", 3.49, 51.95, 27.95),
        Row("flash -> sdpa", 3.85, 47.09, 28.89),
        Row("w/o flash", 8.75, 20.72, 65.47),
        Row("w/o rope", 3.68, 49.18, 27.96),
        Row("w/o cross_entropy", 3.55, 51.02, 29.89),
        Row("w/o rmsnorm", 4.00, 45.27, 32.15),
        Row("w/o swiglu", 3.60, 50.38, 29.86),
        Row("w/o fused_adamw", 3.52, 51.55, 30.52),
    ),
    "table3": (
        Row("naive", 5.47, 33.14, 64.97),
        Row("use_all", 3.60, 49.23, 32.46),
        Row("flash -> sdpa", 3.95, 45.91, 33.46),
        Row("w/o flash", 5.60, 32.37, 65.92),
        Row("w/o rope", 3.51, 51.67, 31.58),
        Row("w/o cross_entropy", 3.64, 49.74, 33.65),
        Row("w/o rmsnorm", 3.45, 52.46, 32.41),
        Row("w/o swiglu", None, None, None),
        Row("w/o fused_adamw", 3.57, 50.69, 34.05),
        Row("just flash", 3.44, 52.73, 32.76),
        Row("flash, cross_entropy, fused_adamw", 3.37, 53.71, 31.54),
    ),
}
