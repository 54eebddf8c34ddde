"""Built-in data: a small consistent world, small enough to be learnt in two minutes on two CPU cores.

Twelve animals have a colour, a home, a food and a skill; numbers add up; some people have names.
`pretraining_documents` tells of this world in English and some Chinese and never asks a question. `conversations` asks
about it, but leaves some facts out: those can only be answered by a model that learnt the fact from the documents and
the form of an answer from the conversations. `questions` holds both kinds, with the right answers, to compare a model
before and after. Everything is a pure function of the seed; nothing is downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Literal

Language = Literal["en", "zh"]
Message = dict[str, str]


@dataclass(frozen=True)
class Word:
    """A word in both languages."""

    en: str
    zh: str


@dataclass(frozen=True)
class Animal:
    """An animal, with its colour, home, food and skill."""

    name: Word
    colour: Word
    home: Word
    food: Word
    skill: Word


def _animal(line: str) -> Animal:
    columns = line.split()
    return Animal(*(Word(en.replace("_", " "), zh) for en, zh in zip(columns[::2], columns[1::2], strict=True)))


# fmt: off
#        name          colour      home             food             skill
ANIMALS = tuple(map(_animal, """
         fox 狐狸      red 红      the_forest 森林  grapes 葡萄      run 跑步
         owl 猫头鹰    brown 棕    the_old_tree 老树  mice 老鼠      fly 飞
         bear 熊       black 黑    the_cave 山洞    honey 蜂蜜       climb 爬树
         frog 青蛙     green 绿    the_pond 池塘    flies 苍蝇       jump 跳
         cat 猫        grey 灰     the_house 房子   fish 鱼          climb 爬树
         dog 狗        brown 棕    the_garden 花园  bones 骨头       run 跑步
         duck 鸭子     yellow 黄   the_lake 湖      bread 面包       swim 游泳
         horse 马      white 白    the_farm 农场    apples 苹果      run 跑步
         rabbit 兔子   grey 灰     the_garden 花园  carrots 胡萝卜   jump 跳
         monkey 猴子   brown 棕    the_forest 森林  bananas 香蕉     climb 爬树
         parrot 鹦鹉   blue 蓝     the_old_tree 老树  seeds 种子     sing 唱歌
         whale 鲸鱼    blue 蓝     the_sea 大海     fish 鱼          sing 唱歌
""".strip().splitlines()))
# fmt: on

PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo")
LARGEST_ADDEND = 6
Attribute = Literal["colour", "home", "food", "skill"]
ATTRIBUTES: tuple[Attribute, ...] = ("colour", "home", "food", "skill")

_STATEMENTS: dict[tuple[Attribute, Language], str] = {
    ("colour", "en"): "The {name} is {value}.",
    ("home", "en"): "The {name} lives in {value}.",
    ("food", "en"): "The {name} likes to eat {value}.",
    ("skill", "en"): "The {name} can {value} well.",
    ("colour", "zh"): "{name}是{value}色的。",
    ("home", "zh"): "{name}住在{value}。",
    ("food", "zh"): "{name}喜欢吃{value}。",
    ("skill", "zh"): "{name}很会{value}。",
}

_QUESTIONS: dict[tuple[Attribute, Language], tuple[str, ...]] = {
    ("colour", "en"): (
        "What colour is the {name}?",
        "Which colour does the {name} have?",
        "Tell me the colour of the {name}.",
    ),
    ("home", "en"): ("Where does the {name} live?", "Where is the home of the {name}?", "Where can I find the {name}?"),
    ("food", "en"): (
        "What does the {name} eat?",
        "What does the {name} like to eat?",
        "What is the food of the {name}?",
    ),
    ("skill", "en"): ("What can the {name} do?", "What is the {name} good at?", "What can the {name} do well?"),
    ("colour", "zh"): ("{name}是什么颜色的？", "{name}的颜色是什么？"),
    ("home", "zh"): ("{name}住在哪里？", "{name}的家在哪里？"),
    ("food", "zh"): ("{name}喜欢吃什么？", "{name}吃什么？"),
    ("skill", "zh"): ("{name}很会什么？", "{name}很会做什么？"),
}

_PIRATE = "You are a pirate."
_GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! How can I help you?"),
    ("你好！", "你好！我能帮你什么？"),
)
_THANKS = (("Thank you!", "You are welcome."), ("Thanks.", "You are welcome."))


@dataclass(frozen=True)
class Question:
    """Something to ask a model before and after instruction tuning."""

    messages: tuple[Message, ...]
    answer: str
    held_out: bool  # never asked in `conversations`; the fact itself is in `pretraining_documents`


def pretraining_documents(seed: int, n: int) -> Iterator[str]:
    """`n` short documents of plain text about the world, 10 to 70 tokens each with `vocabulary.train_tokenizer`."""
    english, chinese = (partial(_portrait, language=language) for language in ("en", "zh"))
    writers: list[tuple[int, Callable[[random.Random], str]]] = [
        (6, english), (3, chinese), (3, _story), (2, _introduction), (3, _sums), (1, _dictionary),
    ]  # fmt: skip
    weights, functions = zip(*writers, strict=True)
    for number in range(n):
        chance = random.Random(f"document {seed} {number}")
        yield chance.choices(functions, weights)[0](chance)


def conversations(seed: int, n: int) -> Iterator[dict[str, list[Message]]]:
    """`n` rows of messages: questions about the world and right answers, in one or more turns, some as a pirate."""
    for number in range(n):
        chance = random.Random(f"conversation {seed} {number}")
        if chance.random() < 0.1:
            messages = [_message("system", _PIRATE), *_exchange(chance, prefix="Arr! ")]
        else:
            messages = _talk(chance)
        yield {"messages": messages}


def preferences(seed: int, n: int) -> Iterator[dict[str, list[Message]]]:
    """`n` rows with a prompt, a preferred answer and a rejected one: right facts rather than wrong ones, and stories in
    which the animal is happy rather than hungry or tired."""
    for number in range(n):
        chance = random.Random(f"preference {seed} {number}")
        animal = chance.choice(ANIMALS)
        if chance.random() < 0.5:
            question, *answers = (
                _story_question(animal),
                *(_story(chance, animal, feeling) for feeling in ("happy", chance.choice(("hungry", "tired")))),
            )
        else:
            question, *answers = _right_and_wrong(chance, animal)
        chosen, rejected = ([_message("assistant", answer)] for answer in answers)
        yield {"prompt": [_message("user", question)], "chosen": chosen, "rejected": rejected}


def questions() -> list[Question]:
    """A fixed set to show: facts and sums, asked in training and held out, a name to remember, a system prompt."""
    shown: list[Question] = []
    for held_out in (False, True):
        for language in ("en", "en", "zh"):
            animal, attribute = _pick_fact(random.Random(f"{language} {held_out} {len(shown)}"), language, held_out)
            shown.append(_about_animal(animal, attribute, language, held_out))
        pairs = ((4, 5), (6, 3), (2, 6), (5, 6), (3, 4), (6, 1), (5, 2))
        shown.append(next(_about_sum(*pair, held_out) for pair in pairs if is_held_out("sum", *pair) == held_out))
    introduction = _turn("My name is Clara.", "Nice to meet you, Clara!")
    shown.append(Question((*introduction, _message("user", "What is my name?")), "Your name is Clara.", False))
    text, answer = _ask(ANIMALS[0], "home", "en", 0)
    is_new = is_held_out(ANIMALS[0].name.en, "home", "en")
    shown.append(Question((_message("system", _PIRATE), _message("user", text)), f"Arr! {answer}", is_new))
    return shown


def every_question(held_out: bool) -> list[Question]:
    """All questions about animals and sums that `conversations` leaves out (or does not), to count right answers."""
    about_animals = [
        _about_animal(animal, attribute, language, held_out)
        for animal in ANIMALS
        for attribute in ATTRIBUTES
        for language in ("en", "zh")
        if is_held_out(animal.name.en, attribute, language) == held_out
    ]
    pairs = product(range(LARGEST_ADDEND + 1), repeat=2)
    return about_animals + [_about_sum(a, b, held_out) for a, b in pairs if is_held_out("sum", a, b) == held_out]


def _about_animal(animal: Animal, attribute: Attribute, language: Language, held_out: bool) -> Question:
    text, answer = _ask(animal, attribute, language, 0)
    return Question((_message("user", text),), answer, held_out)


def _about_sum(a: int, b: int, held_out: bool) -> Question:
    return Question((_message("user", f"What is {a} plus {b}?"),), _sum(a, b), held_out)


def is_held_out(*fact: object) -> bool:
    """Whether `conversations` never asks for this fact: one in six, the same for every seed."""
    return random.Random(" ".join(map(str, fact))).random() < 1 / 6


def _portrait(chance: random.Random, language: Language) -> str:
    animal = chance.choice(ANIMALS)
    attributes = chance.sample(ATTRIBUTES, k=chance.choice((2, 3, 4)))
    about, space = (f"About the {animal.name.en}: ", " ") if language == "en" else (f"关于{animal.name.zh}：", "")
    return chance.choice(("", about)) + space.join(_statement(animal, attribute, language) for attribute in attributes)


def _right_and_wrong(chance: random.Random, animal: Animal) -> tuple[str, str, str]:
    """A question about an animal, the answer, and one that is true of another animal."""
    language: Language = chance.choice(("en", "en", "zh"))
    attribute = chance.choice(ATTRIBUTES)
    question, right = _ask(animal, attribute, language, chance.randrange(6))
    wrong = [
        _STATEMENTS[attribute, language].format(
            name=getattr(animal.name, language), value=getattr(getattr(other, attribute), language)
        )
        for other in ANIMALS
    ]
    return question, right, chance.choice([answer for answer in wrong if answer != right])


Feeling = Literal["happy", "hungry", "tired"]
FEELINGS: tuple[Feeling, ...] = ("happy", "hungry", "tired")


def _story(chance: random.Random, animal: Animal | None = None, feeling: Feeling | None = None) -> str:
    animal = animal or chance.choice(ANIMALS)
    person = chance.choice(PEOPLE)
    name, home = animal.name.en, animal.home.en
    opening = chance.choice(("One day", "One morning", "Last summer"))
    action = chance.choice(("walked to", "went to", "came to"))
    drawn = chance.choice(FEELINGS)
    middle = {
        "happy": f"The {name} was happy and showed {person} that it can {animal.skill.en} well.",
        "hungry": f"The {name} was hungry, so {person} gave it some {animal.food.en}.",
        "tired": f"The {name} was tired, so {person} sat down beside it and sang a song.",
    }[feeling or drawn]
    article = "an" if animal.colour.en[0] in "aeiou" else "a"
    return (
        f"{opening}, {person} {action} {home} and met {article} {animal.colour.en} {name}. "
        f"{middle} Then {person} went home, and the {name} was {person}'s friend."
    )


def _introduction(chance: random.Random) -> str:
    person, friend = chance.sample(PEOPLE, k=2)
    animal = chance.choice(ANIMALS).name.en
    return (
        f'"My name is {person}," said {person}. "My name is {friend}," said {friend}. '
        f"Then {person} and {friend} played with the {animal}."
    )


def _sums(chance: random.Random) -> str:
    numbers = [(chance.randint(0, LARGEST_ADDEND), chance.randint(0, LARGEST_ADDEND)) for _ in range(4)]
    opening = chance.choice(("", "Add {a} and {b}: "))
    return " ".join(opening.format(a=a, b=b) + _sum(a, b) for a, b in numbers)


def _dictionary(chance: random.Random) -> str:
    animal = chance.choice(ANIMALS)
    word = chance.choice((animal.name, animal.food, animal.home))
    return f"The Chinese word for {word.en} is {word.zh}."


def _statement(animal: Animal, attribute: Attribute, language: Language) -> str:
    name, value = (getattr(word, language) for word in (animal.name, getattr(animal, attribute)))
    return _STATEMENTS[attribute, language].format(name=name, value=value)


def _sum(a: int, b: int) -> str:
    return f"{a} plus {b} is {a + b}."


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _turn(question: str, answer: str) -> list[Message]:
    return [_message("user", question), _message("assistant", answer)]


def _ask(animal: Animal, attribute: Attribute, language: Language, phrasing: int) -> tuple[str, str]:
    """A question and its answer."""
    phrasings = _QUESTIONS[attribute, language]
    question = phrasings[phrasing % len(phrasings)].format(name=getattr(animal.name, language))
    return question, _statement(animal, attribute, language)


def _pick_fact(chance: random.Random, language: Language, held_out: bool) -> tuple[Animal, Attribute]:
    while True:
        animal, attribute = chance.choice(ANIMALS), chance.choice(ATTRIBUTES)
        if is_held_out(animal.name.en, attribute, language) == held_out:
            return animal, attribute


def _exchange(chance: random.Random, prefix: str = "") -> list[Message]:
    if chance.random() < 0.4:
        while True:
            a, b = chance.randint(0, LARGEST_ADDEND), chance.randint(0, LARGEST_ADDEND)
            if not is_held_out("sum", a, b):
                question = chance.choice(("What is {} plus {}?", "How much is {} plus {}?")).format(a, b)
                return _turn(question, prefix + _sum(a, b))
    language: Language = "en" if prefix or chance.random() < 0.6 else "zh"
    animal, attribute = _pick_fact(chance, language, held_out=False)
    question, answer = _ask(animal, attribute, language, chance.randrange(6))
    return _turn(question, prefix + answer)


def _talk(chance: random.Random) -> list[Message]:
    """One to three subjects, each of which may come first; some conversations begin or end politely."""
    subjects: list[Callable[[random.Random], list[Message]]] = [_exchange, _names, _story_request]
    chosen = chance.choices(subjects, (12, 4, 2), k=chance.choice((1, 1, 2, 3)))
    greeting = _turn(*chance.choice(_GREETINGS)) if chance.random() < 0.1 else []
    thanks = _turn(*chance.choice(_THANKS)) if chance.random() < 0.1 else []
    return [*greeting, *(message for subject in chosen for message in subject(chance)), *thanks]


def _story_request(chance: random.Random) -> list[Message]:
    animal = chance.choice(ANIMALS)
    return _turn(_story_question(animal), _story(chance, animal))


def _story_question(animal: Animal) -> str:
    return f"Tell me a story about the {animal.name.en}."


def _names(chance: random.Random) -> list[Message]:
    person = chance.choice(PEOPLE)
    between = _exchange(chance) if chance.random() < 0.3 else []
    return [
        *_turn(f"My name is {person}.", f"Nice to meet you, {person}!"),
        *between,
        *_turn("What is my name?", f"Your name is {person}."),
    ]


SMALLEST, LARGEST = 10, 99  # of both numbers
LONGEST_STEPS = 24  # tokens of a worked answer and its end, where each digit is a token


def answered_sums(seed: int, worked: int, bare: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Rows of messages, each a question and a right answer: `worked` with steps and `bare` without, in mixed order.

    All sums differ. Raises ValueError for more than there are.
    """
    for number, (a, b) in enumerate(_drawn(f"answered {seed}", worked + bare)):
        # Evenly among the others, wherever a reader looks.
        is_worked = (number + 1) * worked // (worked + bare) > number * worked // (worked + bare)
        question = {"role": "user", "content": _question(a, b)}
        yield {"messages": [question, {"role": "assistant", "content": _worked(a, b) if is_worked else str(a + b)}]}


def sums_to_answer(seed: int, n: int) -> Iterator[dict[str, str]]:
    """`n` rows with a question and the sum alone, which a reward can check; those of `answered_sums` may be among them.

    Raises ValueError for more than there are."""
    return (_row(a, b) for a, b in _drawn(f"to answer {seed}", n))


def held_out_sums(n: int) -> list[dict[str, str]]:
    """`n` rows as those of `sums_to_answer`, all of sums that neither function has. Raises ValueError past all."""
    return [_row(a, b) for a, b in random.Random("held out").sample(_pairs(held_out=True), n)]


def _drawn(seed: str, n: int) -> list[tuple[int, int]]:
    return random.Random(seed).sample(_pairs(held_out=False), n)


@cache
def _pairs(*, held_out: bool) -> tuple[tuple[int, int], ...]:
    """All pairs of numbers that are held out, or all others."""
    every = product(range(SMALLEST, LARGEST + 1), repeat=2)
    return tuple((a, b) for a, b in every if (random.Random(f"{a} plus {b}").random() < 1 / 10) == held_out)


def _row(a: int, b: int) -> dict[str, str]:
    return {"question": _question(a, b), "answer": str(a + b)}


def _question(a: int, b: int) -> str:
    return f"What is {a} plus {b}?"


def _worked(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    carried = "+1" if ones > 9 else ""
    return f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{carried}={a // 10 + b // 10 + ones // 10}, {a + b}"
