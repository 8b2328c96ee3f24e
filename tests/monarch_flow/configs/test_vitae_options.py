"""monarch_flow/docs/vitae_options.md names all options of ViTAE's programs; what it says works."""

from __future__ import annotations

import re
from pathlib import Path

from monarch_flow.config import COMPOSER, SCHEMA, compose

FILE = Path(__file__).parents[3] / "monarch_flow" / "docs" / "vitae_options.md"
# ../shared/docs/vitae_spec.md, sections 4.2 and 2.3.
BOTH = """DIR --config --model --pretrained --eval_checkpoint --num-classes --gp --img-size
--crop-pct --mean --std --interpolation --batch-size --validation-batch-size-multiplier --opt
--opt-eps --opt-betas --momentum --weight-decay --clip-grad --decay-rate --dr --smoothing
--train-interpolation --drop --drop-connect --drop-path --drop-block --bn-tf --bn-momentum --bn-eps
--sync-bn --dist-bn --split-bn --model-ema --model-ema-force-cpu --model-ema-decay --seed
--log-interval --recovery-interval --workers --num-gpu --save-images --amp --apex-amp --native-amp
--channels-last --pin-mem --no-prefetcher --output --eval-metric --tta --local_rank
--use-multi-epochs-loader"""
MAIN = """--dataDividePath --initial-checkpoint --resume --no-resume-opt --sched --lr --lr-noise
--lr-noise-pct --lr-noise-std --lr-cycle-mul --lr-cycle-limit --warmup-lr --min-lr --epochs
--start-epoch --decay-epochs --warmup-epochs --cooldown-epochs --patience-epochs --no-aug --scale
--ratio --hflip --vflip --color-jitter --aa --aug-splits --jsd --reprob --remode --recount --resplit
--mixup --cutmix --cutmix-minmax --mixup-prob --mixup-switch-prob --mixup-mode --mixup-off-epoch
--RA --ZIP"""
VALIDATE = "--results-file --real-labels"
FORK = "--replace-mlp --replace-attn --s2d --sparse-epoch --s2ddebug --flashattention --dali"
OPTIONS = f"{BOTH} {MAIN} {VALIDATE} {FORK}".split()


def rows():
    """(options, what is here, remarks) of each row of the tables of options."""
    for line in FILE.read_text().splitlines():
        # A bar inside code is escaped.
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and set(cells[0]) - {"-"} and cells[0] != "option":
            yield cells


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def overrides():
    """Every KEY=VALUE in the tables, quotes of the shell removed."""
    found = [text.replace("'", "") for _, *cells in rows() for cell in cells for text in code(cell)]
    return [text for text in found if re.match(r"[a-z/_]+[\w./]*=", text)]


def test_every_option_has_its_row():
    named = {word.split()[0] for options, *_ in rows() for word in code(options)}
    long_names = {word for word in named if not re.fullmatch(r"-\w+", word)}
    assert long_names == set(OPTIONS)
    for options, here, remarks in rows():
        assert code(here) or (here == "none" and remarks), options


def test_what_is_named_is_a_key_or_a_group():
    groups = COMPOSER.groups()
    assert len(overrides()) > 70
    for text in overrides():
        key, _, value = text.partition("=")
        if key == "experiment":
            assert value in groups.options("experiment") or value.startswith(("NAME", "imagenet"))
        elif key in groups:
            assert value in groups.options(key), text
        else:
            assert key in SCHEMA, text


def overlap(first, second):
    """Whether one key is the other, or the group it is in."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def test_what_is_named_is_understood(monkeypatch):
    """As few configurations as there can be, each key once in each."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    batches: list[dict[str, str]] = []
    for text in dict.fromkeys(overrides()):
        key = text.partition("=")[0]
        if key in ("experiment", "optimizer.momentum"):
            continue
        for batch in batches:
            if not any(overlap(key, other) for other in batch):
                batch[key] = text
                break
        else:
            batches.append({key: text})
    # What is of an evaluation does not go with a run that goes on.
    evaluated = {key: text for batch in batches for key, text in batch.items() if "eval." in key}
    assert compose(["experiment=imagenet/vitae/tiny", *evaluated.values()]).mode == "eval"
    for batch in batches:
        texts = [text for key, text in batch.items() if key not in evaluated]
        assert compose(["experiment=imagenet/vitae/tiny", *texts])
    assert len(batches) < 8
    assert compose(["experiment=imagenet/vitae/tiny", "optimizer=sgd", "optimizer.momentum=0.9"])
