"""The browser that tests of pages share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

from prometheus import ROOT


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory, module_processes: Any, require: Any) -> Iterator[Browser]:
    require("chromium")
    browser = Browser(module_processes, tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def browser(tab: Browser) -> Browser:
    """A tab in which nothing is left from before."""
    tab.forget()
    return tab


@pytest.fixture
def axe(require: Any) -> str:
    """The script that finds faults of accessibility: AXE_SCRIPT names its file, as make does."""
    path = os.environ.get("AXE_SCRIPT", "")
    require("axe", available=bool(path) and Path(path).is_file())
    return Path(path).read_text(encoding="utf-8")


@pytest.fixture
def keep(browser: Browser, tmp_path: Path) -> Callable[[str], None]:
    """The pictures of the docs: made anew with TANDEM_SCREENSHOTS=1 (`make screenshots`)."""

    def keep(name: str) -> None:
        if os.environ.get("TANDEM_SCREENSHOTS"):
            browser.replace_text(str(tmp_path), "/home/me/project")
            browser.screenshot(ROOT / "docs" / "pictures" / name)

    return keep
