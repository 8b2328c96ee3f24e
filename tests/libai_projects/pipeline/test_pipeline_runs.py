"""pipeline.py as people start it: processes of its own, real models, one rank and several."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import tokenizers
from launch import REPOSITORY, free_port, run_distributed, run_process
from pipeline_fakes import write_vocabulary

from libai_projects import weights
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.table import initial_weights

PROJECTS = REPOSITORY / "libai_projects"
SCRIPT = "projects/MagicPrompt/pipeline.py"
CAPP = REPOSITORY.parent / "shared" / "data" / "models" / "capp_gpt2_64d"
HERE = Path(__file__).parent
SMALL = [
    "model.cfg.hidden_size=32",
    "model.cfg.ffn_hidden_size=64",
    "model.cfg.num_attention_heads=4",
    "model.cfg.num_layers=2",
    "model.cfg.max_seq_length=64",
]
CAPP_OPTIONS = ["--config-file", str(HERE / "capp_config.py"), "--model", str(CAPP)]
ENVIRONMENT = {
    "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{HERE}",
    "CAPP_MODEL": str(CAPP),
    "MAGICPROMPT_MODEL": "",
    "ONEFLOW_ACCEL_THREADS": "1",
}


def vocabulary(folder: Path) -> list[str]:
    vocab, merges = write_vocabulary(folder)
    return ["--vocab-file", str(vocab), "--merges-file", str(merges)]


def capp_prompts() -> list[str]:
    reference = json.loads((CAPP / "reference.json").read_text(encoding="utf-8"))
    return [" | ".join(words) for words in reference["prompts"]]


def capp_texts() -> list[str]:
    """What transformers continues the prompts with, the end of text left out."""
    reference = json.loads((CAPP / "reference.json").read_text(encoding="utf-8"))
    return [" | ".join(words[:-1]) for words in reference["greedy_tokens"]]


def test_random_weights(tmp_path: Path) -> None:
    options = ["--mode", "random", *SMALL, *vocabulary(tmp_path), "--max-length", "24"]
    options += ["--weights-dtype", "int8", "--cache-dtype", "float32"]
    done = run_distributed([SCRIPT, "1", *options], 1, cwd=PROJECTS, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    texts = "\n" + done.stdout
    for prompt in ("a dog", "a cute pig", "a cute girl"):
        assert f"\n{prompt}" in texts


@pytest.mark.release
def test_an_emulated_device_says_what_a_cpu_does(tmp_path: Path) -> None:
    """Two processes, each with half of the model."""
    options = ["--mode", "random", *SMALL, *vocabulary(tmp_path), "--max-length", "24"]
    options += ["--do-sample", "--seed", "3", "--prompt", "a cute pig", "--device"]
    said = []
    for device in ("cpu", "emulated"):
        done = run_distributed([SCRIPT, *options, device], 2, cwd=PROJECTS, env=ENVIRONMENT)
        assert done.returncode == 0, done.stdout
        said.append(next(line for line in done.stdout.splitlines() if line.startswith("a cute")))
    assert said[0] == said[1] != "a cute pig"


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    """In one process: what is wrong is said by name, and nothing is built before it."""
    words = ["--mode", "random", *SMALL]
    code = (
        "import sys, json\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from oneflow_accel import command\n"
        "from libai_projects.projects.MagicPrompt import pipeline\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    print('code', command.run('pipeline.py', lambda: pipeline.main(argv)), flush=True)\n"
    )
    good = vocabulary(tmp_path)
    cases = {
        "train one (bash tools/train.sh": ["1"],
        "vocab.json does not exist": words,
        "did you mean model.cfg.num_layers": [*words, *good, "model.cfg.num_layer=3"],
        "missing.py: there is no such file": [*words, "--config-file", "missing.py"],
        "did you mean --prompt": ["--promt", "x"],
        "missing: there is nothing of that name": [*good, "--model", str(tmp_path / "missing")],
        "holds no model": [*good, "--model", str(tmp_path)],
        "--nproc_per_node 2": [*words, *good, "--tensor-parallel", "2"],
        "num_attention_heads": [*words, *good, "model.cfg.num_attention_heads=5"],
        "raise max_length": [*words, *good, "--prompt", "x" * 60],
        "temperature": [*words, *good, "--temperature", "0"],
        "takes no --tokenizer": [*words, *good, "--tokenizer", str(tmp_path)],
        "cannot listen": [*words, *good, "--serve", "--host", "192.0.2.1"],
        "device": [*words, *good, "--device", "nonsense"],
        "did you mean bfloat16": [*words, *good, "--weights-dtype", "float16"],
    }
    done = run_process(
        ["-c", code, json.dumps(list(cases.values()))], cwd=PROJECTS, env=ENVIRONMENT
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("pipeline.py: error: ")]
    assert done.stdout.count("code 2") == len(cases), done.stdout
    assert len(errors) == len(cases), done.stdout
    for sentence, error in zip(cases, errors, strict=True):
        assert sentence in error, done.stdout


def test_a_folder_with_a_tokenizer_json_alone(tmp_path: Path) -> None:
    """Found beside the model or named, it gives the texts that GPT-2's two files give."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 257}
    sizes |= {"ffn_hidden_size": 32, "max_seq_length": 64}
    model, alone = tmp_path / "model", tmp_path / "tokenizer.json"
    options = vocabulary(tmp_path)
    library = tokenizers.ByteLevelBPETokenizer(options[1], options[3])
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(alone))
    drawn = dict(initial_weights(GPT2, sizes, seed=3))
    weights.save_huggingface(drawn, sizes, model, tokenizer_files=[alone])
    code = (
        "import sys, json\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from libai_projects.projects.MagicPrompt import pipeline\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    pipeline.main(argv)\n"
    )
    command = ["--model", str(model), "--prompt", "a dög", "--max-length", "24", "--do-sample"]
    command += ["--seed", "5"]
    runs = [[*command, *more] for more in ([], options, ["--tokenizer", str(alone)])]
    done = run_process(["-c", code, json.dumps(runs)], cwd=PROJECTS, env=ENVIRONMENT)
    texts = re.findall(r"^a dög.*$", done.stdout, re.MULTILINE)
    assert len(texts) == 3, done.stdout
    assert texts[0] == texts[1] == texts[2] != "a dög"


def test_interactive_takes_any_bytes(tmp_path: Path) -> None:
    """Each line gets a text or an error, whatever the encodings of input and output are."""
    options = ["--mode", "random", *SMALL, *vocabulary(tmp_path), "--max-length", "24"]
    lines = [b"a dog", b"\xff\xfe", b"", b"a\0b", "öäü🐷".encode(), b"x" * 5000, b"a cute pig"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *options, "--interactive"],
        input=b"\n".join(lines),
        capture_output=True,
        timeout=120,
        cwd=PROJECTS,
        env=os.environ | ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
    )
    errors = done.stderr.decode()
    assert done.returncode == 0, errors
    assert "Traceback" not in errors
    answers = done.stdout.decode("ascii").split("prompt> ")[1:]
    assert answers[0].startswith("a dog")
    assert answers[1].startswith("error: character 0 is half a surrogate pair")
    assert answers[3].startswith("a\0b")
    assert answers[4].startswith("error: ")
    assert answers[5].startswith("error: prompt 0 has 5000 tokens")
    assert answers[6].startswith("a cute pig")


def test_a_closed_input_is_one_sentence(tmp_path: Path) -> None:
    options = ["--mode", "random", *SMALL, *vocabulary(tmp_path)]
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", sys.executable, SCRIPT, *options, "--jsonl"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=PROJECTS,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 2, done.stderr
    assert "pipeline.py: error: the standard input is closed" in done.stderr
    assert "Traceback" not in done.stderr


# Says how each process ended, which the launcher does not.
SAY_CODE = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from oneflow_accel import command
from libai_projects.projects.MagicPrompt import pipeline
code = command.run("pipeline.py", lambda: pipeline.main([*sys.argv[1:], "--jsonl"]))
sys.stderr.write(f"[ended with {{code}}]")
"""


@pytest.mark.skipif(not CAPP.exists(), reason="no shared data")
def test_a_trained_model_on_four_ranks_gives_the_texts_of_transformers(tmp_path: Path) -> None:
    """Tensor 2 x pipeline 2, JSON lines in and out, one bad line between."""
    script = tmp_path / "say_code.py"
    script.write_text(SAY_CODE)
    lines = [json.dumps({"id": i, "prompt": prompt}) for i, prompt in enumerate(capp_prompts())]
    lines.insert(1, "nonsense")
    command = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", "4"]
    done = subprocess.run(
        [*command, "--master_port", str(free_port()), str(script), *CAPP_OPTIONS],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=150,
        cwd=PROJECTS,
        env=os.environ | ENVIRONMENT,
    )
    assert "Traceback" not in done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [answer["id"] for answer in answers] == [0, None, 1, 2], done.stderr
    assert "not JSON" in answers[1]["error"]
    texts = [answer["results"][0]["generated_text"] for answer in answers if "error" not in answer]
    assert texts == capp_texts()
    # One line was bad, which every rank knows.
    assert done.stderr.count("[ended with 1]") == 4


@pytest.mark.skipif(not CAPP.exists(), reason="no shared data")
def test_serves_until_it_is_told_to_stop() -> None:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *CAPP_OPTIONS, "--serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=PROJECTS,
        env=os.environ | ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())
        assert url is not None
        health = httpx.get(f"{url[0]}api/health").json()
        assert health["model"] == "capp_gpt2_64d"
        body = {"prompt": capp_prompts()[1], "do_sample": False, "num_return_sequences": 1}
        answer = httpx.post(f"{url[0]}api/generate", json=body, timeout=30).json()
        assert answer["results"][0]["generated_text"] == capp_texts()[1]
        assert answer["results"][0]["finish_reason"] == "eos"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not CAPP.exists(), reason="no shared data")
def test_a_signal_ends_it_while_it_waits_for_a_line() -> None:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *CAPP_OPTIONS, "--jsonl"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=PROJECTS,
        env=os.environ | ENVIRONMENT,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps({"prompt": capp_prompts()[1]}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert answer["results"][0]["generated_text"] == capp_texts()[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        assert "Fatal" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
