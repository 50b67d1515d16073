"""Downloads against a real server on this machine: resumed, restarted, refused."""

import hashlib
import os
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from firm.data.download import download, fetch
from firm.data.registry import DATASETS, data_root, folder_named, training_files
from firm.errors import DataError, SettingError

CONTENT = bytes(range(256)) * 4096  # 1 MiB
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `content` at every path but /missing; `asked` notes the Range of each request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.ranges, self.cut, self.asked = CONTENT, True, None, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/data.bin"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        content, asked = self.server.content, self.headers.get("Range")
        self.server.asked.append(asked)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and self.server.ranges else 0
        if self.path == "/missing":
            return self.send_error(404)
        if asked and start >= len(content):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : self.server.cut])
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("checksum", [MD5, SHA256[:7] + SHA256[7:].upper()])
def test_a_verified_file_is_not_fetched_twice(server, tmp_path, checksum):
    target = tmp_path / "new" / "folder" / "data.bin"
    steps = []
    assert download(server.url, target, checksum, progress=lambda *step: steps.append(step)) == target
    assert target.read_bytes() == CONTENT
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    download(server.url, target, checksum)
    assert server.asked == [None]
    assert [file.name for file in target.parent.iterdir()] == ["data.bin"]


def test_an_interrupted_download_goes_on_where_it_ended(server, tmp_path):
    target, part = tmp_path / "data.bin", tmp_path / "data.bin.part"
    server.cut = 300_000
    with pytest.raises(DataError, match=r"300,000 of 1,048,576 bytes"):
        download(server.url, target, SHA256)
    assert part.read_bytes() == CONTENT[:300_000]
    assert not target.exists()
    server.cut = None
    steps = []
    download(server.url, target, SHA256, progress=lambda *step: steps.append(step))
    assert target.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-"]
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert not part.exists()


def test_a_server_without_ranges_starts_over(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1000])
    server.ranges = False
    assert download(server.url, tmp_path / "data.bin", SHA256).read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]


def test_a_whole_part_needs_no_network(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    assert download(server.url, tmp_path / "data.bin", SHA256).read_bytes() == CONTENT
    assert server.asked == []


def test_a_part_longer_than_the_file_is_dropped(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CONTENT + b"more")
    assert download(server.url, tmp_path / "data.bin", SHA256).read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT) + 4}-", None]


@pytest.mark.parametrize("started", [b"", b"wrong from the start"])
def test_wrong_content_is_refused_and_removed(server, tmp_path, started):
    if started:
        (tmp_path / "data.bin.part").write_bytes(started)
    else:
        server.content = CONTENT[:-1] + b"!"
    with pytest.raises(DataError, match="does not have the checksum sha256:"):
        download(server.url, tmp_path / "data.bin", SHA256)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_went_bad_is_replaced(server, tmp_path):
    (tmp_path / "data.bin").write_bytes(b"bad")
    assert download(server.url, tmp_path / "data.bin", SHA256).read_bytes() == CONTENT


def test_failures_of_the_network_name_the_address(server, tmp_path):
    missing = server.url.replace("data.bin", "missing")
    with pytest.raises(DataError, match=rf"{missing} could not be fetched \(Not Found\)"):
        download(missing, tmp_path / "data.bin", SHA256)
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=rf"{server.url} could not be fetched .*refused"):
        download(server.url, tmp_path / "data.bin", SHA256)
    assert not (tmp_path / "data.bin").exists()


def test_what_is_no_web_address_or_sum_is_refused(tmp_path):
    with pytest.raises(SettingError, match="file:///etc/hostname"):
        download("file:///etc/hostname", tmp_path / "data.bin", SHA256)
    for checksum in ("abc", "crc32:00", "md5:"):
        with pytest.raises(SettingError, match=checksum):
            download("http://127.0.0.1/", tmp_path / "data.bin", checksum)


def test_fetch_puts_every_file_where_the_loader_looks(server, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], files={server.url: MD5}))
    assert fetch("cifar10", tmp_path) == [tmp_path / "cifar10" / "data.bin"]
    with pytest.raises(SettingError, match=r"cats-vs-dogs.*cifar10, cifar100-super, fashion-mnist"):
        fetch("cats-vs-dogs", tmp_path)


def test_every_file_has_a_sum_of_the_right_length():
    sums = [checksum for facts in DATASETS.values() for checksum in facts.files.values()]
    assert len(sums) == 6
    assert all(re.fullmatch(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", checksum) for checksum in sums)


def test_the_root_is_an_argument_then_the_environment_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FIRM_DATA", "~/sets")
    assert data_root(tmp_path / "here") == tmp_path / "here"
    assert data_root() == tmp_path / "sets"
    monkeypatch.setenv("FIRM_DATA", os.pathsep.join(("~/sets", "~/more")))
    (tmp_path / "more" / "exposure").mkdir(parents=True)
    assert data_root() == tmp_path / "sets"
    assert data_root(holding="exposure") == tmp_path / "more"
    monkeypatch.delenv("FIRM_DATA")
    assert data_root() == tmp_path / ".cache" / "firm"


def test_several_folders_of_data_are_searched_in_their_order(tmp_path, monkeypatch):
    for name in ("a/first", "a/both", "b/second", "b/both"):
        (tmp_path / name).mkdir(parents=True)
    screw = tmp_path / "b" / "mvtec" / "screw" / "train" / "good" / "0.png"
    screw.parent.mkdir(parents=True)
    screw.write_bytes(b"")
    monkeypatch.setenv("FIRM_DATA", os.pathsep.join((str(tmp_path / "a"), str(tmp_path / "b"))))
    assert [folder_named(name).parent.name for name in ("first", "second", "both")] == ["a", "b", "a"]
    assert folder_named("neither") is None
    assert training_files("mvtec:screw") == [screw]
