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
    "demo": Verb("danlu.cli.demo:demo", "Begin", "from nothing to a model that answers, in minutes, on built-in data"),
    "eval": Verb("danlu.cli.eval:eval", "Use", "loss, perplexity and token accuracy of a model on a file"),
    "explain": Verb("danlu.cli.explain:explain", "Look", "what a key of the recipe means, takes and defaults to"),
    "generate": Verb("danlu.cli.generate:generate", "Use", "continue a prompt; the text alone goes to stdout"),
    "merge": Verb("danlu.cli.merge:merge", "Use", "put adapters into their base, or make one of several"),
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
    "train": Verb("danlu.cli.train:train", "Train", "train from a recipe, or go on where a run stopped"),
    "verify": Verb("danlu.cli.verify:verify", "Train", "prove that many processes compute what one does"),
}


# Commands of other tools, and words that are no verbs by themselves -> what to type instead.
SUGGESTIONS = {
    "api": "`danlu serve`",
    "convert": "`danlu checkpoint export` (a checkpoint as a model), `danlu merge` or `danlu quantize`",
    "copy": "`danlu recipes copy`",
    "deploy": "`danlu serve`",
    "download": "`danlu train` with a hub id in model.path downloads what it needs",
    "dpo": "stage: sft or pretrain; preferences are not trained yet",
    "evaluate": "`danlu eval`",
    "export": "`danlu checkpoint export`",
    "finetune": "`danlu train`",
    "fine-tune": "`danlu train`",
    "fit": "`danlu train`",
    "help": "`danlu --help`",
    "infer": "`danlu generate`",
    "inference": "`danlu generate`",
    "init": "`danlu recipes copy sft`",
    "launch": "`danlu train RECIPE --processes N`",
    "list": "`danlu recipes list` or `danlu checkpoint list RUN`",
    "new": "`danlu recipes copy sft`",
    "perplexity": "`danlu eval`",
    "predict": "`danlu generate`",
    "pretrain": "`danlu recipes copy pretrain`, then `danlu train`; stage: pretrain in a recipe",
    "prune": "`danlu checkpoint prune`",
    "resume": "`danlu train` with the same recipe goes on where it stopped (--resume)",
    "run": "`danlu train`",
    "schema": "`danlu recipes schema`",
    "sft": "`danlu recipes copy sft`, then `danlu train`; stage: sft in a recipe",
    "sweep": "`danlu study`",
    "test": "`danlu eval`",
    "tokenize": "`danlu preview`",
    "tune": "`danlu train`",
    "vllm-serve": "`danlu serve`",
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
