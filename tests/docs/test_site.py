"""The docs as a site: every page is in the navigation and reads as on GitHub, the strict build passes."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import markdown
import pytest
from markdown_it import MarkdownIt
from mkdocs.config import load_config

from patience import patient
from tandem.errors import FINISHED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
TUTORIALS = [name for name in PAGES if name.startswith("tutorial-")]
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(https?:[^"' >]+)""")
SHOWN = re.compile(r"<(h[1-6]|ul|ol|li|table|tr|pre|blockquote|img)\b")


@pytest.fixture(scope="module")
def config() -> Any:
    return load_config(str(ROOT / "mkdocs.yml"))


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]


def test_every_page_is_in_the_navigation_once_and_in_its_order_on_the_first_page(config: Any) -> None:
    nav = pages_of(config.nav)
    assert sorted(nav) == PAGES
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert nav == ["index.md", *re.findall(r"^- \[[^\]]+\]\((\w[\w-]+\.md)\): ", index, re.MULTILINE)]
    titles = [next(iter(entry)) for entry in config.nav]
    assert titles == re.findall(r"^## (.+)$", index, re.MULTILINE)


@pytest.mark.parametrize("name", ["cli.md", "exit-codes.md", "api.md"])
def test_reference_pages_are_generated(name: str, reference: ModuleType) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == reference.PAGES[name](), "make docs generates it"


def test_the_strict_build_passes_and_its_pages_load_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    # a request that the build would make is refused at once
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1", "SITE_URL": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(100)
    )
    assert done.returncode == FINISHED, done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.py*"))
    assert (tmp_path / "search" / "search_index.json").is_file()
    built = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert len(built) == len(PAGES) + 1  # 404.html
    for path, text in built.items():
        assert LOADED.findall(text) == [], path
    assert 'blob/main/examples/my_task.py"' in built[tmp_path / "bring-your-own-model" / "index.html"]


@pytest.mark.parametrize("name", PAGES)
def test_the_site_shows_the_lists_tables_and_blocks_that_github_shows(name: str, config: Any) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    github = MarkdownIt("commonmark").enable("table").render(text)
    extensions = {"extensions": config.markdown_extensions, "extension_configs": config.mdx_configs}
    site = markdown.markdown(text, **extensions)
    assert Counter(SHOWN.findall(site)) == Counter(SHOWN.findall(github))


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_begins_with_the_command_and_is_short(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert re.match(r"# Tutorial: .+\n```\n(tandem|kubectl|sbatch) ", text)
    assert len(text.split()) <= 600


def test_there_are_four_tutorials() -> None:
    assert len(TUTORIALS) == 4


def test_the_task_of_the_tutorial_is_the_one_that_init_writes() -> None:
    template = (ROOT / "src" / "tandem" / "tasks" / "project" / "task.py.txt").read_text(encoding="utf-8")
    task = template[template.index("from dataclasses") :]
    assert f"```python\n{task}```" in (DOCS / "tutorial-task.md").read_text(encoding="utf-8")


def launched(words: list[str], folder: Path) -> str:
    """What `tandem launch` prints for a script that has "typed" as its standard input."""
    settings = {"TANDEM_METRICS": "0", "TANDEM_METRICS_LINGER": "0", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "launch", *words],
        cwd=folder, env={**os.environ, **settings}, input="typed", capture_output=True, text=True,
        timeout=patient(100),
    )  # fmt: skip
    assert done.returncode == FINISHED, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(patient(240))
def test_the_scripts_of_the_tutorial_run(tmp_path: Path) -> None:
    text = (DOCS / "tutorial-script.md").read_text(encoding="utf-8")
    plain, resumable = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "train.py").write_text(plain.replace("20_000", "1_001"))
    (tmp_path / "resumable.py").write_text(resumable)
    two = ["--nproc", "2", "--run-dir"]
    assert "\n1000 " in launched([*two, "plain", "train.py"], tmp_path)
    assert "finished at step 200" in launched([*two, "exact", "--steps", "200", "resumable.py"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("words, read", [(["--fresh-interpreter"], "typed"), ([], "")])
def test_standard_input_reaches_a_rank_as_the_page_on_debugging_says(
    words: list[str], read: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('read', repr(sys.stdin.read()), flush=True)\n")
    assert f"read {read!r}\n" in launched(["--nproc", "1", "--run-dir", "run", *words, "train.py"], tmp_path)
