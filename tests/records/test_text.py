"""Texts for display: short, and without control characters."""

import pytest

from bssearch.records.text import LONGEST_TEXT, shortened, visible, with_precision


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
