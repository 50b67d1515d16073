"""Official files over the network: checksummed, resumable, and in place only when whole."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from firm.types import FirmError

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if the server says

CHUNK = 1 << 18
TIMEOUT = 60.0  # seconds of silence


@dataclass(frozen=True)
class Remote:
    """One official file: where it is, and the sum that proves it."""

    url: str
    checksum: str  # "md5:..." as its authors publish it, or "sha256:..."

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

SOURCES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (Remote(f"{_TORONTO}/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
    "cifar100-super": (Remote(f"{_TORONTO}/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),),
    "fashion-mnist": (
        Remote(f"{_ZALANDO}/train-images-idx3-ubyte.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Remote(f"{_ZALANDO}/train-labels-idx1-ubyte.gz", "md5:25c81989df183df01b3e8a0aad5dffbe"),
        Remote(f"{_ZALANDO}/t10k-images-idx3-ubyte.gz", "md5:bef4ecab320f06d8554ea6380940ec79"),
        Remote(f"{_ZALANDO}/t10k-labels-idx1-ubyte.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310"),
    ),
}


def data_root(root: Path | None = None) -> Path:
    """Where data sets live: `root`, else the environment's FIRM_DATA, else ~/.cache/firm."""
    return Path(root or os.environ.get("FIRM_DATA") or "~/.cache/firm").expanduser()


def fetch(dataset: str, root: Path | None = None, *, progress: Progress | None = None) -> list[Path]:
    """The data set's official files in root/<name>, where its loader looks; whole ones already there are kept."""
    if dataset not in SOURCES:
        raise FirmError(
            f"{dataset!r} cannot be fetched by itself, only {', '.join(SOURCES)}; loading it says where it is"
        )
    folder = data_root(root) / dataset
    return [download(r.url, folder / r.name, r.checksum, progress=progress) for r in SOURCES[dataset]]


def download(url: str, target: Path, checksum: str, *, progress: Progress | None = None) -> Path:
    """The file at `url` in `target`, proven by its "md5:..." or "sha256:..." sum.

    An interrupted download leaves target.part, and the next call goes on from there; target itself is never partial.
    """
    if not url.startswith(("http://", "https://")):
        raise FirmError(f"{url} is not a web address; use http:// or https://")
    if _proven(target, checksum):
        return target
    part = target.with_name(target.name + ".part")
    if not _proven(part, checksum):
        part.parent.mkdir(parents=True, exist_ok=True)
        _receive(url, part, progress)
    if not _proven(part, checksum):
        part.unlink()
        raise FirmError(
            f"{url} does not have the sum {checksum}; the download was removed, try again or another network"
        )
    os.replace(part, target)
    return target


def _proven(file: Path, checksum: str) -> bool:
    """Whether the file is there with that sum."""
    algorithm, _, expected = checksum.partition(":")
    if algorithm not in ("md5", "sha256") or not expected:
        raise FirmError(f"checksum {checksum!r} is not understood; write md5:HEX or sha256:HEX")
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, algorithm).hexdigest() == expected.lower()


def _receive(url: str, part: Path, progress: Progress | None) -> None:
    """The rest of the file appended to `part`, on disk when this returns."""
    try:
        with _open(url, part) as response:
            _append(response, part, progress)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FirmError(f"{url} could not be fetched ({reason}); run it again to go on from {part}") from error


def _open(url: str, part: Path) -> http.client.HTTPResponse:
    """An answer from where `part` ends; one that cannot be continued is started over."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise
    part.unlink()  # longer than the file itself: the remains of something else
    return _open(url, part)


def _append(response: http.client.HTTPResponse, part: Path, progress: Progress | None) -> None:
    """The body written behind what `part` holds, or over it when the server sends the whole file regardless."""
    done = part.stat().st_size if part.exists() else 0
    if not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
        done = 0
    length = response.headers.get("Content-Length")
    total = done + int(length) if length else None
    with part.open("ab" if done else "wb") as file:
        while chunk := response.read(CHUNK):
            file.write(chunk)
            done += len(chunk)
            if progress:
                progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    if total is not None and done < total:  # a cut connection looks like an end to read()
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")
