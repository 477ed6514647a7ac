"""The operator's page in a real browser: sign in, create, see it live, make a key, at a desk and on a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.e2e.platform import Platform, running

needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="needs Debian's chromium and chromium-driver",
)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running(tmp_path_factory.mktemp("home")) as made:
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


def see(browser: WebDriver, text: str, seconds: float = 20) -> None:
    WebDriverWait(browser, seconds).until(lambda driver: text in driver.find_element(By.TAG_NAME, "body").text)


def press(browser: WebDriver, text: str) -> None:
    browser.find_element(By.XPATH, f"//button[normalize-space()='{text}']").click()


@needs_browser
def test_an_operator_works_on_the_page(platform: Platform, browser: WebDriver) -> None:
    browser.get(platform.admin + "/")
    see(browser, "Sign in")
    token = browser.find_element(By.NAME, "token")
    token.send_keys("wrong")
    press(browser, "Sign in")
    see(browser, "not known")
    browser.find_element(By.NAME, "token").clear()
    browser.find_element(By.NAME, "token").send_keys(platform.token)
    press(browser, "Sign in")
    see(browser, "local-eu")
    see(browser, "live")

    # the model does not exist: the page must tell why the endpoint failed, without being asked again
    browser.find_element(By.NAME, "name").send_keys("from-the-page")
    model = browser.find_element(By.NAME, "model")
    model.clear()
    model.send_keys("no-such-model")
    press(browser, "Create")
    see(browser, "from-the-page is being created")
    browser.find_element(By.CSS_SELECTOR, "h2").click()
    browser.get(platform.admin + "/#/endpoint/from-the-page")
    see(browser, "failed", 40)
    see(browser, "no model 'no-such-model'")
    assert '"from-the-page"' in platform.ingle("endpoint", "list", "-o", "json")

    browser.get(platform.admin + "/#/keys")
    see(browser, "Create a key")
    press(browser, "Create a key")
    see(browser, "Shown this once")
    browser.refresh()
    see(browser, "All keys")
    assert "Shown this once" not in browser.find_element(By.TAG_NAME, "body").text
    for page, heading in (("usage", "Cost"), ("certs", "Days left"), ("audit", "Verify the chain")):
        browser.get(f"{platform.admin}/#/{page}")
        see(browser, heading)
    press(browser, "Verify the chain")
    see(browser, "intact")

    log = browser.execute("getLog", {"type": "browser"})["value"]
    faults = [entry for entry in log if entry["level"] == "SEVERE" and "401" not in entry["message"]]
    assert faults == []


@needs_browser
def test_it_fits_a_phone(platform: Platform, browser: WebDriver) -> None:
    browser.set_window_size(390, 800)
    for page in ("", "keys", "usage", "certs", "audit"):
        browser.get(f"{platform.admin}/#/{page}")
        see(browser, "ingle")
        assert browser.execute_script("return document.body.scrollWidth <= window.innerWidth")
    browser.set_window_size(1200, 900)


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
