"""The command ``streams``: one file per group of commands."""
