"""The command line, which parses options, calls `commands` and prints results."""

import atexit
import errno
import gc
import sys
from typing import NoReturn

from bssearch.errors import BSSearchError, UsageError

# Garbage-collection threshold. Imported objects are mostly permanent, and Python's default of 700 takes a fifth of a
# short command's CPU time.
COLLECT_AFTER = 500_000

# Errors of a file that the user named, or of its disk.
OF_FILES = {errno.EACCES, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}


def main() -> None:
    """Run the command line, and exit with a nonzero code after an error or Ctrl-C."""
    try:
        if sys.platform == "win32":
            raise UsageError(
                "bssearch does not run on Windows",
                hint="use Linux, such as the Windows Subsystem for Linux",
            )
        gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
        atexit.register(gc.freeze)  # skips garbage collection at exit, too
        from bssearch.cli.app import app

        app()
    except BSSearchError as error:
        from bssearch.records.text import visible, without_passwords

        sys.stderr.write(without_passwords(visible(f"error: {error}\n")))
        if error.hint:
            sys.stderr.write(without_passwords(f"hint: {visible(error.hint)}\n"))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        end_interrupted()
    except BrokenPipeError:
        from bssearch.cli.output import end_of_pipe

        end_of_pipe()
    except OSError as error:
        if error.errno not in OF_FILES or error.filename is None:
            raise
        from bssearch.records.text import shortened, visible

        fault = f"{shortened(str(error.filename), 200)}: {error.strerror}"
        sys.stderr.write(visible(f"error: {fault}\nhint: check the path, the permissions and the free disk space\n"))
        sys.exit(2)


def end_interrupted() -> NoReturn:
    sys.stderr.write("interrupted\n")
    sys.exit(130)
