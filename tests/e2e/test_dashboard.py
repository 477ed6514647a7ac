"""The operator's page in a real browser, on a real model: create, chat, rotate, see an alert fire and resolve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.e2e.platform import Platform, running

needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="needs Debian's chromium and chromium-driver",
)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    quick = {"INGLE_ALERTS__INTERVAL": "0.5", "INGLE_ALERTS__SCALE": "0.01"}
    with running(tmp_path_factory.mktemp("home"), **quick) as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    # the page is served under the platform's own certificate authority
    options.accept_insecure_certs = True
    for flag in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--window-size=1200,900",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def text_of(browser: WebDriver) -> str:
    return str(browser.find_element(By.TAG_NAME, "body").text)


def see(browser: WebDriver, text: str, seconds: float = 20) -> None:
    wait = WebDriverWait(browser, seconds, ignored_exceptions=[StaleElementReferenceException])
    try:
        wait.until(lambda driver: text in text_of(driver))
    except TimeoutException:
        raise AssertionError(f"never saw {text!r} on the page, but: {text_of(browser)}") from None


def press(browser: WebDriver, text: str) -> None:
    find = (By.XPATH, f"//button[normalize-space()='{text}' or @aria-label='{text}']")

    def click(driver: WebDriver) -> bool:
        driver.find_element(*find).click()
        return True

    WebDriverWait(browser, 20, ignored_exceptions=[StaleElementReferenceException, NoSuchElementException]).until(click)


def put(browser: WebDriver, name: str, text: str) -> None:
    """Once the field can be typed into: a page that is drawn anew replaces it."""

    def type_it(driver: WebDriver) -> bool:
        field = driver.find_element(By.NAME, name)
        field.clear()
        field.send_keys(text)
        return True

    passing = [StaleElementReferenceException, NoSuchElementException, ElementNotInteractableException]
    WebDriverWait(browser, 20, ignored_exceptions=passing).until(type_it)


def go(browser: WebDriver, platform: Platform, page: str) -> None:
    browser.get(f"{platform.admin}/#/{page}")


def accept(browser: WebDriver) -> None:
    WebDriverWait(browser, 10).until(lambda driver: driver.switch_to.alert).accept()


def faults(browser: WebDriver) -> list[str]:
    """What the browser complained of, but for the refusals that a test asked for."""
    log = browser.execute("getLog", {"type": "browser"})["value"]
    severe = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
    return [message for message in severe if not any(status in message for status in (" 401 ", " 422 "))]


@needs_browser
def test_an_operator_signs_in_and_creates(platform: Platform, browser: WebDriver) -> None:
    browser.get(platform.admin + "/")
    see(browser, "Sign in")
    put(browser, "token", "wrong")
    press(browser, "Sign in")
    see(browser, "not known")
    put(browser, "token", platform.token)
    press(browser, "Sign in")
    see(browser, "local-eu")
    see(browser, "live")

    # what the server objects to stands at the field, which is then in focus
    put(browser, "name", "No Capitals")
    press(browser, "Create")
    see(browser, "pattern")
    name = browser.find_element(By.NAME, "name")
    assert name.get_attribute("aria-invalid") == "true"
    assert browser.switch_to.active_element == name
    put(browser, "name", "chat")
    put(browser, "idle_timeout", "soon")
    press(browser, "Create")
    see(browser, "soon isn't a duration")
    put(browser, "idle_timeout", "10m")
    press(browser, "Create")
    see(browser, "chat is being created")
    see(browser, "1 of 1 replicas ready", 60)
    assert json.loads(platform.ingle("endpoint", "show", "chat", "-o", "json"))["idle_timeout"] == 600
    assert faults(browser) == []


@needs_browser
def test_a_chat_is_live_and_charts_follow(platform: Platform, browser: WebDriver) -> None:
    go(browser, platform, "endpoint/chat")
    see(browser, "Time to first token")
    WebDriverWait(browser, 20).until(lambda driver: len(driver.find_elements(By.CSS_SELECTOR, ".plot canvas")) == 8)
    browser.find_element(By.ID, "most").clear()
    browser.find_element(By.ID, "most").send_keys("24")
    browser.find_element(By.ID, "prompt").send_keys("Why is the sky blue?\n")
    see(browser, "First token after", 60)
    WebDriverWait(browser, 60).until(lambda driver: "tokens/s" in driver.find_element(By.CLASS_NAME, "times").text)
    WebDriverWait(browser, 60).until_not(lambda driver: driver.find_elements(By.CSS_SELECTOR, "[aria-busy]"))
    assert len(browser.find_element(By.CSS_SELECTOR, ".turn.assistant").text) > 10

    def measured(driver: WebDriver) -> bool:
        figure = driver.find_element(By.CSS_SELECTOR, "figure")
        return " ms" in figure.text and "–" not in figure.text

    WebDriverWait(browser, 30).until(measured)
    # a longer range comes from the roll-ups; with these settings a minute of history is soon there
    press(browser, "6 h")
    press(browser, "15 min")

    browser.find_element(By.ID, "most").clear()
    browser.find_element(By.ID, "most").send_keys("2000")
    browser.find_element(By.ID, "prompt").send_keys("Tell a very long story\n")
    WebDriverWait(browser, 30).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, "[aria-busy]"))
    press(browser, "Stop")
    see(browser, "[stopped]")
    assert faults(browser) == []


@needs_browser
def test_an_endpoint_is_changed_put_to_sleep_and_woken(platform: Platform, browser: WebDriver) -> None:
    go(browser, platform, "endpoint/chat")
    see(browser, "Change this endpoint")
    browser.find_element(By.CSS_SELECTOR, "summary").click()
    put(browser, "min_replicas", "3")
    press(browser, "Save")
    see(browser, "min_replicas 3 is more than max_replicas 1")
    put(browser, "min_replicas", "0")
    put(browser, "max_wait", "90s")
    press(browser, "Save")
    see(browser, "chat is being changed")
    assert json.loads(platform.ingle("endpoint", "show", "chat", "-o", "json"))["max_wait"] == 90
    press(browser, "Sleep")
    see(browser, "0 to 1, 0 wanted", 30)
    press(browser, "Wake")
    see(browser, "1 of 1 replicas ready", 60)
    see(browser, "import")
    # the ladder of warmth, and the way back to what was asked before
    see(browser, "asleep")
    press(browser, "Back to it")
    accept(browser)
    see(browser, "is asked for again")
    assert json.loads(platform.ingle("endpoint", "show", "chat", "-o", "json"))["generation"] == 3
    assert faults(browser) == []


@needs_browser
def test_an_alert_fires_is_silenced_and_resolves(platform: Platform, browser: WebDriver) -> None:
    go(browser, platform, "")
    see(browser, "Create an endpoint")
    put(browser, "name", "broken")
    put(browser, "model", "no-such-model")
    press(browser, "Create")
    see(browser, "no model 'no-such-model'", 40)
    see(browser, "ColdStartFails", 40)
    go(browser, platform, "alerts")
    press(browser, "Silence ColdStartFails for an hour")
    see(browser, "firing, silenced")
    see(browser, "alert=ColdStartFails")
    go(browser, platform, "endpoint/broken")
    see(browser, "no model 'no-such-model'")
    press(browser, "Delete")
    accept(browser)
    see(browser, "Create an endpoint")
    go(browser, platform, "alerts")
    see(browser, "Nothing fires.", 60)
    see(browser, "resolved")
    # its page may look once more at what was just deleted
    assert [fault for fault in faults(browser) if "/endpoints/broken" not in fault or " 404 " not in fault] == []


@needs_browser
def test_keys_and_certificates_are_rotated(platform: Platform, browser: WebDriver) -> None:
    go(browser, platform, "keys")
    see(browser, "Create a key")
    put(browser, "name", "from the page")
    put(browser, "networks", "nowhere")
    press(browser, "Create a key")
    see(browser, "nowhere")
    put(browser, "networks", "")
    press(browser, "Create a key")
    see(browser, "Shown this once")
    first = browser.find_element(By.TAG_NAME, "pre").text
    browser.refresh()
    see(browser, "from the page")
    assert "Shown this once" not in text_of(browser)
    press(browser, "Rotate from the page")
    see(browser, "Shown this once")
    assert browser.find_element(By.TAG_NAME, "pre").text != first
    rotated = [key for key in json.loads(platform.ingle("key", "list", "-o", "json")) if key["name"] == "from the page"]
    assert sorted(bool(key["rotated_to"]) for key in rotated) == [False, True]

    go(browser, platform, "certs")
    see(browser, "gateway-local-eu")
    before = json.loads(platform.ingle("cert", "show", "gateway-local-eu", "-o", "json"))["serial"]
    press(browser, "Rotate gateway-local-eu")
    see(browser, "gateway-local-eu is renewed")
    assert json.loads(platform.ingle("cert", "show", "gateway-local-eu", "-o", "json"))["serial"] != before
    go(browser, platform, "usage")
    see(browser, "Replica hours")
    go(browser, platform, "audit")
    press(browser, "Verify the chain")
    see(browser, "intact")
    assert faults(browser) == []


@needs_browser
def test_a_keyboard_reaches_everything(platform: Platform, browser: WebDriver) -> None:
    go(browser, platform, "endpoint/chat")
    see(browser, "Try it")
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input, select, textarea, button, a, summary')]"
        ".filter((one) => !(one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length"
        ' || document.querySelector(`label[for="${one.id}"]`))).map((one) => one.outerHTML)'
    )
    assert unnamed == []
    reached = set()
    browser.find_element(By.CSS_SELECTOR, "h1").click()
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.add(browser.execute_script("return document.activeElement.id || document.activeElement.textContent"))
    assert {"Fleet", "Sleep", "Delete", "Week", "prompt", "Send", "Change this endpoint"} <= reached
    # nothing but the outline that others have tells where the focus is
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") != "none"


@needs_browser
def test_it_fits_a_phone(platform: Platform, browser: WebDriver) -> None:
    browser.set_window_size(390, 800)
    for page in ("", "endpoint/chat", "keys", "usage", "alerts", "certs", "audit"):
        browser.get(f"{platform.admin}/#/{page}")
        see(browser, {"": "Fleet", "endpoint/chat": "Try it"}.get(page, page.title()[:4]))
        assert browser.execute_script("return document.body.scrollWidth <= window.innerWidth")
    browser.set_window_size(1200, 900)


@needs_browser
def test_without_the_library_charts_are_numbers(platform: Platform, browser: WebDriver) -> None:
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/static/uplot.js"]})
    try:
        browser.get(platform.admin + "/")
        go(browser, platform, "endpoint/chat")
        see(browser, "ready 1 · wanted 1")
        assert browser.find_elements(By.CSS_SELECTOR, ".plot canvas") == []
    finally:
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        browser.execute("getLog", {"type": "browser"})


@needs_browser
def test_signing_out_forgets_the_token(platform: Platform, browser: WebDriver) -> None:
    browser.get(platform.admin + "/")
    press(browser, "Sign out")
    see(browser, "Admin token")
    browser.refresh()
    see(browser, "Admin token")


def test_the_page_is_strict(platform: Platform) -> None:
    import ssl
    import urllib.request

    context = ssl.create_default_context(cafile=platform.ca_file)
    with urllib.request.urlopen(platform.admin + "/", context=context, timeout=10) as answer:
        policy = answer.headers["Content-Security-Policy"]
        page = answer.read().decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http://" not in page
    assert "https://" not in page
    for name in Path("control_plane/dashboard/static").iterdir():
        assert "innerHTML" not in name.read_text()
