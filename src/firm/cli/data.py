"""The verb about data sets: fetch."""

from functools import partial
from typing import Annotated

import typer

from firm.cli.options import Output
from firm.cli.terminal import reporting


def fetch(
    dataset: Annotated[str, typer.Argument(help="cifar10, cifar100-super or fashion-mnist.")], output: Output = None
) -> None:
    """Download a data set.

    Its official files, checksummed, go into FIRM_DATA (else ~/.cache/firm).
    """
    from firm.data.download import fetch as fetch_files

    with reporting() as listener:
        files = fetch_files(dataset, progress=partial(listener.progress, dataset, note="bytes"))
    print("\n".join(map(str, files)))
