"""An example of one board, as a package of your own may have it."""

from pathlib import Path

from bssearch.exchange.boards.base import Board, Figures


class Ends(Board):
    """A line in `ends.txt` for each trial that stopped."""

    def ended(self, number: int, state: str, reason: str, at: float, figures: Figures, is_elsewhere: bool) -> None:
        with Path("ends.txt").open("a") as file:
            file.write(f"{number} {state}\n")
