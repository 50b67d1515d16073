"""Runs as the texts of a page: names with their marks, mean and deviation over seeds, intervals, paired differences."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from scipy.special import stdtrit

from firm.metrics.image import Interval, mean_std
from firm.research.experiment import Record
from firm.research.runner import is_outdated
from firm.research.tables import NOT_TRAINED

Runs = list[Record]  # of one row, one per seed
CURVE = "s_con k=1"  # the score of learning curves
CONFIDENCE = 0.95
PROPERTIES = {"compactness": "compactness", "margin": "margin", "outlier spread": "outlier_spread"}


def curve_of(run: Record, score: str = CURVE) -> list[float]:
    """The learning curve of a semantic run: AUROC at every probe."""
    return [probe[score]["value"] for probe in run["probes"] if score in probe]


def label(name: str, runs: Runs) -> str:
    """The row's name, marked where a training collapsed and where other code made it."""
    collapsed = any((run.get("diagnostics") or {}).get("collapsed") for run in runs)
    return name + " (collapsed)" * collapsed + " †" * any(map(is_outdated, runs))


def machine_text(run: Record) -> str:
    """The versions and the machine a run comes from."""
    origin = run["origin"]
    return f"torch {origin['torch']}, {origin['machine']}, {origin['device']}, {origin['threads']} thread(s)."


def mean_text(values: Iterable[float | None], digits: str) -> str:
    """The mean of what is known."""
    known = [value for value in values if value is not None]
    return f"{mean_std(known)[0]:{digits}}" if known else "-"


def spread_text(values: Sequence[float]) -> str:
    """Mean ± sample deviation in %."""
    if not values:
        return "-"
    mean, deviation = mean_std(list(values))
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}" if len(values) > 1 else f"{100 * mean:.1f}"


def property_cells(runs: Runs) -> list[str]:
    """The means of the three properties in the last logged batches."""
    logged = [run["diagnostics"] for run in runs if run["diagnostics"]]
    return [mean_text([line[name] for line in logged], ".2f") for name in PROPERTIES.values()]


def interval_text(intervals: Sequence[Mapping[str, float]]) -> str:
    """Mean ± deviation over seeds, and the mean interval over the test images."""
    if not intervals:
        return "-"
    low, high = (100 * mean_std([interval[end] for interval in intervals])[0] for end in ("low", "high"))
    return f"{spread_text([interval['value'] for interval in intervals])} [{low:.1f}, {high:.1f}]"


def paired_interval(differences: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean of differences on the same seeds with Student's interval; of one difference it has no bounds."""
    mean, deviation = mean_std(list(differences))
    count = len(differences)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    reach = float(stdtrit(count - 1, (1 + confidence) / 2)) * deviation / math.sqrt(count)
    return Interval(mean, mean - reach, mean + reach)


def lead_text(differences: Sequence[float]) -> str:
    """The mean difference with its 95 % interval, if there are several."""
    if not differences:
        return "-"
    found = paired_interval(differences)
    bounds = f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]" if len(differences) > 1 else ""
    return f"{100 * found.value:+.1f}{bounds}"


def differences_text(pairs: Mapping[str, Sequence[float]]) -> str:
    """The mean difference of every row with its interval, and that of every seed."""
    each = [
        f"{name} {lead_text(values)} ({', '.join(f'{100 * value:+.1f}' for value in values)})"
        for name, values in pairs.items()
        if values
    ]
    return f"{'; '.join(each)}." if each else ""


def rival_of(row: str, rows: Iterable[str]) -> str:
    """The row of FIRM that a row is compared with: of the same suffix (", nsa", " + OE"), else the plain one."""
    firms = [name for name in rows if re.match(r"firm\b", name)]
    suffix = re.sub(r"^[^,+]*?(?=, | \+ |$)", "", row)
    alike = f"firm{suffix}"
    return next((name for name in (*([alike] if alike != row else []), "firm") if name in firms), next(iter(firms), ""))


def firm_minus(rows: Mapping[str, Runs], value: Callable[[Record], float]) -> str:
    """FIRM minus each row, seed by seed: seeds share weights, batches and views, so chance cancels.

    A row is compared with `rival_of` it, and a single run of features that are not trained with every seed.
    """
    pairs = {}
    for row, runs in rows.items():
        compared = rival_of(row, rows)
        rival = rows.get(compared, [])
        others = {run["experiment"]["seed"]: value(run) for run in runs}
        if len(runs) == 1 and runs[0]["recipe"]["features"] in NOT_TRAINED:
            others = dict.fromkeys((run["experiment"]["seed"] for run in rival), value(runs[0]))
        both = [run for run in rival if row != compared and run["experiment"]["seed"] in others]
        pairs[row] = [value(run) - others[run["experiment"]["seed"]] for run in both]
    return differences_text(pairs)
