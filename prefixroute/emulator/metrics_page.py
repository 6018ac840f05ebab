"""The Prometheus text of an emulated engine, under vLLM's metric names.

Rule: every metric carries the labels ``engine`` (the data-parallel rank, always 0) and ``model_name``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of the text that `render` makes."""


class Metric(NamedTuple):
    """One metric: `kind` is ``gauge`` or ``counter``, a sample is its own labels and a value."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]


def single(name: str, kind: str, text: str, value: float) -> Metric:
    """A metric with one sample and no labels of its own."""
    return Metric(name, kind, text, (({}, value),))


def render(metrics: Iterable[Metric], model: str) -> str:
    """The exposition text."""
    common = {"engine": "0", "model_name": model}
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric, common))


def _lines(metric: Metric, common: Mapping[str, str]) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for own, value in metric.samples:
        labels = ",".join(f'{name}="{_escaped(text)}"' for name, text in {**common, **own}.items())
        yield f"{metric.name}{{{labels}}} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
