"""What a calibration says, in sentences: what it decides and promises, and what was wished and cannot be had."""

from __future__ import annotations

import math

from firm.calibration import Calibration, Misses, Promise, Rate


def sentences(found: Calibration) -> list[str]:
    """What it decides and what that promises."""
    lines = [
        f"PASS up to {found.review:.6g}, REVIEW up to {found.fail:.6g}, FAIL above",
        f"good parts: {_promised(found.reviewed)} for REVIEW or FAIL, {_promised(found.failed)} FAIL",
    ]
    review, fail = found.surely(found.review), found.surely(found.fail)
    if review is not None and fail is not None:
        kept = f"at most {_share(review)} and {_share(fail)}"
        lines.append(f"over many calibrations, that is; this one keeps {kept} with 95 % confidence")
    if found.pixel is not None and found.marked is not None:
        lines.append(f"regions: heat above {found.pixel:.6g}, in {_promised(found.marked)} of good parts")
    if found.misses is not None:
        lines.append(f"defects: {_counted(found.misses.unfailed)} do not FAIL, {_counted(found.misses.passed)} PASS")
    return lines


def doubts(found: Calibration) -> list[str]:
    """What was wished and cannot be had, with what it would take."""
    told = [
        _too_few(found, name, promise)
        for name, promise in (("FAIL", found.failed), ("REVIEW", found.reviewed))
        if promise.broken
    ]
    if found.review == found.fail:
        told.append("review and fail are the same threshold, so nothing is for REVIEW")
    if found.misses is not None and found.misses.too_many:
        told.append(_missed(found.misses, found.failed))
    return told


def _promised(promise: Promise) -> str:
    return f"at most {_share(promise.kept)}"


def _share(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _counted(rate: Rate) -> str:
    share = f"{100 * rate.count / rate.of:.1f} %, 95 % interval {100 * rate.low:.1f} to {100 * rate.high:.1f}"
    return f"{rate.count} of {rate.of} ({share})"


def _too_few(found: Calibration, name: str, promise: Promise) -> str:
    wished = promise.wished or 0.0
    things, shown = ("part", found.parts) if found.parts < found.images else ("image", found.images)
    few = f"{shown} good {things}{'s' * (shown != 1)}"
    return (
        f"{few} cannot promise {100 * wished:g} % for {name}: the lowest honest rate is "
        f"{100 * promise.kept:.1f} %, and {100 * wished:g} % takes {math.ceil(1 / wished - 1e-9) - 1}"
    )


def _missed(misses: Misses, failed: Promise) -> str:
    assert misses.wished is not None
    assert misses.enough is not None
    assert misses.price is not None
    wish = f"at most {100 * misses.wished:g} % misses cannot be had with {_promised(failed)} false calls"
    return (
        f"{wish}, which are kept; it takes a fail threshold of {misses.enough:.6g}, "
        f"at which up to {100 * misses.price:.1f} % of good parts FAIL"
    )
