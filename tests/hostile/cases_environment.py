"""A machine, an environment or a terminal that is wrong."""

from __future__ import annotations

from hostile.case import Case, both, recipe, text

TRAIN = ("train", "r.yaml")
GENERATE = ("generate", "@base", "--prompt", "a", "--max-new-tokens", "1")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

CASES = [
    Case(
        "processes under torchrun",
        (*TRAIN, "--processes", "2"),
        2,
        ("error: --processes 2: this was started by environment variables as process 0 of 2 already. Leave",),
        recipe(),
        environ=TORCHRUN,
    ),
    Case(
        "device that is not there",
        (*TRAIN, "device=cuda"),
        2,
        (" device: cuda, but torch sees no CUDA device. Use device: auto or cpu.",),
        recipe(),
    ),
    Case(
        "generate on a device that is not there",
        (*GENERATE, "--device", "cuda"),
        6,
        ("error: device cuda: torch sees no CUDA device here. Use auto or cpu",),
    ),
    Case(
        "variable of 5,000 brackets",
        TRAIN,
        2,
        ("error: r.yaml:1:8 stage: expected one of pretrain, sft, classify,", "reward, distill, rl, not '[[[["),
        text("stage: ${BRACKETS}\n"),
        environ={"BRACKETS": "[" * 5000},
    ),
    Case(
        "variable with escapes",
        TRAIN,
        2,
        ("error: r.yaml:27:12 precision: expected one of auto, fp32, bf16, fp16, fp8, not '\\x1b]0;title\\x07'.",),
        recipe(precision="${TITLE}"),
        environ={"TITLE": "\x1b]0;title\x07"},
    ),
    Case(
        "variable not UTF-8",
        TRAIN,
        2,
        ("error: r.yaml:27:12 precision: '\\udce9' is not Unicode text. Write it in UTF-8; rename a file so named",),
        recipe(precision="${LATIN}"),
        environ={"LATIN": "\udce9"},
    ),
    Case(
        "variable empty",
        TRAIN,
        2,
        ("error: r.yaml:27:12 precision: expected one of auto, fp32, bf16, fp16, fp8, not nothing (null)",),
        recipe(precision="${EMPTY}"),
        environ={"EMPTY": ""},
    ),
    Case(
        "variable that is a list",
        TRAIN,
        2,
        ("error: r.yaml:27:12 precision: expected one of auto, fp32, bf16, fp16, fp8, not '[fp32]'. Did you mean",),
        recipe(precision="${LIST}"),
        environ={"LIST": "[fp32]"},
    ),
    Case(
        "output in a device",
        TRAIN,
        6,
        ("error: /dev/null/run: the run folder cannot be written: Not a directory. Choose another `output`.",),
        recipe(output="/dev/null/run"),
    ),
    Case(
        "output in /proc",
        TRAIN,
        6,
        ("error: /proc/danlu-run: the run folder cannot be written: No such file or directory. Choose another",),
        recipe(output="/proc/danlu-run"),
    ),
    Case(
        "cache in a file",
        TRAIN,
        6,
        ("error: the token cache @/file/cache cannot be written (Not a directory): set data.cache to a folder",),
        both(text("x", "file"), recipe(data={"cache": "@/file/cache"})),
    ),
    Case(
        "cache in /proc",
        TRAIN,
        6,
        ("error: the token cache /proc/danlu-cache cannot be written (No such file or directory): set data.cache",),
        recipe(data={"cache": "/proc/danlu-cache"}),
    ),
    Case(
        "page into no folder",
        ("preview", "r.yaml", "--html", "@/no/page.html"),
        2,
        ("error: --html @/no/page.html: there is no folder @/no",),
        recipe(),
    ),
    Case(
        "page into a folder",
        ("preview", "r.yaml", "--html", "@"),
        2,
        ("error: --html @: this is a folder; name a file in it",),
        recipe(),
    ),
    Case(
        "prompt from a missing file",
        ("generate", "@base", "--file", "@/no.txt"),
        3,
        ("error: @/no.txt: cannot be read: No such file or directory",),
    ),
    Case(
        "prompt from a folder", ("generate", "@base", "--file", "@"), 3, ("error: @: cannot be read: Is a directory",)
    ),
    Case(
        "prompt not UTF-8",
        ("generate", "@base", "--file", "@/latin.txt"),
        3,
        ("error: @/latin.txt: not UTF-8 text (byte 0); convert it first",),
        text(b"\xe9", "latin.txt"),
    ),
    Case(
        "prompt not Unicode",
        ("generate", "@base", "--prompt", "\udce9"),
        3,
        ("error: --prompt: not UTF-8 text (character 0); convert it first",),
    ),
    Case(
        "prompt longer than the context",
        ("generate", "@base", "--prompt", "word " * 1000),
        3,
        ("error: --prompt: the prompt has 3001 tokens, but the model sees 128 tokens at most",),
    ),
    Case(
        "wandb that is not installed",
        TRAIN,
        2,
        (" log.wandb: the wandb package is not installed. Run `pip install wandb`, or leave log.wandb out.",),
        recipe(log={"wandb": "project"}),
    ),
    Case(
        "no user in a model's path",
        ("chat", "~nosuchuser/model"),
        2,
        ("error: a path begins with '~' and the name of no user of this machine. Write it in full",),
    ),
    Case(
        "no user in data's path",
        ("eval", "@base", "--data", "~nosuchuser/rows.jsonl"),
        3,
        ("error: ~nosuchuser/rows.jsonl: no such file: '~' begins it with the name of no user of this machine",),
    ),
    Case("bench of a missing model", ("bench", "quantization", "@/none"), 4, ("error: @/none: no such folder",)),
    Case(
        "study with broken values",
        ("study", "r.yaml", "--vary", "steps=[1"),
        2,
        ("error: --vary 'steps=[1': not valid YAML: expected ',' or ']', but got '<stream end>' (inside { } and",),
        recipe(),
    ),
    Case(
        "verify more processes than heads",
        ("verify", "r.yaml", "--processes", "3"),
        2,
        (" parallel.tensor: 3 does not divide the model's 4 attention heads. Use 2 or 4",),
        recipe(parallel={"tensor": 3}),
    ),
]
