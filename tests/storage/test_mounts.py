"""A SQLite file on a network file system is not written to; everywhere else it is."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from bssearch.errors import DatabaseError
from bssearch.settings import NETWORK_FILE_VARIABLE
from bssearch.storage.access import mounts
from bssearch.storage.access.mounts import file_system_of, is_shared_by_machines
from bssearch.storage.repository import open_store
from tests.storage.conftest import add_study

MADE_UP = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 27 0:50 / /home rw,relatime shared:2 master:3 - autofs systemd-1 rw,fd=29
41 40 0:51 / /home rw,relatime shared:4 - nfs4 filer:/export/home rw,vers=4.2
42 41 254:1 / /home/ada/local rw - xfs /dev/vdb rw
43 27 0:52 / /data\040of\040all rw - cifs //filer/share rw
44 27 0:53 /sub /mnt/c rw - 9p C:\134 rw
45 27 0:54 / /remote rw - fuse.sshfs ada@host: rw
46 27 0:55 / /tmp rw - tmpfs tmpfs rw
a line that is none
47 27 0:56 / /scratch rw - lustre mds@tcp:/scratch rw,flock
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/runs.db", "ext4"),
        ("/home/ada/runs.db", "nfs4"),
        ("/home/ada/local/runs.db", "xfs"),
        ("/home/ada/locally/runs.db", "nfs4"),
        ("/homes/runs.db", "ext4"),
        ("/data of all/runs.db", "cifs"),
        ("/mnt/c/runs.db", "9p"),
        ("/remote/a/b/runs.db", "fuse.sshfs"),
        ("/tmp/runs.db", "tmpfs"),
        ("/scratch/runs.db", "lustre"),
    ],
)
def test_the_longest_and_of_equal_ones_the_last_mount_is_that_of_a_path(path: str, kind: str) -> None:
    assert file_system_of(MADE_UP, PurePosixPath(path)) == kind


@pytest.mark.parametrize("text", ["", "\n\n", "- - -", "nothing of the kind", "1 2 3 4 / - "])
def test_a_text_that_says_nothing_gives_nothing(text: str) -> None:
    assert not file_system_of(text, PurePosixPath("/a/runs.db"))


def test_which_file_systems_several_machines_write_to() -> None:
    shared = ["nfs", "nfs4", "NFS", "cifs", "smb3", "afs", "lustre", "gpfs", "beegfs", "ceph"]
    shared += ["fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.s3fs", "fuse.nfs-ganesha"]
    own = ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "virtiofs", "fuseblk", "fuse", "fuse.ntfs-3g"]
    own += ["fuse.mergerfs", "fuse.gvfsd-fuse", "9p", "ramfs", "squashfs", "apfs", "nfsd", "none", ""]
    assert [one for one in shared if not is_shared_by_machines(one)] == []
    assert [one for one in own if is_shared_by_machines(one)] == []


@pytest.fixture
def remote(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a file with a study, which from now on is said to lie on NFS."""
    with open_store(f"sqlite:///{path}") as store:
        add_study(store)
    table = path.with_name("mountinfo")
    table.write_text(f"1 0 254:0 / / rw - ext4 /dev/vda rw\n2 1 0:9 / {path.parent.resolve()} rw - nfs4 filer:/e rw\n")
    monkeypatch.setattr(mounts, "MOUNTS", table)
    monkeypatch.delenv(NETWORK_FILE_VARIABLE, raising=False)
    return f"sqlite:///{path}"


def test_a_file_there_is_read_and_not_written(remote: str) -> None:
    with open_store(remote, write=False) as store:
        assert store.study("toy").name == "toy"
    with pytest.raises(DatabaseError, match=r"network file system \(nfs4\).*memory that all of them share") as caught:
        open_store(remote)
    assert "PostgreSQL" in str(caught.value.hint)
    assert f"{NETWORK_FILE_VARIABLE}=1" in str(caught.value.hint)


def test_a_link_to_a_file_there_is_one_too(remote: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("local") / "link.db"
    link.symlink_to(remote.removeprefix("sqlite:///"))
    with pytest.raises(DatabaseError, match="network file system"):
        open_store(f"sqlite:///{link}")


def test_who_knows_what_they_do_may_write_there(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NETWORK_FILE_VARIABLE, "1")
    with open_store(remote) as store:
        add_study(store, "another")


def test_a_machine_that_does_not_say_what_is_mounted_refuses_nothing(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "nowhere")
    open_store(remote).close()
