"""Owners of files and folders: what another user of the machine could put his own in the place of.

Who may write a folder may rename what lies in it. Root is trusted, and so are the members of a
group that may write: colleagues share a results folder in this way.
"""

import errno
import os
import pwd
import stat
from collections import deque
from pathlib import Path

from maect.core.errors import UserError

_LINKS = 40  # after as many, the kernel gives up, too
_ALL_USERS = 2**32 - 1  # in the map of a machine's first user namespace


def owner_name(uid: int) -> str:
    """A user's name; without one his number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def is_trusted(uid: int) -> bool:
    """Return whether this is the user of this process, or root."""
    return uid in (0, os.geteuid()) or (uid == _overflow() and not _sees_all_users())


def _overflow() -> int:
    """The number under which a container shows users that it does not know, such as root."""
    return int(Path("/proc/sys/kernel/overflowuid").read_text("ascii"))


def _sees_all_users() -> bool:
    return int(Path("/proc/self/uid_map").read_text("ascii").split()[2]) == _ALL_USERS


def exposed(path: str | Path) -> str:
    """Return why any user may put something of his own in the place of `path`; "" if none may.

    Every folder on the way to it counts, also through links, and what it is itself.
    """
    at, found = "/", os.stat("/")
    left = deque((Path.cwd() / path).parts)
    links = 0
    while True:
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH:
            if not found.st_mode & stat.S_ISVTX:
                return f"{at}: every user may write there; run `chmod o-w {at}`"
            if not is_trusted(found.st_uid):
                return f"{at}: every user may write there, and it is {owner_name(found.st_uid)}'s"
        if not left:
            writable = stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IWOTH
            return f"{at}: every user may write it; run `chmod o-w {at}`" if writable else ""
        part, above = left.popleft(), found
        if part == "/":
            at, found = "/", os.stat("/")
            continue
        at = os.path.dirname(at) if part == ".." else os.path.join(at, part)
        try:
            found = os.lstat(at)
        except FileNotFoundError:
            return ""
        if stat.S_ISLNK(found.st_mode):
            if above.st_mode & stat.S_IWOTH and not is_trusted(found.st_uid):
                return f"{at}: a link of {owner_name(found.st_uid)}"
            links += 1
            if links > _LINKS:
                return f"{at}: a loop of links"
            left.extendleft(reversed(Path(os.readlink(at)).parts))
            at, found = os.path.dirname(at), above


def is_own(folder: str | Path) -> bool:
    """Return whether a folder is there, and nobody but this user and his groups can write in it."""
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH and not exposed(folder)


def read_own(path: Path, anybodys: bool = False) -> str:
    """The text of a file that only this user can have written, or `anybodys`; no link and no pipe.

    Raises:
        OSError: it cannot be read.
        UserError: somebody else's.
        ValueError: no text, or no file.
    """
    # Whether it is a pipe, which might never answer, is known once it is open.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link") from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        if not (anybodys or is_trusted(found.st_uid)):
            raise UserError(f"{path}: written by {owner_name(found.st_uid)}, and not by you")
        if found.st_mode & stat.S_IWOTH and not anybodys:
            raise UserError(f"{path}: every user may write it; see that it is yours, and chmod o-w")
        with open(descriptor, encoding="utf-8", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def private_folder(path: Path) -> Path:
    """Make a folder that nobody else can enter, or take the one that is there (else OSError).

    Raises:
        UserError: it is somebody else's, or others could exchange it.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UserError(f"{path}: not a folder of yours, but {owner_name(found.st_uid)}'s")
    if reason := exposed(path.parent):
        raise UserError(reason)
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UserError(f"{path}: this file system lets others in; choose another one")
    return path
