"""The page in a real browser: what people do with it. Debian: apt-get install chromium chromium-driver.

PICTURES=<folder> keeps screenshots, at several widths, light and dark.
"""
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.serving import Server, wait_for
from wan_torchax.session import session

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.system, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium and chromedriver here"),
]
PICTURES = os.environ.get("PICTURES")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


@pytest.fixture(scope="module")
def server(tmp_path_factory, two_layers):
    model = [] if PICTURES else two_layers
    made = Server(tmp_path_factory.mktemp("queue"), *model, works=True)
    yield made
    made.close()
    session.clear()


@pytest.fixture(scope="module")
def browser(server, tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = f"--user-data-dir={tmp_path_factory.mktemp('profile')}"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", profile, *QUIET):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    show(driver, 1280, 900, "light")
    driver.get(server.url)
    yield driver
    driver.quit()


def show(driver, width: int, height: int, scheme: str) -> None:
    sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


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
    keep(browser, "running")
    run(browser, "a green star, not wanted", 400)
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
    clear = "arguments[0].value = ''; arguments[0].dispatchEvent(new Event('input'))"
    browser.execute_script(clear, find(browser, "#search"))
    wait_for(lambda: len(find_all(browser, ".run")) == 2)

    browser.execute_script("document.querySelectorAll('.pick').forEach((box) => box.click())")
    find(browser, "#compare-open").click()
    times = "return [...document.querySelectorAll('#compare-videos video')].map((video) => video.currentTime)"
    wait_for(lambda: all(time > 0.1 for time in browser.execute_script(times)))
    first, second = browser.execute_script(times)
    assert abs(first - second) < 0.2, "in step"
    keep(browser, "compare")
    find(browser, "#compare-close").click()
    pictures(browser)

    write(browser, "[name=steps]", "0")
    wait_for(lambda: "steps=0: must be from 1 to 1000" in text_of(browser, "#error"))
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

    browser.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    reached, name = set(), "const element = document.activeElement; return element.name || element.id"
    for _ in range(25):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(browser.execute_script(name))
    assert {"prompt", "size", "steps", "seed", "run", "search"} <= reached, reached
