"""Numbers of cards, accounts, persons and telephones in a text, each by its form and its check digits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from danlu.curation.packages import require
from danlu.curation.personal.spans import Span, is_preceded

# Borders on the left stand behind the first character: the engine then skips to characters that can begin a match.
_CARD = re.compile(r"[2-6](?<![\w.,-].)[0-9]{3}(?:[ -]?[0-9]{4}){2}[ -]?[0-9]{1,7}(?![\w]|[.,-][0-9])", re.ASCII)
_SHORT_CARD = re.compile(r"3(?<![\w.,-].)[0-9]{3}[ -]?[0-9]{6}[ -]?[0-9]{4,5}(?![\w]|[.,-][0-9])", re.ASCII)
_LONG = re.compile(r"[0-9][0-9A-Za-f.:() -]{5,}[0-9A-Za-f]")
_ISSUERS = re.compile(
    r"4[0-9]{12}(?:[0-9]{3}(?:[0-9]{3})?)?|(?:5[1-5]|2[2-7])[0-9]{14}|3[47][0-9]{13}|3(?:0[0-5]|[68][0-9])[0-9]{11}"
    r"|(?:6011|65[0-9]{2}|64[4-9][0-9]|35[0-9]{2})[0-9]{12}|62[0-9]{14,17}"
)
"""Digits of cards: Visa, Mastercard, American Express, Diners Club, Discover and JCB, UnionPay."""
_NATIONAL_IDS = {
    "us.ssn": r"[0-9]{3}-[0-9]{2}-[0-9]{4}",
    "cn.ric": r"[1-9][0-9]{16}[0-9Xx]",
    "kr.rrn": r"[0-9]{6}-[0-9]{7}",
    "br.cpf": r"[0-9]{3}\.[0-9]{3}\.[0-9]{3}-[0-9]{2}",
    "in_.aadhaar": r"[2-9][0-9]{3} [0-9]{4} [0-9]{4}",
    "fr.nir": r"[12] ?[0-9]{2} ?[0-9]{2} ?[0-9AB]{2} ?[0-9]{3} ?[0-9]{3} ?[0-9]{2}",
    "it.codicefiscale": r"[A-Z]{6}[0-9]{2}[A-Z][0-9]{2}[A-Z][0-9]{3}[A-Z]",
    "es.dni": r"[0-9]{8}-?[A-Z]",
    "iban": r"[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?",
}
"""Modules of python-stdnum, and the forms in which numbers are looked for: none that any number of some digits has."""
_ID = re.compile(
    r"(?<![\w-])(?:" + "|".join(f"({form})" for form in _NATIONAL_IDS.values()) + r")(?![\w]|-[0-9])",
    re.ASCII,
)
_PHONE = re.compile(
    r"[+(0-9](?<![\w.,/$€£¥#-].)(?:[0-9(]|[ ().-]{1,2}(?=[0-9(])){6,20}(?<=[0-9])(?![\w]|[.,/-][0-9])", re.ASCII
)
_PHONE_WORD = re.compile(
    r"(?<![a-z])(?:[a-z]*phones?|tel|call(?:s|ed|ing)?|mobiles?|cell|fax|whatsapp|contacts?|hotline|sms|dial)(?![a-z])"
    r"|电话|手机|联系|传真|热线|致电",
    re.IGNORECASE,
)
_OTHER_NUMBER = re.compile(
    r"(?<![a-z])(?:orders?|invoices?|tickets?|ref(?:erence)?|track(?:ing)?|parcels?|serial|isbn|issn|doi|parts?|models?"
    r"|items?|sku|ids?|accounts?|cases?|patents?|version)(?![a-z])|订单|单号|编号|序列号|快递|发票|工单|账号",
    re.IGNORECASE,
)


def has_long_number(text: str) -> bool:
    """Whether a digit begins a run of 7 digits, hexadecimal ones, capitals and separators, as in every number here."""
    return _LONG.search(text) is not None


def cards(text: str) -> Iterator[Span]:
    """Numbers of payment cards: digits of an issuer in groups, with Luhn's check digit."""
    for form in (_CARD, _SHORT_CARD):
        for match in form.finditer(text):
            digits = re.sub("[ -]", "", match.group())
            if _ISSUERS.fullmatch(digits) and require("stdnum.luhn").is_valid(digits):
                yield match.span()


def national_ids(text: str) -> Iterator[Span]:
    """Numbers that states give to persons, and of bank accounts, that are valid."""
    for match in _ID.finditer(text):
        module = list(_NATIONAL_IDS)[(match.lastindex or 1) - 1]
        if require(f"stdnum.{module}").is_valid(match.group()):
            yield match.span()


def phones(text: str, regions: tuple[str, ...]) -> Iterator[Span]:
    """Telephone numbers that are valid: international ones, and national ones of some regions (ISO 3166).

    Digits without a plus and without groups are one only behind a word for it, such as "call"; a mobile number of China
    is known by its form. Behind a word for other numbers, such as "order", none is.
    """
    for match in _PHONE.finditer(text):
        number, start = match.group(), match.start()
        if is_preceded(text, start, _OTHER_NUMBER) and not is_preceded(text, start, _PHONE_WORD):
            continue
        is_bare = number.isdigit()
        is_mobile = is_bare and "CN" in regions and re.fullmatch("1[3-9][0-9]{9}", number) is not None
        if is_bare and not is_mobile and not is_preceded(text, start, _PHONE_WORD):
            continue
        if _is_phone(number, regions):
            yield match.span()


def _is_phone(number: str, regions: tuple[str, ...]) -> bool:
    """Whether it is a valid number of a region, with no group of digits split that is written as one there."""
    library = require("phonenumbers")
    is_grouped = library.Leniency.STRICT_GROUPING
    return any(
        any(match.raw_string == number for match in library.PhoneNumberMatcher(number, region, is_grouped, 1))
        for region in ((None,) if number.startswith("+") else regions)
    )
