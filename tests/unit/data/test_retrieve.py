"""Downloads from a real HTTP server on this machine that can be told to misbehave."""

import gzip
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from sample_images import tar_of

from maect.core.errors import UserError
from maect.data.retrieve import CATALOGUE, Remote, fetch_all, retrieve

CONTENT = np.random.default_rng(0).bytes(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/file.bin": CONTENT}
        self.break_after: list[int] = []  # bytes after which the next answers end
        self.status: list[int] = []  # codes of the next answers
        self.ranges = True
        self.etag = '"one"'
        self.then: tuple[bytes, str] | None = None  # content and tag after the first answer
        self.asked: list[str | None] = []

    def remote(self, name: str = "file.bin", **options: str) -> Remote:
        return Remote(f"http://127.0.0.1:{self.server_port}/{name}", name, **options)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        wanted = self.headers.get("Range")
        server.asked.append(wanted)
        if server.status or self.path not in server.files:
            self.send_error(server.status.pop(0) if server.status else 404)
            return
        data, start = server.files[self.path], 0
        if wanted and server.ranges and self.headers.get("If-Range") in (None, server.etag):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", server.etag)
        self.end_headers()
        body = data[start:]
        if server.break_after:
            body = body[: server.break_after.pop(0)]
        if server.then:
            server.files[self.path], server.etag = server.then
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture()
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_fetch_once(server, tmp_path):
    remote = server.remote(sha256=SHA256)
    for _ in range(2):
        assert fetch_all([remote], tmp_path) == [tmp_path / "file.bin"]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(server.asked) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"file.bin", "file.bin.sha256"}


def test_broken_connections_are_resumed(server, tmp_path):
    server.break_after = [1_000_000, 700_000]
    fetch_all([server.remote(sha256=SHA256)], tmp_path, wait=0)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000000-", "bytes=1700000-"]
    server.break_after = [1_000_000] + [0] * 5
    with pytest.raises(UserError, match="connection closed after 0 of 2000000 bytes"):
        fetch_all([server.remote()], tmp_path / "again", wait=0)
    assert not (tmp_path / "again/file.bin").exists()  # no file before it is whole
    fetch_all([server.remote()], tmp_path / "again", wait=0)
    assert (tmp_path / "again/file.bin").read_bytes() == CONTENT


def test_versions_are_never_spliced_and_a_server_without_ranges_sends_it_again(server, tmp_path):
    server.ranges = False
    server.break_after = [1_000_000]
    fetch_all([server.remote(sha256=SHA256)], tmp_path / "whole", wait=0)
    assert (tmp_path / "whole/file.bin").read_bytes() == CONTENT
    server.ranges = True
    server.break_after = [1_000_000]
    server.then = (CONTENT[::-1], '"two"')
    fetch_all([server.remote()], tmp_path, wait=0)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT[::-1]


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    with pytest.raises(UserError, match="sha256 differs"):
        fetch_all([server.remote(sha256="0" * 64)], tmp_path, wait=0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changed_here_is_noticed_until_it_is_forgotten(server, tmp_path):
    """Such as a login page in place of weights whose hash is not known."""
    (tmp_path / "file.bin").write_text("<html>")
    fetch_all([server.remote()], tmp_path)
    (tmp_path / "file.bin").write_text("<html>x")
    with pytest.raises(UserError, match="delete it and try again"):
        fetch_all([server.remote()], tmp_path)
    (tmp_path / "file.bin").unlink()
    with pytest.raises(UserError, match=r"try again \(if the first .* delete file.bin.sha256, too"):
        fetch_all([server.remote()], tmp_path)
    (tmp_path / "file.bin").unlink()
    (tmp_path / "file.bin.sha256").unlink()
    fetch_all([server.remote()], tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(server, tmp_path):
    server.status = [503, 429]
    fetch_all([server.remote(sha256=SHA256)], tmp_path, wait=0)
    assert len(server.asked) == 3
    with pytest.raises(UserError, match="HTTP Error 404"):
        fetch_all([server.remote("other.bin")], tmp_path, wait=0)
    assert len(server.asked) == 4


def test_offline_says_what_to_fetch_by_hand(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    remote = Remote(f"http://127.0.0.1:{port}/list.txt", "list.txt")
    with pytest.raises(UserError) as fault:
        fetch_all([remote], tmp_path, wait=0)
    text = str(fault.value)
    assert f"curl -L -o list.txt {remote.url}" in text and str(tmp_path / "list.txt") in text
    assert "refused" in text and "\n" not in text
    # Put there by hand, it is taken.
    (tmp_path / "list.txt").write_text("by hand")
    assert fetch_all([remote], tmp_path) == [tmp_path / "list.txt"]


def archive(kind: str, folder: str = "things") -> bytes:
    if kind != "zip":
        tar = tar_of([(f"{folder}/a/b.txt", b"hello")])
        return gzip.compress(tar) if kind == "tar.gz" else tar
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as zipped:
        zipped.writestr(f"{folder}/a/b.txt", "hello")
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_archives_are_unpacked_once(kind, server, tmp_path):
    server.files[f"/x.{kind}"] = archive(kind)
    remote = server.remote(f"x.{kind}", unpacks_to="things")
    for _ in range(2):
        assert fetch_all([remote], tmp_path) == [tmp_path / "things"]
    assert (tmp_path / "things/a/b.txt").read_text() == "hello"
    assert len(server.asked) == 1
    assert not list(tmp_path.glob(".unpack-*"))


def test_archives_that_are_broken_or_write_elsewhere(server, tmp_path):
    inside = tmp_path / "in/side"
    remote = server.remote("x.tar.gz", unpacks_to="things")
    for wrong in (archive("tar.gz")[:-30], archive("tar.gz", "../../things")):
        server.files["/x.tar.gz"] = wrong
        with pytest.raises(UserError, match="cannot be unpacked"):
            fetch_all([remote], inside)
        assert not list(tmp_path.rglob("b.txt")) and not (inside / "things").exists()
        (inside / "x.tar.gz").unlink()  # as it says
        (inside / "x.tar.gz.sha256").unlink(missing_ok=True)
    server.files["/x.tar.gz"] = archive("tar.gz")
    fetch_all([remote], inside)
    assert (inside / "things").is_dir()


def test_names_of_the_catalogue(tmp_path):
    with pytest.raises(UserError, match="did you mean 'imagenet_sketch'"):
        retrieve("imagenet_sketsh", tmp_path)
    addresses = [r.url for group in CATALOGUE.values() for r in group]
    assert len(set(addresses)) == len(addresses)
    assert all(url.startswith("https://") for url in addresses)
