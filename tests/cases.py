"""A table of examples that show one behaviour is one test; the traceback names the example that failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str, examples: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, within one test: the function is called with one example after the other."""
    parameters = [name.strip() for name in names.split(",")]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_examples(**fixtures: Any) -> None:
            for example in examples:
                values = (example,) if len(parameters) == 1 else example
                test(**fixtures, **dict(zip(parameters, values, strict=True)))

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in parameters]
        all_examples.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return all_examples

    return decorate
