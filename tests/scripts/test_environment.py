"""What a program finds in its process: torchrun's variables, and a `__main__` as python makes it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text
from tree import MARK

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

SHOW = program_text("environment_show")
DIFFERENT = {
    "MASTER_ADDR", "MASTER_PORT",  # a store of the agent's, wherever it is
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS",
}  # fmt: skip
NOT_SET_BY_EITHER = {"_", "PYTHONPATH", MARK}


def environments(folder: Path) -> dict[str, dict[str, str]]:
    """Of the ranks that have run `show.py` in `folder`, which may run there again."""
    files = list(folder.glob("[0-9].json"))
    found = {file.stem: json.loads(file.read_text()) for file in files}
    for file in files:
        file.unlink()
    return found


def test_the_environment_is_torchruns_variable_by_variable(scripts: Any) -> None:
    (scripts.folder / "show.py").write_text(SHOW)
    code, said = scripts.by_torchrun("--nproc-per-node", 2, "show.py")
    assert code == 0, said
    theirs = environments(scripts.folder)
    code, said = scripts.run(scripts.tandem("--nproc", 2, "--epochs", 7, "show.py"))
    assert code == 0, said
    ours = environments(scripts.folder)
    assert sorted(ours) == sorted(theirs) == ["0", "1"]
    for rank, torchruns in theirs.items():
        set_there = {name for name, value in torchruns.items() if scripts.environment.get(name) != value}
        set_there -= NOT_SET_BY_EITHER
        assert len(set_there) >= 18
        assert set_there <= set(ours[rank]), set_there - set(ours[rank])
        for name in set_there - DIFFERENT:
            assert ours[rank][name] == torchruns[name], name
        added = {name for name in ours[rank] if name.startswith("TANDEM_")}
        assert added == {"TANDEM_RUN_DIR", "TANDEM_RESUME", "TANDEM_EPOCHS"}
        assert ours[rank]["TANDEM_RUN_DIR"] == str(scripts.folder / "run")


MAIN = """
import atexit, json, multiprocessing, os, signal, sys, threading
from concurrent.futures import ProcessPoolExecutor

{relative}

def square(number):
    return number * number

if __name__ == "__main__":
    main = sys.modules["__main__"]
    facts = dict(
        argv=sys.argv, first=sys.path[0], name=__name__, file=__file__, package=__package__,
        spec=getattr(__spec__, "name", None), mine=main.square is square,
        process=multiprocessing.current_process().name, parent=multiprocessing.parent_process() is None,
        method=multiprocessing.get_start_method(),
        handlers=[str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
        squares=list(ProcessPoolExecutor(2).map(square, range(4))),
        spawned=multiprocessing.get_context("spawn").Pool(1).map(square, [3]),
        neighbour=value,
    )
    print("FACTS", json.dumps(facts, sort_keys=True), flush=True)
    print("NAME", open("/proc/self/comm").read(), flush=True)
    atexit.register(lambda: print("exit handlers run", flush=True))
    threading.Timer(0.3, lambda: print("threads end first", flush=True)).start()
    sys.stdout.write("no newline at the end")
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "how", ["script", *(pytest.param(how, marks=pytest.mark.soak) for how in ("module", "cold"))]
)
def test_a_program_finds_itself_as_under_python(how: str, scripts: Any) -> None:
    package = scripts.folder / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "near.py").write_text("value = 5\n")
    relative = "from .near import value" if how == "module" else "from near import value"
    (package / "prog.py").write_text(MAIN.format(relative=relative))
    words = ["-m", "pack.prog"] if how == "module" else ["pack/prog.py"]
    code, said = scripts.run([scripts.tandem()[0], *words, "3", "--nodes", "9"])
    assert code == 3, said
    settings = ["--fresh-interpreter"] if how == "cold" else []
    code, ours = scripts.run(scripts.tandem(*settings, *words, "3", "--nodes", "9"))
    assert code == 3, ours
    log = scripts.log(0)
    expected = re.findall(r"^FACTS (.*)$", said, re.M)
    assert len(expected) == 1 and re.findall(r"^FACTS (.*)$", log, re.M) == expected
    assert "NAME tandem-rank-0\n" in log
    for text in (said, ours, log):
        assert text.index("no newline at the end") < text.index("exit handlers run")
        assert text.index("threads end first") < text.index("exit handlers run")
