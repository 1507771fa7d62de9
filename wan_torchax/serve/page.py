"""The web page: a form generated from the schema, the queue, the gallery. It uses the API like any other client, but
errors are worded in the form's terms."""
import asyncio
import dataclasses
import io
import json
import re
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from wan_torchax.config import camera, clips, inputs, live, trust
from wan_torchax.config.commandline import CONF, options
from wan_torchax.config.long import most_frames
from wan_torchax.config.pipelines import MOST_SHIFT
from wan_torchax.config.registry import family_of
from wan_torchax.config.schema import ConfigError
from wan_torchax.records.files import own_file
from wan_torchax.records.outputs import VIDEO
from wan_torchax.records.pages import render
from wan_torchax.serve import api, requests
from wan_torchax.serve.errors import Answer, Refused
from wan_torchax.serve.estimate import estimate as estimated
from wan_torchax.serve.estimate import seconds_left
from wan_torchax.serve.gallery import shown_inputs
from wan_torchax.serve.guard import COOKIE, given_key, is_good, whole_number
from wan_torchax.serve.requests import FIELDS

LOOK_SECONDS = 0.25  # polling interval for the queue
RUNS = 24  # gallery entries per request
LAST_FRAME = "last_frame.png"  # not a file: made when it is asked for
FAILED = 10  # number of most recent failures shown
COOKIE_SECONDS = 30 * 24 * 3600
# Number fields of the form, in order: label, help text, least, most, step.
NUMBERS = {
    "frames": ("Frames", "a multiple of 4, plus 1", 1, None, 4),
    "steps": ("Steps", "more are finer and slower", 1, 1000, 1),
    "guidance_scale": ("Guidance", "how closely it follows the prompt", 0, 20, 0.1),
    "seed": ("Seed", "same seed, same video", 0, 2**32 - 1, 1),
    "fps": ("Frames per second", "how fast it plays", 1, 120, 1),
    "flow_shift": ("Flow shift", "how far sampling leans towards high noise", 0.1, MOST_SHIFT, 0.1),
}
MORE = ("fps", "flow_shift")  # collapsed by default
AUTO = "auto"  # the size of the files that are given
FILES = {  # labels of file inputs
    "image": "Starts from a picture", "last_image": "Ends with a picture", "video": "Follows a video",
    "mask": "Regenerated where this is white", "references": "Shows what is in these pictures",
    "pose": "Moves like these skeletons", "face": "Has the expressions of this face",
    "background": "Is put into a video", "audio": "Says what is in a sound",
}
RECORDED = {"video": "camera", "face": "camera", "audio": "microphone"}  # not skeletons: a camera films people
NEEDED = {
    "image": "a picture to start from", "last_image": "a picture to end with", "video": "a video",
    "pose": "a video of skeletons", "face": "a video of a face", "background": "a video for the background",
    "mask": "a mask", "camera": "a move of the camera", "audio": "a sound",
}
MISSING = re.compile(r"Choose [a-z ]+ first\.")
GROUPS = {"sampling": "Few steps", "scheduler": "Sampler"}  # labels; others by their own names
# Labels of keys in the form, for messages.
LABELS = {
    **{FIELDS[name]: label for name, (label, *_) in NUMBERS.items()}, "resolution.width": "Width",
    "resolution.height": "Height", "prompt.text": "Prompt", "prompt.negative": "Negative prompt",
    "guidance_scale_2": "Second guidance", "image": "Picture", "last_image": "Last picture", "video": "Video",
    "pose": "Skeletons", "face": "Face", "background": "Background", "mask": "Mask", "references": "Pictures",
    "camera": "Camera", "audio": "Sound", "driving_prompt": "Prompt of the driving video",
    "scheduler.sigmas": "noise levels of the recipe",
}
KEYS = "|".join(re.escape(key) for key in sorted(LABELS, key=len, reverse=True))
EXAMPLES = (  # for real models; the embedded ones have conf/prompt
    "A cat walks on the grass, realistic style, soft morning light",
    "Aerial shot of waves breaking on black cliffs at sunset, slow motion",
    "Two anthropomorphic cats in boxing gear fight on a spotlighted stage",
    "A paper boat sails down a rainy street gutter, macro lens, shallow focus",
)
PICTURE_EXAMPLES = (
    "The camera slowly moves closer", "She turns her head and smiles", "Wind moves the leaves, clouds drift by",
)


@dataclasses.dataclass(frozen=True)
class Number:
    """A field of the form."""

    name: str
    label: str
    help: str
    least: float
    most: float | None
    step: float
    value: float | None  # None: that of the files
    more: bool


def numbers(config) -> list[Number]:
    """The form's number fields, with the values that this server was started with."""
    made = []
    for name, (label, text, least, most, step) in NUMBERS.items():
        if name in ("frames", "fps") and makes(config) == "picture":
            continue
        if name == "flow_shift" and OmegaConf.is_interpolation(config.model, name):
            continue  # it follows the size
        assert trust.is_offered(FIELDS[name]), name
        most = most_frames(config) if name == "frames" else most
        value = OmegaConf.select(config, FIELDS[name])
        if name == "frames" and config.pipeline.segments.whole:
            text, step = "any number", 1
        if name == "frames" and live.is_on(config):
            least, step = live.chunk_frames(config)
            text = f"{least}, and {step} for each further chunk"
        if name == "frames" and inputs.follows(config, name):
            value, text = None, "as long as the input"
        text = text.replace("video", makes(config))
        made.append(Number(name, label, text, least, most, step, value, name in MORE))
    return made


def makes(config) -> str:
    """What the model makes, in a word."""
    return "picture" if config.model.max_frames == 1 else "video"


def sizes(config) -> list[str]:
    """The server's default size, the same rotated by 90°, and a square; or that of the files, and some of its area."""
    if inputs.follows(config, "height"):
        return [AUTO, *(f"{width}x{height}" for width, height in inputs.usual_sizes(config))]
    width, height = config.resolution.width, config.resolution.height
    multiple = max(family_of(config).geometry(config.model.architecture).multiples.values())
    side = max(round((width * height) ** 0.5 / multiple) * multiple, config.model.min_size)
    return list(dict.fromkeys([f"{width}x{height}", f"{height}x{width}", f"{side}x{side}"]))


def examples(config) -> tuple[str, ...]:
    """Example prompts that suit the model."""
    pictures = "image" in inputs.taken(config)
    if not config.model.name.startswith("demo"):
        return PICTURE_EXAMPLES if pictures else EXAMPLES
    if pictures:
        return "the heart moves down", "the star spins", "the circle gets bigger"
    texts = (yaml.safe_load((CONF / "prompt" / f"{name}.yaml").read_text())["text"] for name in options("prompt"))
    return tuple(sorted(texts, key=len)[:4])


def worded(message: str) -> str:
    """run.py's message about a request, in the form's terms."""
    lines = [line.removeprefix("  - ") for line in message.splitlines()]
    if lines and re.fullmatch(r"\d+ problems? in the configuration:", lines[0]):
        del lines[0]
    return "\n".join(map(in_words, lines))


def in_words(line: str) -> str:
    if missing := re.match(r"(\w+): missing; pipeline=", line):
        return f"Choose {NEEDED.get(missing[1], 'a file')} first."
    ours = rf"(?:{'|'.join(inputs.FILES)})[.\d]*\.\w+"  # names of files in a job's folder
    line = re.sub(rf"(?<![\w.])({KEYS})={ours}", label, line)
    line = re.sub(rf"(?<![\w.])({KEYS})=", lambda match: f"{label(match)} ", line)
    return re.sub(rf"(?<![\w.])(({KEYS})(?=:)|(resolution|scheduler)\.\w+)", label, line)  # these are not English words


def label(match: re.Match) -> str:
    return LABELS.get(match[0].partition("=")[0], match[0].rpartition(".")[2])


async def create(request: Request) -> Response:
    """api.create, with errors in the form's terms."""
    try:
        return await api.create(request)
    except ConfigError as error:
        raise ConfigError(worded(str(error))) from error


async def show(request: Request) -> Response:
    front = request.app.state.front
    if front.keys and not is_good(given_key(request.headers), front.keys):
        return HTMLResponse(render("login.html", failed="failed" in request.query_params), 401)
    config = front.base.config
    choices = {group: names for group, names in front.base.choices.items() if group != "preset"}
    text = render(
        "page.html", model=front.base.model, models=front.base.models, choices=choices, groups=GROUPS,
        makes=makes(config), numbers=numbers(config), sizes=sizes(config),
        files={key: FILES[key] for key in inputs.taken(config)},
        videos=inputs.VIDEOS, sounds=inputs.SOUNDS, recorded=RECORDED, auto=AUTO,
        moves=camera.MOVES if camera.is_taken(config) else (),
        driving_prompt="driving_prompt" in config.pipeline.inputs.values(),
        letters=requests.LETTERS, negative=config.prompt.negative or "", examples=examples(config),
        adapters=front.base.adapters, with_key=bool(front.keys),
        upload_mb=front.serve.upload_mb,
    )
    return HTMLResponse(text, headers={"Cache-Control": "no-store"})


async def login(request: Request) -> Response:
    """Store the key in a same-site cookie: requests for videos and streams cannot carry a header."""
    async with request.form(**api.FORM) as form:
        key = str(form.get("key", "")).strip()
    if not is_good(key, request.app.state.front.keys):
        return RedirectResponse("/?failed", 303)
    answer = RedirectResponse("/", 303)
    secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    answer.set_cookie(COOKIE, key, COOKIE_SECONDS, httponly=True, samesite="strict", secure=secure)
    return answer


async def queue(request: Request) -> StreamingResponse:
    """A stream of the queue's state after every change: waiting, running and failed videos."""
    front = request.app.state.front

    async def changes():
        before, silent = None, 0.0
        while not front.stopping:
            now = json.dumps(await run_in_threadpool(shown_queue, front))
            if now != before:
                before, silent = now, 0.0
                yield f"event: queue\ndata: {now}\n\n"
            elif (silent := silent + LOOK_SECONDS) > api.SIGN_SECONDS:
                silent = 0.0
                yield ": still there\n\n"
            await asyncio.sleep(LOOK_SECONDS)

    return api.stream(changes())


def shown_queue(front) -> list[dict]:
    """The API's video objects, with the seconds until each is finished, and errors in the form's terms."""
    jobs = shown_jobs(front.queue)
    left = seconds_left(front.queue, [job for job in jobs if not front.queue.state(job).is_over], front.base.config)
    videos = [api.video(front, job) | {"seconds_left": left.get(job.id)} for job in jobs]
    for video in videos:
        if video["error"]:
            video["error"]["message"] = worded(video["error"]["message"])
    return videos


def shown_jobs(queue) -> list:
    jobs = queue.jobs()
    failed = [job for job in jobs if queue.state(job).status == "failed"]
    return [job for job in jobs if not queue.state(job).is_over] + failed[: -FAILED - 1 : -1]


async def estimate(request: Request) -> Answer:
    """A preview of Run: the video's size, length and time, and the value of every field, including defaults; or what is
    wrong or missing, which is not an error while someone types."""
    front, (fields, files) = request.app.state.front, await api.read(request)

    def answer() -> dict:
        try:
            with front.queue.draft() as draft:  # sizes may be those of its files
                requests.write_files(draft, files)
                return planned(front.queue, requests.make(front.base, fields, draft)[1])
        except ConfigError as error:
            words = worded(str(error))
            return {"missing" if all(map(MISSING.fullmatch, words.splitlines())) else "problem": words}

    return Answer(await run_in_threadpool(answer))


def planned(queue, config) -> dict:
    resolution = config.resolution
    values = {number.name: number.value for number in numbers(config)}
    size = AUTO if inputs.follows(config, "height") else f"{resolution.width}x{resolution.height}"
    return estimated(queue, config) | {
        "values": values | {"size": size}, "width": resolution.width, "height": resolution.height,
        "frames": resolution.frames, "steps": config.steps, "video_seconds": resolution.frames / resolution.fps,
        "ahead": len(queue.waiting()),
    }


async def runs(request: Request) -> Answer:
    """A page of the gallery: runs that match `query`, from index `start` on."""
    front, query = request.app.state.front, request.query_params
    start = query.get("start", "0")
    if whole_number(start) < 0:
        raise Refused(400, f"start={start[:20]}: must be a whole number")
    matches = await run_in_threadpool(front.gallery.search, query.get("query", "")[:200])
    shown = matches[int(start) : int(start) + RUNS]
    return Answer({"total": len(matches), "data": [shown_run(run) for run in shown]})


def shown_run(run: dict) -> dict:
    return {name: value for name, value in run.items() if name != "words"} | {"files": f"/page/runs/{run['id']}"}


async def run_file(request: Request) -> Response:
    gallery, named = request.app.state.front.gallery, request.path_params
    folder = await run_in_threadpool(gallery.folder_of, named["id"])
    if folder is not None and named["name"] == LAST_FRAME and (video := own_file(folder, VIDEO)):
        return Response(await run_in_threadpool(last_frame, video), media_type="image/png")
    if folder is not None and named["name"] in api.VARIANTS.values():
        return api.send_file(folder, named["name"])
    for path in (path for paths in shown_inputs(folder).values() for path in paths) if folder else ():
        if path.name == named["name"]:
            return api.send_file(folder, f"inputs/{path.name}")
    raise Refused(404, "there is no such file", "not_found")


def last_frame(video: Path) -> bytes:
    """A video's last frame as PNG: browsers do not seek to it exactly."""
    from PIL import Image

    made = io.BytesIO()
    try:
        Image.fromarray(clips.last_frame(video)).save(made, "png")
    except Exception as error:  # of a damaged file; imageio-ffmpeg raises all kinds
        raise Refused(404, "the last frame cannot be read", "not_found") from error
    return made.getvalue()
