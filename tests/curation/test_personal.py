"""Personal data is masked where it is, and numbers that only look like it stay."""

from __future__ import annotations

import pytest
from builders.curated_rows import conversation, documents, outcomes

from danlu.curation.personal.step import Personal
from danlu.curation.run_steps import run_steps

PERSONAL = [
    ("Write to jane.doe+news@mail.example.com.", "Write to [EMAIL]."),
    ("邮箱：li_wei@163.com，谢谢", "邮箱：[EMAIL]，谢谢"),
    ("<a@b.co>, (c.d@e-f.org)", "<[EMAIL]>, ([EMAIL])"),
    ("It came from 81.2.69.142, and 2001:4860:4860::8888 too.", "It came from [IP], and [IP] too."),
    ("from 2a02:8109:b540::1", "from [IP]"),
    ("card 4111 1111 1111 1111, or 4111-1111-1111-1111.", "card [CARD], or [CARD]."),
    ("Amex 378282246310005; Mastercard 5555555555554444", "Amex [CARD]; Mastercard [CARD]"),
    ("her SSN is 536-90-4399.", "her SSN is [ID]."),
    ("身份证11010519491231002X。", "身份证[ID]。"),
    ("Konto DE89 3704 0044 0532 0130 00, CPF 390.533.447-05", "Konto [ID], CPF [ID]"),
    ("NIR 2 95 10 99 126 111 93; RSSMRA85T10A562S", "NIR [ID]; [ID]"),
    ("Call +1 415-555-2671 or (212) 736-5000.", "Call [PHONE] or [PHONE]."),
    ("UK: +44 20 7031 3000, 020 7031 3000", "UK: [PHONE], [PHONE]"),
    ("手机：13812345678，座机 010-62781234", "手机：[PHONE]，座机 [PHONE]"),
    ("Phone: 2127365000", "Phone: [PHONE]"),
    ("It was considered. 13812345678", "It was considered. [PHONE]"),  # an "id" within a word
    ("key=sk-proj-abcdEFGH1234abcdEFGH1234", "key=[KEY]"),
    ("AKIAIOSFODNN7EXAMPLE and ghp_16C7e42F292c6912E7710c838347Ae178B4a", "[KEY] and [KEY]"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE1\n-----END RSA PRIVATE KEY-----\n", "[KEY]\n"),
]
OTHERS = [
    "version 10.21.69.142 of Chrome/91.20.44.124 and numpy-1.24.33.10, v81.2.69.142",
    "see section 81.2.69.142 and 1.2.3.4, or 10.0.0.1, 192.168.1.1, 127.0.0.1, 300.1.1.1, 81.2.69.142.7",
    "12:30:45 std::vector<int> a::b 2001:db8 dead::beef",
    "card 4111 1111 1111 1112, and 1234 5678 9012 3456",  # Luhn; no issuer
    "0.4111111111111111 and 4111111111111111.5",
    "000-12-3456 and 123-45-67890",  # no number is given out with these
    "110105194912310021 and A11010519491231002X",  # a check digit; a letter before
    "Order 2127365000 was shipped; invoice no. 212-736-5000",
    "订单号：13812345678",
    "2127365000 people",  # without a word for telephones
    "the excellent hotel 2127365000",  # nor are "cell" and "tel" within a word
    "2020-01-15 12:30, 1990-2000, 978-3-16-148410-0, 3.14159265358979, 1,234,567,890",
    "x = 2127365000.5; 100000000; #8005551234; $2127365000",
    "a@b, @handle, user@localhost, a..b@c.com, 5@3",
    "sk-learn-contributions-are-welcome-here",
    "task-force-abcdefghijklmnop1234567",
]


@pytest.mark.parametrize(("text", "masked"), PERSONAL)
def test_personal_data_is_masked_to_the_character(text: str, masked: str) -> None:
    (row,) = run_steps([documents(text)], [Personal()]).rows
    assert row.text == masked


@pytest.mark.parametrize("text", OTHERS)
def test_what_only_looks_like_it_stays(text: str) -> None:
    (row,) = run_steps([documents(text)], [Personal()]).rows
    assert row.text == text


def test_verdicts_count_what_they_name() -> None:
    text = "a@b.org, c@d.org and 81.2.69.142"
    (account,) = run_steps([documents(text)], [Personal()]).accounts
    ((_, verdict),) = account.decisions
    assert (account.outcome, verdict.reason, verdict.value, verdict.threshold) == (
        "changed",
        "personal: email, ip",
        3,
        0,
    )
    rows = documents(text, "nothing", "4111 1111 1111 1111")
    drop = Personal(action="drop", kinds=("email", "phone"))
    assert outcomes(rows, drop) == [("dropped", "personal: email"), ("kept", ""), ("kept", "")]


def test_all_parts_of_a_conversation_are_masked() -> None:
    rows = [conversation(0, "I am a@b.org", "Hello", "and c@d.org", system="for e@f.org")]
    (row,) = run_steps([rows], [Personal(mask="<{kind}>")]).rows
    assert [part.text for part in row.parts] == ["for <EMAIL>", "I am <EMAIL>", "Hello", "and <EMAIL>"]
