"""Requests that arrive on their own time, at servers of OpenAI's API, all on this machine: ours,
llama.cpp's, and transformers' `generate`, in batches and without a server. All have the same
weights and take turns.

    make llama
    python -m benchmarks.serving --model DIR --peer .venv-peer/bin/python

A prompt is the beginning of a real one, its answer as long as the rest of that; with --lengths all
are alike. Times count from a request's arrival, whether or not a client was free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import oneflow_accel
from oneflow_accel import machine
from oneflow_accel.errors import UserError
from oneflow_accel.rendezvous import free_port

import httpx
import numpy as np
import openai

from benchmarks.side_by_side import REPOSITORY
from flow_train import cli
from flow_train.compare.process import ask, output_of
from flow_train.compare.rows import draw_bars, in_turns, markdown, medians, short
from flow_train.metrics.curves import COLORS, new_figure, save_figure
from libai_projects.projects.MagicPrompt import pipeline
from libai_projects.text.tokenizer import Tokenizer, open_tokenizer

# Until a server answers, and until it has ended when it is told to.
START_SECONDS, END_SECONDS = 120, 5
HEADS = ("tokens/s", "first token s", "p99", "token ms", "p99", "answer s", "p99", "failed")


class Request(NamedTuple):
    """`at` is in seconds from the beginning, `tokens` how many new ones it asks for."""

    at: float
    prompt: str
    tokens: int


class Answer(NamedTuple):
    """Seconds from the request's arrival to the first and the last of its tokens."""

    first: float
    last: float
    tokens: int
    error: str = ""


Load = Callable[[Sequence[Request], int], list[Answer]]


def figures(requests: Sequence[Request], answers: Sequence[Answer]) -> tuple[float, ...]:
    """Those of HEADS: times are medians and 99th percentiles, NaN where nothing was answered."""
    good = [(r, a) for r, a in zip(requests, answers, strict=True) if not a.error]
    firsts, lasts = [a.first for _, a in good], [a.last for _, a in good]
    each = [1e3 * (a.last - a.first) / (a.tokens - 1) for _, a in good if a.tokens > 1]
    seconds = max((r.at + a.last for r, a in good), default=np.inf) - requests[0].at
    times = [np.percentile(part or [np.nan], (50, 99)) for part in (firsts, each, lasts)]
    speed = sum(a.tokens for _, a in good) / seconds
    return speed, *np.concatenate(times).tolist(), len(answers) - len(good)


def draw_requests(
    lines: Sequence[str], tokenizer: Tokenizer, count: int, rate: float, lengths: Sequence[int]
) -> list[Request]:
    """`rate` requests a second on average (0: all at once), the same ones each time, of lines that
    are cut in two or, where `lengths` has two numbers of tokens, of that many in and out."""
    drawn, made = np.random.default_rng(0), []
    times = np.cumsum(drawn.exponential(1 / rate, count)) if rate else np.zeros(count)
    texts = [ids for ids in map(tokenizer.encode, lines) if len(ids) > 1]
    if not texts:
        raise UserError("--prompts: no line of the file has two tokens")
    for at in times.tolist():
        ids = list(texts[drawn.integers(len(texts))])
        while lengths and len(ids) < lengths[0]:
            ids += texts[drawn.integers(len(texts))]
        cut, tokens = lengths or (int(drawn.integers(1, len(ids))), 0)
        made.append(Request(at, tokenizer.decode(ids[:cut]), tokens or len(ids) - cut))
    return made


def complete(client: openai.OpenAI, model: str, request: Request, due: float) -> Answer:
    """Ask for one completion, greedily, as a stream, until the client's timeout after it was `due`;
    what goes wrong is the answer's error."""
    asked: dict[str, Any] = {"model": model, "prompt": request.prompt, "temperature": 0}
    asked |= {"max_tokens": request.tokens, "stream_options": {"include_usage": True}}
    times, reason, tokens, end = [], None, 0, due + float(client.timeout)
    try:
        # Where no client was free before its end, no time is left.
        left = max(1e-3, end - time.monotonic())
        for event in client.completions.create(**asked, stream=True, timeout=left):
            for choice in event.choices:
                times.append(time.monotonic() - due)
                reason = choice.finish_reason or reason
            tokens = event.usage.completion_tokens if event.usage else tokens
            if time.monotonic() > end:
                raise TimeoutError("it took too long")
        if reason is None:
            raise ValueError("the stream ended early")
    except (openai.OpenAIError, httpx.HTTPError, OSError, ValueError) as error:
        return Answer(0.0, 0.0, 0, f"{type(error).__name__}: {error}"[:200])
    # llama.cpp's server says nothing of how many tokens it wrote.
    tokens = tokens or (request.tokens if reason == "length" else len(times))
    return Answer(times[0], times[-1], tokens)


def load(client: openai.OpenAI, requests: Sequence[Request], clients: int) -> list[Answer]:
    """Send each request when it arrives, at most `clients` at once."""
    model, sent = client.models.list().data[0].id, []
    with ThreadPoolExecutor(clients) as pool:
        began = time.monotonic()
        for request in requests:
            due = began + request.at
            time.sleep(max(0.0, due - time.monotonic()))
            sent.append(pool.submit(complete, client, model, request, due))
        return [each.result() for each in sent]


@contextlib.contextmanager
def server(seconds: float, *command: str) -> Iterator[Load]:
    """A server that runs meanwhile, whose requests may take so long; the command ends with the
    option of a port."""
    port, begin = str(free_port()), time.monotonic()
    url = f"http://127.0.0.1:{port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", timeout=seconds, max_retries=0)
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen([*command, port], stdout=said, stderr=said, cwd=REPOSITORY) as process,
    ):
        try:
            while True:
                with contextlib.suppress(openai.OpenAIError):
                    client.models.list(timeout=5)
                    break
                time.sleep(0.5)
                if process.poll() is not None or time.monotonic() > begin + START_SECONDS:
                    said.seek(0)
                    text = said.read().decode(errors="replace")[-2000:]
                    raise UserError(f"{' '.join(command)} did not start:\n{text}")
            yield partial(load, client)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()


def sides(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Load]:
    """What is measured, by name; servers run until the stack is closed."""
    peer, model, weights, cores = (
        options.peer,
        options.model,
        options.weights_dtype,
        machine.cores(),
    )
    ours = [sys.executable, pipeline.__file__, "--serve", "--model", model]
    ours += ["--weights-dtype", weights, "--port"]
    loads = {"ours": stack.enter_context(server(options.seconds, *ours))}
    if peer:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        output_of([peer, "-m", "benchmarks.peers.llama", model, f"{folder}/gguf", weights])
        llama = [peer, "-m", "llama_cpp.server", "--model", f"{folder}/gguf", "--n_ctx", "1024"]
        # Else a request ends the one before it.
        llama += ["--n_threads", str(cores), "--interrupt_requests", "false", "--port"]
        loads["llama.cpp"] = stack.enter_context(server(options.seconds, *llama))

        def transformers(requests: Sequence[Request], clients: int) -> list[Answer]:
            asked = {"folder": model, "clients": clients, "threads": cores, "requests": requests}
            Path(folder, "asked").write_text(json.dumps(asked))
            found = ask([peer, "-m", "benchmarks.peers.serving", f"{folder}/asked"])
            return [Answer(*answer) for answer in found]

        loads["transformers"] = transformers
    return loads


def draw(found: dict[tuple[str, int], tuple[float, ...]], title: str, path: Path) -> None:
    """Tokens per second and the latest first tokens; the bars of a side have a color."""
    colors = COLORS[: len({side for side, _ in found})]
    figure = new_figure(10, 1.2 + 0.3 * len(found), title)
    left, right = figure.subplots(1, 2)
    for axes, column, text in ((left, 0, "tokens/s"), (right, 2, "first token, p99, s")):
        draw_bars(axes, [[values[column]] for values in found.values()], colors=colors)
        names = [f"{side}, clients: {clients}" for side, clients in found]
        axes.set(title=text, yticks=range(len(names)), yticklabels=names)
    save_figure(figure, path)


def _run() -> int:
    parser = cli.Parser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="a GPT-2 of Hugging Face's")
    parser.add_argument("--peer", metavar="PYTHON", help="that of `make llama`; none: ours alone")
    prompts = REPOSITORY.parent / "shared/data/sd_prompts/diffusiondb.valid.txt"
    parser.add_argument("--prompts", type=Path, default=prompts, help="a text, one prompt a line")
    dtypes = {"choices": ("float32", "bfloat16", "int8"), "default": "float32"}
    parser.add_argument("--weights-dtype", help="of ours and llama.cpp (Q8_0)", **dtypes)
    number = {"type": cli.at_least(1)}
    parser.add_argument("--clients", nargs="+", default=[1, 4, 16, 64], help="at once", **number)
    parser.add_argument("--requests", default=64, help="in a round", **number)
    parser.add_argument("--rate", type=float, default=0.0, help="a second; 0: all at once")
    parser.add_argument("--lengths", nargs=2, default=(), metavar=("IN", "OUT"), **number)
    parser.add_argument("--rounds", default=1, help="the median counts", **number)
    parser.add_argument("--seconds", type=float, default=300.0, help="that a request may take")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw it, too")
    options = parser.parse_args()
    try:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--prompts {options.prompts}: {error.strerror}") from None
    words, lengths = open_tokenizer(options.model), options.lengths
    requests = draw_requests(lines, words, options.requests, options.rate, lengths)

    def measure(run: tuple[str, int]) -> tuple[float, ...]:
        answers = loads[run[0]](requests, run[1])
        found = figures(requests, answers)
        said = {answer.error: None for answer in answers if answer.error}
        print(f"{run[0]}, clients: {run[1]}: {short(found[0])} tokens/s", *said, flush=True)
        return found

    with contextlib.ExitStack() as stack:
        loads = sides(options, stack)
        runs = [(name, clients) for clients in options.clients for name in loads]
        seen = in_turns(runs, options.rounds, measure)
    found = {run: medians(rounds) for run, rounds in seen.items()}
    arrival = f"{options.rate:g} a second" if options.rate else "all at once"
    title = f"{len(requests)} requests, {arrival}, tokens "
    title += f"{' + '.join(map(str, lengths)) or 'as in prompts'}, {options.weights_dtype}; "
    title += f"{oneflow_accel.current_backend().properties().name}; {date.today()}"
    rows = [["side", "clients", *HEADS]]
    rows += [[name, str(n), *map(short, values)] for (name, n), values in found.items()]
    print(f"{title}\n\n{markdown(rows)}")
    if options.picture:
        draw(found, title, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("serving", _run))
