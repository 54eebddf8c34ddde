"""E-mail addresses, IP addresses and keys of programming interfaces in a text."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from danlu.curation.personal.spans import Span, is_preceded

_EMAIL = re.compile(
    r"(?<![\w.%+-])[A-Za-z0-9][\w.%+-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.)+[A-Za-z]{2,24}(?![\w-])", re.ASCII
)
# Borders on the left stand behind the first character: the engine then skips to characters that can begin a match.
_IPV4 = re.compile(r"[0-9](?<![\w.].)[0-9]{0,2}\.(?:[0-9]{1,3}\.){2}[0-9]{1,3}(?![\w]|\.[0-9])", re.ASCII)
_IPV6 = re.compile(
    r"[23](?<![\w:.].)[0-9a-f]{3}:(?:[0-9a-f]{0,4}:){1,6}[0-9a-f]{0,4}(?![\w:])", re.IGNORECASE | re.ASCII
)
# "OpenSSL/1.1.1.20" and "numpy-1.24.3.10" too: a name that a version is written behind.
_VERSION = re.compile(
    r"(?:\b(?:version|ver|v|release|build|section|sec|chapter|figure|fig|table|driver|firmware|update|upgrade|patch"
    r"|clause|article|rule|item|python|java|kernel)\b[\s.:#(]*|[A-Za-z][/_-]|§\s*|(?:版本|第|章|节)[号:：\s]*)$",
    re.IGNORECASE,
)
_KEY_MARKS = (
    "sk-",
    "sk_",
    "rk_",
    "AKIA",
    "ASIA",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "AIza",
    "xox",
    "hf_",
    "eyJ",
    "-----BEGIN",
)
_KEY = re.compile(
    r"(?<![\w-])(?:"
    r"sk-(?:proj-|ant-|or-)?[A-Za-z0-9_-]{20,}"  # OpenAI and others that write keys like it
    r"|(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}"  # Stripe
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # Amazon
    r"|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,}|glpat-[A-Za-z0-9_-]{20,}"  # GitHub, GitLab
    r"|AIza[A-Za-z0-9_-]{35}"  # Google
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|hf_[A-Za-z0-9]{30,}"  # Hugging Face
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"  # JSON web tokens
    r")(?![\w-])"
    r"|-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----[\s\S]{1,8192}?-----END (?:[A-Z]+ )*PRIVATE KEY-----",
    re.ASCII,
)


def emails(text: str) -> Iterator[Span]:
    """E-mail addresses, without a full stop behind them."""
    if "@" in text:
        yield from (match.span() for match in _EMAIL.finditer(text) if ".." not in match.group())


def ip_addresses(text: str) -> Iterator[Span]:
    """Public IP addresses of both versions.

    Four numbers are a version or a section where a word for it stands before them, or where each has one digit. Private
    and reserved addresses say nothing about anybody.
    """
    for match in _IPV4.finditer(text):
        is_version = len(match.group()) == 7 or is_preceded(text, match.start(), _VERSION)
        if not is_version and _is_public(match.group()):
            yield match.span()
    if ":" in text:
        yield from (match.span() for match in _IPV6.finditer(text) if _is_public(match.group()))


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def api_keys(text: str) -> Iterator[Span]:
    """Keys and tokens by the forms that their makers give them, and private keys in PEM. All have a digit."""
    if not any(mark in text for mark in _KEY_MARKS):
        return
    for match in _KEY.finditer(text):
        if any(map(str.isdigit, match.group())):
            yield match.span()
