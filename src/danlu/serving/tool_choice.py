"""The parameters of a chat that say which tools there are, and whether the model has to call one."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, model_validator

from danlu.recipe.messages import format_value


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what is no function, or has parameters that are no JSON schema."""
    if tool.get("type", "function") != "function" or _function_name(tool) is None:
        raise ValueError('a tool is {"type": "function", "function": {"name": ..}}, and there are no others')
    if not isinstance(tool["function"].get("parameters", {}), dict | None):
        raise ValueError("parameters of a function are a JSON schema, an object")
    return tool


Tool = Annotated[dict[str, Any], AfterValidator(_check_tool)]


class ToolsBody(BaseModel):
    """Tools as OpenAI has them."""

    tools: list[Tool] = []
    tool_choice: Any = "auto"
    """auto, none, required, or {"type": "function", "function": {"name": the only one}}."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""

    @model_validator(mode="after")
    def _check_forced_tools(self) -> Self:
        if not self._forces_call:
            return self
        if self.tool_choice != "required" and self._only_tool is None:
            raise ValueError('tool_choice: give auto, none, required or {"type": "function", "function": {"name": ..}}')
        if not self.forced_tools:
            names = [str(_function_name(tool)) for tool in self.tools]
            there = f"there are {', '.join(names)}" if names else "there are none"
            asked = self._only_tool or self.tool_choice
            raise ValueError(f"tool_choice: {format_value(asked)} needs a tool to call, and {there} in tools")
        return self

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is shown."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which the answer has to call one; none where it may do otherwise."""
        if not self._forces_call:
            return []
        return [tool for tool in self.tools if self._only_tool in (None, _function_name(tool))]

    @property
    def may_call_several(self) -> bool:
        """Whether an answer may have more than one call."""
        return self.parallel_tool_calls and self._only_tool is None

    @property
    def _forces_call(self) -> bool:
        return self.tool_choice not in ("auto", "none")

    @property
    def _only_tool(self) -> str | None:
        """The name of the only tool that `tool_choice` allows; None where it names none."""
        choice = self.tool_choice
        return _function_name(choice) if isinstance(choice, dict) and choice.get("type") == "function" else None


def _function_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None
