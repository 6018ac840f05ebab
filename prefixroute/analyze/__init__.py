"""What a request log says about prefix caching and routing: `prefixroute analyze LOG...`.

`Collector` reads a log in one pass and bounded memory. `build` makes the `Report` from it, simulations included. Text,
JSON and HTML are made from the report.
"""

from __future__ import annotations

from .collect import Collector, Limits, Log
from .gain import DelayGain, Gain, GainSettings
from .log_report import ModelReport, Report, Wanted, as_json, build
from .page import page
from .prompt_keys import PromptReader
from .text import table
from .verdict import Advice, Verdict

__all__ = [
    "Advice",
    "Collector",
    "DelayGain",
    "Gain",
    "GainSettings",
    "Limits",
    "Log",
    "ModelReport",
    "PromptReader",
    "Report",
    "Verdict",
    "Wanted",
    "as_json",
    "build",
    "page",
    "table",
]
