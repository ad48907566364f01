"""When a server is refused: it does not hold what this process has confirmed."""

from __future__ import annotations

import pytest

from streams.errors import RelayBlocked
from streams.relay.slot import branched_off, require_same
from streams.relay.source import Server
from streams.relay.stream import connection_options
from streams.settings import Settings

BEFORE = Server("7001", 1, 5_000)
HISTORY = "1\t0/3000060\tno recovery target specified\n2\t0/5000000\tat restore point x\n"


def require(now: Server, confirmed: int, history: str = "", before: Server | None = BEFORE) -> None:
    require_same("fencepost", before, now, confirmed, lambda _timeline: history)


def test_the_same_server_goes_on() -> None:
    require(Server("7001", 1, 5_000), 5_000)


def test_the_first_server_is_taken_as_it_is() -> None:
    require(Server("7001", 4, 5_000), 0, before=None)


def test_another_system_is_refused() -> None:
    with pytest.raises(RelayBlocked, match="system identifier is 7002, it was 7001"):
        require(Server("7002", 1, 9_000), 5_000)


def test_a_server_that_has_not_written_what_was_confirmed_is_refused_and_told_what_to_do() -> None:
    with pytest.raises(RelayBlocked, match=r"written up to 0/1387, confirmed was 0/1388.*Compare the topics"):
        require(Server("7001", 1, 4_999), 5_000)


def test_a_promoted_copy_that_had_everything_goes_on() -> None:
    require(Server("7001", 2, 0x4000000), 0x3000060, HISTORY)


def test_a_promoted_copy_that_was_behind_is_refused_though_it_has_written_further_since() -> None:
    with pytest.raises(RelayBlocked, match="timeline 2 branched off at 0/3000060, confirmed was 0/3000061"):
        require(Server("7001", 2, 0x4000000), 0x3000061, HISTORY)


def test_a_timeline_that_never_was_on_ours_is_refused() -> None:
    with pytest.raises(RelayBlocked, match="branched off elsewhere"):
        require(Server("7001", 5, 0x4000000), 0x10, HISTORY, before=Server("7001", 4, 0x20))


def test_a_history_is_read_line_by_line() -> None:
    assert branched_off(HISTORY, 2) == 0x5000000
    assert branched_off(HISTORY, 3) is None
    assert branched_off("", 1) is None


def test_a_log_connection_notices_that_its_server_is_gone() -> None:
    options = connection_options(Settings.load(database_url="postgresql://u@h/d", connect_seconds=7))
    assert options["connect_timeout"] == 7
    assert options["keepalives"] == 1
    idle, interval, count = (int(options[f"keepalives_{name}"]) for name in ("idle", "interval", "count"))
    assert idle + interval * count <= 30
    assert int(options["tcp_user_timeout"]) <= 30_000


def test_what_the_url_says_of_the_connection_stands() -> None:
    url = "postgresql://u@h/d?keepalives_idle=99&connect_timeout=3"
    options = connection_options(Settings.load(database_url=url))
    assert (options["keepalives_idle"], options["connect_timeout"]) == ("99", "3")
