"""Requests that arrive on their own time, at servers that speak /v1/completions, all on this
machine: ours, llama.cpp's, and transformers' `generate`, which has no server. All have the same
weights and take turns.

    make llama
    python -m benchmarks.serving --peer .venv-peer/bin/python
    python -m benchmarks.serving --url http://127.0.0.1:8000    what runs there, in place of ours

A prompt is the beginning of a real one, its answer as long as the rest of that; with --lengths all
are alike. Times count from a request's arrival, whether or not a client was free.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import oneflow_accel
from oneflow_accel import machine
from oneflow_accel.errors import UserError
from oneflow_accel.rendezvous import free_port

import numpy as np

from benchmarks import results
from benchmarks.side_by_side import REPOSITORY
from flow_train import cli
from flow_train.compare.process import ask, output_of
from flow_train.compare.rows import in_turns, markdown, medians, short, show
from flow_train.files import replace_file
from flow_train.metrics.curves import COLORS, new_figure, save_figure, tidy
from libai_projects.projects.MagicPrompt import pipeline
from libai_projects.text.tokenizer import Tokenizer, open_tokenizer

DATA = REPOSITORY.parent / "shared" / "data"
# Until a server answers: it reads and packs weights.
START_SECONDS = 120
JSON = "application/json"
HEADS = ("tokens/s", "first token s", "p99", "token ms", "p99", "answer s", "p99", "failed %")


class Request(NamedTuple):
    """Seconds from the beginning until it arrives, its prompt, that as tokens, and new tokens."""

    at: float
    prompt: str
    ids: Sequence[int]
    tokens: int


class Answer(NamedTuple):
    """Seconds from the request's arrival to the first and the last of its tokens, how many these
    are, and what was wrong."""

    first: float
    last: float
    tokens: int
    error: str = ""


Load = Callable[[Sequence[Request], int], list[Answer]]


def figures(requests: Sequence[Request], answers: Sequence[Answer]) -> tuple[float, ...]:
    """Those of HEADS, medians and 99th percentiles; NaN for times where no request was answered."""
    good = [(r, a) for r, a in zip(requests, answers, strict=True) if not a.error]
    firsts, lasts = [a.first for _, a in good], [a.last for _, a in good]
    later = [1e3 * (a.last - a.first) / (a.tokens - 1) for _, a in good if a.tokens > 1]
    end = max((r.at + a.last for r, a in good), default=0.0)
    speed = sum(a.tokens for _, a in good) / (end - requests[0].at) if good else 0.0
    parts = [v or [float("nan")] for v in (firsts, later, lasts)]
    spread = (float(np.percentile(values, q)) for values in parts for q in (50, 99))
    return speed, *spread, 100 - 100 * len(good) / len(requests)


def draw_requests(
    lines: Sequence[str],
    tokenizer: Tokenizer,
    count: int,
    rate: float,
    lengths: tuple[int, int] | None,
) -> list[Request]:
    """`rate` requests a second on average (0: all at once), the same ones each time, of lines that
    are cut in two, or of `lengths` in and out."""
    drawn = np.random.default_rng(0)
    times = np.cumsum(drawn.exponential(1 / rate, count)) if rate else np.zeros(count)
    texts = [ids for ids in map(tokenizer.encode, lines) if len(ids) > 1]
    if not texts:
        raise UserError("--prompts: no line of the file has two tokens")
    made = []
    for at in times:
        ids = list(texts[drawn.integers(len(texts))])
        while lengths and len(ids) < lengths[0]:
            ids += texts[drawn.integers(len(texts))]
        cut = lengths[0] if lengths else int(drawn.integers(1, len(ids)))
        tokens = lengths[1] if lengths else len(ids) - cut
        made.append(Request(float(at), tokenizer.decode(ids[:cut]), ids[:cut], tokens))
    return made


def complete(url: str, model: str, request: Request, due: float, limit: float) -> Answer:
    """Ask for one completion, greedily, as a stream; what goes wrong is the answer's error."""
    body = {"model": model, "prompt": request.prompt, "max_tokens": request.tokens}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    asked = (f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": JSON})
    # llama.cpp's server says nothing of how many tokens it wrote.
    times, ended, count = [], False, request.tokens
    try:
        if time.monotonic() > due + limit:
            raise TimeoutError("no client was free in time")
        with urllib.request.urlopen(urllib.request.Request(*asked), timeout=limit) as response:
            for line in response:
                name, _, data = line.strip().partition(b":")
                if name != b"data" or data.strip() == b"[DONE]":
                    continue
                event = json.loads(data)
                if "choices" not in event:
                    raise ValueError(f"it said {data!r}")
                times += [time.monotonic() - due for _ in event["choices"]]
                ended |= any(choice.get("finish_reason") for choice in event["choices"])
                count = (event.get("usage") or {}).get("completion_tokens", count)
                if time.monotonic() > due + limit:
                    raise TimeoutError("it took too long")
        if not ended:
            raise ValueError("the stream ended early")
    except urllib.error.HTTPError as error:
        return Answer(0.0, 0.0, 0, f"{error}: {error.read(200).decode(errors='replace')}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(0.0, 0.0, 0, f"{type(error).__name__}: {error}"[:200])
    return Answer(times[0], times[-1], count)


def load(url: str, limit: float, requests: Sequence[Request], clients: int) -> list[Answer]:
    """Send each request when it arrives, at most `clients` at once; each has `limit` seconds from
    then on."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=limit) as answer:
        model = json.load(answer)["data"][0]["id"]
    with ThreadPoolExecutor(clients) as pool:
        began, sent = time.monotonic(), []
        for request in requests:
            time.sleep(max(0.0, began + request.at - time.monotonic()))
            sent.append(pool.submit(complete, url, model, request, began + request.at, limit))
        return [each.result() for each in sent]


@contextlib.contextmanager
def server(*command: str) -> Iterator[str]:
    """The address of a server that runs meanwhile; its command ends with the option of a port."""
    port = str(free_port())
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*command, port], stdout=said, stderr=said, cwd=REPOSITORY)
        try:
            for _ in range(START_SECONDS):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                    break
                if process.poll() is not None:
                    break
                time.sleep(1)
            else:
                process.kill()
            if process.poll() is not None:
                said.seek(0)
                text = said.read().decode(errors="replace")[-2000:]
                raise UserError(f"{' '.join(command)} did not start:\n{text}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def transformers(peer: str, model: Path, requests: Sequence[Request], clients: int) -> list[Answer]:
    """`clients` are sequences at once: those that arrived until the batch before ended."""
    asked = {"model": str(model), "batch": clients, "threads": machine.cores()}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**asked, "requests": [request._asdict() for request in requests]}, file)
        file.flush()
        answers = ask([peer, "-m", "benchmarks.peers.serving", file.name])
    return [Answer(*answer) for answer in answers]


@contextlib.contextmanager
def sides(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Load]]:
    """What is measured, by name; servers run meanwhile."""
    model, weights, threads = str(options.model), options.weights_dtype, str(machine.cores())
    with contextlib.ExitStack() as stack:
        ours = [sys.executable, pipeline.__file__, "--serve", "--model", model]
        ours += ["--weights-dtype", weights, "--port"]
        found = {"ours": options.url or stack.enter_context(server(*ours))}
        if options.peer:
            file = str(folder / "model.gguf")
            output_of([options.peer, "-m", "benchmarks.peers.llama", model, file, weights])
            llama = [options.peer, "-m", "llama_cpp.server", "--model", file, "--n_ctx", "1024"]
            llama += ["--n_threads", threads, "--n_threads_batch", threads]
            # Else a request ends the one before it.
            llama += ["--interrupt_requests", "false", "--port"]
            found["llama.cpp"] = stack.enter_context(server(*llama))
        loads: dict[str, Load] = {
            name: partial(load, url.rstrip("/"), options.seconds) for name, url in found.items()
        }
        if options.peer:
            loads["transformers"] = partial(transformers, options.peer, options.model)
        yield loads


def draw(found: dict[tuple[str, int], tuple[float, ...]], title: str, path: Path) -> None:
    """Tokens per second and the latest first tokens, by clients."""
    figure = new_figure(10, 4, title)
    for axes, column in zip(figure.subplots(1, 2), (0, 2), strict=True):
        for name, color in zip(dict.fromkeys(side for side, _ in found), COLORS, strict=False):
            points = [(n, seen[column]) for (side, n), seen in found.items() if side == name]
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=name)
        label = "p99 of the time to the first token, s" if column else "tokens per second"
        axes.set(xlabel="clients", ylabel=label, ylim=(0, None))
        tidy(axes)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def _options() -> argparse.Namespace:
    parser = cli.Parser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="that of `make llama`; none: ours alone")
    parser.add_argument("--url", help="a server that runs already, in place of ours")
    parser.add_argument("--model", type=Path, help="a GPT-2's Hugging Face folder with vocabulary")
    prompts = DATA / "sd_prompts" / "diffusiondb.valid.txt"
    parser.add_argument("--prompts", type=Path, default=prompts, help="a text, one prompt a line")
    dtypes = {"choices": ("float32", "bfloat16", "int8"), "default": "float32"}
    parser.add_argument("--weights-dtype", help="of ours and llama.cpp (Q8_0)", **dtypes)
    at_least = {"type": cli.at_least(1)}
    parser.add_argument("--clients", nargs="+", default=[1, 4, 16, 64], **at_least)
    parser.add_argument("--requests", default=64, help="in a round", **at_least)
    parser.add_argument("--rate", type=float, default=0.0, help="a second; 0: all at once")
    parser.add_argument("--lengths", nargs=2, metavar=("IN", "OUT"), help="tokens", **at_least)
    parser.add_argument("--rounds", default=1, help="the median counts", **at_least)
    parser.add_argument("--seconds", type=float, default=300.0, help="that a request may take")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="of serving.md, .png")
    options = parser.parse_args()
    if max(options.clients) > 64:
        parser.error("--clients: at most 64")
    if options.peer and shutil.which(options.peer) is None:
        parser.error(f"--peer {options.peer}: there is no such program; `make llama` makes one")
    if not (options.peer or options.model or options.url):
        parser.error("give --model, or --peer, which makes one with random weights")
    return options


def _run() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as temporary:
        folder, vocabulary = Path(temporary), options.model or DATA / "gpt2_tokenizer"
        tokenizer = open_tokenizer(vocabulary)
        if not options.model and options.peer:
            options.model = folder / "model"
            output_of([options.peer, "-m", "benchmarks.peers.serving", str(options.model)])
            for name in ("vocab.json", "merges.txt"):
                shutil.copy(vocabulary / name, options.model)
        try:
            lines = options.prompts.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(f"--prompts {options.prompts}: {error.strerror}") from None
        lengths = options.lengths
        requests = draw_requests(lines, tokenizer, options.requests, options.rate, lengths)
        errors: Counter[str] = Counter()
        with sides(options, folder) as loads:

            def measure(run: tuple[str, int]) -> tuple[float, ...]:
                answers = loads[run[0]](requests, run[1])
                errors.update(f"{run[0]}: {each.error}" for each in answers if each.error)
                return figures(requests, answers)

            runs = [(name, clients) for clients in options.clients for name in loads]
            seen = in_turns(runs, options.rounds, measure)
    found = {run: medians(rounds) for run, rounds in seen.items()}
    arrive = f"{options.rate:g} a second" if options.rate else "all at once"
    sizes = f"{lengths[0]} + {lengths[1]} tokens" if lengths else "lengths of real prompts"
    title = f"{options.requests} requests, {arrive}, {sizes}, {options.weights_dtype}; "
    title += f"{oneflow_accel.current_backend().properties().name}, {machine.cores()} threads; "
    title += str(date.today())
    rows = [["side", "clients", *HEADS]]
    rows += [[name, str(n), *map(short, seen)] for (name, n), seen in found.items()]
    show(title, rows)
    for error, count in errors.items():
        print(f"{count} x {error}")
    options.output.mkdir(parents=True, exist_ok=True)
    replace_file(options.output / "serving.md", f"{title}\n\n{markdown(rows)}\n".encode())
    draw(found, title, options.output / "serving.png")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("serving", _run))
