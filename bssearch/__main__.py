"""Run the command ``bssearch`` with ``python -m bssearch``."""

from bssearch.cli import main

if __name__ == "__main__":
    main()
