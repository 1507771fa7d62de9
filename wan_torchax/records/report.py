"""One page for a sweep or a list of prompts: what was run, how fast it was, what it looks like, how to run it again.

Reads the job folders, so that it works for a sweep that was interrupted too, and for jobs of other processes.
Writes results.csv, results.jsonl and report.html, which holds pictures and videos itself (up to EMBEDDED_BYTES, then
links).
"""
import base64
import csv
import html
import io
import itertools
import json
import re
from pathlib import Path

from PIL import Image

from wan_torchax import ROOT
from wan_torchax.config.commandline import key_of
from wan_torchax.records.files import write_text
from wan_torchax.records.outputs import is_under

# Settings that say where things are on this machine, or belong to all jobs alike: not on a page.
MACHINE = (
    "compile.cache_dir", "compile.store", "model.path", "hydra", "plan.compiler", "prompt.file", "prompt.negative_file",
    "sweep",
)
EMBEDDED_BYTES = 40e6  # videos beyond this much in all are linked, not embedded: a browser must still open the page
STAGE_COLOURS = ("#7aa6c2", "#2f6690", "#f2a65a", "#8d6a9f", "#c9ae5d", "#4f9d8b")  # by a stage's place in its pipeline
OTHER_COLOURS = {"load": "#b8b8b8", "compile": "#d1495b", "write": "#81b29a"}
NUMBERS = ("seconds_per_step", "floor_seconds_per_step", "seconds_total", "peak_device_gib", "peak_host_gib")


def write(folder: Path) -> Path:
    """Report on every job folder below `folder`; returns the page."""
    rows = collect(folder)
    varying = varying_keys(rows)
    write_table(folder / "results.csv", rows, varying)
    write_text(folder / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    page = folder / "report.html"
    write_text(page, render(folder, rows, varying))
    return page


# ---------------------------------------------------------------- the rows


def collect(folder: Path) -> list[dict]:
    """One row for each job: finished ones have metrics.json, failed ones failure.json, others did not get that far."""
    files = [path for name in ("metrics.json", "failure.json", "config.yaml") for path in folder.rglob(name)]
    jobs = {path.parent for path in files if ".hydra" not in path.parts} - {folder}
    order = read_json(folder / "list.json", list)
    places = {name: place for place, name in enumerate(order) if isinstance(name, str)}

    def place(job):
        return places.get(str(job.relative_to(folder)), len(places)), natural(job.relative_to(folder))

    return [read_job(folder, job) for job in sorted(jobs, key=place)]


def natural(path: Path) -> list:
    """Job 10 after job 9."""
    return [(int(part), "") if re.fullmatch("[0-9]+", part) else (0, part) for part in path.parts]


def read_job(folder: Path, job: Path) -> dict:
    metrics, failure = (read_json(job / name) for name in ("metrics.json", "failure.json"))
    overrides = metrics.get("overrides") or failure.get("overrides") or []
    pairs = (override.partition("=") for override in overrides if not is_under(key_of(override), MACHINE))
    seconds = metrics.get("seconds", {})
    return {
        "job": str(job.relative_to(folder)),
        "status": "failed" if failure else "done" if metrics else "unfinished",
        "error": failure.get("error") and without_places(failure["error"], folder),
        "overrides": {key.lstrip("+"): value.strip("'\"") for key, _, value in pairs},
        "seconds_per_step": metrics.get("step_seconds_median"),
        "seconds_total": seconds.get("total"),
        "seconds": seconds_by_part(metrics),
        "peak_device_gib": metrics.get("peak_device_gib"),
        "peak_host_gib": metrics.get("peak_host_gib"),
        "device": metrics.get("device"),
        "mesh": metrics.get("mesh"),
        "floor_seconds_per_step": metrics.get("floor_seconds_per_step"),
        "video": str((job / "video.mp4").relative_to(folder)) if (job / "video.mp4").is_file() else None,
        "replay": f"python run.py replay={from_here(job)}" if metrics else None,
    }


def read_json(path: Path, kind: type = dict):
    """What a file of a job holds; nothing while another machine is writing it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return kind()
    return content if isinstance(content, kind) else kind()


def from_here(job: Path) -> Path:
    """A job's folder as the next command names it; elsewhere, without where that is on this machine."""
    return job.relative_to(Path.cwd()) if Path.cwd() in job.parents else Path(*job.parts[-2:])


def without_places(text: str, folder: Path) -> str:
    """A message without where this machine keeps things: pages are passed on."""
    for place, name in ((folder.parent, "…"), (ROOT, "…"), (Path.home(), "~")):
        text = text.replace(f"{place}/", f"{name}/")
    return text


def seconds_by_part(metrics: dict) -> dict:
    """Where a job's time went: its stages, then the rest. Compilation runs beside loading: it can be more than all."""
    seconds = metrics.get("seconds")
    if not seconds:
        return {}
    parts = {stage: seconds.get(stage, 0) for stage in metrics["stages"]}
    parts["load"] = sum(value for name, value in seconds.items() if name.startswith("load_"))
    parts["compile"] = sum(program["seconds"] for program in metrics.get("compile", {}).values())
    parts["write"] = seconds.get("write", 0)
    return {name: round(value, 3) for name, value in parts.items()}


def colours(rows) -> dict[str, str]:
    """A colour for every part of a job's time."""
    parts = dict.fromkeys(name for row in rows for name in row["seconds"])
    stages = [name for name in parts if name not in OTHER_COLOURS]
    return dict(zip(stages, itertools.cycle(STAGE_COLOURS))) | OTHER_COLOURS


def varying_keys(rows) -> list[str]:
    """The overrides that differ between jobs, in the order they were given."""
    keys = list(dict.fromkeys(key for row in rows for key in row["overrides"]))
    return [key for key in keys if len({row["overrides"].get(key) for row in rows}) > 1]


def columns(row, varying) -> dict:
    chosen = {key: row["overrides"].get(key, "") for key in varying}
    return {"job": row["job"], "status": row["status"]} | chosen | {key: row[key] for key in NUMBERS}


def shown(rows, varying) -> list[str]:
    """The columns that say something."""
    listed = [columns(row, varying) for row in rows]
    return [name for name in (listed[0] if listed else ()) if any(row[name] not in (None, "") for row in listed)]


def write_table(path: Path, rows, varying) -> None:
    table = io.StringIO(newline="")
    if rows:
        others = ("error", "video", "replay")
        writer = csv.DictWriter(table, [*columns(rows[0], varying), *others], lineterminator="\n")
        writer.writeheader()
        writer.writerows(columns(row, varying) | {key: row[key] for key in others} for row in rows)
    write_text(path, table.getvalue())


# ---------------------------------------------------------------- the page


STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .3rem .6rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--soft); } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.failed { color: #c62828; } .best { font-weight: 600; }
.scroll { overflow-x: auto; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 1rem; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .7rem; }
.card img, .card video { width: 100%; border-radius: 4px; display: block; margin-bottom: .4rem; }
code { background: var(--soft); padding: .1rem .3rem; border-radius: 4px; overflow-wrap: anywhere; font-size: .85em; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
"""


def render(folder: Path, rows, varying) -> str:
    counts = {status: sum(row["status"] == status for row in rows) for status in ("done", "failed", "unfinished")}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    devices = ", ".join(sorted({str(row["device"]) for row in rows if row["device"]}))
    parts = [
        f"<h1>{len(rows)} jobs: {summary or 'nothing yet'}</h1>",
        f"<p>{html.escape(folder.name)} on {html.escape(devices or 'no device')}</p>",
        f"<h2>Results</h2><div class=scroll>{render_table(rows, varying)}</div>",
        f"<h2>Seconds a step</h2>{render_bars(rows, varying)}",
        f"<h2>Where the time went</h2>{render_stages(rows, varying)}",
        f"<h2>Videos</h2><div class=gallery>{''.join(render_cards(folder, rows, varying))}</div>",
    ]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>{len(rows)} jobs</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def render_table(rows, varying) -> str:
    names = shown(rows, varying)
    fastest = min((row["seconds_per_step"] for row in rows if row["seconds_per_step"]), default=None)
    heads = [html.escape(name if name in varying else name.replace("_", " ")) for name in names]
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in (*heads, "error")) + "</tr>"]
    for row in rows:
        best = fastest and row["seconds_per_step"] == fastest
        marks = " ".join(mark for mark, on in (("failed", row["status"] == "failed"), ("best", best)) if on)
        cells = "".join(render_cell(columns(row, varying)[name]) for name in names)
        lines.append(f"<tr class='{marks}'>{cells}<td>{html.escape(row['error'] or '')}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


def render_cell(value) -> str:
    if isinstance(value, float):
        return f"<td class=number>{value:.4g}</td>"
    return f"<td>{html.escape('' if value is None else str(value))}</td>"


def label(row, varying) -> str:
    return ", ".join(f"{key}={row['overrides'].get(key, '')}" for key in varying) or f"job {row['job']}"


def render_bars(rows, varying) -> str:
    """One bar a job: seconds a step."""
    timed = [(row, row["seconds_per_step"]) for row in rows if row["seconds_per_step"]]
    return chart([(label(row, varying), [(STAGE_COLOURS[1], seconds)], f"{seconds:.3g} s") for row, seconds in timed])


def render_stages(rows, varying) -> str:
    """One bar a job: its seconds by stage, with a key to the colours."""
    timed, colour_of = [row for row in rows if row["seconds"]], colours(rows)
    key = "".join(f"<span class=key style='background:{colour}'></span>{name}" for name, colour in colour_of.items())
    bars = []
    for row in timed:
        parts = [(colour_of[name], value) for name, value in row["seconds"].items()]
        bars.append((label(row, varying), parts, f"{sum(row['seconds'].values()):.3g} s"))
    return f"<p>{key}</p>{chart(bars)}"


def chart(bars) -> str:
    """Horizontal stacked bars as an SVG: (label, [(colour, value)], what to write behind it)."""
    if not bars:
        return "<p>nothing to show</p>"
    largest = max(sum(value for _, value in parts) for _, parts, _ in bars) or 1
    lines = []
    for index, (name, parts, note) in enumerate(bars):
        top, left, short = index * 24, 360.0, name if len(name) < 54 else "…" + name[-53:]
        lines.append(f"<text x=350 y={top + 15} text-anchor=end>{html.escape(short)}</text>")
        for colour, value in parts:
            width = 700 * value / largest
            lines.append(f"<rect x={left:.1f} y={top + 3} width={width:.1f} height=16 fill='{colour}'/>")
            left += width
        lines.append(f"<text x={left + 6:.1f} y={top + 15}>{note}</text>")
    return f"<svg viewBox='0 0 1150 {24 * len(bars)}' width='100%' role=img>{''.join(lines)}</svg>"


def render_cards(folder: Path, rows, varying):
    """Contact sheets and videos side by side, each with its command."""
    budget = EMBEDDED_BYTES
    for row in rows:
        if row["video"] is None:
            continue
        video = folder / row["video"]
        sheet = small_picture(video.with_name("contact_sheet.png"))
        budget -= video.stat().st_size + len(sheet)
        source = data_uri(video.read_bytes(), "video/mp4") if budget > 0 else html.escape(row["video"], quote=True)
        picture = f"<img src='{data_uri(sheet, 'image/jpeg')}' alt='contact sheet'>" if sheet else ""
        command = f"<code>{html.escape(row['replay'] or '')}</code>"
        player = f"<video src='{source}' controls loop muted></video>"
        yield f"<div class=card>{picture}{player}{html.escape(label(row, varying))}<br>{command}</div>"


def small_picture(path: Path) -> bytes:
    """A contact sheet as a JPEG no wider than it is shown; empty between a video and its pictures."""
    if not path.is_file():
        return b""
    picture, buffer = Image.open(path).convert("RGB"), io.BytesIO()
    picture.thumbnail((640, 640))
    picture.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
