"""Precision and recall of each step of curation on dirt that is planted in real texts, so that the truth is known.

    python benchmarks/planted.py DATA [--rows 300] [--seed 0]

DATA is a folder with `text/` (wiki_demo.txt, c4_demo.jsonl, books/) and `rl/` (gsm8k_train.jsonl, svamp.jsonl). Every
step is given clean rows and planted ones, and traps that look like dirt and are none. Recall is the share of what was
planted that is found, precision the share of planted ones among all that is found. Near duplicates and chains are known
by the Jaccard index of sets of words made here, over all pairs. No figure hangs on the machine.
"""
# ruff: noqa: E501 - a sentence of another language, or one with personal data, stands on one line

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from danlu.curation.decontaminate import Benchmark, Decontaminate
from danlu.curation.duplicates import ExactDuplicates, RepeatedParagraphs
from danlu.curation.language import Language
from danlu.curation.near_duplicates import NearDuplicates
from danlu.curation.personal.step import Personal
from danlu.curation.quality.c4 import C4Rules
from danlu.curation.quality.fineweb import FineWebRules
from danlu.curation.quality.gopher import GopherRules
from danlu.curation.quality.repetition import RepetitionRules
from danlu.curation.repair import Repair
from danlu.curation.rows import Row, document
from danlu.curation.run_steps import run_steps
from danlu.curation.steps import Step

WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Counts:
    """What was planted, what was found, and both."""

    planted: int
    found: int
    right: int

    def line(self, name: str) -> str:
        recall = self.right / self.planted if self.planted else 1.0
        precision = self.right / self.found if self.found else 1.0
        return f"| {name} | {self.planted:,} | {self.found:,} | {precision:.3f} | {recall:.3f} |"


def counts(planted: set[int], found: set[int]) -> Counts:
    return Counts(len(planted), len(found), len(planted & found))


def paragraphs(data: Path) -> list[str]:
    """Paragraphs of some 120 words from articles of an encyclopedia, each once; they end with a sentence."""
    text = (data / "text" / "wiki_demo.txt").read_text(encoding="utf-8")
    cut = list[str]()
    for article in text.split("\n"):
        sentences = list[str]()
        for sentence in re.split(r"(?<=[a-z0-9)][.!?])\s*(?=[A-Z])", article):
            sentences.append(sentence.strip())
            if sum(len(each.split()) for each in sentences) >= 120:
                cut.append(" ".join(sentences))
                sentences = []
    return list(dict.fromkeys(cut))


def pages(texts: Sequence[str], paragraphs_of_page: int = 5) -> list[str]:
    """Documents of several paragraphs each."""
    return ["\n".join(texts[start : start + paragraphs_of_page]) for start in range(0, len(texts), paragraphs_of_page)]


def documents_of(texts: Iterable[str], source: int = 0) -> list[Row]:
    return [document(text, source, number) for number, text in enumerate(texts)]


def dropped(step: Step, rows: Sequence[Row]) -> set[int]:
    """The places of rows that a step drops."""
    return {each.place for each in run_steps([rows], [step]).accounts if each.outcome == "dropped"}


def shuffled(clean: Sequence[str], dirt: Sequence[str], draw: random.Random) -> tuple[list[Row], set[int]]:
    """Rows of both kinds in a drawn order, and the places of the dirt."""
    texts = [(text, False) for text in clean] + [(text, True) for text in dirt]
    draw.shuffle(texts)
    rows = documents_of(text for text, _ in texts)
    return rows, {row.place for row, (_, is_dirt) in zip(rows, texts, strict=True) if is_dirt}


# Duplicates


def exact(texts: list[str], count: int, draw: random.Random) -> Counts:
    """Copies, and traps that differ by one character."""
    copied = draw.sample(texts, count)
    traps = [text + "." for text in draw.sample(texts, count)]
    rows = documents_of([*texts, *traps, *copied])
    return counts({row.place for row in rows[len(texts) + len(traps) :]}, dropped(ExactDuplicates(), rows))


def edited(text: str, share: float, draw: random.Random) -> str:
    """The text with a share of its words, one at least, replaced by others."""
    words = text.split(" ")
    for place in draw.sample(range(len(words)), max(1, round(share * len(words)))):
        words[place] = f"{draw.choice('bcdfgklmnprst')}{draw.choice('aeiou')}{draw.randrange(10_000)}"
    return " ".join(words)


def shingle_set(text: str, words: int = 5) -> set[tuple[str, ...]]:
    tokens = WORD.findall(text.lower())
    return {tuple(tokens[start : start + words]) for start in range(len(tokens) - words + 1)}


def near(texts: list[str], count: int, draw: random.Random, at_least: float = 0.75) -> Counts:
    """Edited copies, most of them near duplicates, and chains of three of which each is like the next.

    The truth is the rule itself over all pairs: by place, a row goes if its Jaccard index with one that stays is high.
    """
    new = list[str]()
    for text in draw.sample(texts, count):
        new.append(edited(text, draw.choice((0.005, 0.01, 0.02, 0.04, 0.08)), draw))
    for text in draw.sample(texts, count // 3):
        second = edited(text, 0.02, draw)
        new += [second, edited(second, 0.025, draw)]
    draw.shuffle(new)
    rows = documents_of([*texts, *new])
    sets, kept, truth = [shingle_set(row.text) for row in rows], list[int](), set[int]()
    for number, own in enumerate(sets):
        if any(len(own & sets[each]) >= at_least * len(own | sets[each]) for each in kept if own & sets[each]):
            truth.add(rows[number].place)
        else:
            kept.append(number)
    return counts(truth, dropped(NearDuplicates(at_least=at_least), rows))


def repeated_paragraphs(texts: list[str], count: int, draw: random.Random) -> Counts:
    """A paragraph of an earlier document in the middle of a later one; the other lines are its own."""
    sources, hosts = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    planted = draw.sample(range(len(hosts) // 2), min(count, len(hosts) // 2))
    later = [f"{hosts[2 * number]}\n{hosts[2 * number + 1]}" for number in range(len(hosts) // 2)]
    for number in planted:
        later[number] = f"{hosts[2 * number]}\n{draw.choice(sources)}\n{hosts[2 * number + 1]}"
    rows = documents_of([*sources, *later])
    accounts = run_steps([rows], [RepeatedParagraphs()]).accounts
    found = {each.place for each in accounts if each.outcome != "kept"}
    return counts({rows[len(sources) + number].place for number in planted}, found)


# Personal data


def luhn(digits: str) -> str:
    """The digits and their check digit (ISO/IEC 7812-1)."""
    total = sum(
        sum(divmod(2 * int(digit), 10)) if place % 2 == 0 else int(digit) for place, digit in enumerate(digits[::-1])
    )
    return digits + str(-total % 10)


def digits_of(draw: random.Random, count: int) -> str:
    return "".join(draw.choice("0123456789") for _ in range(count))


def letters_of(draw: random.Random, count: int) -> str:
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(count))


def card(draw: random.Random) -> str:
    number = luhn("4" + digits_of(draw, 14))
    return draw.choice((number, " ".join(re.findall("....", number)), "-".join(re.findall("....", number))))


PERSONAL: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "email": lambda draw: ("Write to {}.", f"{letters_of(draw, 6)}.{letters_of(draw, 5)}@{letters_of(draw, 7)}.org"),
    "ip": lambda draw: (
        "The request came from {} at noon.",
        f"{draw.randrange(20, 90)}.{draw.randrange(16, 250)}.{draw.randrange(1, 250)}.{draw.randrange(1, 250)}",
    ),
    "key": lambda draw: (
        "export OPENAI_API_KEY={}",
        f"sk-{''.join(draw.choice('abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789') for _ in range(48))}",
    ),
    "card": lambda draw: ("The card {} was charged.", card(draw)),
    "phone": lambda draw: (
        "Call me at {} tomorrow.",
        f"+1 212-{draw.choice('23456789')}{digits_of(draw, 2)}-{digits_of(draw, 4)}",
    ),
    "phone of China": lambda draw: ("请拨打 {} 联系我。", f"13{draw.choice('56789')}{digits_of(draw, 8)}"),
    "id": lambda draw: (
        "His social security number is {}.",
        f"{draw.randrange(1, 665):03}-{draw.randrange(1, 99):02}-{draw.randrange(1, 9999):04}",
    ),
}
"""By kind of personal data a sentence with a place for it, and the data."""
TRAPS: tuple[Callable[[random.Random], str], ...] = (
    lambda draw: (
        f"Install version {draw.randrange(1, 9)}.{draw.randrange(0, 20)}.{draw.randrange(0, 20)}.{draw.randrange(0, 9)} first."
    ),
    lambda draw: f"Your order number is {digits_of(draw, 10)}.",
    lambda draw: f"The serial number 4{digits_of(draw, 14)}{draw.choice('0123456789')} has no check digit.",
    lambda draw: (
        f"It was sold for {draw.randrange(1, 999):,},{draw.randrange(100, 999)},{draw.randrange(100, 999)} dollars in {draw.randrange(1900, 2020)}."
    ),
    lambda draw: (
        f"See section {draw.randrange(1, 9)}.{draw.randrange(1, 9)}.{draw.randrange(1, 9)} and ISBN 978-{digits_of(draw, 1)}-{digits_of(draw, 4)}-{digits_of(draw, 4)}-{digits_of(draw, 1)}."
    ),
    lambda draw: f"@{letters_of(draw, 6)} wrote it in the years 1999-{draw.randrange(2000, 2024)}.",
)
"""Sentences with what looks like personal data."""


def valid_luhn(digits: str) -> bool:
    return luhn(digits[:-1]) == digits


def personal(texts: list[str], count: int, draw: random.Random) -> dict[str, Counts]:
    """Rows with one piece of personal data each, rows with a trap, and rows with neither."""
    outcome = dict[str, Counts]()
    traps = [draw.choice(TRAPS)(draw) for _ in range(count)]
    traps = [trap for trap in traps if not any(valid_luhn(digits) for digits in re.findall(r"\d{16}", trap))]
    for name, make in PERSONAL.items():
        sentences = [make(draw) for _ in range(count)]
        planted = [form.format(data) for form, data in sentences]
        hosts = draw.sample(texts, min(len(texts), 2 * count))
        with_data = [f"{hosts[number % len(hosts)]} {each}" for number, each in enumerate(planted)]
        with_traps = [f"{hosts[-1 - number % len(hosts)]} {each}" for number, each in enumerate(traps)]
        rows = documents_of([*with_data, *with_traps])
        accounts = run_steps([rows], [Personal()])
        after = {row.place: row.text for row in accounts.rows}
        changed = {each.place for each in accounts.accounts if each.outcome == "changed"}
        right = {
            row.place
            for row, (_, data), sentence in zip(rows, sentences, planted, strict=False)
            if data not in after[row.place] and len(after[row.place]) > len(row.text) - len(sentence)
        }
        outcome[name] = Counts(count, len(changed), len(right & changed))
    return outcome


# Benchmarks, spam, language, encoding


def contaminated(data: Path, texts: list[str], count: int, draw: random.Random) -> Counts:
    """Rows of a benchmark within documents, with other case, punctuation and numbers with separators.

    Traps are other questions by the same authors, which are no part of the benchmark.
    """
    lines = (data / "rl" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    questions = list(dict.fromkeys(json.loads(line)["question"] for line in lines))
    draw.shuffle(questions)
    benchmark, others = questions[:1000], questions[1000 : 1000 + count]
    planted = [disguised(question, draw) for question in draw.sample(benchmark, count)]
    hosts = [draw.choice(texts) for _ in range(2 * count)]
    dirt = [f"{host}\n{question}" for host, question in zip(hosts, planted, strict=False)]
    traps = [f"{host}\n{question}" for host, question in zip(hosts[count:], others, strict=True)]
    rows, places = shuffled([*texts, *traps], dirt, draw)
    return counts(places, dropped(Decontaminate((Benchmark("gsm8k", tuple(benchmark)),)), rows))


def disguised(text: str, draw: random.Random) -> str:
    kinds: tuple[Callable[[str], str], ...] = (
        str.upper,
        str.lower,
        lambda text: re.sub(r"[,.?!']", "", text),
        lambda text: re.sub(r"(\d)(\d{3})\b", r"\1,\2", text),
        lambda text: text.replace(" ", "\n", 3),
        lambda text: text[: -max(1, len(text) // 5)],
    )
    return draw.choice(kinds)(text)


def spam(texts: list[str], count: int, draw: random.Random) -> Counts:
    """Pages of spam of six kinds among pages of an encyclopedia, by all four sets of rules."""
    rows, places = shuffled(pages(texts), [draw.choice(SPAM)(draw) for _ in range(count)], draw)
    found = {
        each.place
        for each in run_steps([rows], [C4Rules(), GopherRules(), RepetitionRules(), FineWebRules()]).accounts
        if each.outcome == "dropped"
    }
    return counts(places, found)


SPAM: tuple[Callable[[random.Random], str], ...] = (
    lambda draw: "\n".join([f"Buy cheap {letters_of(draw, 6)} online now."] * draw.randrange(20, 60)),
    lambda draw: " ".join(draw.choice(("casino", "bonus", "win", "free", "slots", "poker")) for _ in range(300)),
    lambda draw: "\n".join(f"- {letters_of(draw, 5)} {letters_of(draw, 4)}" for _ in range(80)),
    lambda draw: "\n".join(f"Home | {letters_of(draw, 5)} | Login | # | {digits_of(draw, 4)} | $$$" for _ in range(40)),
    lambda draw: " ".join(letters_of(draw, draw.randrange(12, 25)) for _ in range(200)),
    lambda draw: "\n".join(f"{letters_of(draw, 4)} {letters_of(draw, 6)} read more..." for _ in range(60)),
)

LANGUAGES = {
    "de": "Der alte Müller ging jeden Morgen zum Fluss und sah den Schiffen nach. Niemand wusste, warum er dort so lange stand, denn das Wasser war kalt und der Wind blies heftig über die Felder.",
    "fr": "Le vieux meunier allait chaque matin à la rivière et regardait passer les bateaux. Personne ne savait pourquoi il y restait si longtemps, car l'eau était froide et le vent soufflait sur les champs.",
    "es": "El viejo molinero iba cada mañana al río y miraba pasar los barcos. Nadie sabía por qué se quedaba tanto tiempo, porque el agua estaba fría y el viento soplaba con fuerza sobre los campos.",
    "ru": "Старый мельник каждое утро ходил к реке и смотрел на проплывающие суда. Никто не знал, почему он стоит там так долго, ведь вода была холодной, а ветер сильно дул над полями.",
    "ja": "年老いた粉屋は毎朝川へ行き、通り過ぎる船を眺めていた。水は冷たく、風は畑の上を激しく吹いていたので、彼がなぜそんなに長くそこに立っているのか誰も知らなかった。",
}


def language(texts: list[str], count: int, draw: random.Random) -> Counts:
    """Documents in five other languages among English pages, each made of drawn sentences of its language."""

    def other() -> str:
        sentences = re.findall(r"[^.。]+[.。]", draw.choice(list(LANGUAGES.values())))
        return " ".join(draw.choice(sentences).strip() for _ in range(draw.randrange(2, 6)))

    rows, places = shuffled(pages(texts), [other() for _ in range(count)], draw)
    return counts(places, dropped(Language(keep=("en",)), rows))


def mojibake(data: Path, count: int, draw: random.Random) -> Counts:
    """Texts that were decoded as Windows-1252, among those that were not: right is one that is what it was."""
    base = [each for each in paragraphs(data) if any(ord(sign) > 127 for sign in each)][:count]
    wrong, right = list[str](), list[str]()
    for text in base:
        try:
            wrong.append(text.encode().decode("cp1252"))
        except UnicodeDecodeError:  # a byte that Windows-1252 does not have
            continue
        right.append(text)
    clean = [each for each in paragraphs(data) if each not in set(right)]
    rows = documents_of([*wrong, *clean])
    repaired = run_steps([rows], [Repair()])
    after = {row.place: row.text for row in repaired.rows}
    changed = {each.place for each in repaired.accounts if each.outcome != "kept"}
    clean_after = run_steps([documents_of(right)], [Repair()]).rows  # what else repair does to these
    is_right = {
        row.place for row, wanted in zip(rows, clean_after, strict=False) if after.get(row.place) == wanted.text
    }
    of_clean = {row.place for row in rows[len(wrong) :]}
    trimmed = {
        place for place in changed & of_clean if "".join(after[place].split()) == "".join(rows[place].text.split())
    }
    return Counts(len(wrong), len(changed - trimmed), len(is_right & changed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=300, help="how much is planted of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, count = random.Random(arguments.seed), arguments.rows
    texts = paragraphs(arguments.data)
    print(f"{len(texts):,} paragraphs of wiki_demo.txt, {count} planted of each kind, seed {arguments.seed}\n")
    print("| step | planted | found | precision | recall |\n|---|---|---|---|---|")
    print(exact(texts, count, draw).line("deduplicate.exact"))
    print(near(texts, count, draw).line("deduplicate.minhash"))
    print(repeated_paragraphs(texts, count, draw).line("deduplicate.paragraph"))
    for name, of_kind in personal(texts, count, draw).items():
        print(of_kind.line(f"personal: {name}"))
    print(contaminated(arguments.data, texts, count, draw).line("decontaminate"))
    print(spam(texts, count, draw).line("quality (four sets of rules)"))
    print(language(texts, count, draw).line("language"))
    print(mojibake(arguments.data, count, draw).line("repair"))


if __name__ == "__main__":
    main()
