"""OpenAI's former video API, which other servers have adopted, on top of the queue; with additions."""
import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import time
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse

from wan_torchax.config import live
from wan_torchax.config.geometry import segment_count
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import SEEDS
from wan_torchax.config.wording import one_of
from wan_torchax.records.files import own_file
from wan_torchax.records.growing import NAME as GROWING
from wan_torchax.records.outputs import PICTURE, VIDEO, made_file
from wan_torchax.records.report import without_places
from wan_torchax.serve import estimate, requests
from wan_torchax.serve.errors import Answer, Refused
from wan_torchax.serve.guard import whole_number
from wan_torchax.serve.queue import Conflict, Full, Job, Prompts, Watched, events_from

VARIANTS = {"video": VIDEO, "picture": PICTURE, "thumbnail": "poster.png", "spritesheet": "contact_sheet.png"}
POLL = {"openai-poll-after-ms": "500"}  # polling interval for OpenAI's client
FORM = dict(max_files=20, max_fields=64, max_part_size=1_000_000)
MOST_LISTED = 100
MOST_IMAGES = 10  # per request
# Other fields of image requests (SGLang, vLLM-Omni): values that are accepted; the first is the default.
IMAGE_FIELDS = {
    "response_format": ("b64_json", "url"), "output_format": ("png",), "quality": ("auto", "standard"),
    "background": ("auto", "opaque"), "style": ("natural", "vivid"),
}
TAIL_SECONDS = 0.1  # polling interval for new events and chunks
FIRST_SECONDS, QUICK_LOOKS = 0.02, 100  # for the first chunk of a video that is being made, so many times
READ_BYTES = 2**18
SIGN_SECONDS = 15  # heartbeat interval of a stream without events


def video(front, job: Job) -> dict:
    """OpenAI's video object, with additional fields."""
    request, state = job.request, front.queue.state(job)
    error = state.error and {"code": "failed", "message": without_places(state.error, job.folder)}
    return {
        "id": job.id, "object": "video", "model": request["model"], "status": state.status, "progress": state.progress,
        "created_at": int(request["created"]), "completed_at": state.ended and int(state.ended), "expires_at": None,
        "prompt": request["values"]["prompt.text"], "size": request["size"], "seconds": request["seconds"],
        "remixed_from_video_id": request["remixed_from"], "error": error or None, "quality": "standard",
        "phase": state.phase, "step": state.step, "steps": state.steps or request["steps"], "preview": state.preview,
        "frames": request["frames"], "fps": request.get("fps"), "seed": request["seed"],
        "media_type": "image/png" if request["frames"] == 1 else "video/mp4",
        "url": f"/v1/videos/{job.id}/content" if state.status == "completed" else None,
        "stream": f"/v1/videos/{job.id}/stream" if grows(job) and not state.is_over else None,
    }


def find(request: Request) -> Job:
    job = request.app.state.front.queue.get(request.path_params["id"])
    if job is None:
        raise Refused(404, f"there is no video {request.path_params['id'][:60]!r}", "not_found")
    return job


# ---------------------------------------------------------------- requesting a video


async def create(request: Request) -> Answer:
    front, asked = request.app.state.front, await read(request)
    return await run_in_threadpool(submit, front, *asked, request.headers.get("idempotency-key"))


async def create_and_wait(request: Request) -> FileResponse:
    """Respond with the video once it is finished; delete the job if the client disconnects."""
    asked = await read(request)
    job = await run_in_threadpool(submitted, request.app.state.front, *asked, request.headers.get("idempotency-key"))
    await finished(request, [job])
    return send_file(job.folder, made_name(job), **{"X-Video-Id": job.id})


async def create_images(request: Request) -> Answer:
    """Pictures: videos of one frame."""
    front, (fields, files) = request.app.state.front, await read(request)
    fields = {"frames": 1} | {name: value for name, value in requests.plain(fields).items() if value is not None}
    said = {name: fields.pop(name, None) or usual[0] for name, usual in IMAGE_FIELDS.items()}
    for name, value in said.items():
        for problem in one_of(name, value, IMAGE_FIELDS[name]):
            raise ConfigError(problem)
    count = fields.pop("n", 1)
    if not 1 <= whole_number(str(count)) <= MOST_IMAGES:
        raise ConfigError(f"n={str(count)[:20]}: must be from 1 to {MOST_IMAGES}")

    def submit_all() -> list[Job]:
        jobs = [submitted(front, fields, files, None)]
        try:
            for number in range(1, int(count)):
                seed = (jobs[0].request["seed"] + number) % SEEDS
                jobs.append(submitted(front, fields | {"seed": seed}, files, None))
        except Exception:  # the queue is full, or the disk: all or none
            for job in jobs:
                front.queue.delete(job)
            raise
        return jobs

    jobs = await run_in_threadpool(submit_all)
    await finished(request, jobs)
    pictures = [own_file(job.folder, VARIANTS["thumbnail"]) for job in jobs]
    if said["response_format"] == "url":
        data = [{"url": f"{request.base_url}v1/videos/{job.id}/content?variant=thumbnail"} for job in jobs]
    else:
        data = [{"b64_json": base64.b64encode(path.read_bytes()).decode()} for path in pictures if path]
    size = jobs[0].request["size"]
    return Answer({"created": int(time.time()), "data": data, "output_format": "png", "size": size})


async def finished(request: Request, jobs: list[Job]) -> None:
    """Wait for videos to finish; delete them if the client disconnects."""
    front = request.app.state.front
    for job in jobs:
        while not (state := front.queue.state(job)).is_over:
            if front.stopping:
                raise Refused(503, "the server is shutting down; the video is finished when it is back", "draining")
            if front.queue.get(job.id) is None:
                raise Refused(404, f"{job.id} was deleted before it was finished", "not_found")
            if await request.is_disconnected():
                for one in jobs:
                    await run_in_threadpool(front.queue.delete, one)
                raise Refused(499, "the client has disconnected", "cancelled")
            await asyncio.sleep(TAIL_SECONDS)
        if state.status == "failed":
            raise Refused(500, without_places(state.error, job.folder), "failed")


async def remix(request: Request) -> Answer:
    """The same video with another prompt."""
    front, job, (fields, files) = request.app.state.front, find(request), await read(request)
    if set(fields) != {"prompt"} or files:
        raise ConfigError("a remix takes a prompt and nothing else")
    return await run_in_threadpool(submit, front, fields, {}, request.headers.get("idempotency-key"), job)


async def read(request: Request) -> tuple[dict, dict[str, list[bytes]]]:
    """The fields of a JSON object or form, and its files."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        async with request.form(**FORM) as form:
            return await read_form(form)
    if kind != "application/json":
        raise Refused(415, "send application/json or multipart/form-data", "unknown_content")
    try:
        fields = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"not JSON ({error})", "invalid_json") from error
    if not isinstance(fields, dict):
        raise Refused(400, "not a JSON object", "invalid_json")
    given = {name: value for name, value in fields.items() if holds_file(name, value)}
    files = {name: requests.bytes_of(name, value) for name, value in given.items() if value is not None}
    return {name: value for name, value in fields.items() if name not in given}, files


def holds_file(name: str, value) -> bool:
    """Whether a field is a file; `background` is one for pipeline=replace, and a word in requests of images."""
    return requests.is_file(name) and value not in IMAGE_FIELDS.get(name, ())


async def read_form(form: FormData) -> tuple[dict, dict[str, list[bytes]]]:
    """The same for a form, which writes objects and lists as `input_reference[image_url]` and `references[]`."""
    fields, files = {}, {}
    for name, value in form.multi_items():
        plain = name.partition("[")[0]
        if isinstance(value, UploadFile):
            files.setdefault(plain, []).append(await value.read())
        elif holds_file(plain, value):
            files.setdefault(plain, []).extend(requests.bytes_of(plain, value))
        elif name in fields:
            raise ConfigError(f"{name}: given twice")
        else:
            fields[name] = value
    return fields, files


def submit(front, fields: dict, files: dict, key: str | None, source: Job | None = None) -> Answer:
    return Answer(video(front, submitted(front, fields, files, key, source)), headers=POLL)


def submitted(front, fields: dict, files: dict, key: str | None, source: Job | None = None) -> Job:
    """Validate a request like run.py, and enqueue it."""
    if front.draining:
        raise Refused(503, "the server is shutting down; try again in a moment", "draining", {"Retry-After": "10"})
    with front.queue.draft() as draft:
        requests.write_files(draft, files)
        if source is not None:
            for path in itertools.chain(*requests.files_in(source.folder).values()):
                shutil.copy(path, draft / "inputs")
            fields = requests.plain(source.request["fields"]) | fields
        values, config = requests.make(front.base, fields, draft)
        content = describe(front.base, fields, values, config)
        content["remixed_from"] = source and source.id
        try:
            job = front.queue.submit(draft, content, front.serve.queue_limit, key)
        except Full:
            seconds = max(round(estimate.usual_seconds(front.queue)), 1)
            message = f"the queue is full ({front.serve.queue_limit} videos); try again later"
            raise Refused(429, message, "queue_full", {"Retry-After": str(seconds)}) from None
        except Conflict as error:
            raise Refused(409, str(error), "idempotency_conflict") from None
    front.measures.open[job.id] = job
    return job


def describe(base, fields: dict, values: dict, config) -> dict:
    """The content of request.json: the request's fields, and the settings derived from them."""
    resolution = config.resolution
    seconds = fields.get("seconds") or f"{resolution.frames / resolution.fps:.4g}"
    return {
        "fields": fields, "values": values, "model": values.get("preset", base.model), "seconds": str(seconds),
        "size": f"{resolution.width}x{resolution.height}", "frames": resolution.frames, "fps": resolution.fps,
        "steps": estimate.step_count(config), "step_flops": estimate.step_flops(config), "seed": config.seed,
        "live": live.is_on(config), "segments": segment_count(config),
    }


# ---------------------------------------------------------------- status and results


async def show(request: Request) -> Answer:
    return Answer(video(request.app.state.front, find(request)), headers=POLL)


async def listed(request: Request) -> Answer:
    return Answer(await run_in_threadpool(page_of, request.app.state.front, request.query_params))


def page_of(front, query) -> dict:
    """A page of all videos, newest first; `after` is the last id of the previous page."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    for problem in one_of("order", order, ("asc", "desc")):
        raise ConfigError(problem)
    if not 1 <= whole_number(limit) <= MOST_LISTED:
        raise ConfigError(f"limit={limit[:20]}: must be from 1 to {MOST_LISTED}")
    jobs = front.queue.jobs()
    jobs = jobs if order == "asc" else jobs[::-1]
    if "after" in query:
        places = [place for place, job in enumerate(jobs) if job.id == query["after"]]
        if not places:
            raise Refused(404, f"after={query['after'][:60]}: there is no such video", "not_found")
        jobs = jobs[places[0] + 1 :]
    chosen = [video(front, job) for job in jobs[: int(limit)]]
    ends = {"first_id": chosen[0]["id"], "last_id": chosen[-1]["id"]} if chosen else {"first_id": None, "last_id": None}
    return {"object": "list", "data": chosen, "has_more": len(jobs) > len(chosen)} | ends


async def delete(request: Request) -> Answer:
    """Delete a video. Unlike OpenAI's API, this also cancels a running one, at its next step."""
    front, job = request.app.state.front, find(request)
    await run_in_threadpool(front.queue.delete, job)
    return Answer({"id": job.id, "object": "video.deleted", "deleted": True})


async def content(request: Request) -> FileResponse:
    job, variant = find(request), request.query_params.get("variant", "video")
    for problem in one_of("variant", variant, VARIANTS):
        raise ConfigError(problem)
    state = request.app.state.front.queue.state(job)
    if state.status != "completed":
        raise Refused(409, f"the video is not ready: {state.phase}", "not_ready")
    return send_file(job.folder, made_name(job) if variant == "video" else VARIANTS[variant])


def made_name(job: Job) -> str:
    """The file that a job has made: a video of one frame is a picture."""
    made = made_file(job.folder)
    return VIDEO if made is None else made.name


def send_file(folder: Path, name: str, **headers: str) -> FileResponse:
    path = own_file(folder, name)
    if path is None:
        raise Refused(404, f"there is no {name}", "not_found")
    return FileResponse(path, headers={"Cache-Control": "private, max-age=86400"} | headers)


def grows(job: Job) -> bool:
    """Whether the video can be watched while it is made."""
    return bool(job.request.get("live"))


async def watch(request: Request) -> Response:
    """The video as it grows, from its beginning, until it is finished: fragmented MP4 in chunks. A finished one is sent
    as it is."""
    front, job = request.app.state.front, find(request)
    if not grows(job):
        raise Refused(409, "this video is made in one piece; GET its content once it is completed", "not_live")
    if front.queue.state(job).is_over:
        return await content(request)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(growing(front, job), media_type="video/mp4", headers=headers)


async def change_prompt(request: Request) -> Answer:
    """Another prompt for a live video that is being made, from its next chunk on."""
    front, job, (fields, files) = request.app.state.front, find(request), await read(request)
    if set(fields) != {"prompt"} or files:
        raise ConfigError("a change takes a prompt and nothing else")
    prompt = requests.read_prompt(" ".join(requests.read_prompt(fields["prompt"]).split()))
    if not grows(job):
        raise Refused(409, "this video is made in one piece; remix it with another prompt", "not_live")
    if front.queue.state(job).is_over:
        raise Refused(409, "this video is finished; remix it with another prompt", "finished")
    prompts = Prompts(job.folder)
    if not prompts.room(prompt):
        raise Refused(429, "this video was given too many prompts", "too_many_prompts")
    await run_in_threadpool(prompts.add, prompt)
    return Answer(video(front, job))


async def growing(front, job: Job):
    """The bytes of the file that grows. It ends with the video, or where a worker has begun the file anew."""
    file, quick = None, QUICK_LOOKS
    try:
        while not front.stopping:
            # Checked before reading: nothing follows once it is true.
            state = front.queue.state(job)
            over = state.is_over or front.queue.get(job.id) is None
            if file is None and (path := own_file(job.folder, GROWING)):
                with contextlib.suppress(FileNotFoundError):  # the video has just been finished
                    file = path.open("rb")
            while file is not None and (content := file.read(READ_BYTES)):
                yield content
            if file is not None and not over:
                Watched(job.folder).now()
            if over or (file is not None and os.fstat(file.fileno()).st_size < file.tell()):
                return
            soon = (file is None or file.tell() == 0) and state.status == "in_progress" and quick > 0
            quick -= soon
            await asyncio.sleep(FIRST_SECONDS if soon else TAIL_SECONDS)
    finally:
        if file is not None:
            file.close()


async def preview(request: Request) -> Response:
    """The last preview, read in one piece: it may be replaced at any moment."""
    path = own_file(find(request).folder, "preview.png")
    if path is None:
        raise Refused(404, "there is no preview yet", "not_ready")
    return Response(path.read_bytes(), media_type="image/png", headers={"Cache-Control": "no-store"})


async def events(request: Request) -> StreamingResponse:
    """Server-sent events, from the first or after Last-Event-ID: queued, loading, …, step, preview; done is last."""
    front, job, last = request.app.state.front, find(request), request.headers.get("last-event-id", "0")
    return stream(follow(front, job, whole_number(last)))


def stream(generator) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not buffer events
    return StreamingResponse(generator, media_type="text/event-stream", headers=headers)


async def follow(front, job: Job, sent: int):
    place = number = 0
    spoke = time.monotonic()
    while not front.stopping:
        gone = front.queue.get(job.id) is None
        over = gone or front.queue.state(job).is_over  # checked before reading lines: none follow once it is true
        lines, place = events_from(job.folder, place)
        for line in lines:
            number += 1
            if number > sent:
                spoke = time.monotonic()
                yield written(line.pop("event"), line, number)
        if over:
            yield written("deleted", {"id": job.id}) if gone else written("done", video(front, job), number + 1)
            return
        if time.monotonic() - spoke > SIGN_SECONDS:
            spoke = time.monotonic()
            yield ": still there\n\n"
        await asyncio.sleep(TAIL_SECONDS)


def written(name: str, data, number: int | None = None) -> str:
    """One server-sent event."""
    start = "" if number is None else f"id: {number}\n"
    return f"{start}event: {name}\ndata: {json.dumps(data)}\n\n"


# ---------------------------------------------------------------- the server itself


async def models(request: Request) -> Answer:
    names = request.app.state.front.base.models
    return Answer({"object": "list", "data": [
        {"id": name, "object": "model", "created": 0, "owned_by": "wan-torchax"} for name in names
    ]})


async def adapters(request: Request) -> Answer:
    """The owner's adapters that a request may name, as `adapter.<id>`."""
    offered = request.app.state.front.base.adapters
    return Answer({"object": "list", "data": [
        {"id": name, "object": "adapter", "trigger_words": one.words,
         "picture": one.picture and f"/v1/adapters/{name}/picture"}
        for name, one in offered.items()
    ]})


async def adapter_picture(request: Request) -> FileResponse:
    offered = request.app.state.front.base.adapters.get(request.path_params["name"])
    if offered is None or offered.picture is None:
        raise Refused(404, "there is no such picture", "not_found")
    return send_file(offered.picture.parent, offered.picture.name)


async def alive(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def is_ready(request: Request) -> Response:
    """Whether weights are loaded and programs compiled, so that a request waits only for its turn."""
    front = request.app.state.front
    if front.draining:
        return PlainTextResponse("shutting down\n", 503)
    return PlainTextResponse("ready\n") if front.ready.value else PlainTextResponse("loading\n", 503)


async def metrics(request: Request) -> Response:
    text = await run_in_threadpool(request.app.state.front.measures.text)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
