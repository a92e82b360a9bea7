"""The way to a store elsewhere: what counts as out of reach."""

import socket
from collections.abc import Iterator

import pytest

from wattune import access
from wattune.access import Access, refused
from wattune.errors import SpaceError, TrackingError

CLOSED = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def listening() -> Iterator[str]:
    """Host and port that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_server_is_asked_for_a_connection_alone(listening: str) -> None:
    assert refused(f"http://{listening}/path") == ""
    assert "refused" in refused(CLOSED)
    assert refused("http://[") != ""


@pytest.mark.parametrize("form", ["http://{}", "{}", "http://me:pw@{}/"])
def test_behind_a_proxy_the_proxy_is_what_must_be_there(
    listening: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", form.format(listening))
    assert refused(CLOSED) == ""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "refused" in refused(CLOSED)


def test_a_name_that_is_looked_up_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_CONNECT_WITHIN_S", 0.05)
    hangs = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(access.socket, "create_connection", lambda *_: hangs.accept())
    assert refused("http://name.of.a.server") == "no answer within 0 s"
    hangs.shutdown(socket.SHUT_RDWR)


def test_an_error_of_our_own_is_no_failure_of_the_store() -> None:
    store = Access("store", "mend it", lambda: 0.0)

    def refuse() -> None:
        raise SpaceError("two spaces differ")

    for _ in range(2):
        with pytest.raises(SpaceError, match="two spaces differ"):
            store.do("send", refuse)
    with pytest.raises(TrackingError, match=r"store cannot be reached \(integer .*zero\); .*, mend it"):
        store.do("send", lambda: 1 // 0)
    with pytest.raises(TrackingError, match="not tried again for 60 s"):
        store.do("send", refuse)
