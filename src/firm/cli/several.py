"""Several products at once: a detector for every sub-folder, and none of them costs the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from firm.cli.inputs import refuse_mixing
from firm.cli.learning import Asked, Ready, learn, made_ready
from firm.cli.terminal import say, sentence, show
from firm.errors import FirmError, named

if TYPE_CHECKING:
    from firm.detector import Detector

LEARNT, KEPT, FAILED = "learnt", "kept", "failed"


@dataclass(frozen=True)
class Outcome:
    """What became of one product."""

    product: str
    model: str
    state: str  # learnt, kept as it was, failed
    summary: str  # what its detector promises, or why there is none
    left_out: list[str] = field(default_factory=list)


def fit_each(tree: str, out: Path, asked: Asked, *, as_json: bool) -> int:
    """A detector OUT/<name>.firm of every product in the tree; the exit code.

    What is finished and would be learnt again to the same end is kept, so the same command goes on after anything.
    """
    found = _products(tree, out)
    outcomes = list[Outcome]()
    for number, product in enumerate(found, 1):
        say(f"{named(product.name)}: product {number} of {len(found)}")
        outcomes.append(_fitted(product, out / f"{product.name}.firm", asked))
    show({"products": [asdict(one) for one in outcomes]}, "\n".join(_lines(outcomes)), as_json)
    done = [one for one in outcomes if one.state != FAILED]
    return 2 if not done else int(len(done) < len(outcomes) or any(one.left_out for one in done))


def _products(tree: str, out: Path) -> list[Path]:
    """The sub-folders, in order of name; what cannot be a tree of products, or a place for detectors, is refused."""
    from firm.data import folder_named
    from firm.data.folder import GOOD, folders_in, image_files, list_mvtec
    from firm.model_folder import CARD

    home = folder_named(tree)
    if home is None:
        raise FirmError(f"--per-folder takes a folder with a sub-folder for each product, and {tree!r} is no folder")
    stray = image_files(home)
    if (home / GOOD).is_dir() or list_mvtec(home) is not None:
        raise FirmError(f"{named(home)} is laid out as one product; leave --per-folder out, or give the folder above")
    refuse_mixing(out, [home])
    if out.is_file() or (out / CARD).is_file():
        raise FirmError(f"{named(out)} is not a folder of detectors; name one in which each product gets its own")
    found = list(folders_in(home).values())
    if not found:
        raise FirmError(f"{named(home)} has no sub-folder; --per-folder takes one for each product")
    if stray:
        say(f"warning: {len(stray)} images in {named(home)} itself belong to no product and are not learnt from")
    return found


def _fitted(product: Path, model: Path, asked: Asked) -> Outcome:
    """One product; what goes wrong with it is said and costs it alone."""
    name = product.name
    try:
        ready = made_ready(str(product), model, asked)
        detector = _finished(ready, model)
        state = LEARNT if detector is None else KEPT
        if detector is None:
            detector = learn(ready, model)
        else:
            say(f"{named(name)}: images and settings are those of {named(model)}, which is kept")
        return Outcome(name, str(model), state, _promise(detector), ready.left_out)
    except (FirmError, OSError) as error:
        reason = sentence(error)
        say(f"firm: {named(name)}: {reason}")
        return Outcome(name, str(model), FAILED, reason)


def _finished(ready: Ready, model: Path) -> Detector | None:
    """The detector that is there, if it is whole, decides, and would be learnt again just so."""
    from firm.detector import Detector

    try:
        detector = Detector.load(model, device=ready.asked.device)
    except FirmError:
        return None
    return detector if detector.calibration and detector.origin.get("asked") == ready.key else None


def _promise(detector: Detector) -> str:
    from firm.promises import sentences

    return f"{detector.origin['good_images']} good images learnt; {sentences(detector.decides)[1]}"


def _lines(outcomes: list[Outcome]) -> Iterator[str]:
    """A line for each product, and how many fared how."""
    for one in outcomes:
        where = "" if one.state == FAILED else f" {named(one.model)}:"
        short = f" ({len(one.left_out)} files left out)" if one.left_out else ""
        yield f"{one.state:<6}  {named(one.product)} {where} {one.summary}{short}"
    counts = [f"{[one.state for one in outcomes].count(state)} {state}" for state in (LEARNT, KEPT, FAILED)]
    yield f"{len(outcomes)} products: {', '.join(counts)}"
