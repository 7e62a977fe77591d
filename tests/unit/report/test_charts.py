"""Which charts there are, and what they say."""

from megatron_opd.metrics.catalogue import METRICS
from megatron_opd.metrics.dictionary.turns import TURNS
from megatron_opd.report.charts import OTHERS, SECTIONS, described, sections_of


def test_every_column_of_a_chart_is_in_the_catalogue_and_units_agree():
    charts = [chart for _, charts in SECTIONS for chart in charts]
    columns = [column for chart in charts for column in chart.columns]
    assert sorted(set(columns)) == sorted(columns)
    assert set(columns) <= set(METRICS)
    mixed = [c.title for c in charts if len({METRICS[column].unit for column in c.columns}) > 1]
    assert mixed == []


def test_charts_without_data_are_left_out_and_no_column_is_lost():
    found = dict(sections_of(["update", "time_s", "loss", "my_column", "publish_s", "loss"]))
    assert list(found) == ["Learning", "Speed", OTHERS]
    assert [chart.columns for chart in found["Learning"]] == [("loss",)]
    assert [chart.columns for chart in found["Speed"]] == [("publish_s",)]
    assert [chart.title for chart in found[OTHERS]] == ["my_column"]


def test_every_column_of_turns_has_its_chart():
    ((title, charts),) = sections_of(TURNS)
    assert title == "Turns and tools"
    assert sorted(column for chart in charts for column in chart.columns) == sorted(TURNS)


def test_a_chart_says_unit_text_and_healthy_range():
    (_, charts), *_ = sections_of(["probs_diff_mean"])
    found = described(charts[0])
    assert found["healthy"] == [0, 0.02]
    assert "sampler" in found["text"]
    (_, (chart,)), *_ = sections_of(["train_s"])
    assert described(chart)["unit"] == "s"
    (_, (own,)), *_ = sections_of(["my_column"])
    assert described(own) | {"columns": None} == {
        **{"title": "my_column", "columns": None, "unit": "", "text": "", "healthy": None}
    }
