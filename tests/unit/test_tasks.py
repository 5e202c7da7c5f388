"""Tasks found by name, their fields, and the built-in ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_datasets import write_set
from torch.utils.data import TensorDataset

from patience import patient
from tandem import Datasets
from tandem.config.task_names import BUILT_IN
from tandem.data import datasets, digits
from tandem.data.kinds import evaluation_batches
from tandem.data.loader import train_batches
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.errors import ConfigError
from tandem.tasks.base import TaskWithDefaults, load_task, task_class
from tandem.tasks.build import datasets_of

EXAMPLES = Path(__file__).parents[2] / "examples"
BINARY = str(Path(__file__).parents[1] / "fixtures" / "binary.py")
TASK = """
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

@dataclass
class Mine:
    width: int = 1
    rate: float = 0.5
    fast: bool = False
    kind: Literal["a", "b"] = "a"
    limit: int | None = None
    place: Path = Path(".")
    names: list[str] = field(default_factory=list)
    data_dir: Path = Path("nowhere")

    def __post_init__(self):
        if self.width < 1:
            raise ValueError("width must be positive")

    def build_model(self): ...
    def build_datasets(self): ...
    def loss(self, model, batch): ...

class Other: ...
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(TASK)
    return path


def load(task_name: str, data_folder: Path = Path("data"), /, **fields: str):
    return load_task(task_name, fields, data_folder, download=False)


def error_of(task_name: str, /, **fields: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(task_name, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fields_are_converted_by_their_type(task_file: Path) -> None:
    task = load(
        f"{task_file}:Mine", Path("d"), width="3", rate="1e-3", fast="yes", kind="b", limit="4", place="x"
    )
    assert (task.width, task.rate, task.fast, task.kind, task.limit) == (3, 1e-3, True, "b", 4)
    assert task.place == Path("x") and task.data_dir == Path("d")
    assert load(f"{task_file}", limit="none").limit is None  # the only task class of the file


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"width": "x"}, "--task.width: invalid value 'x'; expected an integer"),
        ({"rate": "x"}, "expected a number"),
        ({"fast": "x"}, "expected true or false"),
        ({"kind": "x"}, "expected one of a, b"),
        ({"limit": "x"}, "expected an integer, or none"),
        ({"names": "x"}, "cannot be set from the command line"),
        ({"widht": "1"}, "did you mean --task.width"),
        ({"data_dir": "x"}, "--data-dir"),
        ({"width": "0"}, "width must be positive"),
    ],
)
def test_fields_that_do_not_fit_are_named(task_file: Path, fields: dict[str, str], says: str) -> None:
    assert says in error_of(f"{task_file}:Mine", **fields)


@given(st.text())
def test_any_text_for_a_number_is_taken_or_refused_in_one_line(text: str) -> None:
    try:
        load(BINARY, samples=text)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("digit", "did you mean digits?"),
        ("", "unknown task"),
        ("nothing.py:A", "nothing.py does not exist"),
        ("no_such_module:A", "no module named 'no_such_module'"),
        ("tandem.nothing:A", "no module named 'tandem.nothing'"),
        ("tandem.tasks.digits:Digit", "task classes in it: Digits"),
        ("tandem.errors:ConfigError", "is not a task: add build_model, build_datasets, loss"),
        ("tandem.errors", "without --task: tandem launch -m tandem.errors"),
    ],
)
def test_a_task_that_is_not_there_is_explained(name: str, says: str) -> None:
    assert says in error_of(name)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def (", "SyntaxError"),
        ("x = 1\ny = nothing", "NameError: name 'nothing' is not defined"),
        ("import no_such_thing", "no_such_thing"),
        ("raise ValueError('two\\nlines')", "two lines"),
    ],
)
def test_a_file_that_does_not_import_says_why_and_where(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    message = error_of(f"{tmp_path / 'broken.py'}:A")
    assert says in message and "broken.py" in message
    assert "tandem_task_broken" not in sys.modules


def test_a_task_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_task.py").write_text("WIDTH = 7")
    (tmp_path / "mine2.py").write_text("import neighbour_of_task\n" + TASK)
    assert load(f"{tmp_path / 'mine2.py'}:Mine").width == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_task_is_there(name: str) -> None:
    assert load(name) is not None


def one_step(task, batch_size: int = 8):
    """Loss and sums of one batch, and of the first evaluation batch; gradients must arrive."""
    model, (train, evaluation) = task.build_model(), task.build_datasets()
    sampler = TrainBatches(GlobalOrder(len(train), batch_size, 0), 0, 1, None, 0, 1)
    cpu = torch.device("cpu")
    result = task.loss(model, next(iter(train_batches(train, sampler, seed=0, device=cpu))))
    loss, sums = result if isinstance(result, tuple) else (result, {})
    loss.backward()
    assert loss.isfinite() and all(parameter.grad is not None for parameter in model.parameters())
    for total, count in sums.values():
        assert total.dim() == count.dim() == 0 and count >= batch_size
    with torch.no_grad():
        task.loss(model.eval(), next(iter(evaluation_batches(evaluation, 0, 1, 8, device=cpu))))
    return model, sums


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "mnist"), ("fashion-mnist", "FashionMNIST/raw"), ("mnist", "")]
)
def test_idx_tasks_read_their_folders(tmp_path: Path, name: str, folder: str) -> None:
    write_set(tmp_path / folder, count=16)
    task = load(name, tmp_path)
    task.prepare()
    one_step(task)


def test_missing_files_say_what_where_and_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("fashion-mnist", tmp_path).prepare()
    message = str(caught.value)
    for part in ("train-images-idx3-ubyte", str(tmp_path / "FashionMNIST" / "raw"), "--download"):
        assert part in message
    assert "\n" not in message


def test_digits_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "TRAIN_SAMPLES", 60)
    monkeypatch.setattr(digits, "EVALUATION_SAMPLES", 10)
    task = load("digits", tmp_path, train_samples="24")
    model, sums = one_step(task)
    assert len(task.build_datasets().train) == 24 and sums["accuracy"][1] == 8
    assert 9_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 21_000
    assert "--task.train-samples" in error_of("digits", train_samples="0")


def test_binary_counts_its_passes_in_training_only() -> None:
    model, _ = one_step(load(BINARY))
    assert model.passes == 1
    assert [len(part) for part in load(BINARY).build_datasets()] == [100, 100]


@pytest.mark.parametrize(
    ("name", "fields"), [("my_task.py:MyTask", {"width": "8"}), ("char_lm.py:CharLM", {"context": "16"})]
)
def test_the_examples_train(name: str, fields: dict[str, str]) -> None:
    one_step(load(f"{EXAMPLES / name}", **fields))


def test_the_short_example_has_25_lines() -> None:
    assert len((EXAMPLES / "my_task.py").read_text().splitlines()) == 25


def test_cifar10_without_files_says_how_to_get_them(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    with pytest.raises(ConfigError, match="cifar-10-batches-py.*--download"):
        load("cifar10", tmp_path).build_datasets()


def test_cifar10_network_takes_color_pictures() -> None:
    assert load("cifar10", width="4").build_model()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_image_folder_trains_through_the_data_loader(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    for part in ("train", "val"):
        for kind in ("cat", "dog"):
            (tmp_path / part / kind).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 40), (number * 60, 0, 0)).save(tmp_path / part / kind / f"{number}.png")
    one_step(load("image-folder", tmp_path, image_size="32"), batch_size=4)
    with pytest.raises(ConfigError, match="resnet18"):
        load("image-folder", tmp_path, model="resnet_18").build_model()
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "wolf")
    with pytest.raises(ConfigError, match="dog, wolf"):
        load("image-folder", tmp_path).build_datasets()
    with pytest.raises(ConfigError, match="train/CLASS"):
        load("image-folder", tmp_path / "val").build_model()


LEFT = ".ipynb_checkpoints __MACOSX @eaDir lost+found .Trash-1000 $RECYCLE.BIN".split()


def test_what_tools_leave_in_a_data_folder_is_no_class_and_no_picture(tmp_path: Path) -> None:
    """At the top, where only one of the two parts has it, and inside a class."""
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    for part in ("train", "val"):
        left = [*(LEFT if part == "train" else LEFT[:1]), "cat/@eaDir", "dog/.ipynb_checkpoints"]
        for kind in ("cat", "dog", *left):
            (tmp_path / part / kind).mkdir(parents=True)
            Image.new("RGB", (40, 40)).save(tmp_path / part / kind / "1.png")
        (tmp_path / part / "cat" / "._1.png").write_bytes(b"a resource fork")
    task = load("image-folder", tmp_path, image_size="32")
    train, evaluation = task.build_datasets()
    assert train.classes == evaluation.classes == ["cat", "dog"]
    assert len(train) == len(evaluation) == 2 and [train[0][1], train[1][1]] == [0, 1]
    assert task.build_model()(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 2)


@pytest.mark.parametrize("content", [b"", b"no picture", None])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_named(tmp_path: Path, content: bytes | None, workers: int) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        Image.new("RGB", (64, 64), (200, 30, 90)).save(tmp_path / part / "cat" / "1.jpg")
    torn = tmp_path / "train" / "cat" / "1.jpg"
    torn.write_bytes(torn.read_bytes()[:400] if content is None else content)
    dataset = load("image-folder", tmp_path, image_size="32").build_datasets().train
    with pytest.raises(OSError, match="train/cat/1.jpg"):
        next(iter(torch.utils.data.DataLoader(dataset, num_workers=workers)))


TYPE = r"; type: pip install 'tandem-train\[vision\]'$"


def test_a_torchvision_that_does_not_import_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match=rf"^task cifar10 needs torchvision, .*{TYPE}"):
        load("cifar10").build_datasets()
    with pytest.raises(ConfigError, match=rf"^task mnist needs torchvision, .*{TYPE}"):
        load_task("mnist", {}, tmp_path, download=True).prepare()  # type: ignore[attr-defined]
    (tmp_path / "seeing.py").write_text("from torchvision import models\n")
    with pytest.raises(ConfigError, match=rf"^task file .*seeing.py cannot be imported .*{TYPE}"):
        load(f"{tmp_path}/seeing.py")
    (tmp_path / "blind.py").write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match=r"no_such_module[^;]*$"):
        load(f"{tmp_path}/blind.py")


def test_a_torchvision_of_another_build_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(ConfigError, match="nms does not exist.*; install the torchvision of the same build"):
        load("cifar10").build_datasets()


def test_a_download_that_fails_is_one_line() -> None:
    def fail() -> None:
        raise RuntimeError("Error downloading\nx")

    with pytest.raises(ConfigError, match="cannot download .*RuntimeError: Error downloading x"):
        datasets.download("mnist", fail)


def test_what_a_task_does_not_have_is_filled_in() -> None:
    class Bare:
        def loss(self, model: torch.nn.Module, batch: torch.Tensor):
            return batch.mean(), {"ones": (batch.sum(), len(batch))}

    class Own(Bare):
        def collate(self, samples: list) -> str:
            return "own"

        def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=3.0)

    model, (bare, own) = torch.nn.Linear(1, 1), (TaskWithDefaults(kind()) for kind in (Bare, Own))  # type: ignore[arg-type]
    assert bare.own == set() and own.own == {"collate", "build_optimizer"}
    assert bare.collate is None and own.collate is not None and own.collate([]) == "own"
    assert bare.build_optimizer(model) is None and own.build_optimizer(model).defaults["lr"] == 3.0  # type: ignore[union-attr]
    assert bare.place(model, torch.device("cpu")) is model and bare.after_step(model, 1) is None  # type: ignore[func-returns-value]
    scores = own.evaluate_batch(model, torch.ones(4))
    assert scores["loss"] == (4.0, 4) and scores["ones"] == (4.0, 4)


@pytest.mark.parametrize(
    "method, meant",
    [
        ("build_schedule", "build_scheduler"),
        ("evaluate_batches", "evaluate_batch"),
        ("build_optimiser", "build_optimizer"),
        ("after_steps", "after_step"),
        ("collate_fn", "collate"),
        ("configure_optimizers", "build_optimizer"),
    ],
)
def test_near_misses_of_optional_methods_are_one_line(task_file: Path, method: str, meant: str) -> None:
    task_file.write_text(TASK.replace("class Other", f"    def {method}(self, *a): ...\n\nclass Other"))
    for name in (f"{task_file}:Mine", str(task_file)):
        with pytest.raises(
            ConfigError, match=f"^Mine.{method} would never be called; did you mean {meant}."
        ) as e:
            load(name)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "methods",
    [
        "build_schedule build_scheduler", "_collate_fn", "build_dataset", "accuracy", "step", "losses",
        "evaluate", "augment", "prepare_data", "optimizer", "schedule", "batch",
    ],
)  # fmt: skip
def test_helpers_of_ones_own_are_no_near_misses(task_file: Path, methods: str) -> None:
    own = "".join(f"    def {method}(self, *a): ...\n" for method in methods.split())
    task_file.write_text(TASK.replace("class Other", own + "\nclass Other"))
    load(f"{task_file}:Mine")


def test_the_tasks_at_hand_have_no_near_misses() -> None:
    for name in (*BUILT_IN, *(f"{path}" for path in EXAMPLES.glob("*task*.py"))):
        task_class(name)


@pytest.mark.parametrize(
    ("task", "said"), [("digit", "did you mean digits?"), ("absent.py:Task", "absent.py does not exist")]
)
def test_a_slip_in_a_tasks_name_is_told_before_torch_is_imported(
    tmp_path: Path, task: str, said: str
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    words = [sys.executable, "-m", "tandem", "launch", "--nodes", "2", "--task", task, "--run-dir", "run"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2] / 'src'}"}
    ended = subprocess.run(
        words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=patient(100)
    )
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("train", "evaluation", "part"), [
    (0, None, "train"), (4, 0, "evaluation"), (4, {"val": 4, "test": 0}, "evaluation set test"),
])  # fmt: skip
def test_a_dataset_without_samples_is_a_mistake(train: int, evaluation: Any, part: str) -> None:
    def rows(size: Any) -> Any:
        if isinstance(size, dict):
            return {name: rows(each) for name, each in size.items()}
        return None if size is None else TensorDataset(torch.ones(size, 1))

    class Task:
        def build_datasets(self) -> Datasets:
            return Datasets(rows(train), rows(evaluation))

        build_model: Any = None
        loss: Any = build_datasets

    with pytest.raises(ConfigError, match=f"as {part}; it has no samples"):
        datasets_of(TaskWithDefaults(Task()), 0)
