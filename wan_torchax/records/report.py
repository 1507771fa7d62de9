"""The report of a sweep or a prompt list: settings, timings, contact sheets and replay commands of all jobs.

Reads the job folders, so it also works for interrupted sweeps and for jobs of other processes. Writes results.csv,
results.jsonl and report.html, which embeds images and videos (up to EMBEDDED_BYTES, then links).
"""
import base64
import csv
import io
import itertools
import json
import re
from pathlib import Path

from PIL import Image

from wan_torchax import ROOT
from wan_torchax.config.commandline import key_of
from wan_torchax.records import pages
from wan_torchax.records.files import write_text
from wan_torchax.records.outputs import PICTURE, is_under, made_file

# Local paths and settings shared by all jobs: not in the report.
MACHINE = (
    "compile.cache_dir", "compile.store", "model.path", "model.paths", "hydra", "plan.compiler", "prompt.file",
    "prompt.negative_file", "sweep",
)
EMBEDDED_BYTES = 40e6  # total size of embedded videos; beyond it they are linked, so that browsers can open the page
STAGE_COLOURS = ("#7aa6c2", "#2f6690", "#f2a65a", "#8d6a9f", "#c9ae5d", "#4f9d8b")  # by a stage's index in the pipeline
OTHER_COLOURS = {"load": "#b8b8b8", "compile": "#d1495b", "write": "#81b29a"}
NUMBERS = ("seconds_per_step", "floor_seconds_per_step", "seconds_total", "peak_device_gib", "peak_host_gib")


def write(folder: Path) -> Path:
    """Write the report of all job folders below `folder`; returns the page."""
    rows = collect(folder)
    varying = varying_keys(rows)
    write_table(folder / "results.csv", rows, varying)
    write_text(folder / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    page = folder / "report.html"
    write_text(page, render(folder, rows, varying))
    return page


# ---------------------------------------------------------------- the rows


def collect(folder: Path) -> list[dict]:
    """One row per job: finished ones have metrics.json, failed ones failure.json, unfinished ones neither."""
    files = [path for name in ("metrics.json", "failure.json", "config.yaml") for path in folder.rglob(name)]
    jobs = {path.parent for path in files if ".hydra" not in path.parts} - {folder}
    order = read_json(folder / "list.json", list)
    places = {name: place for place, name in enumerate(order) if isinstance(name, str)}

    def place(job):
        return places.get(str(job.relative_to(folder)), len(places)), natural(job.relative_to(folder))

    return [read_job(folder, job) for job in sorted(jobs, key=place)]


def natural(path: Path) -> list:
    """A sort key that puts job 10 after job 9."""
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
        "video": (made := made_file(job)) and str(made.relative_to(folder)),
        "replay": f"python run.py replay={from_here(job)}" if metrics else None,
    }


def read_json(path: Path, kind: type = dict):
    """The contents of a JSON file; empty if it is missing or incomplete."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return kind()
    return content if isinstance(content, kind) else kind()


def from_here(job: Path) -> Path:
    """A job's folder relative to the working directory; elsewhere, only its last two parts."""
    return job.relative_to(Path.cwd()) if Path.cwd() in job.parents else Path(*job.parts[-2:])


def without_places(text: str, folder: Path) -> str:
    """A message without local paths: reports are shared."""
    for place, name in ((folder.parent, "…"), (ROOT, "…"), (Path.home(), "~")):
        text = text.replace(f"{place}/", f"{name}/")
    return text


def seconds_by_part(metrics: dict) -> dict:
    """A job's time by part: stages, then the rest. Compilation overlaps loading, so the sum can exceed the total."""
    seconds = metrics.get("seconds")
    if not seconds:
        return {}
    parts = {stage: seconds.get(stage, 0) for stage in metrics["stages"]}
    parts["load"] = sum(value for name, value in seconds.items() if name.startswith("load_"))
    parts["compile"] = sum(program["seconds"] for program in metrics.get("compile", {}).values())
    parts["write"] = seconds.get("write", 0)
    return {name: round(value, 3) for name, value in parts.items()}


def colours(rows) -> dict[str, str]:
    """Colours of the parts of a job's time."""
    parts = dict.fromkeys(name for row in rows for name in row["seconds"])
    stages = [name for name in parts if name not in OTHER_COLOURS]
    return dict(zip(stages, itertools.cycle(STAGE_COLOURS))) | OTHER_COLOURS


def varying_keys(rows) -> list[str]:
    """The overrides that differ between jobs, in order."""
    keys = list(dict.fromkeys(key for row in rows for key in row["overrides"]))
    return [key for key in keys if len({row["overrides"].get(key) for row in rows}) > 1]


def columns(row, varying) -> dict:
    chosen = {key: row["overrides"].get(key, "") for key in varying}
    return {"job": row["job"], "status": row["status"]} | chosen | {key: row[key] for key in NUMBERS}


def shown(rows, varying) -> list[str]:
    """The non-empty columns."""
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


def render(folder: Path, rows, varying) -> str:
    counts = {status: sum(row["status"] == status for row in rows) for status in ("done", "failed", "unfinished")}
    names, colour_of = shown(rows, varying), colours(rows)
    fastest = min((row["seconds_per_step"] for row in rows if row["seconds_per_step"]), default=None)
    timed = [row for row in rows if row["seconds_per_step"]]
    steps = [(label(row, varying), [(STAGE_COLOURS[1], row["seconds_per_step"])]) for row in timed]
    parts = [(label(row, varying), [(colour_of[name], value) for name, value in row["seconds"].items()])
             for row in rows if row["seconds"]]
    return pages.render(
        "report.html",
        summary=", ".join(f"{count} {status}" for status, count in counts.items() if count),
        name=folder.name,
        devices=", ".join(sorted({str(row["device"]) for row in rows if row["device"]})),
        heads=[name if name in varying else name.replace("_", " ") for name in names],
        rows=[table_row(row, names, varying, fastest) for row in rows],
        step_bars=bars(steps), part_bars=bars(parts), colours=colour_of, cards=list(cards(folder, rows, varying)),
    ) + "\n"


def table_row(row, names, varying, fastest) -> dict:
    best = fastest and row["seconds_per_step"] == fastest
    marks = " ".join(mark for mark, on in (("failed", row["status"] == "failed"), ("best", best)) if on)
    return {"marks": marks, "cells": [columns(row, varying)[name] for name in names], "error": row["error"]}


def label(row, varying) -> str:
    return ", ".join(f"{key}={row['overrides'].get(key, '')}" for key in varying) or f"job {row['job']}"


def bars(labelled) -> list[dict]:
    """The layout of a bar chart from labels and their (colour, seconds) parts."""
    largest, placed = max((sum(value for _, value in parts) for _, parts in labelled), default=0) or 1, []
    for name, parts in labelled:
        left, boxes = 360.0, []
        for colour, value in parts:
            boxes.append((colour, f"{left:.1f}", f"{700 * value / largest:.1f}"))
            left += 700 * value / largest
        note, short = f"{sum(value for _, value in parts):.3g} s", name if len(name) < 54 else "…" + name[-53:]
        placed.append({"label": short, "parts": boxes, "end": f"{left + 6:.1f}", "note": note})
    return placed


def cards(folder: Path, rows, varying):
    """Contact sheet, video and replay command of each job."""
    budget = EMBEDDED_BYTES
    for row in rows:
        if row["video"] is None:
            continue
        video = folder / row["video"]
        sheet = small_picture(video.with_name("contact_sheet.png"))
        budget -= video.stat().st_size + len(sheet)
        kind = "image/png" if video.name == PICTURE else "video/mp4"
        yield {
            "video": data_uri(video.read_bytes(), kind) if budget > 0 else row["video"], "kind": kind,
            "sheet": sheet and data_uri(sheet, "image/jpeg"), "label": label(row, varying), "replay": row["replay"],
        }


def small_picture(path: Path) -> bytes:
    """A contact sheet as a small JPEG; empty if it is not written yet."""
    if not path.is_file():
        return b""
    picture, buffer = Image.open(path).convert("RGB"), io.BytesIO()
    picture.thumbnail((640, 640))
    picture.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
