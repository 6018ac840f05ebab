"""Pages in a headless Chromium: opened from disk in frames of a phone's and a desktop's width, measured by a script.

Rules:
1. A page is opened as a reader would, from a file and without a server. What it tells the console, and whatever it
   loads, is a fault; names of hosts do not resolve.
2. What is measured is what is seen: sizes after scaling, colours against what is behind them.
3. Faults are sentences. A page without any is fit to be read.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "PREFIXROUTE_BROWSER"
WANTED = f"no browser: apt-get install chromium, or name one that is Chromium's kin in {VARIABLE}"

PHONE, DESKTOP = (390, 844), (1440, 900)
LEAST_PX = 12.0
"""Of a letter."""

TEXT_CONTRAST, LINE_CONTRAST = 4.5, 3.0
"""WCAG 2, level AA: of text, and of what a chart is drawn with."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
)
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"
RUN_S = 60.0

_CONSOLE = re.compile(r":CONSOLE[:(]\d+\)?\] (.*)")

_MEASURE = """
const faults = (frame, limits) => {
  const page = frame.contentDocument, view = frame.contentWindow, found = [];
  const say = text => { if (!found.includes(text) && found.length < 50) found.push(text); };
  const name = e => `${e.tagName.toLowerCase()}.${e.className.baseVal ?? e.className}`;
  const rgb = text => { const n = (text.match(/[\\d.]+/g) || []).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const colour = rgb(view.getComputedStyle(e).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [255, 255, 255, 1];
  };
  const light = c => {
    const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const root = page.documentElement;
  if (root.scrollWidth > root.clientWidth) say(`the page is ${root.scrollWidth} px wide in ${root.clientWidth}`);
  for (const e of page.body.querySelectorAll("*")) {
    const style = view.getComputedStyle(e), svg = e.ownerSVGElement;
    if (svg && (style.stroke !== "none" || e.tagName === "circle") && /^(polyline|circle)$/.test(e.tagName)) {
      const colour = rgb(style.stroke !== "none" ? style.stroke : style.fill);
      if (contrast(colour, behind(svg)) < limits.line) say(`${name(e)} is hardly seen`);
    }
    const text = [...e.childNodes].filter(n => n.nodeType === 3 && n.data.trim()).map(n => n.data.trim()).join(" ");
    if (!text || /^(style|script)$/.test(e.tagName.toLowerCase())) continue;
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    const size = parseFloat(style.fontSize) * scale;
    if (size < limits.px) say(`${name(e)} '${text.slice(0, 30)}' has ${size.toFixed(1)} px`);
    const ratio = contrast(rgb(svg ? style.fill : style.color), behind(svg || e));
    if (ratio < limits.text) say(`${name(e)} '${text.slice(0, 30)}' has a contrast of ${ratio.toFixed(1)}`);
  }
  const charts = [...page.querySelectorAll("svg")];
  for (const chart of charts) {
    const box = chart.getBoundingClientRect(), labels = [...chart.querySelectorAll("text")];
    const boxes = labels.map(label => label.getBoundingClientRect());
    if (!labels.length) say("a chart has no label");
    if (!chart.querySelector("polyline")) say("a chart has no line");
    if (box.left < 0 || box.right > root.clientWidth) say("a chart is wider than the page");
    labels.forEach((label, i) => {
      const b = boxes[i], text = label.textContent;
      if (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1)
        say(`label '${text}' leaves its chart`);
      boxes.slice(0, i).forEach((o, j) => {
        if (b.left < o.right && o.left < b.right && b.top + 2 < o.bottom && o.top + 2 < b.bottom)
          say(`labels '${labels[j].textContent}' and '${text}' lie on each other`);
      });
    });
  }
  for (const one of view.performance.getEntriesByType("resource")) say(`loads ${one.name}`);
  return {faults: found, charts: charts.length, dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
          width: view.innerWidth, letters: page.body.innerText.length};
};
addEventListener("load", () => {
  const told = {};
  for (const frame of document.querySelectorAll("iframe")) told[frame.name] = faults(frame, LIMITS);
  document.getElementById("told").textContent = JSON.stringify(told);
});
"""


class Seen(NamedTuple):
    """A page in a frame: what is wrong with it, its charts, whether it is dark, its width, and letters of text."""

    faults: list[str]
    charts: int
    dark: bool
    width: int
    letters: int


class Run(NamedTuple):
    """A run of the browser: what was told of each frame, and lines of the console."""

    frames: dict[str, Seen]
    console: list[str]


def browser() -> str:
    """Return the browser; fail, and say what to install, when there is none."""
    named = os.environ.get(VARIABLE)
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(f"{named} is no browser" if named else WANTED, pytrace=False)
    return found


def launch(folder: Path, *options: str) -> tuple[str, list[str]]:
    """Run the browser to its end; return what it printed and the lines of the console."""
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [browser(), *FLAGS, profile, *options], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, _CONSOLE.findall(done.stderr)


def examine(folder: Path, pages: Mapping[str, tuple[Path, tuple[int, int]]], scheme: str) -> Run:
    """Open files in frames of their sizes and measure them."""
    limits = json.dumps({"px": LEAST_PX, "text": TEXT_CONTRAST, "line": LINE_CONTRAST})
    frames = "".join(
        f'<iframe name="{name}" src="{file.resolve().as_uri()}" width={size[0]} height={size[1]} '
        'style="border:0;display:block"></iframe>'
        for name, (file, size) in pages.items()
    )
    outer = folder / "frames.html"
    outer.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f"<link rel=icon href=data:,><script>{_MEASURE.replace('LIMITS', limits)}</script>"
        f"<pre id=told></pre>{frames}"
    )
    dom, console = launch(folder, scheme, "--window-size=1600,1000", "--dump-dom", outer.as_uri())
    told = re.search(r'<pre id="told">(.+?)</pre>', dom, re.DOTALL)
    assert told, f"nothing was measured: {console}"
    found = json.loads(html.unescape(told.group(1)))
    return Run({name: Seen(**one) for name, one in found.items()}, console)
