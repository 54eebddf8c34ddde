"""The recipes that the demo writes into its folder, and the folder's layout."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from danlu.data.demo_data import LONGEST_STEPS

LONGEST_ANSWER = 48  # tokens; the longest right one, a story apart, has about 20
SAMPLES = 8
"""Answers to a sum in a rollout."""


@dataclass(frozen=True)
class Size:
    """The size of the data and of the model.

    With the defaults it takes a few minutes on two cores, and nearly every question is answered right.
    """

    documents: int = 7_000  # of about 120 tokens
    conversations: int = 4_000  # of about 73 tokens
    vocabulary: int = 768
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    sft_epochs: int = 2
    worked_sums: int = 2_800  # of about 45 tokens
    bare_sums: int = 4_200  # of about 29 tokens
    sums_epochs: int = 2
    grpo_steps: int = 30
    prompts: int = 32  # sums of a step, each with SAMPLES answers
    held_out_sums: int = 200


class Place:
    """The folder, and the paths of its contents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = folder / "tokenizer"
        self.documents = folder / "data" / "documents.jsonl"
        self.conversations = folder / "data" / "conversations.jsonl"
        self.preferences = folder / "data" / "preferences.jsonl"
        self.answered_sums = folder / "data" / "answered-sums.jsonl"
        self.sums = folder / "data" / "sums.jsonl"
        self.held_out_sums = folder / "data" / "held-out-sums.jsonl"
        self.cache = folder / "cache"
        self.answers = folder / "answers.json"
        self.report = folder / "grpo" / "report.html"

    def recipe(self, stage: str) -> Path:
        return self.folder / f"{stage}.yaml"

    def run(self, stage: str) -> Path:
        return self.folder / stage


def pretrain_recipe(place: Place, size: Size) -> str:
    """Returns the recipe of a small model from scratch."""
    return f"""\
# Pretraining, as `danlu demo` does it: a small model reads about a small world.
# Edit what you like. Paths are those of the folder that danlu is started in.
#
#   danlu train {place.recipe("pretrain")}    goes on where it stopped, or says that it is finished
#   danlu explain KEY --recipe {place.recipe("pretrain")}    what a key means, and its value here

stage: pretrain

model:
  config:                         # from scratch, as a Hugging Face config.json would say it
    model_type: llama
    hidden_size: {size.hidden_size}
    intermediate_size: {3 * size.hidden_size}
    num_hidden_layers: {size.layers}
    num_attention_heads: {size.heads}
    num_key_value_heads: {size.heads // 2}
    max_position_embeddings: 512
    tie_word_embeddings: true
  tokenizer: {_quoted(place.tokenizer)}

data:
  train: {_quoted(place.documents)}
  eval: 0.02                      # a share is set aside, to see how well it predicts what it has not read
  max_length: 256                 # tokens of a sequence
  packing: concatenate            # documents end to end; attention never crosses from one to the next
  cache: {_quoted(place.cache)}

optimizer: {{kind: adamw, learning_rate: 2e-3, weight_decay: 0.1}}  # a model this small likes a high rate
schedule: {{kind: cosine, warmup: 0.05, floor: 0.1}}
batch: {{tokens: 2048}}  # of one optimizer step
epochs: 1

precision: auto  # fp32 or bf16, whichever multiplies faster here
evaluation: {{every: 100, samples: {{prompts: ["One day,"], max_new_tokens: {LONGEST_ANSWER}}}}}
checkpoint: {{every: 100, keep: 2}}
seed: 0
output: {_quoted(place.run("pretrain"))}
"""


def sft_recipe(place: Place, size: Size) -> str:
    """Returns the recipe of instruction tuning on conversations."""
    return f"""\
# Instruction tuning, as `danlu demo` does it: the pretrained model learns to answer.
# Edit what you like. Paths are those of the folder that danlu is started in.
#
#   danlu preview {place.recipe("sft")}       every token in colour: trained or only read, and why
#   danlu train {place.recipe("sft")}         goes on where it stopped, or says that it is finished
#   danlu train {place.recipe("sft")} output={place.folder / "again"} optimizer.learning_rate=3e-4

stage: sft

model: {_quoted(place.run("pretrain"))}  # the run before, or any folder in Hugging Face form

data:
  train: {_quoted(place.conversations)}
  eval: 0.02                      # a share is set aside
  max_length: 256
  train_on: assistant             # the answers are trained, the questions only read
  packing: true                   # conversations share a sequence without seeing each other
  cache: {_quoted(place.cache)}

optimizer: {{kind: adamw, learning_rate: 5e-4, weight_decay: 0.1}}  # gentle enough not to forget what it read
schedule: {{kind: cosine, warmup: 0.05, floor: 0.1}}
batch: {{sequences: 8}}  # packs of max_length in one optimizer step
epochs: {size.sft_epochs}

precision: auto  # fp32 or bf16, whichever multiplies faster here
evaluation: {{every: 50, samples: {{prompts: ["What does the owl eat?"], max_new_tokens: {LONGEST_ANSWER}}}}}
checkpoint: {{every: 50, keep: 2}}
seed: 0
output: {_quoted(place.run("sft"))}
"""


def sums_recipe(place: Place, size: Size) -> str:
    """Returns the recipe of SFT on sums, from the model that answers."""
    return f"""\
# Instruction tuning once more, as `danlu demo` does it: the tuned model sees sums and their answers.
# {size.worked_sums:,} are worked out, and {size.bare_sums:,} are results alone, which it is more likely to give then.
# Edit what you like. Paths are those of the folder that danlu is started in.
#
#   danlu train {place.recipe("sums")}        goes on where it stopped, or says that it is finished
#   danlu eval {place.run("sums")} --rewards {place.recipe("grpo")} --data {place.held_out_sums} --samples 8

stage: sft

model: {_quoted(place.run("sft"))}

data:
  train: {_quoted(place.answered_sums)}
  max_length: 256
  cache: {_quoted(place.cache)}

optimizer: {{kind: adamw, learning_rate: 2e-3, weight_decay: 0.1}}
schedule: {{kind: cosine, warmup: 0.05, floor: 0.1}}
batch: {{sequences: 8}}
epochs: {size.sums_epochs}

precision: auto  # fp32 or bf16, whichever multiplies faster here
checkpoint: {{every: 50, keep: 2}}
seed: 0
output: {_quoted(place.run("sums"))}
"""


def grpo_recipe(place: Place, size: Size) -> str:
    """Returns the recipe of GRPO on sums with results that a reward checks."""
    return f"""\
# Reinforcement learning, as `danlu demo` does it: the model tries other sums, {SAMPLES} times each.
# A reward checks the result alone, and what led to a right one becomes likelier (GRPO): to work it out, and carefully.
# Edit what you like. Paths are those of the folder that danlu is started in.
#
#   danlu train {place.recipe("grpo")}        goes on where it stopped, or says that it is finished
#   danlu report {place.run("grpo")}           reward, entropy and lengths as curves; the best and the worst answers
#   danlu replay {place.run("grpo")} --step 3  the rollout of a step again, its tokens compared

stage: grpo

model: {_quoted(place.run("sums"))}

data:
  train: {_quoted(place.sums)}
  prompt: "{{question}}"            # what is asked, from columns of a row; the reward sees all columns
  eval: {_quoted(place.held_out_sums)}
  max_length: 64                  # of a question with an answer

rollout:
  samples: {SAMPLES}                      # answers to each question, which are compared with each other
  max_new_tokens: {LONGEST_STEPS}

rewards: [{{kind: numeric, column: answer}}]  # 1 where the last number of the answer is that of the column

optimizer: {{kind: adamw, learning_rate: 1e-4, weight_decay: 0.0}}
schedule: {{kind: constant, warmup: 0.05}}
batch: {{prompts: {size.prompts}}}
steps: {size.grpo_steps}

precision: fp32
evaluation: {{every: 20}}
checkpoint: {{every: 20, keep: 2}}
seed: 0
output: {_quoted(place.run("grpo"))}
"""


def _quoted(path: Path) -> str:
    """A path as YAML reads it back, whatever characters it has."""
    text = str(path)
    if re.fullmatch(r"[/._-]*[A-Za-z][A-Za-z0-9/._-]*", text):
        return text
    return json.dumps(text.replace("${", "$${"), ensure_ascii=False)
