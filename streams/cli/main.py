"""The root of the command line."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import click
import typer

from streams.cli import demo, dev, dlq, migrate, relay, retry, run, status, topics
from streams.errors import StreamsError
from streams.stores.postgres import DATABASE_ERRORS

app = typer.Typer(
    name="streams",
    help="Event-sourced stream processing on Kafka and PostgreSQL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.add_typer(dev.app, name="dev")
app.add_typer(relay.app, name="relay")
app.add_typer(topics.app, name="topics")
app.add_typer(dlq.app, name="dlq")
app.add_typer(retry.app, name="retry")
app.command("demo")(demo.demo)
app.command("migrate")(migrate.migrate)
app.command("run")(run.run)
app.command("status")(status.status)


@app.callback()
def _root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="also log what goes well")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def main() -> None:
    """Runs the command line. Exit status: 0 done, 1 failed with a message, 2 called wrongly, 130 interrupted."""
    try:
        status_code = app(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except DATABASE_ERRORS as error:
        print(f"error: the database says: {str(error).strip()}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except StreamsError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command line's own voice
        sys.exit(1)
    sys.exit(status_code if isinstance(status_code, int) else 0)


if __name__ == "__main__":
    main()
