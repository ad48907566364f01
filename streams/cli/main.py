"""The root of the command line."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from streams.cli import demo, dev, dlq, migrate, relay, retry, run, status, topics
from streams.errors import ConfigurationError, StreamsError
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
    """Runs the command line. Exit status: 0 done, 1 failed with a message, 2 called or
    configured wrongly, 130 interrupted.
    """
    try:
        app(prog_name="streams")  # ends by SystemExit, also where it was called wrongly
    except KeyboardInterrupt:
        sys.exit(130)
    except DATABASE_ERRORS as error:
        _fail(f"the database says: {str(error).strip()}", 1)
    except ConfigurationError as error:
        _fail(str(error), 2)
    except StreamsError as error:
        _fail(str(error), 1)
    except Exception as error:
        # What the database says while it is migrated comes wrapped.
        said = getattr(error, "orig", None)
        if not isinstance(said, DATABASE_ERRORS):
            raise
        _fail(f"the database says: {str(said).strip()}", 1)


def _fail(message: str, status: int) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
