"""Where a SQLite file must not be written: on a network file system, whose locks and shared memory end at the machine.

https://sqlite.org/wal.html ("all processes using a database must be on the same host computer"),
https://sqlite.org/howtocorrupt.html (2.1, file systems with broken or missing locks).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from bssearch.errors import DatabaseError
from bssearch.settings import NETWORK_FILE_VARIABLE

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "davfs"),
        *("lustre", "gpfs", "beegfs", "ceph", "orangefs", "pvfs2", "panfs", "wekafs", "glusterfs"),
    }
)
"""Types of file systems that several machines write to, without memory that they share.

Those of a cluster may lock alike on all machines; a write-ahead log needs shared memory too, which none of them has.
"""

NETWORK_FUSE = (
    "sshfs",
    "nfs",
    "smb",
    "cifs",
    "davfs",
    "glusterfs",
    "ceph",
    "juicefs",
    "s3fs",
    "gcsfuse",
    "goofys",
    "rclone",
)
"""What the subtype of a FUSE file system begins with where it is one of those. Others are disks of this machine.

9p is not among those refused: it is how WSL, gVisor and virtual machines show a folder of the machine they run on.
"""

MOUNTS = Path("/proc/self/mountinfo")


def file_system_of(mountinfo: str, path: PurePosixPath) -> str | None:
    """Return the type of the file system that an absolute path lies on, None where the text does not say.

    ``mountinfo`` is what Linux says in /proc/self/mountinfo (proc(5)): of mounts at one place the last one is seen.
    """
    found: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        place = PurePosixPath(re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits.group(1), 8)), fields[4]))
        depth = len(place.parts)
        if path.is_relative_to(place) and (found is None or depth >= found[0]):
            found = depth, after.split(" ")[0]
    return None if found is None else found[1]


def is_shared_by_machines(file_system: str) -> bool:
    """Return whether a file system of a type is one that several machines write to."""
    kind, _, subtype = file_system.lower().partition(".")
    return kind in NETWORK_FILE_SYSTEMS or (kind in {"fuse", "fuseblk"} and subtype.startswith(NETWORK_FUSE))


def refuse_network_file(path: Path) -> None:
    """Raise `DatabaseError` where a SQLite file to be written lies on a network file system, unless that is allowed.

    Where the machine does not say what is mounted nothing is refused.
    """
    if os.environ.get(NETWORK_FILE_VARIABLE) == "1":
        return
    try:
        mountinfo = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    kind = file_system_of(mountinfo, PurePosixPath(path.resolve()))
    if kind is not None and is_shared_by_machines(kind):
        raise DatabaseError(
            f"{path} lies on a network file system ({kind}), where SQLite cannot keep two writers apart: "
            "its write-ahead log needs memory that all of them share, and locks that hold on every machine",
            hint="name a file on a disk of this machine with --db, or for several machines a PostgreSQL database; "
            f"{NETWORK_FILE_VARIABLE}=1 allows it where one process of one machine writes",
        )
