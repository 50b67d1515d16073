"""Official files over the network: verified by checksum, resumable, and in place only when complete."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from firm.data.registry import DATASETS, data_root
from firm.errors import DataError, SettingError
from firm.runtime.files import replace_file

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if the server says

CHUNK = 1 << 18
TIMEOUT = 60.0  # seconds of silence


def fetch(dataset: str, root: Path | None = None, *, progress: Progress | None = None) -> list[Path]:
    """The data set's official files in root/<name>, where `load` finds them; complete files are not fetched again."""
    files = DATASETS[dataset].files if dataset in DATASETS else {}
    if not files:
        known = ", ".join(name for name, facts in DATASETS.items() if facts.files)
        raise SettingError(f"{dataset!r} cannot be fetched, only {known}; loading it tells where to get it")
    folder = data_root(root) / dataset
    return [download(url, folder / Path(url).name, checksum, progress=progress) for url, checksum in files.items()]


def download(url: str, target: Path, checksum: str, *, progress: Progress | None = None) -> Path:
    """The file at `url` in `target`, verified by its "md5:..." or "sha256:..." checksum.

    An interrupted download leaves target.part, and the next call continues it; target itself is never partial.
    """
    if not url.startswith(("http://", "https://")):
        raise SettingError(f"{url} is not a web address; use http:// or https://")
    if _verified(target, checksum):
        return target
    part = target.with_name(target.name + ".part")
    if not _verified(part, checksum):
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _open(url, part) as response:
                _append(response, part, progress)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise DataError(f"{url} could not be fetched ({reason}); run it again to continue {part}") from error
    if not _verified(part, checksum):
        part.unlink()
        advice = "the download was removed, try again or another network"
        raise DataError(f"{url} does not have the checksum {checksum}; {advice}")
    replace_file(part, target)
    return target


def _verified(file: Path, checksum: str) -> bool:
    """Whether the file exists with that checksum."""
    algorithm, _, expected = checksum.partition(":")
    if algorithm not in ("md5", "sha256") or not expected:
        raise SettingError(f"checksum {checksum!r} is not understood; write md5:HEX or sha256:HEX")
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, algorithm).hexdigest() == expected.lower()


def _open(url: str, part: Path) -> http.client.HTTPResponse:
    """A response from where `part` ends; a part that cannot be continued is started over."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise
    part.unlink()  # longer than the file itself: the remains of another file
    return _open(url, part)


def _append(response: http.client.HTTPResponse, part: Path, progress: Progress | None) -> None:
    """Write the body after what `part` holds, or over it when the server sends the whole file regardless."""
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
    if total is not None and done < total:  # to read(), a broken connection looks like the end
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")
