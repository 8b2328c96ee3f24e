"""A checkout in which the documents' commands are typed, and small stand-ins for what they name."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from oneflow_accel.kernels import plugin

import numpy as np
import pytest
from entries import COMMANDS, EXTRA, SERVE
from PIL import Image
from safetensors.numpy import save_file

from tests.launch import LAUNCHER, REPOSITORY, free_port
from tests.libai_projects.llama.test_llama_files import write_meta
from tests.libai_projects.train.conftest import prompts  # noqa: F401 - a fixture
from tests.torch_writer import save_torch_file

# Copied, as commands write into them; all else are links.
COPIED = ("resnet50_imagenet", "libai_projects")
DATA = REPOSITORY / "tests" / "data"
TIMEOUT = 200
# One in a hundred starts of several processes hangs (docs/troubleshooting.md).
TRIES = 2


class World:
    """The checkout, what its files are called, and what the commands that ran there printed."""

    def __init__(self, folder: Path, environment: dict[str, str], lines: Path) -> None:
        self.folder = folder
        self.checkout = folder / "checkout"
        self.environment = environment
        self.done: dict[str, str] = {}
        self.servers: list[subprocess.Popen[bytes]] = []
        self._copy()
        # Made when a command asks for it.
        self._makers = {
            "photos": self._photos,
            "digits": self._digits,
            "real_labels": self._real_labels,
            "requests": self._requests,
            "server": self._server,
            "meta": lambda: write_meta(folder / "meta"),
            "resnet": self._resnet,
            "vit": lambda: self._vision("vit_tiny_patch4_28"),
            "vitae": lambda: self._vision("ViTAE_basic_Tiny", num_classes=5, img_size=32),
            "t2t14": lambda: self._vision("t2t_vit_t_14", num_classes=5, img_size=32),
        }
        self._paths: dict[str, Path | str] = {
            "runs": folder / "runs",
            "prompts": lines,
            # Of GPT-2's two files, which the prompts are encoded with.
            "tokenizer": lines.parent,
            "huggingface": DATA / "hf_gpt2" / "safetensors",
            "t2t": DATA / "torch_checkpoints" / "t2t_ema.pth",
        }
        self._paths["runs"].mkdir()

    def path(self, name: str) -> Path | str:
        if name not in self._paths:
            self._paths[name] = self._makers[name]()
        return self._paths[name]

    def run(self, command: str) -> str:
        """Type a command once, as its entry says, after what it needs; what it printed."""
        name = command
        if name in self.done:
            return self.done[name]
        command, run = EXTRA[name] if name in EXTRA else (name, COMMANDS[name])
        if run.plugin and not plugin.state().loaded:
            pytest.skip("it needs the CPU plug-in, which is not built")
        for needed in run.after:
            self.run(needed)
        line, rest = run.instead or command, ""
        if " < " in line:
            line, rest = line.split(" < ")
            rest = f" < {rest}"
        line = f"{line} {run.add}{rest}"
        for word, value in run.replace.items():
            assert word in line, f"{word} is not in {line}"
            line = re.sub(rf"(?<![\w/]){re.escape(word)}(?!\w)", lambda _, v=value: v, line)
        line = line.replace("-m oneflow.distributed.launch", str(LAUNCHER))
        output = self.type(self.filled(line), self.checkout / run.cwd, run.until)
        assert re.search(run.expect, output), output
        self.done[name] = output
        return output

    def type(self, line: str, folder: Path, until: str = "") -> str:
        """Type a line into bash; what it printed. What has printed `until` goes on, as a server."""
        for left in reversed(range(TRIES)):
            try:
                return self._type(line, folder, until)
            except TimeoutError:
                if not left or "launch" not in line:
                    raise
        raise AssertionError("unreachable")

    def _type(self, line: str, folder: Path, until: str) -> str:
        file = self.folder / f"{'server' if until else 'output'}.txt"
        with file.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", line],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env=self.environment,
                start_new_session=True,
            )
        end = time.monotonic() + TIMEOUT
        found = None
        while process.poll() is None and found is None:
            if time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise TimeoutError(f"{line}\n{file.read_text(errors='replace')}")
            time.sleep(0.02)
            found = re.search(until, file.read_text(errors="replace")) if until else None
        if found is not None:
            self.servers.append(process)
        text = file.read_text(errors="replace")
        assert found or process.returncode == 0, f"{line}: exit {process.returncode}\n{text}"
        assert "Traceback" not in text, f"{line}\n{text}"
        return text

    def filled(self, text: str) -> str:
        """With paths, and numbers of free ports, for `{name}`."""

        def value(found: re.Match[str]) -> str:
            return str(free_port()) if found[1] == "port" else str(self.path(found[1]))

        return re.sub(r"\{(\w+)\}", value, text)

    def stop_servers(self) -> None:
        """By SIGTERM, which they take as a wish."""
        for process in self.servers:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.servers:
            assert process.wait(60) == 0

    def _copy(self) -> None:
        self.checkout.mkdir()
        listed = subprocess.run(
            ["git", "ls-files", "-z", *COPIED], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            target = self.checkout / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, target)
        for entry in REPOSITORY.iterdir():
            if entry.name not in (*COPIED, ".venv", ".git", "runs", "build"):
                (self.checkout / entry.name).symlink_to(entry)
        (self.checkout / ".venv").symlink_to(sys.prefix)

    def _photos(self) -> Path:
        """Five classes as ImageFolder has them, named as in ImageNet for reassessed labels."""
        root = self.folder / "photos"
        rng = np.random.default_rng(0)
        number = 0
        for part, count in (("train", 4), ("val", 1)):
            for kind in "abcde":
                folder = root / part / kind
                folder.mkdir(parents=True)
                for _ in range(count):
                    number += 1
                    name = f"ILSVRC2012_val_{number - 20:08d}.JPEG" if part == "val" else number
                    pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{name}", "JPEG")
                    if part == "train":
                        (folder / f"{name}").rename(folder / f"{name}.jpg")
        return root

    def _real_labels(self) -> Path:
        file = self.folder / "real.json"
        file.write_text(json.dumps([[0], [1], [2], [3], [4]]))
        return file

    def _digits(self) -> Path:
        root = self.folder / "digits"
        root.mkdir()
        rng = np.random.default_rng(0)
        for stem, count in (("train", 60), ("t10k", 20)):
            for name, array in (
                ("images-idx3", rng.integers(0, 256, (count, 28, 28))),
                ("labels-idx1", np.arange(count) % 10),
            ):
                sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
                content = bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()
                (root / f"{stem}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
        return root

    def _requests(self) -> Path:
        file = self.folder / "requests.jsonl"
        file.write_text('{"prompt": "a cute pig"}\n')
        return file

    def _server(self) -> str:
        """Its address; the command that starts it is the documents'."""
        return re.search(r"http://[\d.]+:\d+", self.run(SERVE))[0]

    def _resnet(self) -> Path:
        from resnet50_imagenet.models import create_model

        state = create_model("shufflenet_v2_x0_5", 5).state_dict()
        weights = {name: value.numpy() for name, value in state.items()}
        return save_torch_file(self.folder / "resnet50-11ad3fa6.pth", weights)

    def _vision(self, name: str, **arguments: int) -> Path:
        from monarch_flow.models import create_model

        state = create_model(name, **arguments).state_dict()
        file = self.folder / f"{name}.safetensors"
        save_file({name: value.numpy() for name, value in state.items()}, file)
        return file


@pytest.fixture(scope="session")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: dict[str, str],  # noqa: F811
) -> Iterator[World]:
    # What is left of another environment than the checkout's must not be of help.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ONEFLOW_ACCEL_", "MAGICPROMPT_", "LLAMA_", "PYTHONPATH", "MAKE"))
    }
    data = Path(prompts["MAGICPROMPT_DATA"])
    environment = {
        **kept,
        "MAGICPROMPT_VOCAB": prompts["MAGICPROMPT_VOCAB"],
        "MAGICPROMPT_MERGES": prompts["MAGICPROMPT_MERGES"],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ONEFLOW_ACCEL_THREADS": "1",
    }
    world = World(tmp_path_factory.mktemp("readmes"), environment, data.with_name("prompts.txt"))
    yield world
    world.stop_servers()
