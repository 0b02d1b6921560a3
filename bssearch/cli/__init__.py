"""The command line, quick to start."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> None:
    """Run the command line; Ctrl-C exits with one line and code 130, even during imports."""
    try:
        from bssearch.cli.app import main as run

        run()
    except KeyboardInterrupt:
        end_interrupted()


def end_interrupted() -> NoReturn:
    """Exit as interrupted."""
    sys.stderr.write("interrupted\n")
    sys.exit(130)
