"""danlu (丹炉): train large language models from one recipe, on a laptop CPU or a cluster.

From Python, `danlu.train` trains a recipe and `danlu.load` loads a model; both are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danlu.api.model import Model, TokenLogprob, load
    from danlu.api.training import Run, train
    from danlu.core.errors import DanluError

__version__ = "0.1.0"
__all__ = ["DanluError", "Model", "Run", "TokenLogprob", "__version__", "load", "train"]

_LAZY = {
    "DanluError": "danlu.core.errors",
    "Model": "danlu.api.model",
    "Run": "danlu.api.training",
    "TokenLogprob": "danlu.api.model",
    "load": "danlu.api.model",
    "train": "danlu.api.training",
}
"""The module of each name that is imported when it is first used: `import danlu` alone takes no time."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'danlu' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
