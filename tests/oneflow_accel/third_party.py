"""Makes installed packages that offer a backend, by hand: a module and its dist-info folder."""

from __future__ import annotations

import textwrap
from pathlib import Path

# Computes on the CPU under a name of its own: a real device to OneFlow, another one to us.
TINY = """
    from typing import ClassVar

    import oneflow as flow

    from oneflow_accel.backends import Backend, DeviceProperties


    class TinyBackend(Backend):
        name: ClassVar[str] = "tiny"
        collective_backend: ClassVar[str] = "none"

        def _problems(self) -> list[str]:
            return []

        def device_count(self) -> int:
            return 1

        def current_device(self) -> int:
            return 0

        def device(self, index: int | None = None) -> flow.device:
            return flow.device("cpu", index or 0)

        def properties(self) -> DeviceProperties:
            return DeviceProperties("Tiny 1", 1024, {"float32": 1e9})

        def supported_dtypes(self) -> tuple[flow.dtype, ...]:
            return (flow.float32,)

        def _memory_used(self) -> int:
            return 512
"""


def install(
    folder: Path, package: str, source: str, *, entry: str = "tiny", attribute: str = "TinyBackend"
) -> Path:
    """Put `package` with one module of this `source` into `folder`, for the import path.

    `entry` is its entry point in oneflow_accel.backends, which names `attribute` in the module.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{package}.py").write_text(
        "from __future__ import annotations\n" + textwrap.dedent(source)
    )
    information = folder / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[oneflow_accel.backends]\n{entry} = {package}:{attribute}\n"
    )
    return folder
