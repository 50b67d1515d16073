"""The checker of annotated shapes: beartype, where an int may stand for a float as everywhere in Python."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
