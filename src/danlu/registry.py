"""The names that danlu looks up at run time, as strings: the table of contents of modules that are imported only when
used.

One broken or missing module hurts only its own name. `stages/table.py` names the parts of stages in the same way.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """A verb of the command line: where its function or sub-app is, its heading and its line in `danlu --help`."""

    target: str
    heading: str
    about: str


VERBS: dict[str, Verb] = {
    "bench": Verb(
        "danlu.cli.bench:app", "Look", "measure this machine's GEMM peak, or what quantization loses of a model"
    ),
    "chat": Verb("danlu.cli.chat:chat", "Use", "talk with a model or a finished run, and switch its adapters"),
    "checkpoint": Verb("danlu.cli.checkpoint:app", "Look", "list, verify, prune and export the checkpoints of a run"),
    "data": Verb("danlu.cli.data:app", "Train", "clean rows before training, with an account of every one"),
    "demo": Verb("danlu.cli.demo:demo", "Begin", "from nothing to a model that answers, in minutes, on built-in data"),
    "eval": Verb("danlu.cli.eval:eval", "Use", "loss, perplexity and token accuracy of a model on a file"),
    "explain": Verb(
        "danlu.cli.explain:explain", "Look", "what a key means, takes and defaults to; words are looked for"
    ),
    "generate": Verb("danlu.cli.generate:generate", "Use", "continue a prompt; the text alone goes to stdout"),
    "merge": Verb("danlu.cli.merge:merge", "Use", "put adapters into their base, or make one of several"),
    "plan": Verb(
        "danlu.cli.plan:plan", "Train", "will it fit, how fast, what to change: memory, seconds and price of a step"
    ),
    "preview": Verb(
        "danlu.cli.preview:preview",
        "Train",
        "see every token with its label mask and reason, the packed sequences and the totals",
    ),
    "quantize": Verb("danlu.cli.quantize:quantize", "Use", "write a model in 4 bits, a quarter of its size"),
    "recipes": Verb("danlu.cli.recipes:app", "Begin", "list and copy the recipes that come with danlu; the schema"),
    "replay": Verb("danlu.cli.replay:replay", "Look", "make a rollout of a run again, and compare its tokens"),
    "report": Verb(
        "danlu.cli.report:report", "Look", "a run as a page: curves, best and worst samples, failed rewards"
    ),
    "runs": Verb("danlu.cli.runs:app", "Look", "list runs: running, finished or stopped, steps, losses and time"),
    "schedule": Verb(
        "danlu.cli.schedule:schedule",
        "Look",
        "a pipeline schedule drawn in time: its bubble and activations in flight",
    ),
    "serve": Verb(
        "danlu.cli.serve:serve", "Use", "answer over HTTP as OpenAI's API does, with a model and its adapters"
    ),
    "study": Verb("danlu.cli.study:study", "Train", "vary keys of a recipe, train every combination, and compare"),
    "synthesize": Verb(
        "danlu.cli.synthesize:synthesize", "Train", "make data by a model: tasks, answers, marks and pairs, from seeds"
    ),
    "train": Verb("danlu.cli.train:train", "Train", "train from a recipe, or go on where a run stopped"),
    "verify": Verb("danlu.cli.verify:verify", "Train", "prove that many processes compute what one does"),
}


# Stages, their short names and the names that other tools have for them -> the value of `stage` in a recipe, and the
# shipped recipe to begin with.
STAGE_WORDS = {
    "classify": ("classify", "lenet_mnist"),
    "cpo": ("cpo", "dpo"),
    "cpt": ("pretrain", "continue"),
    "dapo": ("dapo", "grpo"),
    "distill": ("distill", "distill"),
    "distillation": ("distill", "distill"),
    "dpo": ("dpo", "dpo"),
    "dr-grpo": ("dr-grpo", "grpo"),
    "gkd": ("distill", "gkd"),
    "grpo": ("grpo", "grpo"),
    "gspo": ("gspo", "grpo"),
    "ipo": ("dpo", "dpo"),
    "kd": ("distill", "distill"),
    "kto": ("kto", "kto"),
    "online-dpo": ("online-dpo", "grpo"),
    "orpo": ("orpo", "orpo"),
    "ppo": ("ppo", "ppo"),
    "preference": ("preference", "dpo"),
    "pretrain": ("pretrain", "pretrain"),
    "pt": ("pretrain", "pretrain"),
    "reinforce": ("reinforce", "grpo"),
    "remax": ("remax", "grpo"),
    "reward": ("reward", "reward"),
    "rl": ("rl", "grpo"),
    "rlhf": ("ppo", "ppo"),
    "rloo": ("rloo", "grpo"),
    "rm": ("reward", "reward"),
    "sft": ("sft", "sft"),
    "simpo": ("simpo", "dpo"),
}
# Commands of other tools, and words that are no verbs by themselves -> what to type instead.
SUGGESTIONS = {
    **{
        word: f"`danlu recipes copy {recipe}`, then `danlu train`; stage: {stage} in a recipe"
        for word, (stage, recipe) in STAGE_WORDS.items()
    },
    "api": "`danlu serve`",
    "benchmark": "`danlu bench`",
    "cat": "`danlu recipes copy NAME`, which writes the recipe to read",
    "config": "`danlu explain` for the keys, `danlu recipes list` for recipes to begin with",
    "convert": "`danlu checkpoint export` (a checkpoint as a model), `danlu merge` or `danlu quantize`",
    "copy": "`danlu recipes copy`",
    "cp": "`danlu recipes copy`",
    "deploy": "`danlu serve`",
    "download": "`danlu train` with a hub id in model.path downloads what it needs",
    "env": "`danlu --version`; the summary.json of a run says what it ran on",
    "estimate": "`danlu plan`: memory, seconds and price of a step",
    "estimate-memory": "`danlu plan`: memory, seconds and price of a step",
    "evaluate": "`danlu eval`",
    "export": "`danlu checkpoint export` (a checkpoint as a model) or `danlu merge` (an adapter into its base)",
    "fetch": "`danlu recipes copy`",
    "fine-tune": "`danlu train`",
    "finetune": "`danlu train`",
    "fit": "`danlu train`",
    "full": "`danlu recipes copy sft`, then `danlu train`; without `adapter` all weights are trained",
    "help": "`danlu --help`",
    "infer": "`danlu generate`",
    "inference": "`danlu generate`",
    "init": "`danlu recipes copy sft`",
    "launch": "`danlu train RECIPE --processes N`",
    "list": "`danlu recipes list` or `danlu checkpoint list RUN`",
    "list-checkpoints": "`danlu checkpoint list RUN`",
    "lm-eval": "`danlu eval`; lm-evaluation-harness reads the folder that a run writes, and asks `danlu serve`",
    "lora": "`danlu recipes copy lora`, then `danlu train`; adapter: lora in a recipe",
    "ls": "`danlu recipes list`",
    "merge-lora": "`danlu merge`",
    "merge-sharded-fsdp-weights": "`danlu checkpoint export`; a finished run has written its model in one folder",
    "new": "`danlu recipes copy sft`",
    "perplexity": "`danlu eval`",
    "predict": "`danlu generate`",
    "preprocess": "`danlu preview` shows the tokens; `danlu train` writes and reuses them",
    "prune": "`danlu checkpoint prune`",
    "push": "the folder that a run writes, with `hf upload`",
    "qlora": "`danlu recipes copy lora`, then `danlu train`; adapter: lora and quantization: nf4 in a recipe",
    "quant": "`danlu quantize`",
    "ray": "`danlu train RECIPE --processes N`; on several machines under torchrun or srun",
    "resume": "`danlu train` with the same recipe goes on where it stopped (--resume)",
    "run": "`danlu train`",
    "schema": "`danlu recipes schema`",
    "server": "`danlu serve`",
    "sweep": "`danlu study`",
    "test": "`danlu eval`",
    "tokenize": "`danlu preview`",
    "tune": "`danlu train`",
    "validate": "`danlu train RECIPE --dry-run`",
    "version": "`danlu --version`",
    "vllm-serve": "`danlu serve`",
    "webchat": "`danlu chat`, in the terminal",
    "webui": "`danlu chat`, in the terminal",
}


def suggested_verb(word: str) -> str | None:
    """The command to suggest for a word of another tool, or the help of danlu's own verb; None for other words."""
    word = word.lower()
    return f"`danlu {word} --help`" if word in VERBS else SUGGESTIONS.get(word)


def resolve(target: str) -> Any:
    """Imports the object that `package.module:Name` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
