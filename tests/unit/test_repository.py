"""The repository as a newcomer finds it: its root, its wheel, its compose file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

from ruamel.yaml import YAML

from streams.settings import refuse_misspelt

ROOT = Path(__file__).parent.parent.parent


def test_the_root_holds_what_it_must_and_nothing_else() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    visible = {line.split("/")[0] for line in listed.splitlines() if not line.startswith(".")}
    assert visible == {
        "README.md",
        "docker-compose.yml",
        "processors",
        "pyproject.toml",
        "schemas",
        "streams",
        "tests",
    }


def test_the_wheel_ships_streams_alone(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("fencepost-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"streams"}
    for needed in ("py.typed", "migrations/sql/0001_foundation.sql", "dev/kafka-pom.xml", "DESIGN.md"):
        assert f"streams/{needed}" in names


def test_the_compose_file_is_one() -> None:
    check = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(
        [Path(sys.executable).parent / check[0], *check[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_runs_only_commands_and_settings_that_there_are() -> None:
    services = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]
    ours = {name: service for name, service in services.items() if "build" in service}
    assert set(ours) == {"migrate", "topics", "relay", "processors"}
    for service in ours.values():
        help_text = subprocess.run(
            [sys.executable, "-m", "streams.cli.main", *_words(service["command"]), "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert help_text.returncode == 0, help_text.stderr
        for variable in service["environment"]:
            refuse_misspelt({variable: ""})


def _words(command: list[str]) -> list[str]:
    """The command without its arguments."""
    return [word for word in command[:2] if word.isalpha()]


def test_nothing_is_imported_that_the_wheel_does_not_ask_for() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*declared["dependencies"], *declared["optional-dependencies"]["dev"]]
    distributions = {re.split(r"[\[<>=;]", requirement)[0] for requirement in asked}
    provided = {
        module
        for module, names in packages_distributions().items()
        if distributions & {n.lower().replace("_", "-") for n in names}
    }
    imported = {
        name.split(".")[0]
        for path in (ROOT / "streams").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imports(node)
    }
    assert imported - provided - sys.stdlib_module_names - {"streams"} == set()


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or ""]
    return []
