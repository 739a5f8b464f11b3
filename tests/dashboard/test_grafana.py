"""docs/grafana/ckptsync.json against real scrapes: every name, label and label value that it asks for is there."""

from __future__ import annotations

import re
from typing import Any

import httpx
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.watcher.sidecars import until

from .grafana import DASHBOARD, on_the_air, panels, plain, queries

SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""

Labels = dict[str, set[str]]


def scrape(url: str) -> dict[str, Labels]:
    """Series name -> label -> values."""
    found: dict[str, Labels] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Labels]:
    """A publisher that has published and failed, and an engine that was loaded and failed to be."""
    with on_the_air(str(tmp_path_factory.mktemp("grafana"))) as scene:
        until(lambda: "ckptsync_failures_total" in scrape(scene.sidecar), 60)
        found = [scrape(scene.trainer), scrape(scene.sidecar)]
    assert not found[0].keys() & found[1].keys()
    return {**found[0], **found[1]}


def selectors(expression: str) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    return [each for each in found if isinstance(each, promql_parser.VectorSelector)]


def _family(series: str) -> str:
    return re.sub(r"_(bucket|sum|count|created|total)$", "", series)


def grouped(expression: str) -> set[str]:
    """Labels that an aggregation keeps."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    kept = [each.modifier.labels for each in found if isinstance(each, promql_parser.AggregateExpr) and each.modifier]
    return {label for labels in kept for label in labels}


def known(selector: Any, scraped: dict[str, Labels]) -> Labels:
    assert selector.name in scraped, f"no scrape has {selector.name}"
    return scraped[selector.name]


@pytest.mark.parametrize("query", queries(), ids=lambda query: query[0])
def test_every_series_and_label_that_a_panel_asks_for_is_in_a_real_scrape(query, scraped):
    title, expression, legend = query
    used = selectors(expression)
    assert used, title
    for selector in used:
        labels = known(selector, scraped)
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
            if matcher.op == promql_parser.MatchOp.Equal:
                assert matcher.value in labels[matcher.name]
    theirs = set().union(*(known(selector, scraped) for selector in used))
    assert grouped(expression) <= theirs | SCRAPED
    shown = set(re.findall(r"{{\s*(\w+)\s*}}", legend))
    assert shown <= (grouped(expression) or theirs) | (SCRAPED if grouped(expression) & SCRAPED else set())


def test_variables_and_annotations_ask_for_what_is_there(scraped):
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            assert scraped[series][label]
    for annotation in DASHBOARD["annotations"]["list"]:
        for selector in selectors(plain(annotation["expr"])):
            assert known(selector, scraped)


def test_the_dashboard_shows_every_metric_and_no_panel_lies_on_another(scraped):
    asked = {selector.name for _, expression, _ in queries() for selector in selectors(expression)}
    unseen = {_family(name) for name in scraped} - {_family(name) for name in asked}
    assert unseen <= {"ckptsync_state_since_seconds", "ckptsync_newest_version_epoch"}
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_panels_and_queries_have_names_of_their_own_and_ask_the_chosen_data_source():
    """What Grafana's import goes by; no Grafana is asked."""
    assert DASHBOARD["uid"]
    assert DASHBOARD["schemaVersion"] >= 36, "data sources by uid"
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    for panel in panels():
        names = [target["refId"] for target in panel.get("targets", ())]
        assert len(names) == len(set(names)), panel["title"]
        if names:
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
