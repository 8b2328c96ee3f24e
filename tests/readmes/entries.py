"""How each command and block of the documents is run, by its text; both must have all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.libai_projects.train.conftest import TINY


@dataclass(frozen=True)
class Run:
    """A command that is run.

    Attributes:
        add: options that make it short; they go to its end, but before `<`.
        replace: what stands for something, and files too large for a test. `{name}` in a value is
            a path of conftest.World.
        instead: another command that does the same in less time.
        after: commands, or names of EXTRA, that make the files it needs.
        expect: an expression that its output matches.
        until: likewise, of a server, which goes on until all tests are over.
    """

    add: str = ""
    cwd: str = "."
    replace: Mapping[str, str] = field(default_factory=dict)
    instead: str = ""
    after: tuple[str, ...] = ()
    expect: str = ""
    until: str = ""
    plugin: bool = False


@dataclass(frozen=True)
class Dry:
    """A target of make: make only says what it would do (-n)."""


@dataclass(frozen=True)
class Help:
    """Asks a program of test_readmes.PROGRAMS for --help, which all are asked in one process."""

    program: str
    expect: str = "default"


@dataclass(frozen=True)
class NotRun:
    reason: str


@dataclass(frozen=True)
class Code:
    """Python: its imports run first, in a fresh interpreter, then `before`, then the rest of it,
    then `check`. With `yaml` it is a block of YAML that `check` finds in `text`."""

    before: str = ""
    check: str = ""
    after: tuple[str, ...] = ()
    yaml: bool = False


RESNET = "resnet50_imagenet"
LIBAI = "libai_projects"
TWO = {"--nproc_per_node 4": "--nproc_per_node 2 --master_port {port}"}
PHOTOS = {"DIR": "{photos}"}
DIGITS = {"DIR": "{digits}"}

SMALL_IMAGES = "-a shufflenet_v2_x0_5 --image-size 32 -b 20 --max-steps 1 -j 0"
SMALL_VIT = (
    "datamodule.image_size=32 datamodule.batch_size=2 datamodule.batch_size_eval=2 "
    "datamodule.num_workers=0 train.global_batch_size=2 "
)
ONE_STEP = (
    "datamodule.batch_size=4 datamodule.batch_size_eval=4 datamodule.num_workers=0 "
    "train.global_batch_size=4 trainer.max_epochs=1 scheduler.t_initial=1 scheduler.warmup_t=0 "
    "trainer.limit_train_batches=1 trainer.limit_val_batches=1"
)
TINY_GPT = " ".join([*TINY, "train.train_iter=1", "train.checkpointer.period=1"]).replace(
    "[[80,10,10]]", "'[[80,10,10]]'"
)
DONE = "done: 1 steps"
FEW_WORDS = "model.cfg.vocab_size=512 model.cfg.vocab_size_real=512"
TRAIN_ONE = "bash tools/train.sh tools/train_net.py projects/MagicPrompt/configs/gpt2_training.py 1"
PREPARE = "python projects/MagicPrompt/prepare.py prompts.txt --validation valid.txt"
BERT_TEXT = "--output-prefix bert/text --tokenizer bert/tokenizer.json --train-vocabulary"
PREPARE_BERT = (
    f"python projects/BERT/prepare.py prompts.txt --validation valid.txt {BERT_TEXT} 4096"
)
TRAIN_BERT = (
    "python tools/train_net.py projects/BERT/configs/bert_small_cpu.py model.cfg.mlp_cfg=blockdiag "
    "train.sparse_to_dense.fraction=0.7"
)
STUDY = NotRun("tests/libai_projects/train/test_language_studies.py")
TINY_BERT = f"{TINY_GPT} dataloader.train.splits='[[1,0,0]]' train.output_dir={{runs}}/bert"
PIPELINE_OF_FOUR = (
    "python3 -m oneflow.distributed.launch --nproc_per_node 4 projects/MagicPrompt/pipeline.py"
)
SERVE = "python projects/MagicPrompt/pipeline.py --model DIR --serve"
# The output folder of TRAIN_ONE.
TEXT_MODEL = {"DIR": "{runs}/gpt2"}
SHORT_TEXT = "--max-new-tokens 4"
PRETRAIN = "projects/Llama/pretrain.py"
PREPARE_TEXT = (
    "python projects/Llama/prepare.py text.txt --tokenizer TOKENIZER --validation 0.05 "
    "--output-prefix tokens/text"
)
TRAIN_LLAMA = (
    f"python {PRETRAIN} --preset=tiny --vocab_size=0 --data=tokens/text.bin --max_iters=500 "
    "--learning_rate=3e-3 --warmup_iters=50 --eval_interval=100"
)
SHORT_LLAMA = (
    "--preset=tiny --vocab_size=0 --max_iters=2 --batch_size=1 --num_accumulation_steps=1 "
    "--eval_iters=1"
)
LLAMA_OUTPUT = "projects/Llama/output"
TRAINED_LLAMA = {LLAMA_OUTPUT: "{runs}/llama", "TOKENIZER": "{tokenizer}"}
TWO_LLAMAS = {"nproc_per_node 2": "nproc_per_node 2 --master_port {port}"}
MNIST_MONARCH = "python -m monarch_flow.train experiment=mnist/vit-monarch datamodule.data_dir=DIR"
TRAIN_VIT = (
    "python -m monarch_flow.train experiment=imagenet/vit/vit-s-butterflyblockdiag-mlp "
    "datamodule.data_dir=DIR"
)
TRAIN_VIT_10B = (
    "python3 -m oneflow.distributed.launch --nproc_per_node 4 vit_10b/run_vit_training.py "
    "--data_dir DIR"
)
SHORT_VIT_10B = (
    "--image_size 32 --patch_size 8 --embed_dim 32 --num_heads 2 --num_blocks 1 --num_workers 0 "
    "--batch_size 4 --num_epochs 1 --warmup_steps 1"
)
TRAIN_RESNET = "python3 main.py -a resnet50 --channels-last DIR"

CI = NotRun("CI runs it: it is this suite, or what goes before it")
PIP = NotRun("installs 2 GB into an environment, from PyPI")
SYSTEM = NotRun("installs packages of the system")
SAME = NotRun("is run as above, with a number for N and a folder or a model")
ALIKE = NotRun("one that differs in an option is run")
CONFORMANCE = "python -m oneflow_accel conformance --device emulated"
# Whose library may not be built.
ON_CPU = {"emulated": "cpu"}
ON_CARD = NotRun("tests/scripts/test_on_your_card.py")
ROW = NotRun("tests/monarch_flow/configs/test_replaced_commands.py, which reads the same table")
ELSEWHERE = NotRun("a command of another project, beside ours for it")

COMMANDS: dict[str, Run | Dry | Help | NotRun] = {
    # README.md and README_zh-CN.md
    "make demo": Run(
        instead='python -c "import sys, resnet50_imagenet.demo as demo; main = demo.imagenet.main; '
        "more = sys.argv[1:]; del sys.argv[1:]; "
        "demo.imagenet.main = lambda options: main([*options, *more]); "
        'sys.exit(demo.main())" -a shufflenet_v2_x0_5 --max-steps 1',
        expect=r"Trained in \d+ s",
    ),
    "make check": CI,
    "make test": CI,
    "make test-release": Dry(),
    "make lint": CI,
    "make lint && make test": CI,
    ".ci/run": CI,
    "make setup": Dry(),
    "PIP_INDEX_URL=https://pypi.tuna.tsinghua.edu.cn/simple make setup": Dry(),
    "make plugin": Dry(),
    "make bench": Dry(),
    "make bench-compare": Dry(),
    "make help": Run(expect="make demo"),
    "make PYTHON=/path/to/python3.10": Run(expect="make demo"),
    "CXX=g++-12 make plugin": Dry(),
    "ONEFLOW_ACCEL_PLUGIN=off make test": CI,
    "apt-get install make python3-venv": SYSTEM,
    "apt-get install g++": SYSTEM,
    "pip install .": PIP,
    "pip install --build-constraint requirements/build.txt .": PIP,
    "pip install .[mkl]": PIP,
    "pip install -r requirements/build.txt -r requirements/libai.txt && "
    "pip install --no-build-isolation --no-deps libai==0.1.1": PIP,
    "python3 ...": NotRun("stands for any of them"),
    "python scripts/mutations.py": Run("--help", expect="draw"),
    "python scripts/golden_record.py": NotRun("trains each case five times"),
    "python scripts/golden_record.py --device emulated": Run("--help", expect="--device DEVICE"),
    "source .venv/bin/activate": Run(),
    "source ../.venv/bin/activate": Run(cwd=RESNET),
    "python -m oneflow_accel": Run(expect="oneflow"),
    "python -m oneflow_accel kernels": Run(expect="matmul", plugin=True),
    "python -m oneflow_accel kernels softsign softsign_grad": Run(expect="softsign", plugin=True),
    "python -m oneflow_accel conformance --device NAME": ALIKE,
    CONFORMANCE: ALIKE,
    f"{CONFORMANCE} --only device memory copies": ALIKE,
    f"{CONFORMANCE} --json report.json": Run(
        "--only device memory", replace=ON_CPU, expect=" 0 fail, "
    ),
    "python scripts/golden_record.py --device emulated --tolerance 0.01": Run("--help"),
    "bash scripts/on_your_card.sh mlu": ON_CARD,
    "bash scripts/on_your_card.sh emulated": ON_CARD,
    "python -m oneflow_accel explain": Run(expect="mlu"),
    f"cd resnet50_imagenet && {TRAIN_RESNET}": NotRun("is run in that folder"),
    "python3 -m oneflow.distributed.launch --nproc_per_node 4 main.py "
    "--multiprocessing-distributed DIR": Run(
        f"{SMALL_IMAGES} --output-dir runs/two", RESNET, {**TWO, **PHOTOS}
    ),
    "cd libai_projects && bash tools/train.sh tools/train_net.py "
    "projects/MagicPrompt/configs/gpt2_training.py 4": Run(
        f"{TINY_GPT} train.output_dir={{runs}}/two",
        replace={"training.py 4": "training.py 2"},
        after=(PREPARE,),
    ),
    PIPELINE_OF_FOUR: SAME,
    TRAIN_VIT: Run(f"{SMALL_VIT} model.depth=1 trainer.fast_dev_run=1", replace=PHOTOS),
    # The table of commands that their users know
    TRAIN_VIT.replace("-m monarch_flow.train", "run.py"): ROW,
    "python run.py experiment=imagenet-t2tvit-eval.yaml model/t2tattn_cfg=full "
    "datamodule.data_dir=DIR eval.ckpt=FILE": ROW,
    "python3 main.py": Run(
        f"{SMALL_IMAGES} --output-dir runs/alone",
        RESNET,
        {"python3 main.py": "IMAGENET_DIR={photos} python3 main.py"},
    ),
    "python scripts/convert_checkpoint_t2t_vit.py FILE": ROW,
    "python run.py experiment=imagenet/mixer/mixerb-cutmix-fbbflylr datamodule.data_dir=DIR "
    "model.channel_mlp_cfg.linear1_cfg.sparse_cfg.sparsity_config.butterfly_size=8": ROW,
    "python main.py DIR --model ViTAE_basic_Tiny -b 128 --lr 1e-3 --weight-decay .03 "
    "--img-size 224 --amp": ROW,
    "python -m monarch_flow.train experiment=imagenet/vitae/tiny datamodule.data_dir=DIR "
    "datamodule.batch_size=128 train.lr_base=1e-3 optimizer.weight_decay=.03 "
    "datamodule.image_size=224 trainer.precision=16": ROW,
    "python main.py DIR --model ViTAE_basic_Tiny --resume last.pth.tar": ROW,
    "python -m monarch_flow.train experiment=imagenet/vitae/tiny datamodule.data_dir=DIR "
    "resume=last.pth.tar": ROW,
    "python validate.py DIR --model ViTAE_basic_Tiny --eval_checkpoint FILE": ROW,
    "python -m monarch_flow.validate experiment=imagenet/vitae/tiny datamodule.data_dir=DIR "
    "eval.ckpt=FILE": ROW,
    "python mymain.py DIR --model ViTAE_basic_Tiny --replace-mlp --s2d": ROW,
    "python -m monarch_flow.train experiment=imagenet/vitae/tiny datamodule.data_dir=DIR "
    "model/vitmlp_cfg=butterflyblockdiag train.sparse_to_dense.fraction=0.7": ROW,
    # CONTRIBUTING.md
    "python -m benchmarks.breakdown MODEL": ALIKE,
    "python -m benchmarks.fused": Run("--only rope --rounds 1", expect="ratio"),
    # resnet50_imagenet
    TRAIN_RESNET: Run(
        f"{SMALL_IMAGES} --output-dir runs/resnet50", RESNET, PHOTOS, expect=DONE, plugin=True
    ),
    "python3 main.py --help": Help("resnet50_imagenet/main.py", "--channels-last"),
    "python3 main.py --benchmark all": Run(
        "-a resnet18 --image-size 32 -b 2", RESNET, expect="NCHW float32"
    ),
    "python3 main.py -e --weights resnet50-11ad3fa6.pth DIR": Run(
        SMALL_IMAGES, RESNET, {"resnet50-11ad3fa6.pth": "{resnet}", **PHOTOS}, expect="Acc@1"
    ),
    "python3 main.py -e --weights resnet50-11ad3fa6.pth --conv-cfg monarch DIR": Run(
        SMALL_IMAGES,
        RESNET,
        {"resnet50-11ad3fa6.pth": "{resnet}", **PHOTOS},
        expect=r"all: relative error 0\.\d",
    ),
    "python3 main.py -a resnet18 --conv-cfg monarch --seed 0 --channels-last --image-size 32 "
    "--epochs 4 -b 64 --lr 0.02 --scheduler cosine --scale 0.7 1 --hflip 0 -j 0 "
    "--output-dir runs/monarch-0 DIR": Run("-b 20 --max-steps 1", RESNET, PHOTOS),
    "python3 main.py --weights resnet50-11ad3fa6.pth --reset-head --lr 0.01 DIR": Run(
        f"{SMALL_IMAGES} --output-dir runs/tuned",
        RESNET,
        {"resnet50-11ad3fa6.pth": "{resnet}", **PHOTOS},
        expect=DONE,
    ),
    "python3 -m oneflow_accel.launch": Help("oneflow_accel.launch", "nproc_per_node"),
    "python3 main.py -e --resume runs/resnet50/checkpoints/best DIR": Run(
        SMALL_IMAGES, RESNET, PHOTOS, after=(TRAIN_RESNET,), expect="Acc@1"
    ),
    # vit_10b
    TRAIN_VIT_10B: Run(
        f"{SHORT_VIT_10B} --ckpt_dir {{runs}}/vit_10b",
        replace={**TWO, **PHOTOS},
        expect="checkpoints: ",
    ),
    "python3 vit_10b/run_vit_training.py --dry_run --num_devices 128 --device_memory 16": Run(
        expect="10,077,917,160"
    ),
    "python3 vit_10b/run_vit_training.py --dry_run --largest": NotRun(
        "tests/vit_10b/test_vit_options.py"
    ),
    "python3 vit_10b/run_vit_training.py --help": Help(
        "vit_10b/run_vit_training.py", "--no_reshard_after_forward"
    ),
    "python -m vit_10b.consolidate --ckpt_prefix DIR/checkpoints/step-00001251": Run(
        "--save_path {runs}/whole.safetensors",
        replace={"DIR/checkpoints/step-00001251": "{runs}/vit_10b/checkpoints/step-00000005"},
        after=(TRAIN_VIT_10B,),
        expect="written",
    ),
    "python -m benchmarks.sharded --peer .venv-peer/bin/python": Run(
        instead='python -c "import sys; from benchmarks import sharded; sharded.MODES = dict('
        'list(sharded.MODES.items())[:1]); sharded._measure()" --embed-dim 64 --num-blocks 1 '
        "--steps 1 --rounds 1 --image-size 28",
        expect="s / step",
    ),
    "python -m vit_10b.consolidate --split FILE.safetensors --processes 8 --save_path DIR": Run(
        replace={"FILE.safetensors": "{runs}/whole.safetensors", "DIR": "{runs}/cut"},
        after=("python -m vit_10b.consolidate --ckpt_prefix DIR/checkpoints/step-00001251",),
        expect="written",
    ),
    "python3 vit_10b/run_vit_training.py --dry_run --num_devices 128 --mlp_cfg monarch": Run(
        expect="5,464,182,760"
    ),
    # MagicPrompt
    "export MAGICPROMPT_VOCAB=/path/to/vocab.json MAGICPROMPT_MERGES=/path/to/merges.txt": Run(),
    "python tools/train_net.py projects/MagicPrompt/configs/gpt2_small_cpu.py --dummy "
    "--fast-dev-run": Run(f"{TINY_GPT} {FEW_WORDS} train.output_dir={{runs}}/at_once", LIBAI),
    PREPARE: Run(
        cwd=LIBAI, replace={"prompts.txt": "{prompts}", "valid.txt": "{prompts}"}, expect="prompts"
    ),
    TRAIN_ONE: Run(f"{TINY_GPT} train.output_dir={{runs}}/gpt2", LIBAI, after=(PREPARE,)),
    "bash tools/train.sh tools/train_net.py projects/MagicPrompt/configs/gpt2_training.py 4 "
    "train.dist.tensor_parallel_size=2 train.dist.pipeline_parallel_size=2": ALIKE,
    "python3 -m oneflow.distributed.launch projects/MagicPrompt/pipeline.py 1 --model DIR "
    '--prompt "a cute pig"': Run(
        f"{SHORT_TEXT} --num-return-sequences 1",
        LIBAI,
        {**TEXT_MODEL, "launch ": "launch --master_port {port} "},
        after=(TRAIN_ONE,),
        expect="a cute pig",
    ),
    f"{PIPELINE_OF_FOUR} --model DIR": Run(
        SHORT_TEXT, LIBAI, {**TWO, **TEXT_MODEL}, after=(TRAIN_ONE,), expect="a cute pig"
    ),
    SERVE: Run("--port 0", LIBAI, TEXT_MODEL, after=(TRAIN_ONE,), until=r"http://127.0.0.1:\d+"),
    f"{PIPELINE_OF_FOUR} --model DIR --serve": ALIKE,
    f"MAGICPROMPT_API_KEY=KEY {SERVE} --host 0.0.0.0": ALIKE,
    'curl http://127.0.0.1:8000/api/generate -H "Content-Type: application/json" '
    """-d '{"prompt": "a cute pig", "max_new_tokens": 20}'""": Run(
        replace={"http://127.0.0.1:8000": "{server}"},
        expect=r'\{"results":\[\{"generated_text":"a cute pig',
    ),
    "export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=KEY": Run(),
    "python projects/MagicPrompt/pipeline.py --model DIR --weights-dtype int8": ALIKE,
    "python projects/MagicPrompt/pipeline.py --model DIR --jsonl < requests.jsonl": Run(
        SHORT_TEXT,
        LIBAI,
        {**TEXT_MODEL, "requests.jsonl": "{requests}"},
        after=(TRAIN_ONE,),
        expect=r'\{.*"a cute pig',
    ),
    "python -m libai_projects.weights.convert SRC DST --from huggingface --to libai": Run(
        cwd=LIBAI, replace={"SRC": "{huggingface}", "DST": "{runs}/converted"}
    ),
    "python -m libai_projects.weights.convert SRC DST --from huggingface --to huggingface "
    "--dtype int8": Run(cwd=LIBAI, replace={"SRC": "{huggingface}", "DST": "{runs}/quarter"}),
    "python -m libai_projects.weights.convert DIR/checkpoints/latest DST --from libai --to libai "
    "--resumable graph": Run(
        cwd=LIBAI,
        replace={**TEXT_MODEL, "DST": "{runs}/for_libai"},
        after=(TRAIN_ONE,),
        expect="model_0000000: with optimizer and schedule",
    ),
    "python projects/MagicPrompt/prepare.py diffusiondb.train.txt --output-prefix data/sd": ALIKE,
    "MAGICPROMPT_DATA=data/sd bash tools/train.sh tools/train_net.py "
    "projects/MagicPrompt/configs/gpt2_small_cpu.py 1": ALIKE,
    "python tools/train_net.py --help": Help("libai_projects/tools/train_net.py", "KEY=VALUE"),
    # BERT
    "python tools/train_net.py projects/BERT/configs/bert_small_cpu.py --dummy --fast-dev-run": Run(
        f"{TINY_BERT}_dummy {FEW_WORDS}", LIBAI, expect="20/20"
    ),
    PREPARE_BERT: Run("--overwrite", LIBAI, {"prompts.txt": "{prompts}", "valid.txt": "{prompts}"}),
    f"python projects/BERT/prepare.py text.txt --validation 0.05 {BERT_TEXT} 30522 "
    "--split-sentences": Run(
        "--output-prefix bert/pairs --tokenizer bert/pairs.json", LIBAI, {"text.txt": "{prompts}"}
    ),
    TRAIN_BERT: Run(
        f"{TINY_BERT} train.train_iter=2 train.sparse_to_dense.fraction=0.5",
        LIBAI,
        after=(PREPARE_BERT,),
        expect="structured layers are dense from here on",
    ),
    "bash tools/train.sh tools/train_net.py projects/BERT/configs/bert_pretraining.py 4 "
    "train.dist.tensor_parallel_size=2": NotRun("tests/libai_projects/bert/test_bert_runs.py"),
    "python -m libai_projects.weights.convert projects/BERT/bert_small/checkpoints/best DST "
    "--from libai --to huggingface --model bert": Run(
        cwd=LIBAI,
        replace={"projects/BERT/bert_small": "{runs}/bert", "DST": "{runs}/bert_for_others"},
        after=(TRAIN_BERT,),
    ),
    "python -m libai_projects.compare projects/BERT/study.yaml": STUDY,
    "python -m libai_projects.compare projects/MagicPrompt/study.yaml": STUDY,
    "python -m libai_projects.compare projects/Llama/study.yaml "
    "dataloader.train.dataset.0.path=tokens/text.bin": STUDY,
    # Llama
    f"python {PRETRAIN} --preset=small --mlp_cfg=monarch --dummy --max_iters=5": ALIKE,
    "cd libai_projects": Run(),
    f"python {PRETRAIN} --preset=tiny --dummy --max_iters=20": Run(
        f"{SHORT_LLAMA} --vocab_size=512 --output_dir={{runs}}/dummy", LIBAI, expect="623,232"
    ),
    PREPARE_TEXT: Run(
        cwd=LIBAI,
        replace={"text.txt": "{prompts}", "TOKENIZER": "{tokenizer}"},
        expect="which a Llama pads to 400",
    ),
    TRAIN_LLAMA: Run(
        f"{SHORT_LLAMA} --eval_interval=2 --output_dir={{runs}}/llama",
        LIBAI,
        after=(PREPARE_TEXT,),
        expect="validation is on tokens/text_valid.bin",
    ),
    f"python projects/Llama/pipeline.py --model {LLAMA_OUTPUT} --tokenizer TOKENIZER "
    '--prompt "Once upon a time"': Run(
        SHORT_TEXT, LIBAI, TRAINED_LLAMA, after=(TRAIN_LLAMA,), expect="Once upon a time"
    ),
    f"python {PRETRAIN} --help": Help(
        "libai_projects/projects/Llama/pretrain.py", "--gradient_accumulation_steps"
    ),
    f"python3 -m oneflow.distributed.launch --nproc_per_node 2 {PRETRAIN} "
    "--data=tokens/text.bin": Run(
        f"{SHORT_LLAMA} --output_dir={{runs}}/two_llamas",
        LIBAI,
        TWO_LLAMAS,
        after=(PREPARE_TEXT,),
        expect="2 data-parallel processes",
    ),
    f"python3 -m oneflow.distributed.launch --nproc_per_node 4 {PRETRAIN} "
    "--data=tokens/text.bin --tensor_parallel=2 --pipeline_parallel=2": ALIKE,
    "python -m libai_projects.weights.convert SRC DST --from meta --to huggingface": Run(
        cwd=LIBAI, replace={"SRC": "{meta}", "DST": "{runs}/from_meta"}
    ),
    f"python -m libai_projects.weights.convert {LLAMA_OUTPUT}/checkpoints/best DST --from libai "
    "--to huggingface --model llama --tokenizer TOKENIZER": Run(
        cwd=LIBAI,
        replace={
            f"{LLAMA_OUTPUT}/checkpoints": "{runs}/llama/checkpoints",
            "DST": "{runs}/llama_for_others",
            "TOKENIZER": "{tokenizer}",
        },
        after=(TRAIN_LLAMA,),
    ),
    "python projects/Llama/pipeline.py --model DIR --tokenizer TOKENIZER --serve": ALIKE,
    "python3 -m oneflow.distributed.launch --nproc_per_node 4 projects/Llama/pipeline.py "
    "--model DIR --tokenizer TOKENIZER": ALIKE,
    f"python {PRETRAIN} --ablate table1 --preset=z2all --num_layers=2 --vocab_size=8000 "
    "--batch_size=2 --gradient_accumulation_steps=1 --max_iters=3 --warm_up=1 --turns=1 "
    "--output_dir=projects/Llama/ablation": ALIKE,
    # One of its rows.
    f"python {PRETRAIN} --ablate table1 --preset=small --gradient_accumulation_steps=1 "
    "--output_dir=projects/Llama/ablation": Run(
        f"{SHORT_LLAMA} --vocab_size=512 --max_iters=6 --turns=1",
        LIBAI,
        instead='python -c "import sys; from libai_projects.projects.Llama import diary, pretrain; '
        "rows = diary.TABLES; rows['table1'] = rows['table1'][1:2]; "
        'sys.exit(pretrain.main(sys.argv[1:]))" --ablate table1 --output_dir={runs}/ablation',
        expect="table1.png",
    ),
    f"python {PRETRAIN} --estimate": Run(cwd=LIBAI, expect="1,255,499,776"),
    "python projects/Llama/prepare.py diffusiondb.train.txt --tokenizer TOKENIZER "
    "--validation diffusiondb.valid.txt --output-prefix tokens/sd": ALIKE,
    f"python {PRETRAIN} --data=tokens/sd.bin --vocab_size=0 --hidden_size=256 "
    "--ffn_hidden_size=704 --num_layers=6 --num_attention_heads=8 --num_key_value_heads=8 "
    "--max_seq_len=128 --tie_word_embeddings --dropout=0.1 --attention_dropout=0.1 "
    "--embedding_dropout=0.1 --batch_size=8 --gradient_accumulation_steps=1 --learning_rate=1e-3 "
    "--warmup_iters=100 --max_iters=2400 --max_minutes=30 --eval_interval=100 "
    "--log_interval=20": Run(
        instead=f"python {PRETRAIN} --data=tokens/text.bin --vocab_size=0 --hidden_size=32 "
        "--ffn_hidden_size=64 --num_layers=1 --num_attention_heads=2 --num_key_value_heads=2 "
        "--max_seq_len=32 --tie_word_embeddings --dropout=0.1 --attention_dropout=0.1 "
        "--embedding_dropout=0.1 --batch_size=2 --gradient_accumulation_steps=1 --warmup_iters=1 "
        "--max_iters=2 --max_minutes=30 --eval_interval=2 --eval_iters=1 "
        "--output_dir={runs}/prompts_llama",
        cwd=LIBAI,
        after=(PREPARE_TEXT,),
        expect="val perplexity",
    ),
    "python -m benchmarks --only flash-attention": Help("benchmarks", "flash-attention"),
    'make llama bench ARGS="--only generation llama.cpp"': Dry(),
    "make llama": Dry(),
    "python -m benchmarks.serving --model DIR --peer .venv-peer/bin/python --picture "
    "serving.png": ALIKE,
    "python -m benchmarks.serving --model DIR --clients 1 16 --requests 16 --lengths 64 64": Run(
        instead="python -m benchmarks.serving --help", expect="--clients"
    ),
    "LLAMA_TOKENIZER=TOKENIZER python -m benchmarks.quantised "
    "libai_projects/projects/Llama/configs/llama_inference.py --model DIR --tokens FILE": Run(
        "--length 16",
        replace={
            "TOKENIZER": "{tokenizer}",
            "DIR": "{runs}/llama",
            "FILE": "libai_projects/tokens/text_valid.bin",
        },
        after=(TRAIN_LLAMA,),
        expect="int8",
    ),
    "python -m benchmarks.memory": Help("benchmarks.memory", "usage"),
    "python -m benchmarks.precision": Run(instead="python -m benchmarks.precision --help"),
    "python -m benchmarks.contention": Help("benchmarks.contention"),
    "python -m benchmarks.contention --also GOMP_SPINCOUNT=300000": Help(
        "benchmarks.contention", "NAME=VALUE"
    ),
    "python -m benchmarks.flash --picture flash.png": Run(
        instead='python -c "import sys; from benchmarks import flash; flash.LENGTHS = (1024,); '
        'flash.run(sys.argv[1:])" --picture {runs}/flash.png --batch 1 --dropout 0 --rounds 1 '
        "--steps 1",
        expect="backward",
    ),
    "python -m benchmarks.flash --precision bfloat16": Help("benchmarks.flash", "--precision"),
    # monarch_flow
    "python -m monarch_flow.models vit_small_patch16_224 mlp_cfg=monarch": ALIKE,
    "python -m monarch_flow.convert project vit.safetensors out.safetensors --config monarch": Run(
        replace={"vit.safetensors": "{vit}", "out.safetensors": "{runs}/projected.safetensors"}
    ),
    "python -m monarch_flow.convert densify runs/vit-monarch out.safetensors": Run(
        replace={"runs/vit-monarch": "{runs}/mnist", "out.safetensors": "{runs}/dense.safetensors"},
        after=(MNIST_MONARCH,),
    ),
    "python -m monarch_flow.convert t2t 81.7_T2T_ViTt_14.pth.tar out.safetensors": Run(
        replace={"81.7_T2T_ViTt_14.pth.tar": "{t2t}", "out.safetensors": "{runs}/t2t.safetensors"}
    ),
    MNIST_MONARCH: Run(f"{ONE_STEP} run_dir={{runs}}/mnist", replace=DIGITS),
    "python -m oneflow.distributed.launch --nproc_per_node 4 -m monarch_flow.train "
    "experiment=...": Run(
        f"datamodule.data_dir=DIR {ONE_STEP} train.global_batch_size=8 trainer.fast_dev_run=1",
        replace={**TWO, "experiment=...": "experiment=mnist/vit-monarch", **DIGITS},
    ),
    "python -m monarch_flow.train --help": Help("monarch_flow.train", "experiment="),
    "python -m monarch_flow.train experiment=imagenet/vitae/tiny datamodule.data_dir=DIR": ALIKE,
    "python -m oneflow.distributed.launch --nproc_per_node 4 -m monarch_flow.train "
    "experiment=imagenet/vitae/tiny datamodule.data_dir=DIR": ALIKE,
    "python -m monarch_flow.validate experiment=imagenet/vitae/tiny eval.ckpt=PATH "
    "eval.real_labels=FILE datamodule.data_dir=DIR": Run(
        SMALL_VIT, replace={"PATH": "{vitae}", "FILE": "{real_labels}", **PHOTOS}, expect="real"
    ),
    "python -m monarch_flow.validate experiment=imagenet/vitae/tiny eval.ckpt=PATH "
    "datamodule.data_dir=DIR": ALIKE,
    "python -m monarch_flow.validate experiment=NAME eval.ckpt=PATH datamodule.data_dir=DIR": ALIKE,
    # Its runs take half a minute; test_compare_command.py has such ones.
    "python -m monarch_flow.compare mnist-vit datamodule.data_dir=DIR": ALIKE,
    "python -m monarch_flow.compare transforms --n 16 64 256 1024": Run(
        "--minutes 0.01 --output {runs}/transforms",
        replace={"16 64 256 1024": "4 8"},
        expect="PASS",
    ),
    "python -m monarch_flow.compare flowers5-vitae datamodule.data_dir=DIR": Run(
        "-c job", replace=PHOTOS, expect="projected"
    ),
    "python -m monarch_flow.validate experiment=imagenet/t2tvit/t2tvit14t-eval "
    "eval.ckpt=81.7_T2T_ViTt_14.pth.tar datamodule.data_dir=DIR": Run(
        SMALL_VIT, replace={"81.7_T2T_ViTt_14.pth.tar": "{t2t14}", **PHOTOS}, expect="acc"
    ),
    "python -m benchmarks.breakdown ViTAE_basic_Tiny --batch 8 --size 224 --beside "
    "mlp_cfg=monarch": Run("--batch 1 --size 32 --rounds 1", expect="whole step"),
    'make bench ARGS="--only monarch monarch-batches vitae"': Dry(),
    'make bench ARGS="--only generation"': Dry(),
    'make bench ARGS="--only conv gemm"': Dry(),
    'make bench ARGS="--only ways --no-stock"': Dry(),
    'make bench ARGS="--item softsign"': Dry(),
    'make test ARGS="tests/oneflow_accel/kernels -k softsign"': CI,
    "python -m benchmarks.batches PNG": Run(replace={"PNG": "{runs}/batches.png"}),
    # docs/vitae_options.md
    "python validate.py DIR --model ViTAE_basic_Tiny --eval_checkpoint PATH": ELSEWHERE,
    "python -m torch.distributed.launch --nproc_per_node=4 main.py DIR --model ViTAE_basic_Tiny "
    "-b 128 --lr 1e-3 --weight-decay .03 --img-size 224 --amp": ELSEWHERE,
    # The texts of --help
    "python3 -m oneflow.distributed.launch --nproc_per_node N main.py "
    "--multiprocessing-distributed": SAME,
    "python3 -m oneflow.distributed.launch --nproc_per_node N pipeline.py": SAME,
    "python -m monarch_flow.models": ALIKE,
    "python -m monarch_flow.models NAME": SAME,
    "python -m monarch_flow.models 'vit*'": Run(expect="vit_small_patch16_224"),
    "python -m monarch_flow.models vit_small_patch16_224 mlp_cfg=monarch attnlinear_cfg=monarch": (
        Run(expect="22,802,152")
    ),
    "python -m monarch_flow.models vit_tiny_patch4_28 embed_dim=64 depth=2": ALIKE,
    "python -m benchmarks.breakdown vit_small_patch16_224 mlp_cfg=monarch --batch 8": ALIKE,
}

# What a reader has done before, where no single command of the documents says so.
EXTRA: dict[str, tuple[str, Run]] = {
    "photos": (
        "python -m monarch_flow.train experiment=flowers5/vitae-tiny-monarch "
        "datamodule.data_dir=DIR",
        Run(f"{ONE_STEP} run_dir=runs/flowers5-vitae-tiny-monarch", replace=PHOTOS),
    ),
}

# By a block's beginning; the longest that fits counts.
BLOCKS: dict[str, Code | NotRun] = {
    "import oneflow_accel": Code(check="assert oneflow_accel.select_device().name"),
    "from flow_train.data.arrays import ArrayLoader": Code(
        check="from flow_train.metrics.log import read_metrics\n"
        "*_, last = read_metrics(run.folder / 'metrics.jsonl')\n"
        "assert last['split'] == 'val' and last['values']['acc1'] > 70",
    ),
    "import sys\nfrom pathlib import Path\nfrom flow_train": Code(
        before="sys.argv = ['train.py', 'README.md']",
        check="from flow_train.metrics.log import read_metrics\n"
        "first, *_, last = read_metrics(run.folder / 'metrics.jsonl')\n"
        "assert last['split'] == 'val'\n"
        "assert last['values']['perplexity'] < first['values']['perplexity'] / 2",
    ),
    "from monarch_flow.layers import MonarchLinear": Code(
        before="class Model: pass\nself = Model()",
        check="import oneflow as flow\n"
        "assert self.fc2(self.fc1(flow.randn(2, 768))).shape == (2, 768)",
    ),
    "from monarch_flow.layers import replace_linears": Code(
        before="from monarch_flow.models import create_model\n"
        "model = create_model('vit_tiny_patch4_28')",
        check="assert type(model.blocks[0].mlp.fc1).__name__ == 'MonarchLinear'",
    ),
    "mlp_cfg:": Code(
        check="import yaml\n"
        "from monarch_flow.models import create_model\n"
        "model = create_model('vit_tiny_patch4_28', **yaml.safe_load(text))\n"
        "assert type(model.blocks[0].mlp.fc1).__name__ == 'MonarchLinear'",
        yaml=True,
    ),
    "from monarch_flow.models import create_model": Code(
        check="assert model.head.out_features == 10"
    ),
    'replace_linears(model, "monarch", include=r"NC\\.\\d+\\.attn\\.(qkv|proj)$")': Code(
        before="from monarch_flow.layers import replace_linears\n"
        "from monarch_flow.models import create_model\n"
        "model = create_model('ViTAE_basic_Tiny', mlp_cfg='monarch')",
        # The table's last column.
        check="parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)\n"
        "assert parameters == 2589032, parameters",
    ),
    "from monarch_flow.projection import project_model, densify_model": Code(
        before="from monarch_flow.models import create_model\n"
        "model = create_model('vit_tiny_patch4_28')",
        check="assert reports and 'Monarch' not in type(model.blocks[0].mlp.fc1).__name__",
    ),
    "import oneflow_accel\nfrom oneflow_accel.inference import prepare": Code(
        check="import oneflow as flow\nassert model(flow.randn(2, 3, 96, 96)).shape == (2, 5)",
        after=("photos",),
    ),
    "title: Mine": Code(
        check="import pathlib\n"
        "from monarch_flow.compare import STUDIES\n"
        "file = pathlib.Path('mine.yaml')\n"
        "file.write_text(text)\n"
        "assert [row.name for row in STUDIES.read(str(file)).rows][-1] == 'projected'",
        yaml=True,
    ),
    "from libai_projects.projects.MagicPrompt.pipeline import TextGenerationPipeline": Code(
        check="assert callable(TextGenerationPipeline)"
    ),
    "from openai import OpenAI": Code(
        before="import os\n"
        "os.environ |= {'OPENAI_BASE_URL': '{server}/v1', 'OPENAI_API_KEY': 'KEY'}",
        check="assert len(answer.choices) == 3",
    ),
    "from oneflow_accel.kernels.registry import disabled": Code(
        before="import oneflow as flow\n"
        "from oneflow_accel.kernels.transformer import swiglu\n"
        "x, off = flow.ones(2, 4), []\n"
        "train = lambda: off.append(swiglu.choose(x, x) is swiglu.reference)",
        check="assert off == [True]",
    ),
    "Record(": Code(
        before="import oneflow as flow\n"
        "import numpy as np\n"
        "from tests.oneflow_accel.kernels.record import Layout, Record, case"
    ),
    (
        'REGISTER_MAP("softsign", {"in", "out"}, '
        "[](float x) { return x / (1.0F + std::fabs(x)); });"
    ): NotRun("C++, which takes a build of the plug-in"),
    "metrics.jsonl            one line per log step: loss, accuracy, rate, learning rate": NotRun(
        "a list of files"
    ),
    "DIR/checkpoints/step-00001251/shard-00000-of-00004.safetensors   what each process keeps": (
        NotRun("a list of files")
    ),
}
