import pytest

from bssearch.records import Goal, Target, crossing, sparkline
from bssearch.records.text import LONGEST_TEXT, shortened, visible, with_precision
from tests.factories import make_curve

ACCURACY = Target(metric="accuracy", value=0.9)
LOSS = Target(metric="loss", value=0.5, goal=Goal.MINIMIZE)


def test_crossing_is_interpolated_by_the_same_fraction() -> None:
    miss, hit = make_curve((1.0, 0.8), (3.0, 0.96))
    found = crossing(miss, hit, ACCURACY)
    assert (found.last_miss_step, found.first_hit_step) == (0, 10)
    assert found.train_seconds == pytest.approx(1.0 + 2.0 * 0.625)
    assert found.steps == 7  # 6.25, rounded up
    assert crossing(None, make_curve((0.0, 0.4))[0], LOSS).train_seconds == 0.0
    above, below = make_curve((0.0, 1.0), (1.0, 0.0))
    assert crossing(above, below, LOSS).train_seconds == pytest.approx(0.5)


def test_target_met_at_once_takes_no_steps() -> None:
    assert crossing(None, make_curve((0.0, 0.95))[0], ACCURACY).steps == 0


def test_sparkline_shows_the_ends_of_a_long_curve() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    long = sparkline([index / 999 for index in range(1000)])
    assert (len(long), long[0], long[-1]) == (40, "▁", "█")
    assert sparkline([0.0] * 10 + [1.0], width=3) == "▁▁█", "the last value is shown, however few there are to show"


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, LONGEST_TEXT, LONGEST_TEXT + 1, 10**7])
def test_a_long_text_keeps_its_start_and_end_and_says_how_long_it_was(length: int) -> None:
    text = ("start" + "x" * length + "end")[-length:] if length else ""
    short = shortened(text)
    assert len(short) <= LONGEST_TEXT and shortened(short) == short
    assert short[:100] == text[:100] and short[-100:] == text[-100:]
    assert (f"({length:,} characters)" in short) == (length > LONGEST_TEXT)


@pytest.mark.parametrize("code", [0, 7, 8, 9, 10, 11, 13, 27, 31, 32, 126, 127, 155, 159, 160, 0xD800, 0xDFFF, 0xE000])
def test_control_characters_and_lone_surrogates_are_replaced_but_no_tabs_and_line_breaks(code: int) -> None:
    is_shown = code in (9, 10) or 32 <= code < 127 or 160 <= code < 0xD800 or code > 0xDFFF
    assert visible(f"a{chr(code)}b") == (f"a{chr(code)}b" if is_shown else "a\ufffdb")


def test_a_precision_that_only_a_program_knows_is_left_out() -> None:
    assert with_precision("AMD EPYC", "fp32") == "AMD EPYC, fp32"
    assert with_precision("AMD EPYC", "own") == with_precision("AMD EPYC", None) == "AMD EPYC"
    assert with_precision(None, "unknown") == ""
    assert with_precision("unknown", "unknown") == "device unknown"
