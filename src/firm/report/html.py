"""The templates of the pages. Whatever a template prints is made printable and escaped."""

import base64
import hashlib
from collections.abc import Iterator

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from firm.errors import named

SIGNS = {"FAIL": "✕", "REVIEW": "!", "PASS": "✓"}  # worst first; a sign and a word beside every colour


def render(template: str, **values: object) -> Markup:
    """A template as text that another template prints as it is."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def generate(template: str, **values: object) -> Iterator[str]:
    """A template piece by piece: a generator among the values is consumed as it is printed."""
    return _TEMPLATES.get_template(template).generate(values)


def sha256(text: str) -> str:
    """The source a content security policy allows for this style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


_LOADER = PackageLoader("firm.report")
_TEMPLATES = Environment(
    loader=_LOADER,
    autoescape=True,
    finalize=lambda value: value if isinstance(value, Markup) else named(str(value)),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.globals |= {"asset": lambda name: Markup(_LOADER.get_source(_TEMPLATES, name)[0]), "signs": SIGNS}
_TEMPLATES.filters |= {"sha256": sha256}
