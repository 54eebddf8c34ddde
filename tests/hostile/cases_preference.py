"""Recipes and rows of the stages preference, reward and distill that are wrong."""

from __future__ import annotations

import json
import shutil
from typing import Any

from hostile.case import Arrange, Case, Place

TRAIN = ("train", "r.yaml")
FINISHED = {"path": "@base", "config": None, "tokenizer": None}
GOOD = {"prompt": "What is red?", "chosen": "The fox.", "rejected": "The owl is red."}
JUDGED = {"prompt": "What is red?", "completion": "The fox.", "label": True}
STEPS = {"prompt": "1 + 2 + 3 =", "completions": ["1 + 2 = 3", "3 + 3 = 6"], "labels": [True, True]}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def stage(name: str, *lines: object, **changes: Any) -> Arrange:
    """Arranges `rows.jsonl` and a recipe of this stage that trains on it, its batch counted in rows."""

    def arrange(place: Place) -> None:
        place.rows(*lines)
        values: dict[str, Any] = {"model": FINISHED, "batch": {"sequences": None, "micro": None, "rows": 2}}
        values |= {"data": {"train": "@/rows.jsonl", "cache": "@/cache"}, **changes}
        values["batch"] = {key: value for key, value in values["batch"].items() if value is not None}
        place.recipe(stage=name, **values)

    return arrange


def distil(**changes: Any) -> Arrange:
    """Arranges a recipe of stage distill over conversations."""
    return lambda place: place.recipe(stage="distill", **{"model": FINISHED, "teacher": "@base", **changes})


def other_vocabulary(place: Place) -> None:
    """A copy of the base in `@/other` whose tokenizer has two tokens in each other's place."""
    folder = place.tmp / "other"
    shutil.copytree(place.world.base, folder)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    vocabulary["Ġfox"], vocabulary["Ġowl"] = vocabulary["Ġowl"], vocabulary["Ġfox"]
    file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def after(arrange: Arrange, *others: Arrange) -> Arrange:
    def both(place: Place) -> None:
        for one in (arrange, *others):
            one(place)

    return both


CASES = [
    # -- rows
    Case(
        "pair of equal answers",
        TRAIN,
        3,
        ("error: rows.jsonl:2: chosen and rejected are the same", "remove the row"),
        stage("dpo", GOOD, {**GOOD, "rejected": GOOD["chosen"]}),
    ),
    Case(
        "pair without a prompt's text",
        TRAIN,
        3,
        ("error: rows.jsonl:2: the prompt is empty, so there is nothing to answer",),
        stage("dpo", GOOD, {**GOOD, "prompt": ""}),
    ),
    Case(
        "pair with an empty answer",
        TRAIN,
        3,
        ("error: rows.jsonl:2: 'rejected' is empty, so there is no answer",),
        stage("dpo", GOOD, {**GOOD, "rejected": " "}),
    ),
    Case(
        "pairs for a stage that judges answers",
        TRAIN,
        3,
        ("error: rows.jsonl:1: this stage needs answers with a column that judges each", "which are for stage dpo"),
        stage("kto", GOOD),
    ),
    Case(
        "judged answers for a stage of pairs",
        TRAIN,
        3,
        ("error: rows.jsonl:1: this stage needs pairs of answers (chosen, rejected)", "which are for stage kto"),
        stage("dpo", JUDGED),
    ),
    Case(
        "conversations for a stage of pairs",
        TRAIN,
        3,
        ("error: rows.jsonl:1: this stage needs pairs of answers (chosen, rejected)", "which are for stage sft"),
        stage("dpo", CHAT),
    ),
    Case(
        "plain text for a stage of pairs",
        TRAIN,
        3,
        ("error: rows.jsonl:1: this stage needs pairs of answers (chosen, rejected)", "stage pretrain or sft"),
        stage("dpo", {"text": "The fox is red."}),
    ),
    Case(
        "answers in steps for a stage of pairs",
        TRAIN,
        3,
        (
            "error: rows.jsonl:1: this stage needs pairs of answers",
            "which are for stage reward with objective stepwise",
        ),
        stage("reward", STEPS),
    ),
    Case(
        "pairs for a reward of steps",
        TRAIN,
        3,
        ("error: rows.jsonl:1: this stage needs answers in steps (prompt, completions, labels)", "for stage dpo"),
        stage("reward", GOOD, objective="stepwise"),
    ),
    Case(
        "steps and labels of different numbers",
        TRAIN,
        3,
        ("error: rows.jsonl:2: 'completions' has 2 steps and 'labels' 1; give one for each",),
        stage("reward", STEPS, {**STEPS, "labels": [True]}, objective="stepwise"),
    ),
    Case(
        "judged answers of one label",
        TRAIN,
        3,
        ("rows.jsonl: all 2 answers are desirable; nothing is learnt from one label, so add undesirable ones",),
        stage("kto", JUDGED, {**JUDGED, "completion": "A fox."}),
    ),
    Case(
        "margins in some rows",
        TRAIN,
        3,
        ("error: rows.jsonl:2: no 'margin', which 1 of 2 rows have (the first is rows.jsonl:1); give every row one",),
        stage("dpo", {**GOOD, "margin": 0.5}, {**GOOD, "chosen": "A fox."}),
    ),
    Case(
        "margin no number",
        TRAIN,
        3,
        ("error: rows.jsonl:1: 'margin' must be a number, by how much the chosen answer is better, not 'much'",),
        stage("dpo", {**GOOD, "margin": "much"}),
    ),
    # -- recipes
    Case(
        "objective misspelt",
        TRAIN,
        2,
        ("error: r.yaml:", "objective.0.kind: unknown kind 'sigmoyd'. Did you mean 'sigmoid'?"),
        stage("dpo", GOOD, objective="sigmoyd"),
    ),
    Case(
        "objective of TRL's name",
        TRAIN,
        2,
        ("error: r.yaml:", "objective.0.kind: unknown kind 'nca_pair'. Write objective.kind: nca"),
        stage("dpo", GOOD, objective="nca_pair"),
    ),
    Case(
        "objective of a reward model in dpo",
        TRAIN,
        2,
        ("error: r.yaml:", "objective.0.kind: bradley-terry is an objective of stage reward, not of stage preference"),
        stage("dpo", GOOD, objective="bradley-terry"),
    ),
    Case(
        "objective of dpo in a reward model",
        TRAIN,
        2,
        ("error: r.yaml:", "objective.0.kind: sigmoid is an objective of stage preference, not of stage reward"),
        stage("reward", GOOD, objective="sigmoid"),
    ),
    Case(
        "objectives of pairs and of judged answers",
        TRAIN,
        2,
        ("error: r.yaml:", "objective.1.kind: kto takes answers judged one by one", "sigmoid"),
        stage("dpo", GOOD, objective=[{"kind": "sigmoid"}, {"kind": "kto"}]),
    ),
    Case(
        "objective in sft",
        TRAIN,
        2,
        ("error: r.yaml:", "objective: not read with stage sft"),
        lambda place: place.recipe(objective="sigmoid"),
    ),
    Case(
        "sequences in a step of pairs",
        TRAIN,
        2,
        ("error: r.yaml:", "batch.sequences: a step of stage preference is counted in rows. Give batch.rows instead"),
        stage("dpo", GOOD, batch={"sequences": 4, "micro": 2}),
    ),
    Case(
        "pairs in a step of sft",
        TRAIN,
        2,
        (
            "error: r.yaml:",
            "batch.rows: only stages preference and reward count rows; stage sft takes batch.sequences",
        ),
        lambda place: place.recipe(batch={"sequences": None, "micro": "auto", "rows": 4}),
    ),
    Case(
        "reference without the adapter that is off",
        TRAIN,
        2,
        ("error: r.yaml:", "reference.kind: adapter-off: there is no adapter to switch off. Use reference: cached"),
        stage("dpo", GOOD, reference="adapter-off"),
    ),
    Case(
        "no reference for an objective that needs one",
        TRAIN,
        2,
        ("error: r.yaml:", "reference.kind: ", "kto"),
        stage("kto", JUDGED, reference="none"),
    ),
    Case(
        "reference in a reward model",
        TRAIN,
        2,
        ("error: r.yaml:", "reference: only stages preference and rl have a reference; this is reward. Leave"),
        stage("reward", GOOD, reference="frozen"),
    ),
    Case(
        "reference missing",
        TRAIN,
        2,
        ("error: r.yaml:", "reference.model: no file or folder '@/none' in '@'"),
        stage("dpo", GOOD, reference={"kind": "frozen", "model": "@/none"}),
    ),
    Case(
        "reference of another vocabulary",
        TRAIN,
        2,
        (" reference.model: @/other has another vocabulary", "is 'Ġfox', the policy's is 'Ġowl'"),
        after(other_vocabulary, stage("dpo", GOOD, reference={"kind": "frozen", "model": "@/other"})),
        max_bytes=80 << 20,
    ),
    Case(
        "distillation without a teacher",
        TRAIN,
        2,
        ("error: r.yaml:", "teacher: missing: stage distill learns from one. Name its folder or run"),
        distil(teacher=None),
    ),
    Case(
        "teacher missing",
        TRAIN,
        2,
        ("error: r.yaml:", "teacher.0.model: no file or folder '@/none' in '@'"),
        distil(teacher="@/none"),
    ),
    Case(
        "teacher of another vocabulary",
        TRAIN,
        2,
        (" teacher.0.model: @/other has another vocabulary", "is 'Ġfox', the policy's is 'Ġowl'"),
        after(other_vocabulary, distil(teacher="@/other")),
        max_bytes=80 << 20,
    ),
    Case(
        "teacher in sft",
        TRAIN,
        2,
        ("error: r.yaml:", "teacher: only stages distill and rl have a teacher; this is sft. Leave it out"),
        lambda place: place.recipe(teacher="@base"),
    ),
    Case(
        "own answers to texts",
        TRAIN,
        3,
        ("error: ", "rows.jsonl:1: has no prompt that the policy could answer", "on_policy needs conversations"),
        after(
            lambda place: place.rows({"text": "The fox is red."}, {"text": "The owl is not."}),
            distil(on_policy=True, data={"train": "@/rows.jsonl", "cache": "@/cache"}),
        ),
    ),
    Case(
        "own answers and a cached teacher",
        TRAIN,
        2,
        ("error: r.yaml:", "teacher.0.cache: true: what the policy will answer is not known before training"),
        distil(on_policy=0.5, teacher={"model": "@base", "top_k": 8, "cache": True}),
    ),
    Case(
        "cached teacher without top_k",
        TRAIN,
        2,
        ("error: r.yaml:", "teacher.0.cache: ", "top_k"),
        distil(teacher={"model": "@base", "cache": True}),
    ),
]
