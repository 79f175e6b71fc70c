import math
import re
from xml.etree import ElementTree

import pytest

from longstraw.report.plots import NUM_BARS, NUM_COLOURS, Line, line_chart, stacked_chart

SVG = "{http://www.w3.org/2000/svg}"


def curve(values, **options):
    return line_chart([Line("x", range(1, len(values) + 1), values)], chart_id="chart", description="d", **options)


def axis_labels(svg):
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    return [text.replace("\N{MINUS SIGN}", "-") for text in texts]


def markers(svg):
    return [
        element
        for element in ElementTree.fromstring(svg).iter(f"{SVG}use")
        if "var(--series" in element.get("style", "")
    ]


def test_colours_are_left_to_the_page():
    lines = [Line("x", [1, 2], [index, 2.0], index, [0, 0], [3, 3]) for index in range(NUM_COLOURS)]
    svg = line_chart(lines, chart_id="chart", description="d")
    for index in range(NUM_COLOURS):
        assert f"var(--series-{index})" in svg
    assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) == set()


def test_size_is_left_to_the_page():
    opening = curve([1.0, 2.0]).split(">", 1)[0]
    assert "viewBox" in opening
    assert "width" not in opening
    assert "height" not in opening


def test_description_is_read_aloud_and_escaped():
    svg = line_chart([Line("x", [1], [1.0])], chart_id="chart", description='"<b>')
    assert ElementTree.fromstring(svg).get("aria-label") == '"<b>'


def test_single_point_is_visible():
    assert len(markers(curve([0.5]))) == 1


def test_few_points_are_marked():
    assert len(markers(curve([1.0, 2.0, 4.0]))) == 3


def test_point_between_gaps_is_visible():
    values = [1.0] * 20 + [math.nan, 2.0, math.nan] + [1.0] * 20
    assert markers(curve(values))
    assert not markers(curve([1.0] * 43))


def test_axis_from_zero_keeps_negative_numbers_in_sight():
    assert "0.0" in axis_labels(curve([0.6, 0.7], from_zero=True))
    assert "0.0" not in axis_labels(curve([0.6, 0.7]))
    assert any(label.startswith("-") for label in axis_labels(curve([-0.6, 0.7], from_zero=True)))


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.nan, math.nan], [1e-9, 2e-9], [1e9, 2e9], [-5.0], [1e300, 1.0]])
def test_extreme_values_make_a_chart(values):
    ElementTree.fromstring(curve(values, from_zero=True))


def test_steps_are_whole_numbers():
    svg = line_chart([Line("x", [3, 4], [0.1, 0.2])], chart_id="chart", description="d")
    assert {"3", "4"} <= set(axis_labels(svg))
    assert "3.5" not in axis_labels(svg)


@pytest.mark.parametrize("num_steps", [1, 3, NUM_BARS + 1])
def test_stack_is_as_high_as_the_sum_and_takes_gaps_as_zero(num_steps):
    steps = range(1, num_steps + 1)
    parts = [
        Line("a", steps, [300.0] * num_steps),
        Line("b", steps, [math.nan] * num_steps, 1),
        Line("c", steps, [500.0] * num_steps, 2),
    ]
    labels = axis_labels(stacked_chart(steps, parts, chart_id="chart", description="d"))
    numbers = [float(label) for label in labels if label.isdigit()]
    assert 600 <= max(numbers) <= 850
