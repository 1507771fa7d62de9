"""The page in a real browser: what people do with it. Debian: apt-get install chromium chromium-driver.

PICTURES=<folder> keeps screenshots, at several widths, light and dark.
"""
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

from tests import flux, hunyuan15, tiny
from tests.conftest import ROOT, SMALL
from tests.serving import Server, wait_for
from wan_torchax.config import camera, clips, sounds
from wan_torchax.records.files import write_text
from wan_torchax.records.growing import Growing
from wan_torchax.records.media import Encoding
from wan_torchax.serve import api, worker
from wan_torchax.serve.queue import Prompts, append
from wan_torchax.session import session

sys.path.insert(0, str(ROOT / "tools"))

import browser as chromium
from browser import show

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not (chromium.CHROMIUM and chromium.DRIVER), reason="no Chromium and chromedriver here"),
]
PICTURES = os.environ.get("PICTURES")
RECORDS = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")  # beeps and a clock; no questions


@pytest.fixture(scope="module")
def server(tmp_path_factory, two_layers):
    model = [] if PICTURES else two_layers
    made = Server(tmp_path_factory.mktemp("queue"), *model, works=True)
    yield made
    made.close()
    session.clear()


@pytest.fixture(scope="module")
def browser(server, tmp_path_factory):
    driver = chromium.start(tmp_path_factory.mktemp("profile"), *RECORDS)
    show(driver, 1280, 900, "light")
    driver.get(server.url)
    yield driver
    driver.quit()


@pytest.fixture
def waiting(tmp_path, browser):
    """The browser at a server of the demo model that makes nothing."""
    made = Server(tmp_path / "queue", *SMALL)
    browser.get(made.url)
    yield made
    browser.get("about:blank")
    made.close()


def keep(driver, name: str) -> None:
    if PICTURES:
        Path(PICTURES).mkdir(exist_ok=True, parents=True)
        driver.save_screenshot(f"{PICTURES}/{name}.png")


def find(driver, selector):
    return driver.find_element("css selector", selector)


def find_all(driver, selector):
    return driver.find_elements("css selector", selector)


def text_of(driver, selector) -> str:
    """Of an element that may be replaced at any moment; empty if there is none."""
    return driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)


def value_of(driver, selector):
    return driver.execute_script("return document.querySelector(arguments[0]).value", selector)


def write(driver, selector, text) -> None:
    field = find(driver, selector)
    field.clear()
    field.send_keys(text)


def run(driver, prompt: str, steps: int, seed: int = 1) -> None:
    for selector, text in (("#prompt", prompt), ("[name=steps]", str(steps)), ("[name=seed]", str(seed))):
        write(driver, selector, text)
    find(driver, "#run").click()


def test_people_can_use_the_page(server, browser):
    """One after the other, as one would: run, watch, cancel, reload, search, use again, compare."""
    wait_for(lambda: text_of(browser, "#ready") == "ready")
    run(browser, "a red circle moving right", 40)
    seen, previews = set(), set()

    def watched():
        seen.add(text_of(browser, ".job .phase"))
        previews.add(browser.execute_script("return document.querySelector('.job img')?.src || null"))
        return len([word for word in seen if word.startswith("step ")]) >= 3 and len(previews - {None}) >= 2

    wait_for(watched)
    wait_for(lambda: re.search(r"step \d+ of 40 · about .+ left", text_of(browser, ".job .phase")))
    keep(browser, "running")
    run(browser, "a green star, not wanted", 900)
    wait_for(lambda: len(find_all(browser, ".job")) == 2 or "not wanted" in text_of(browser, ".job .prompt"))
    wait_for(lambda: "red circle" in text_of(browser, ".run .prompt"))

    browser.refresh()
    wait_for(lambda: "not wanted" in text_of(browser, ".job .prompt"))
    assert value_of(browser, "#prompt") == "a green star, not wanted", "the form is as it was left"
    browser.execute_script("document.querySelector('.job .cancel').click()")
    wait_for(lambda: not find_all(browser, ".job"))
    wait_for(lambda: len(server.queue.jobs()) == 1)

    run(browser, "a blue square", 2, seed=77)
    wait_for(lambda: len(find_all(browser, ".run")) == 2)
    assert "to make" in wait_for(lambda: "to make" in text_of(browser, "#estimate") and text_of(browser, "#estimate"))
    keep(browser, "finished")

    write(browser, "#search", "circle seed=1")
    wait_for(lambda: len(find_all(browser, ".run")) == 1 and "red circle" in text_of(browser, ".run .prompt"))
    find(browser, ".run .use").click()
    assert value_of(browser, "#prompt") == "a red circle moving right" and value_of(browser, "[name=steps]") == "40"
    assert not find(browser, "[name=flow_shift]").is_displayed(), "what is as usual stays folded away"
    clear = "arguments[0].value = ''; arguments[0].dispatchEvent(new Event('input'))"
    browser.execute_script(clear, find(browser, "#search"))
    wait_for(lambda: len(find_all(browser, ".run")) == 2)

    browser.execute_script("document.querySelectorAll('.pick').forEach((box) => box.click())")
    find(browser, "#compare-open").click()
    times = "return [...document.querySelectorAll('#compare-videos video')].map((video) => video.currentTime)"
    wait_for(lambda: min(shown := browser.execute_script(times)) > 0.1 and max(shown) - min(shown) < 0.2)  # in step
    keep(browser, "compare")
    find(browser, "#compare-close").click()
    pictures(browser)

    write(browser, "[name=steps]", "0")
    wait_for(lambda: "Steps 0: must be from 1 to 1000" in text_of(browser, "#error"))
    nothing_went_wrong(server, browser)


def pictures(browser) -> None:
    for width, height in ((375, 812), (768, 1024), (1280, 900)):
        for scheme in ("light", "dark"):
            show(browser, width, height, scheme)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, "nothing sticks out"
            keep(browser, f"page-{width}-{scheme}")


def nothing_went_wrong(server, browser) -> None:
    assert not browser.get_log("browser")
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = [entry["params"] for entry in messages if entry["method"] == "Network.requestWillBeSent"]
    asked = {entry["request"]["url"] for entry in sent if entry["documentURL"].startswith(server.url)}
    assert len(asked) > 10 and all(url.startswith((server.url, "data:", "blob:")) for url in asked), asked


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(browser):
    unnamed = browser.execute_script("""
      return [...document.querySelectorAll("button, a, input:not([type=hidden]), textarea, select, video, progress")]
        .filter((element) => element.checkVisibility())
        .filter((element) => !(element.ariaLabel || element.labels?.length || element.textContent.trim()))
        .map((element) => element.outerHTML)""")
    assert not unnamed
    from selenium.webdriver.common.keys import Keys

    browser.execute_script("scrollTo(0, 0); document.querySelector('.skip').focus()")
    reached, name = set(), "const element = document.activeElement; return element.name || element.id"
    for _ in range(25):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(browser.execute_script(name))
    assert {"prompt", "size", "steps", "seed", "run", "search"} <= reached, reached


# ---------------------------------------------------------------- what is remembered


BROKEN = ["{", "[1, 2]", "null", "7", '{"steps": {"a": 1}, "seed": [1]}', '{"seed": "99999999999999", "frames": "x"}',
          '{"size": "<b>x", "adapter": "gone", "length": "5", "elements": "1"}']


@pytest.mark.parametrize("stored", BROKEN)
def test_whatever_is_stored_the_page_starts(waiting, browser, stored):
    browser.execute_script("localStorage.setItem('form demo', arguments[0]); localStorage.setItem('form', '{')", stored)
    browser.refresh()
    wait_for(lambda: text_of(browser, "#ready") == "loading")
    wait_for(lambda: "64 × 64, 5 frames" in text_of(browser, "#estimate"))
    values = {name: value_of(browser, f"[name={name}]") for name in ("steps", "seed", "frames", "adapter")}
    assert values == {"steps": "3", "seed": "2025", "frames": "5", "adapter": ""}
    assert not find(browser, "#error").is_displayed()


def test_what_was_not_changed_is_the_servers_to_change(waiting, browser):
    write(browser, "[name=steps]", "9")
    find(browser, "#prompt").send_keys("a star")
    stored = json.loads(browser.execute_script("return localStorage.getItem('form demo')"))
    assert stored == {"prompt": "a star", "steps": "9"}, "neither seed nor size nor frames"
    browser.refresh()
    assert (value_of(browser, "[name=steps]"), value_of(browser, "#prompt")) == ("9", "a star")
    browser.execute_script("document.querySelector('#start-over').click()")
    assert (value_of(browser, "[name=steps]"), value_of(browser, "#prompt")) == ("3", "")
    browser.refresh()
    assert value_of(browser, "[name=steps]") == "3"


@pytest.mark.parametrize("width", [375, 1280])
def test_a_seed_of_ten_digits_is_all_there(waiting, browser, width):
    show(browser, width, 900, "light")
    write(browser, "[name=seed]", "4294967295")
    field = find(browser, "[name=seed]")
    room = "return [arguments[0].scrollWidth, arguments[0].clientWidth, arguments[0].offsetWidth]"
    needed, had, _ = browser.execute_script(room, field)
    assert needed <= had and had > 170, "ten digits, and the arrows beside them"
    show(browser, 1280, 900, "light")


# ---------------------------------------------------------------- what people have elsewhere


def test_a_page_that_was_just_opened_shows_what_there_is(waiting, browser):
    assert text_of(browser, ".model") == "demo"
    example = find(browser, ".example")
    text = example.text
    example.click()
    assert value_of(browser, "#prompt") == text and not find(browser, "#examples").is_displayed()
    browser.execute_script("document.querySelector('#start-over').click()")
    assert find(browser, "#examples").is_displayed()


def test_an_adapter_brings_its_numbers_and_takes_them_away(waiting, browser):
    browser.execute_script("document.querySelector('#start-over').click()")
    find(browser, "[name=adapter] option:nth-child(3)").click()
    assert value_of(browser, "[name=adapter]") == "demo_4step"
    wait_for(lambda: value_of(browser, "[name=steps]") == "4" and value_of(browser, "[name=guidance_scale]") == "1")
    write(browser, "#prompt", "a star")
    find(browser, "#run").click()
    job = wait_for(waiting.queue.jobs)[0]
    assert job.request["values"]["adapter"] == "demo_4step" and job.request["steps"] == 4
    find(browser, "[name=adapter] option:nth-child(1)").click()
    wait_for(lambda: value_of(browser, "[name=steps]") == "3")


def test_four_at_once_have_four_seeds(waiting, browser):
    browser.execute_script("document.querySelector('#start-over').click()")
    find(browser, "#count option:nth-child(3)").click()
    run(browser, "a star", 2, seed=4294967294)
    jobs = wait_for(lambda: len(jobs := waiting.queue.jobs()) == 4 and jobs)
    assert [job.request["seed"] for job in jobs] == [4294967294, 4294967295, 0, 1]
    wait_for(lambda: len(find_all(browser, ".job")) == 4)
    keep(browser, "four")


def test_the_api_call_of_the_form_makes_the_video_of_the_form(server, browser, tmp_path):
    browser.get(server.url)
    browser.execute_script("document.querySelector('#start-over').click()")
    text = """it's a "red" circle, $HOME & `ls` \\ <b>"""
    write(browser, "#prompt", text)
    write(browser, "[name=steps]", "1")
    find(browser, "#api summary").click()
    edges = "return ['#copy', '#call', '#form'].map((one) => document.querySelector(one).getBoundingClientRect().right)"
    copy, call, form = browser.execute_script(edges)
    assert max(copy, call) < form, "a long line is scrolled, not the card"
    programs = {"curl": ["sh", "-c"], "python": [sys.executable, "-c"]}
    for language, program in programs.items():
        find(browser, f"#tab-{language}").click()
        keep(browser, f"api-{language}")
        if not shutil.which(program[0]) or (language == "curl" and not shutil.which("curl")):
            continue
        call = text_of(browser, "#call")
        subprocess.run([*program, call], cwd=tmp_path, check=True, timeout=120, capture_output=True)
        made = server.queue.jobs()[-1]
        assert (made.request["values"]["prompt.text"], made.request["steps"]) == (text, 1)
        video = (tmp_path / "video.mp4").read_bytes()
        assert video == (made.folder / "video.mp4").read_bytes()
        (tmp_path / "video.mp4").unlink()


def test_a_video_is_shown_large_and_the_keyboard_turns_pages(server, browser):
    from selenium.webdriver.common.keys import Keys

    for seed in (31, 32):
        server.finished(server.post(prompt=f"large {seed}", steps=1, seed=seed)["id"])
    browser.get(server.url)
    wait_for(lambda: text_of(browser, ".run .prompt") == "large 32")
    browser.execute_script("document.querySelector('.run video').focus()")

    def press(key):
        browser.switch_to.active_element.send_keys(key)

    press(Keys.ENTER)
    assert find(browser, "#large").is_displayed() and text_of(browser, "#large .prompt") == "large 32"
    wait_for(lambda: browser.execute_script("return document.querySelector('#large video').currentTime") > 0)
    keep(browser, "large")
    press(Keys.ARROW_RIGHT)
    assert text_of(browser, "#large .prompt") == "large 31"
    press(Keys.ARROW_LEFT)
    press(Keys.ARROW_LEFT)
    assert text_of(browser, "#large .prompt") == "large 32" and not find(browser, "#previous").is_enabled()
    show(browser, 375, 812, "dark")
    assert browser.execute_script("return document.querySelector('#large').scrollWidth") <= 375
    keep(browser, "large-375-dark")
    show(browser, 1280, 900, "light")
    press(Keys.ESCAPE)
    assert not find(browser, "#large").is_displayed()


# ---------------------------------------------------------------- pictures


@pytest.fixture(scope="module")
def pictured(tmp_path_factory, server):
    """A server that starts from pictures."""
    model = tiny.model("pictured")
    made = Server(tmp_path_factory.mktemp("pictured"), *SMALL, *model, "pipeline=i2v", works=True)
    yield made
    made.close()


def test_nothing_is_red_before_anything_was_done(pictured, browser):
    browser.get(pictured.url)
    wait_for(lambda: text_of(browser, "#estimate") == "Choose a picture to start from first.")
    assert not find(browser, "#error").is_displayed()
    words = browser.execute_script("return document.body.innerText")
    assert not re.search(r"\w+(\.\w+)?=\w", words), words
    write(browser, "#prompt", "a star")
    find(browser, "#run").click()
    wait_for(lambda: text_of(browser, "#error") == "Choose a picture to start from first.")
    keep(browser, "missing")
    # An estimate that was under way does not wipe it away; a change of the form does.
    estimates = "return performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/estimate')).length"
    before = browser.execute_script(estimates)
    browser.execute_script("estimate()")
    wait_for(lambda: browser.execute_script(estimates) > before)
    assert find(browser, "#error").is_displayed()
    write(browser, "#prompt", "two stars")
    wait_for(lambda: not find(browser, "#error").is_displayed())


def test_use_these_brings_the_picture_back_and_a_video_goes_on(pictured, browser, tmp_path):
    browser.get(pictured.url)
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    find(browser, "#file-image").send_keys(str(tmp_path / "red.png"))
    wait_for(lambda: "64 × 64" in text_of(browser, "#estimate"))
    run(browser, "a red thing", 1)
    wait_for(lambda: text_of(browser, ".run .prompt") == "a red thing")
    browser.refresh()
    wait_for(lambda: text_of(browser, ".run .prompt") == "a red thing")
    assert not find(browser, ".drop img").is_displayed()
    find(browser, ".run .use").click()
    wait_for(lambda: find(browser, ".drop img").is_displayed())
    keep(browser, "picture")
    run(browser, "the same again", 1)
    wait_for(lambda: text_of(browser, ".run .prompt") == "the same again")
    first, second = pictured.queue.jobs()
    assert (second.folder / "inputs/image.png").read_bytes() == (first.folder / "inputs/image.png").read_bytes()

    find(browser, ".run video").click()
    find(browser, "#large .go-on").click()
    wait_for(lambda: "last frame of" in text_of(browser, ".drop .names"))
    run(browser, "it goes on", 1)
    wait_for(lambda: text_of(browser, ".run .prompt") == "it goes on")
    from safetensors.numpy import load_file

    last = load_file(second.folder / "decode.safetensors")["frames"]
    assert last.shape[0] == 5 or last.shape[1] == 5, last.shape
    given = Image.open(pictured.queue.jobs()[-1].folder / "inputs/image.png").convert("RGB")
    assert given.size == (64, 64)
    import imageio.v3 as imageio
    import numpy

    frames = imageio.imread(second.folder / "video.mp4")
    apart = [numpy.abs(numpy.asarray(given, float) - frame).mean() for frame in frames]
    assert numpy.argmin(apart) == len(frames) - 1 and apart[-1] == 0, apart


# ---------------------------------------------------------------- people who move and speak


@pytest.fixture
def at(tmp_path, browser):
    """The browser at a server of a tiny model."""
    made = []

    def start(kind: str, *overrides: str, **options) -> Server:
        made.append(Server(tmp_path / kind, *tiny.model(kind), *overrides, **options))
        browser.get_log("browser")  # what earlier tests left
        browser.get(made[-1].url)
        return made[-1]

    yield start
    browser.get("about:blank")
    for one in made:
        one.close()
    session.clear()


def record(browser, key: str, seconds: int) -> None:
    button = f"[data-key={key}] .record"
    find(browser, button).click()
    wait_for(lambda: text_of(browser, button) == f"Stop, {seconds} s")
    find(browser, button).click()
    wait_for(lambda: "recording.webm" in text_of(browser, f"[data-key={key}] .names"))
    assert text_of(browser, button).startswith("Record") and find(browser, f"[data-key={key}] .clip").is_displayed()


def test_what_is_said_into_the_microphone_is_said_in_the_video(at, browser, tmp_path):
    """As long as it is said, at the picture's aspect; the sound is in the video, and comes back with its settings."""
    sized = ["model.area=8192", "model.size_multiple=64", "model.fps=8", "pipeline.segments.frames=8", "steps=1"]
    server = at("spoken", "pipeline=s2v", "resolution=spoken", *sized, works=True)
    worker.prepare(server.base, lambda event: None)
    missing = "Choose a picture to start from first.\nChoose a sound first."
    wait_for(lambda: text_of(browser, "#estimate") == missing)
    Image.new("RGB", (128, 64), "red").save(tmp_path / "red.png")
    find(browser, "#file-image").send_keys(str(tmp_path / "red.png"))
    wait_for(lambda: text_of(browser, "#estimate") == "Choose a sound first.")
    record(browser, "audio", 1)
    shown = wait_for(lambda: re.match(r"128 × 64, (\d+) frames", text_of(browser, "#estimate")))
    write(browser, "#prompt", "somebody speaks")
    keep(browser, "recorded")
    find(browser, "#run").click()
    wait_for(lambda: text_of(browser, ".run .prompt") == "somebody speaks")
    (job,) = server.queue.jobs()
    frames = sounds.frame_count(job.folder / "inputs/audio.webm", 8) - 3
    assert clips.frame_count(job.folder / "video.mp4", 8) == int(shown[1]) == frames and frames >= 4
    assert clips.probe(job.folder / "video.mp4").has_sound
    find(browser, "[data-key=audio] .remove").click()
    wait_for(lambda: text_of(browser, "#estimate") == "Choose a sound first.")
    find(browser, ".run .use").click()
    wait_for(lambda: text_of(browser, "[data-key=audio] .names") == "audio.webm")
    assert not browser.get_log("browser")


def test_a_driving_video_is_filmed_and_described(at, browser, tmp_path):
    server = at("driven", *SMALL, "pipeline=animate2", "resolution.fps=8")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    find(browser, "#file-image").send_keys(str(tmp_path / "red.png"))
    record(browser, "video", 1)
    write(browser, "[name=driving_prompt]", "a clock ticks")
    keep(browser, "filmed")
    run(browser, "a red thing ticks", 1)
    (job,) = wait_for(server.queue.jobs)
    assert job.request["values"]["driving_prompt"] == "a clock ticks"
    clip = clips.probe(job.folder / "inputs/video.webm")
    assert clip.fps in (20, clips.RECORDED_FPS)  # the fake camera's; some versions of ffmpeg see none in a recording
    assert clip.has_sound and clip.width > clip.height


def test_a_recording_ends_where_a_request_is_full(at, browser, tmp_path):
    server = at("driven", *SMALL, "pipeline=animate2", "resolution.fps=8", "serve.upload_mb=1")
    assert text_of(browser, "#room") == "up to 1 MB in all", "said before anything is recorded"
    (tmp_path / "large.png").write_bytes(b"a" * 1_000_000)
    find(browser, "#file-image").send_keys(str(tmp_path / "large.png"))
    wait_for(lambda: text_of(browser, "#room") == "up to 1 MB in all: large.png would be too much, and was left out")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    find(browser, "#file-image").send_keys(str(tmp_path / "red.png"))
    find(browser, "[data-key=video] .record").click()
    wait_for(lambda: re.fullmatch(r"up to 1 MB in all: 0\.\d MB recorded", text_of(browser, "#room")))
    wait_for(lambda: text_of(browser, "#room") == "up to 1 MB in all: the recording ended there")
    assert "recording.webm" in text_of(browser, "[data-key=video] .names")
    write(browser, "[name=driving_prompt]", "a clock ticks")
    run(browser, "a red thing ticks", 1)
    (job,) = wait_for(server.queue.jobs)
    assert 100_000 < (job.folder / "inputs/video.webm").stat().st_size < 1_000_000
    find(browser, "[data-key=video] .remove").click()
    wait_for(lambda: text_of(browser, "#room") == "up to 1 MB in all")


def test_a_recording_that_is_too_much_from_the_first_second_on_is_left_out(at, browser):
    at("driven", *SMALL, "pipeline=animate2", "resolution.fps=8", "serve.upload_mb=0.01")
    find(browser, "[data-key=video] .record").click()
    left_out = "up to 0.01 MB in all: recording.webm would be too much, and was left out"
    wait_for(lambda: text_of(browser, "#room") == left_out)
    assert "recording" not in text_of(browser, "[data-key=video] .names")


def test_a_camera_that_is_refused_is_told(at, browser):
    at("driven", *SMALL, "pipeline=animate2")
    refused = "navigator.mediaDevices.getUserMedia = async () => { throw new Error('Permission denied'); }"
    browser.execute_script(refused)
    find(browser, "[data-key=video] .record").click()
    wait_for(lambda: text_of(browser, "#error") == "The camera cannot be used: Permission denied")
    assert text_of(browser, "[data-key=video] .record") == "Record with the camera"


def test_moves_of_the_camera_are_put_one_after_the_other(at, browser, tmp_path):
    server = at("fun_camera", *SMALL, "pipeline=fun_camera")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    find(browser, "#file-image").send_keys(str(tmp_path / "red.png"))
    for move in find_all(browser, ".move"):
        if move.text in ("zoom_in", "clockwise"):
            move.click()
    assert value_of(browser, "[name=camera]") == "zoom_in, clockwise"
    run(browser, "a red thing", 1)
    (job,) = wait_for(server.queue.jobs)
    assert camera.moves_of(job.request["values"]["camera"]) == ["zoom_in", "clockwise"]


def test_a_live_video_plays_while_it_is_made_and_takes_another_prompt(tmp_path, browser):
    """The worker's part is played here: a step is done, and chunks are appended."""
    live = ["pipeline=live", "live=self_forcing", "scheduler=renoise_linear", "steps=4", "guidance_scale=1"]
    made = Server(tmp_path / "queue", *live)
    frames = numpy.random.default_rng(0).integers(0, 255, (33, 64, 64, 3), dtype=numpy.uint8)

    def player(key):
        return browser.execute_script(f"return document.querySelector('.job video')?.{key}")

    try:
        video = made.post(prompt="a red circle", frames=33)
        folder = made.queue.folder / video["id"]
        growing = Growing(folder / "video.mp4", Encoding(8, 18), (9, 12))
        browser.get(made.url)
        wait_for(lambda: text_of(browser, ".job .phase").startswith("waiting"))
        append(folder, {"event": "step", "progress": 5, "step": 5, "steps": 12})
        growing.add(frames[:21])
        wait_for(lambda: player("buffered.length") and player("buffered.end(0)") >= 21 / 8 - 0.01)
        wait_for(lambda: player("currentTime") > 0 and not player("hidden"))
        keep(browser, "live")
        write(browser, ".job .next input", "a blue star")
        find(browser, ".job .next button").click()
        wait_for(lambda: "a blue star" in text_of(browser, ".job .prompt"))
        growing.add(frames[21:])
        wait_for(lambda: player("buffered.end(0)") >= 33 / 8 - 0.01)
        pace = r"first frames after [\d.]+ s, [\d.]+ frames a second; it plays at 8"
        wait_for(lambda: re.fullmatch(pace, text_of(browser, ".job .pace")))
        browser.refresh()
        wait_for(lambda: player("buffered.length") and player("buffered.end(0)") >= 33 / 8 - 0.01)
        assert text_of(browser, ".job .pace") == "", "what comes at once has no pace"
        assert json.loads(Prompts(folder).given.read_text()) == {"prompt": "a blue star"}
        growing.close()
    finally:
        browser.get("about:blank")
        made.close()


def test_a_live_video_plays_on_after_what_cut_it_off(tmp_path, browser, monkeypatch):
    """A connection that is lost within a fragment, and a worker that begins the file anew."""
    live = ["pipeline=live", "live=self_forcing", "scheduler=renoise_linear", "steps=4", "guidance_scale=1"]
    made, watched = Server(tmp_path / "queue", *live), []
    frames = numpy.random.default_rng(0).integers(0, 255, (57, 64, 64, 3), dtype=numpy.uint8)
    growing_bytes = api.growing

    async def cut(*asked):
        watched.append(asked)
        async for content in growing_bytes(*asked):
            yield content[: len(content) // 2] if len(watched) == 1 else content
            if len(watched) == 1:
                raise ConnectionResetError

    def player(key):
        return browser.execute_script(f"return document.querySelector('.job video')?.{key}")

    def there(count):
        wait_for(lambda: player("buffered.length") and player("buffered.end(0)") >= count / 8 - 0.01)

    monkeypatch.setattr(api, "growing", cut)
    try:
        video = made.post(prompt="a red circle", frames=57)
        folder = made.queue.folder / video["id"]
        browser.get(made.url)
        append(folder, {"event": "step", "progress": 5, "step": 5, "steps": 20})
        with contextlib.closing(Growing(folder / "video.mp4", Encoding(8, 18), (9, 12))) as growing:
            growing.add(frames[:33])
            there(33)
            wait_for(lambda: player("currentTime") > 0.5)
        with contextlib.closing(Growing(folder / "video.mp4", Encoding(8, 18), (9, 12))) as growing:
            growing.add(frames[:9])
            wait_for(lambda: len(watched) == 3)
            growing.add(frames[9:])
            there(57)
            wait_for(lambda: player("currentTime") > 33 / 8)
        write_text(folder / "metrics.json", '{"step_seconds": [0.1]}')
        wait_for(lambda: not find_all(browser, ".job"))
        assert len(watched) == 3, "a finished one is not asked for again"
    finally:
        browser.get("about:blank")
        made.close()


@pytest.mark.parametrize(
    "model, size, script",
    [
        pytest.param(
            hunyuan15.model, ["resolution=848x480", "resolution.frames=5"],
            "shown.play(); return [shown.videoWidth, shown.videoHeight]", id="a clip",
        ),
        pytest.param(
            lambda: flux.model("dev"), [],
            "picture = new Image(); picture.src = shown.poster; return [picture.naturalWidth, picture.naturalHeight]",
            id="a picture",
        ),
    ],
)
def test_other_families_have_the_page(request, tmp_path, browser, model, size, script):
    """HunyuanVideo's clip plays in it, FLUX's picture is seen in it; its flow shift follows the size."""
    kept = [text for text in model() if not text.startswith(("prompt=", "negative_prompt=", "output."))]
    made = Server(tmp_path / "queue", *kept, *size, "resolution.height=48", "resolution.width=64", works=True)
    try:
        browser.get(made.url)
        wait_for(lambda: text_of(browser, "#ready") == "ready")
        run(browser, "a red circle", 2)
        shown = "const shown = document.querySelector('.run video'); if (!shown) return null; "
        wait_for(lambda: browser.execute_script(shown + script) == [64, 48])
        keep(browser, request.node.callspec.id)
    finally:
        browser.get("about:blank")
        made.close()
        session.clear()
