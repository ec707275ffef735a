"""What a benchmark found: build/bench.json, the page docs/benchmarks.md with its bars, and a sentence of README.md."""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from reshard.pipeline.abreast import cores
from reshard.pipeline.limits import MB
from tests.benchmarks.figures import Figure, Profile, Race
from tests.benchmarks.folders import CLASS, COPY, FOLDERS, OURS, TRANSFORMERS
from tests.benchmarks.race import Cost

ROOT = Path(__file__).parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
HEADLINE = re.compile(r"(?<=<!-- make bench -->\n).*?(?=<!-- end -->)", re.DOTALL)
DATA, PAGE, BARS = DOCS / "benchmarks.json", DOCS / "benchmarks.md", DOCS / "benchmarks.svg"
MEASURED = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "hf_xet", "celery", "redis")
WIDTH, LABEL, ROW, GAP = 820, 330, 20, 34  # pixels
RACE_HEAD = ("", "seconds", "processor seconds", "peak of the largest process", "written to the disk")
WIRE_HEAD = ("sent", "received")
PROFILE_HEAD = ("thread or process", "in", "seconds", "on a core", "waiting for a core")
BLUE, GREY = "#2563eb", "#94a3b8"  # ours, and the others


def line(one: Figure | Race) -> str:
    """For who waits for it."""
    if isinstance(one, Figure):
        met = "" if one.kind == "report" else f"{one.kind} {one.target:.3g}: {'met' if one.met else 'MISSED'}"
        return f"{one.name:56} {one.value:8.3g} {one.unit:5} {met}"
    return "\n".join([f"{one.name}:", *(f"  {name:54} {_cost(cost)}" for name, cost in one.costs.items())])


def _cost(cost: Cost) -> str:
    return f"{cost.wall:8.2f} s, {cost.cpu:6.2f} s CPU, {cost.peak / MB:6.0f} MB"


def machine() -> dict[str, Any]:
    """What it was measured on."""
    models = [row.partition(":")[2].strip() for row in _lines("/proc/cpuinfo") if row.startswith("model name")]
    memory = next((int(row.split()[1]) for row in _lines("/proc/meminfo") if row.startswith("MemTotal")), 0)
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": cores(),
        "memory_gb": round(memory * 1024 / 1e9),
        "disk": _file_system(Path(tempfile.gettempdir()).resolve()),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in MEASURED},
    }


@dataclass
class Found:
    """What the benchmarks have found so far, and why some of them are missing, by name."""

    figures: list[Figure] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, one: Figure | Race) -> None:
        if isinstance(one, Figure):
            self.figures.append(one)
        else:
            self.races.append(one)

    @property
    def met(self) -> bool:
        """Every benchmark came to its end and every must is met."""
        return not self.missing and all(figure.met for figure in self.figures if figure.kind == "must")


def keep(found: Found, path: Path) -> dict[str, Any]:
    """The figures, for programs: written again after each benchmark, so that what comes later cannot lose them."""
    facts = {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "figures": [figure.to_dict() for figure in found.figures],
        "races": [race.to_dict() for race in found.races],
        "missing": found.missing,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def amended(before: Mapping[str, Any], news: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The facts of ``before`` with those of ``news``, by the benchmarks ``names``, in place of what has their names.

    Raises ValueError on another machine.
    """
    if {**before["machine"], "memory_gb": 0} != {**news["machine"], "memory_gb": 0}:
        raise ValueError(f"measured on {before['machine']}, and now on {news['machine']}: measure all of them")
    missing = {name: why for name, why in before["missing"].items() if name not in {*names}}
    facts = {**before, "measured": news["measured"], "missing": missing | news["missing"]}
    for kind in ("figures", "races"):
        found = {one["name"]: one for one in news[kind]}
        there = [found.pop(one["name"], one) for one in before[kind]]
        facts[kind] = [*there, *found.values()]
    return facts


def publish(facts: Mapping[str, Any]) -> None:
    """Those, once more beside the page that is made of them, the page, its bars and the headline."""
    DATA.write_text(json.dumps(facts, indent=2) + "\n")
    PAGE.write_text(page(facts))
    BARS.write_text(bars(facts["races"]))
    README.write_text(with_headline(README.read_text(), facts))


def with_headline(text: str, facts: Mapping[str, Any]) -> str:
    """README.md, whose ``text`` has a place for the headline, with that of ``facts``."""
    return HEADLINE.sub(lambda _: headline(facts), text)


def headline(facts: Mapping[str, Any]) -> str:
    """The ratios that a person asks for first, in lines of README.md; none where they were not measured."""
    race = next((race for race in facts["races"] if race["name"].endswith(FOLDERS)), None)
    if race is None:
        return ""
    costs = {name: Cost(**cost) for name, cost in race["costs"].items()}
    ours, checked, peer = costs[OURS], costs[CLASS], costs[TRANSFORMERS]
    text = (
        f"Measured with `make bench`: copying {race['name']} takes {ours.wall / costs[COPY].wall:.1f} times as long"
        f" as `cp` and sync, with {ours.peak / MB:.0f} MB of memory (0.8 to 2.0 times, depending on the state of memory"
        " and disk: [performance](docs/performance.md#compared-with-cp)). With the model class checked, it takes"
        f" {checked.wall / peer.wall:.2f} times as long as loading and saving with transformers, which needs"
        f" {peer.peak / MB:,.0f} MB ([benchmarks](docs/benchmarks.md))."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def page(facts: Mapping[str, Any]) -> str:
    """The Markdown of docs/benchmarks.md."""
    on, versions = facts["machine"], facts["machine"]["versions"]
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    rows = [[f["name"], f"{f['value']:.3g} {f['unit']}", _target(f), _result(f)] for f in facts["figures"]]
    parts = [
        "# Benchmarks",
        "Written by `make bench`; do not edit. Contenders take turns. Each run is a separate process with an empty"
        " home, and the figures are medians. The source is in the page cache. The Hub is a server on loopback, which"
        " uses the same cores as the contenders, so no figure includes the Internet. Only ratios carry over to other"
        " machines.",
        f"Measured {facts['measured']} on {on['processor']}, {on['cores']} cores, {on['memory_gb']} GB,"
        f" {on['system']}, files on {on['disk']}, Python {on['python']}; {told}.",
        "![Seconds of each contender](benchmarks.svg)",
        "## Promises",
        _table(["what", "measured", "at most", ""], rows),
    ]
    for figure in facts["figures"]:
        if figure["profile"]:
            profile = Profile.from_dict(figure["profile"])
            parts += [
                f"## {'Profile' if figure['met'] else 'Missed'}: {figure['name']}",
                _limit(profile),
                _table(PROFILE_HEAD, _stages(profile)),
            ]
    if facts["missing"]:
        missing = "\n".join(f"* `{name}` {why}" for name, why in facts["missing"].items())
        parts.append(f"## Missing\n\nNot measured:\n\n{missing}")
    for race in facts["races"]:
        parts += [f"## {race['name']}", _costs({name: Cost(**cost) for name, cost in race["costs"].items()})]
    return "\n\n".join(parts) + "\n"


def _costs(costs: Mapping[str, Cost]) -> str:
    """The table of a race."""
    wire = any(cost.received for cost in costs.values())
    rows = [
        [name, f"{cost.wall:.2f}", f"{cost.cpu:.2f}", *(f"{size / MB:,.0f} MB" for size in cost[2 : 6 if wire else 4])]
        for name, cost in costs.items()
    ]
    return _table([*RACE_HEAD, *(WIRE_HEAD if wire else ())], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _limit(profile: Profile) -> str:
    """What the machine had, and what of it was used."""
    return (
        f"The profiled run took {profile.wall:.2f} s, so {profile.cores} cores had"
        f" {profile.wall * profile.cores:.2f} s of processor time. They were busy for {profile.machine:.2f} s:"
        f" {profile.processor:.2f} s with processes of the run, and the rest with others."
    )


def _stages(profile: Profile) -> list[list[str]]:
    return [
        [
            stage.thread,
            f"`{stage.place}`".replace("|", r"\|") if stage.place else "",
            *(f"{seconds:.2f}" for seconds in stage[2:]),
        ]
        for stage in profile.stages
    ]


def _target(one: Mapping[str, Any]) -> str:
    return "" if one["kind"] == "report" else f"{one['target']:.3g} {one['unit']} ({one['kind']})"


def _result(one: Mapping[str, Any]) -> str:
    return "" if one["kind"] == "report" else "met" if one["met"] else "**missed**"


def bars(races: Sequence[Mapping[str, Any]]) -> str:
    """An SVG with a bar for each contender of each race."""
    drawn, y = [], 10
    for race in races:
        y += GAP
        drawn.append(f'<text x="10" y="{y}" class="head">{escape(race["name"])}</text>')
        most = max(cost["wall"] for cost in race["costs"].values())
        for name, cost in race["costs"].items():
            y += ROW
            long = max(1, round((WIDTH - LABEL - 70) * cost["wall"] / most))
            fill = BLUE if name.startswith("reshard") else GREY
            drawn += [
                f'<text x="{LABEL - 8}" y="{y + 13}" class="name">{escape(name)}</text>',
                f'<rect x="{LABEL}" y="{y + 2}" width="{long}" height="{ROW - 5}" fill="{fill}"/>',
                f'<text x="{LABEL + long + 6}" y="{y + 13}">{cost["wall"]:.1f} s</text>',
            ]
    height = y + ROW + 16
    style = "text{font:12px sans-serif;fill:#64748b}.head{font-weight:bold}.name{text-anchor:end}"
    top = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    return "\n".join([top, f"<style>{style}</style>", *drawn, "</svg>"]) + "\n"


def _file_system(folder: Path) -> str:
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[place] for place in (folder, *folder.parents) if place in mounts), "a file system not known")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if sys.platform == "linux" else []
