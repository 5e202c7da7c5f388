"""examples/README.md lists every example, and names what is in it."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
INDEX = (EXAMPLES / "README.md").read_text()


def test_every_example_has_a_row() -> None:
    found = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"), *EXAMPLES.glob("recipes/*.py")]
    files = {str(path.relative_to(EXAMPLES)) for path in found}
    assert set(re.findall(r"\]\(((?:recipes/)?\w+\.(?:py|ipynb))\)", INDEX)) == files


def test_every_recipe_has_a_section_of_at_most_600_words() -> None:
    page = (EXAMPLES.parent / "docs" / "recipes.md").read_text()
    sections = page.split("\n## ")[1:]
    recipes = {path.name for path in (EXAMPLES / "recipes").glob("*.py")}
    assert {re.findall(r"recipes/(\w+\.py)", section)[0] for section in sections} == recipes
    assert all(len(section.split()) <= 600 for section in sections)


def test_every_class_of_a_command_exists() -> None:
    named = re.findall(r"examples/([\w/]+\.py):(\w+)", INDEX)
    assert len(named) >= 8
    for file, name in named:
        assert f"class {name}" in (EXAMPLES / file).read_text(), f"{file}:{name}"
