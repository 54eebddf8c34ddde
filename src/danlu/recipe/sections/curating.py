"""The recipe of `danlu data clean`: sources of rows, the steps over them, and the folder of the data set.

The keys of a step are the settings of its class in `danlu.curation`, with the same defaults; a test says so.
"""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, ReadWith, Section, Share, VariantSection, default_section
from danlu.recipe.sections.data import Source

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class RepairStep(VariantSection):
    """Mends texts that were decoded wrongly; removes control characters and lines that pages have around their text."""

    kind: Literal["repair"] = "repair"
    boilerplate: bool = True
    """Remove lines such as "Share this" and notices of copyright from documents, in English and Chinese. Conversations
    keep all lines."""


class LanguageStep(VariantSection):
    """Keeps rows in some languages, by fastText's lid.176."""

    kind: Literal["language"] = "language"
    keep: Annotated[list[str], Field(min_length=1)]
    """Codes of languages, ISO 639-1 where there is one: [en, zh]."""
    at_least: Share = 0.65
    """Smallest probability of the language of a row that stays."""


class C4Rules(VariantSection):
    """Lines of documents that are no sentences go, and documents in which too few sentences are left."""

    kind: Literal["c4"] = "c4"
    sentences: Count = 5
    """Fewest sentences in the lines that stay."""
    words: Count = 3
    """Fewest words of a line, split at spaces."""
    longest_word: PositiveInt = 1000
    """Most characters of a word of a line that stays."""


class GopherRules(VariantSection):
    """Documents go by the number and length of their words, by symbols, bullets, ellipses, and missing stop words."""

    kind: Literal["gopher"] = "gopher"
    words: tuple[Count, Count] = (50, 100_000)
    """Fewest and most words that are not punctuation."""
    mean_length: tuple[Positive, Positive] = (3, 10)
    """Shortest and longest mean of their length, in characters."""
    symbols: Positive = 0.1
    """Most hash signs, and most ellipses, for each word."""
    bullet_lines: Share = 0.9
    """Largest share of lines that begin with a bullet or dash."""
    ellipsis_lines: Share = 0.3
    """Largest share of lines that end with an ellipsis."""
    alphabetic: Share = 0.8
    """Smallest share of words with a letter."""
    stop_words: Count = 2
    """Fewest different stop words."""


class RepetitionRules(VariantSection):
    """Documents go of which too much is repeated: lines, paragraphs, n-grams of words."""

    kind: Literal["gopher-repetition"] = "gopher-repetition"
    paragraphs: Share = 0.3
    """Largest share of repeated paragraphs."""
    paragraph_characters: Share = 0.2
    """Largest share of characters in them."""
    lines: Share = 0.3
    """Largest share of repeated lines."""
    line_characters: Share = 0.2
    """Largest share of characters in them."""
    top: list[tuple[PositiveInt, Share]] = [(2, 0.2), (3, 0.18), (4, 0.16)]
    """Pairs of n, and the largest share of characters in the most frequent n-gram."""
    repeated: list[tuple[PositiveInt, Share]] = [(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1)]
    """Pairs of n, and the largest share of characters in repeated n-grams."""


class FineWebRules(VariantSection):
    """Documents go that are lists of short lines."""

    kind: Literal["fineweb"] = "fineweb"
    punctuation: Share = 0.12
    """Smallest share of lines that end with a mark that ends sentences."""
    short_lines: Share = 0.67
    """Largest share of lines of at most 30 characters (10 in scripts without spaces)."""
    repeated: Share = 0.01
    """Largest share of characters in lines that repeat an earlier one."""
    line_ends: Positive = 0.3
    """Most line ends for each word."""


QualityRules = Annotated[C4Rules | GopherRules | RepetitionRules | FineWebRules, Field(discriminator="kind")]


class QualityStep(VariantSection):
    """Rules for documents and conversations, with the decisions of datatrove 0.10.1 given the same words."""

    kind: Literal["quality"] = "quality"
    rules: Annotated[list[QualityRules], Field(min_length=1)]
    """One or more of c4, gopher, gopher-repetition and fineweb, in the order in which they are applied; with settings
    as {kind: gopher, words: [30, 100000]}."""


class RepeatedParagraphs(Section):
    """The settings of paragraphs that stand in an earlier document."""

    words: PositiveInt = 8
    """Lines of fewer words stay, repeated or not."""
    drop_at: Share = 1.0
    """A document goes when this share of its characters or more is repeated lines."""


class DeduplicationStep(VariantSection):
    """Removes what an earlier row has: of duplicates the first by source and row stays."""

    kind: Literal["deduplicate"] = "deduplicate"
    by: Annotated[list[Literal["exact", "paragraph", "minhash"]], Field(min_length=1)] = ["exact", "minhash"]
    """exact: rows with the same roles and texts; paragraph: lines of documents, word for word; minhash: rows that share
    most runs of words, by MinHash and then the true Jaccard index. In the order in which they are applied."""
    words: PositiveInt = 5
    """minhash: the length of the runs of words; of short rows, of characters."""
    bands: tuple[PositiveInt, PositiveInt] = (14, 8)
    """minhash: the bands of a signature, and the values in each. Rows that share a band are compared."""
    at_least: Share = 0.75
    """minhash: the Jaccard index from which rows are duplicates."""
    paragraph: RepeatedParagraphs = default_section(RepeatedParagraphs)
    """paragraph: its settings."""


class PersonalStep(VariantSection):
    """Masks personal data in all texts of a row, or drops rows that have any."""

    kind: Literal["personal"] = "personal"
    action: Literal["mask", "drop"] = "mask"
    """mask it, or drop the row."""
    kinds: Annotated[list[Literal["email", "key", "ip", "card", "id", "phone"]], Field(min_length=1)] = [
        "email", "key", "ip", "card", "id", "phone"
    ]  # fmt: skip
    """The kinds that are looked for: e-mail addresses, keys of services, IP addresses, payment cards, national numbers,
    telephones."""
    mask: Annotated[str, ReadWith("action", "mask", "only read with action: mask")] = "[{kind}]"
    """The text in its place; {kind} in it is the kind in capitals."""
    regions: list[str] = ["US", "CN", "GB"]
    """Countries (ISO 3166) of telephone numbers without the code of one."""


class DecontaminateStep(VariantSection):
    """Drops rows that share a run of words with a row of a benchmark, or hold a shorter row of it whole."""

    kind: Literal["decontaminate"] = "decontaminate"
    against: Annotated[list[Source], Field(min_length=1)]
    """The benchmarks: files or hub data sets, as sources of rows; the text of a row is what its format reads."""
    words: PositiveInt = 13
    """The length of the runs of words."""
    shortest: PositiveInt = 8
    """Fewest words of a benchmark row that is looked for within lines; a shorter one must be a whole line."""


class SelectStep(VariantSection):
    """Keeps a number of rows that are drawn."""

    kind: Literal["select"] = "select"
    by: Literal["random", "quota"] = "random"
    """random draws from all rows; quota as many from each group, and what a small group lacks from the others."""
    rows: PositiveInt
    """How many rows stay."""
    of: Annotated[Literal["source", "language"], ReadWith("by", "quota", "only read with by: quota")] = "source"
    """The groups of a quota."""
    seed: Count = 0
    """Another seed draws other rows. More rows by the same seed hold fewer."""


CurationStep = Annotated[
    RepairStep | LanguageStep | QualityStep | DeduplicationStep | PersonalStep | DecontaminateStep | SelectStep,
    Field(discriminator="kind"),
]


class CurateRecipe(Section):
    """A recipe with `stage: curate`."""

    stage: Literal["curate"]
    """Data before training: rows are mended, judged and dropped."""
    data: Annotated[list[Source], Field(min_length=1)]
    """One or more sources of rows. Rows keep their form and their order."""
    steps: Annotated[list[CurationStep], Field(min_length=1)]
    """The steps in their order."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read: stop with its file and line, or drop it, with a line of the ledger."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes over shards; auto takes one per core. The result is the same."""
    keep_marks: bool = True
    """Keep what was measured in `output`/.work, so that other thresholds decide on it again."""
    output: str
    """The folder of the data set, empty or new: `data.train` of a recipe that trains on it."""
