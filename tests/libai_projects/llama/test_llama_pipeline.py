"""From text to a trained Llama to continued prompts, by the commands that a user types."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from libai_projects.text import prepare
from tests.launch import REPOSITORY, run_process

PROJECT = REPOSITORY / "libai_projects" / "projects" / "Llama"
PIPELINE = PROJECT / "pipeline.py"
ENVIRONMENT = {"ONEFLOW_ACCEL_THREADS": "1"}
SENTENCES = [
    f"a {color} {thing}, oil on canvas" for color in ("red", "blue") for thing in ("fox", "owl")
]
# Of which 8 does not divide.
VOCABULARY = 275
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json and `run`, which pretrain.py left there."""
    folder = tmp_path_factory.mktemp("llama")
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(SENTENCES * 5, trainer)
    assert library.get_vocab_size() == VOCABULARY
    library.save(str(folder / "tokenizer.json"))
    text = folder / "text.txt"
    text.write_text("\n".join(SENTENCES * 60) + "\n")
    options = ["--tokenizer", folder, "--output-prefix", folder / "train", "--workers", "1"]
    assert prepare.main([str(text), *map(str, options)]) == 0
    done = run_process(
        [
            PROJECT / "pretrain.py",
            "--preset=tiny",
            f"--data={folder / 'train.bin'}",
            "--vocab_size=0",
            "--max_seq_len=32",
            "--batch_size=8",
            "--gradient_accumulation_steps=1",
            "--max_iters=60",
            "--warmup_iters=5",
            "--learning_rate=3e-3",
            f"--output_dir={folder / 'run'}",
        ],
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout
    assert "vocabulary: 275 tokens, padded to 280, a multiple of 8" in done.stdout
    return folder


def test_a_server_continues_prompts(trained: Path) -> None:
    command = [sys.executable, str(PIPELINE), "--model", str(trained / "run")]
    command += ["--tokenizer", str(trained), "--serve", "--port", "0"]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
    )
    try:
        said, end = "", time.monotonic() + 120
        assert server.stdout is not None
        while "http://" not in said and server.poll() is None and time.monotonic() < end:
            if select.select([server.stdout], [], [], 1)[0]:
                said += server.stdout.readline()
        assert "http://" in said, said
        address = said[said.index("http://") :].split()[0].rstrip("/.,")
        assert f"Llama is at {address}" in said
        page = httpx.get(address).text
        assert "<h1>Llama</h1>" in page
        assert "MagicPrompt" not in page
        assert "image" not in page.replace("image/svg", "")
        for prompt in ("a red", "a blue"):
            asked = {"prompt": prompt, "do_sample": False, "max_new_tokens": 8}
            answer = httpx.post(f"{address}/api/generate", json=asked, timeout=60)
            assert answer.status_code == 200, answer.text
            (result,) = answer.json()["results"]
            text = result["generated_text"]
            assert text.startswith(prompt)
            # 60 steps are enough to learn four sentences.
            assert any(text.startswith(each[:12]) for each in SENTENCES), text
    finally:
        server.terminate()
        server.wait(30)


def test_a_tokenizer_of_another_size(trained: Path, tmp_path: Path) -> None:
    other = json.loads((trained / "tokenizer.json").read_text())
    vocabulary, merges = other["model"]["vocab"], other["model"]["merges"]
    for _ in range(10):
        merged = merges.pop()
        del vocabulary["".join(merged if isinstance(merged, list) else merged.split(" "))]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    given = ["--model", trained / "run", "--tokenizer", tmp_path, "--prompt", "a"]
    done = run_process([PIPELINE, *given], env=ENVIRONMENT)
    assert done.returncode != 0
    assert "the tokenizer has 265 tokens, the model 280" in done.stdout
    assert "Traceback" not in done.stdout
