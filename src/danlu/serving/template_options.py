"""How a request's conversation becomes a prompt: variables of the chat template, and an answer that is begun."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, model_validator

from danlu.recipe.rules.model import TEMPLATE_ARGUMENTS


class TemplateBody(BaseModel):
    """The parameters of a conversation's prompt, as vLLM has them."""

    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as {"enable_thinking": false}; before those of the server."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of the assistant's turn: by default, unless the last is continued."""
    continue_final_message: bool = False
    """The last message is the beginning of the answer, which goes on with it."""

    @model_validator(mode="after")
    def _check_template_options(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message: the answer goes on with the last message or begins a turn "
                "(add_generation_prompt); leave out one of both"
            )
        if taken := [name for name in TEMPLATE_ARGUMENTS if name in self.chat_template_kwargs]:
            raise ValueError(f"chat_template_kwargs: {taken[0]} is a parameter of its own; leave it out there")
        return self

    @property
    def begins_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        return not self.continue_final_message and self.add_generation_prompt is not False
