"""The grammar of the answer that a request asks for: of a form, or of calls that have to be."""

from __future__ import annotations

from danlu.core.errors import DanluError
from danlu.inference.grammar import after_opened_thought
from danlu.serving.forced_calls import forced_calls_grammar, forced_form
from danlu.serving.openai_api import ApiError, ChatBody, SamplingBody
from danlu.serving.served_models import ServedModel


def grammar_of(body: SamplingBody, model: ServedModel, opened: str | None = None) -> str | None:
    """Returns the grammar of the form that a request asks for, compiled; None for any text.

    opened: the mark of a thought that the answer goes on with; the form is that of the text behind it.

    Raises ApiError for a form that no answer can have.
    """
    form = body.form()
    if form is None:
        return None
    return compiled(form[1], model, opened, form[0])


def chat_grammar_of(body: ChatBody, model: ServedModel, opened: str | None) -> str | None:
    """Likewise of a chat, where the form may be that of calls of tools."""
    if not body.forced_tools:
        return grammar_of(body, model, opened)
    form, tokenizer = forced_form(model.read_calls.form), model.chat_tokenizer.tokenizer
    grammar = forced_calls_grammar(form, body.forced_tools, tokenizer, several=body.may_call_several)
    return compiled(grammar, model, opened, "tools")


def compiled(grammar: str, model: ServedModel, opened: str | None, param: str) -> str:
    """Returns a grammar for answers that go on with a thought, where one is opened, after compiling it.

    Raises ApiError for one that no answer can follow. param: the parameter that it comes from.
    """
    assert model.grammars is not None, "a model that answers has a tokenizer"
    grammar = after_opened_thought(grammar, model.chat_tokenizer.tokenizer, opened or "")
    try:
        model.grammars.compile(grammar)
    except DanluError as error:
        raise ApiError(f"{param}: {error}", param=param) from None
    return grammar
