import math

import pytest

from longstraw.report.formats import bytes_text, count_text, escape, number_text, score_text, seconds_text


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (number_text, 12.0, "12"),
        (number_text, 1234567.0, "1,234,567"),
        (number_text, 0.12345, "0.123"),
        (number_text, 3e-6, "3.0e-06"),
        (score_text, 0.5, "0.50"),
        (score_text, -0.001, "-0.001"),
        (score_text, 0.0, "0.00"),
        (count_text, 999.0, "999"),
        (count_text, 728000.0, "728K"),
        (count_text, 15.6e6, "15.6M"),
        (bytes_text, 512.0, "512 B"),
        (bytes_text, 611 * 2.0**20, "611 MiB"),
        (bytes_text, 1.5 * 2**30, "1.5 GiB"),
        (seconds_text, 0.004, "4 ms"),
        (seconds_text, 4.21, "4.2 s"),
        (seconds_text, 59.97, "1 min 00 s"),
        (seconds_text, 731.0, "12 min 11 s"),
        (seconds_text, 15_700.0, "4 h 21 min"),
    ],
)
def test_number_reads_well(function, value, text):
    assert function(value) == text


@pytest.mark.parametrize("function", [number_text, score_text, count_text, bytes_text, seconds_text])
def test_what_is_not_finite_is_a_dash(function):
    assert {function(value) for value in (math.nan, math.inf, -math.inf)} == {"–"}


def test_text_that_no_page_can_hold_is_replaced():
    assert escape("a\ud800b\x00c<'\"&\n") == "a\ufffdb\ufffdc&lt;&#x27;&quot;&amp;\n"
