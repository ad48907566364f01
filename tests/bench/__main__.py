"""Measures on real servers: ``python -m tests.bench relay|consume [--json] [--events N]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from tests.bench import consume, relay
from tests.bench.setting import bench_settings

BENCHES: dict[str, Callable[..., dict[str, Any]]] = {"relay": relay.measure, "consume": consume.measure}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--events", type=int, default=200_000, help="how many events (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    with bench_settings() as settings:
        figures = BENCHES[arguments.bench](settings, arguments.events)
    if arguments.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for name, figure in figures.items():
        sys.stdout.write(f"{name:24} {figure:>14,}\n")


main()
