"""Measures on real servers: ``python -m tests.bench relay|consume|fencing``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from streams.settings import Settings
from tests.bench import consume, fencing, growth, peer, relay
from tests.bench.setting import bench_servers

Row = dict[str, Any]
Measure = Callable[[Settings, int | None], Row | list[Row]]

ALONE: dict[str, Measure] = {"consume": consume.measure, "fencing": fencing.measure}
PEERS: dict[str, Measure] = {"debezium": peer.measure}


def main() -> None:
    arguments = parse()
    with bench_servers() as servers:
        result = chosen(arguments)(servers, arguments.events)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    elif isinstance(result, list):
        sys.stdout.write(table(result))
    else:
        sys.stdout.write("".join(f"{name:24} {figure:>14,}\n" for name, figure in result.items()))


def parse() -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--events", type=int, help="how many events, or as many as suit the bench")
    common.add_argument("--json", action="store_true", help="print one line of JSON")
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True)
    relaying = benches.add_parser("relay", parents=[common], help=relay.__doc__)
    further = relaying.add_mutually_exclusive_group()
    further.add_argument("--peer", choices=PEERS, help="and a peer over the same backlog, with latencies")
    further.add_argument("--growth", action="store_true", help="over backlogs of other shapes")
    benches.add_parser("consume", parents=[common], help=consume.__doc__)
    benches.add_parser("fencing", parents=[common], help=fencing.__doc__)
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> Measure:
    if arguments.bench in ALONE:
        return ALONE[arguments.bench]
    if arguments.growth:
        return growth.measure
    return PEERS[arguments.peer] if arguments.peer else relay.measure


def table(rows: list[Row]) -> str:
    """A line for each row, below the names; the columns as wide as what is in them."""
    lines = [list(rows[0]), *([f"{figure:,}" for figure in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) + "\n"
        for line in lines
    )


main()
