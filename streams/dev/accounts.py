"""The account that PostgreSQL runs as where we are root, which it refuses to be; and folders it can reach."""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
from pathlib import Path

from streams.dev.process import Account
from streams.errors import ConfigurationError

PREFERRED = ("postgres", "nobody")
SHARED = Path("/var/lib/fencepost")


def server_account() -> Account | None:
    """The unprivileged account to use; None where we are one ourselves."""
    if os.geteuid() != 0:
        return None
    found = {entry.pw_name: entry for entry in pwd.getpwall() if entry.pw_uid != 0}
    if not found:
        raise ConfigurationError(
            "PostgreSQL does not run as root, and there is no other account here: add one"
        )
    name = next((name for name in PREFERRED if name in found), next(iter(found)))
    return Account(name, found[name].pw_uid, found[name].pw_gid)


def is_reachable(path: Path, account: Account) -> bool:
    """Whether the account may enter every folder above the path, as far as they exist."""
    return all(_may_enter(folder.stat(), account) for folder in path.parents if folder.exists())


def _may_enter(found: os.stat_result, account: Account) -> bool:
    if found.st_uid == account.uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid == account.gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)


def own_folder(folder: Path, account: Account | None) -> None:
    """Makes a private folder that belongs to the account."""
    folder.mkdir(mode=0o700, parents=True)
    if account is not None:
        os.chown(folder, account.uid, account.gid)


def shared_folder(owner: Path) -> Path:
    """The owner's folder below one that every account can reach; root's own folders are often closed to others."""
    return SHARED.resolve() / hashlib.sha256(str(owner).encode()).hexdigest()[:12]


def open_folder(folder: Path) -> None:
    """Makes a folder that others may enter, whatever the umask is."""
    for part in (SHARED, folder):
        part.mkdir(parents=True, exist_ok=True)
        part.chmod(0o755)
