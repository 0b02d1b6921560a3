"""``python -m bssearch`` is the command ``bssearch``."""

from bssearch.cli import main

if __name__ == "__main__":
    main()
