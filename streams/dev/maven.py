"""Jars from Maven, downloaded once into the cache directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from streams.dev.programs import find_java
from streams.dev.server import Attempt
from streams.dev.state import locked
from streams.errors import ConfigurationError, ServerUnavailable
from streams.settings import cache_directory

POLL_SECONDS = 0.2
REPORT_SECONDS = 2.0
UNITS = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}  # in megabytes
DOWNLOADED = re.compile(r"Downloaded from \S+ \S+ \(([\d.]+) (B|kB|MB|GB)")


def cached(name: str, what: str, attempt: Attempt, fill: Callable[[Path], None]) -> Path:
    """The folder ``name`` in the cache, made by ``fill`` where it is missing.

    Made under another name and renamed, so that a folder which is there is whole. The lock lets one process
    download while others wait; Maven's own repository does not stand two at once either.
    """
    folder = cache_directory() / name
    if folder.is_dir():
        return folder
    lock = cache_directory() / "download.lock"
    with locked(lock, lambda: attempt.report(f"{what}: waiting for another download"), attempt.pause):
        if folder.is_dir():
            return folder
        draft = folder.with_name(f"{name}.part")
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
        draft.mkdir(parents=True)
        fill(draft)
        draft.rename(folder)
    return folder


def run_maven(goal: Sequence[str], what: str, attempt: Attempt) -> None:
    """Runs Maven and reports how much it has downloaded.

    Raises:
        ConfigurationError: there is no Maven.
        ServerUnavailable: Maven failed; the message has its reason.

    """
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigurationError(
            f"{what} comes through Maven, and there is no mvn: install it (the package is called maven), "
            "or set the endpoint of a server that runs elsewhere (STREAMS_KAFKA, STREAMS_REGISTRY_URL)"
        )
    attempt.report(f"{what}: downloading (once)")
    with tempfile.TemporaryFile() as output:
        command = [maven, "-B", *goal]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_with_java())
        try:
            _watch(process, output, what, attempt)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise ServerUnavailable(f"Maven could not download {what}: {_reason(_content(output))}")


def _with_java() -> dict[str, str]:
    if shutil.which("java") or "JAVA_HOME" in os.environ:
        return dict(os.environ)
    return {**os.environ, "JAVA_HOME": str(find_java().parent.parent)}


def _watch(process: subprocess.Popen[bytes], output: IO[bytes], what: str, attempt: Attempt) -> None:
    reported = time.monotonic()
    while process.poll() is None:
        attempt.pause(POLL_SECONDS)
        if time.monotonic() - reported >= REPORT_SECONDS:
            reported = time.monotonic()
            attempt.report(f"{what}: downloading (once), {_progress(_content(output))}")


def _content(output: IO[bytes]) -> str:
    # Read by offset: seeking would move the position at which Maven, which shares it, goes on writing.
    return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(errors="replace")


def _progress(output: str) -> str:
    sizes = [float(number) * UNITS[unit] for number, unit in DOWNLOADED.findall(output)]
    return f"{len(sizes)} files, {sum(sizes):.0f} MB so far"


def _reason(output: str) -> str:
    errors = re.findall(r"^\[ERROR\] (.+)", output, re.MULTILINE)
    return errors[0] if errors else output.strip()[-300:] or "it said nothing"
