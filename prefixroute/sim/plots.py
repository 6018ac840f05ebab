"""Plots of experiments, as PNG. Needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from prefixroute import UsageError

SIZE, DOTS = (10.0, 3.2), 110


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UsageError(f"plots need the extra sim, run: pip install 'prefixroute[sim]' ({error})") from error


def plot_shares(path: str, title: str, panels: Mapping[str, Sequence[tuple[float, Sequence[float]]]]) -> None:
    """Draw one stacked panel for each entry of points (time in seconds, share of each node). Raises `UsageError`."""
    plt = _pyplot()
    figure, axes = plt.subplots(len(panels), 1, figsize=(SIZE[0], SIZE[1] * len(panels)), squeeze=False)
    for axis, (name, points) in zip(axes[:, 0], panels.items(), strict=True):
        times = [at for at, _ in points]
        nodes = len(points[0][1])
        axis.stackplot(times, *([shares[i] for _, shares in points] for i in range(nodes)), labels=range(nodes))
        axis.set_title(name, fontsize=10)
        axis.set_ylim(0, 1)
        axis.margins(x=0)
        axis.set_ylabel("share by node")
    axes[-1, 0].set_xlabel("seconds")
    axes[0, 0].legend(title="node", loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.suptitle(title)
    _save(plt, figure, path)


def plot_lines(
    path: str, title: str, across: str, up: str, lines: Mapping[str, Sequence[tuple[float, float]]], log: bool = False
) -> None:
    """Draw one line for each entry of points (x, y). Raises `UsageError`."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(SIZE[0] * 0.75, SIZE[1] * 1.5))
    for name, points in lines.items():
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    if log:
        axis.set_xscale("log")
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.legend()
    axis.set_title(title)
    _save(plt, figure, path)


def plot_spans(path: str, title: str, rows: Sequence[tuple[str, int, int]], blocks: int) -> None:
    """Draw one bar for each row (name, first block, number of blocks). Raises `UsageError`."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(SIZE[0] * 0.75, max(SIZE[1], 0.22 * len(rows))))
    names = [name for name, _, _ in rows]
    axis.barh(names, [count for _, _, count in rows], left=[first - 0.5 for _, first, _ in rows], height=0.7)
    axis.invert_yaxis()
    axis.set_xlim(0.5, blocks + 0.5)
    axis.set_xlabel("block of the model")
    axis.set_title(title)
    _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=DOTS, bbox_inches="tight", format="png")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    finally:
        plt.close(figure)
