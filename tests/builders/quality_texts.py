"""Documents near the bounds of quality rules: random mixtures of the kinds of lines that the rules look for."""

from __future__ import annotations

import random

WORDS = [
    "the", "of", "and", "to", "that", "with", "have", "a", "in", "on", "it", "was", "for", "as", "his", "at", "by",
    "from", "old", "house", "river", "stone", "light", "morning",
]  # fmt: skip
_SHORT = ("Home", "Contact us", "• milk", "- eggs", "# # #", "...", "42", "Read more…", "!!!", "")
_ODD = (
    "Please read our privacy policy before you go on.",
    "This page needs JavaScript to be shown as it should.",
    "Lorem ipsum dolor sit amet.",
    "if (a) { return b; } is how it ends.",
    "He was born here [1] and died there [citation needed].",
    "We found out that nothing was there... ",
)


def quality_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    texts = ["", " ", "\n\n", "the " * 60, "and that " * 40 + ".", "word\n" * 80]
    while len(texts) < count:
        lines = list[str]()
        odd, short, again = (
            draw.choice([0, 0, 0, 0.1]),
            draw.choice([0, 0.1, 0.5, 0.9]),
            draw.choice([0, 0, 0.02, 0.2, 0.5]),
        )
        vocabulary = draw.sample(WORDS, draw.choice([3, 8, len(WORDS)]))
        for _ in range(draw.randrange(1, 30)):
            kind = draw.random()
            if lines and kind < again:
                lines.append(draw.choice(lines))
            elif draw.random() < odd:
                lines.append(draw.choice(_ODD))
            elif draw.random() < short:
                lines.append(draw.choice(_SHORT))
            else:
                words = draw.choices(vocabulary, k=draw.randrange(2, 25))
                lines.append(
                    " ".join(words).capitalize() + draw.choice([".", ".", "!", "", ". And so it went on.", "..."])
                )
        texts.append(draw.choice(["\n", "\n", "\n\n"]).join(lines))
    return texts
