"""Triton's interpreter with a third of its time saved.

It looks through all of Triton's language for functions to replace, in every launch of a kernel and again in every call
of a device function, where they are replaced already.
"""

from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def replace_once() -> None:
    """Leave out the search where the functions that `function` sees are replaced already. A Triton that has no such
    search stays as it is."""
    search = getattr(interpreter, "_patch_lang", None)
    nothing = getattr(interpreter, "_LangPatchScope", None)
    if search is None or nothing is None:
        return

    def replace(function: FunctionType) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        is_replaced = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return nothing() if is_replaced else search(function)

    interpreter._patch_lang = replace
