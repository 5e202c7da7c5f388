"""The recipes of examples/recipes on small data: they learn, and a killed GPT ends with the same bits."""

import array
import csv
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from patience import patient
from program_files import program_text
from tandem.errors import ConfigError
from tandem.tasks.base import load_task

pytestmark = pytest.mark.multi

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
IMAGES = f"{RECIPES}/images.py:Images"
QUIET = ("--metrics", "0", "--metrics-linger", "0", "--threads", "1")
GPT = ("--context", "16", "--width", "32", "--layers", "2", "--heads", "2", "--batch-size", "8")


def environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def launch(folder: Path, run: str, *words: object, python: str = sys.executable) -> dict[str, Any]:
    """`tandem launch`, begun by `Processes`: its command and options."""
    command = [python, "-m", "tandem", "launch", "--run-dir", run, *QUIET, *map(str, words)]
    return {"command": command, "cwd": folder, "env": environment()}


def summary(folder: Path, run: str) -> dict[str, Any]:
    return dict(json.loads((folder / run / "summary.json").read_text()))


def pictures(folder: Path) -> Path:
    """Three classes of noise with a tint, 24 pictures each to train and 8 to evaluate."""
    from torchvision.transforms.functional import to_pil_image

    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 24), ("val", 8)):
        for channel, name in enumerate(("red", "green", "blue")):
            (folder / part / name).mkdir(parents=True)
            for index in range(count):
                picture = torch.randint(0, 90, (3, 40, 40), generator=generator, dtype=torch.uint8)
                picture[channel] += 150
                to_pil_image(picture).save(folder / part / name / f"{index}.png")
    return folder


@pytest.mark.timeout(300)
def test_pictures_are_told_apart_by_a_torchvision_model(processes: Any, tmp_path: Path) -> None:
    data = ("--task", IMAGES, "--data-dir", pictures(tmp_path / "data"), "--task.size", 32)
    flags = ("--nproc", 2, "--epochs", 6, "--batch-size", 24, "--task.lr", 0.003, "--workers", 0)
    code, output = processes.run(limit=250, **launch(tmp_path, "run", *data, *flags))
    assert code == 0, output
    seen = summary(tmp_path, "run")
    assert seen["global_step"] == 18 and seen["eval"]["accuracy"] > 0.6 and seen["eval"]["top5"] == 1


@pytest.mark.parametrize(("model", "key"), [
    ("resnet81", "resnet18"), ("tim:resnet18", "timm:NAME"),
    pytest.param("timm:vit_tiny_patch16_224", "pip install timm", marks=pytest.mark.skipif(
        importlib.util.find_spec("timm") is not None, reason="timm is installed")),
])  # fmt: skip
def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, model: str, key: str) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    task = load_task(IMAGES, {"model": model}, tmp_path, False)
    with pytest.raises(ConfigError, match=key) as raised:
        task.build_model()
    assert "\n" not in str(raised.value)


def test_classes_of_train_alone_are_one_line(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/a"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=": b is in train or val alone"):
        load_task(IMAGES, {}, tmp_path, False).build_datasets()


def reviews(path: Path) -> Path:
    """Sentences whose label one of their words tells."""
    chance = random.Random(0)
    words = {"good": ["great", "lovely", "superb"], "bad": ["awful", "dull", "broken"]}
    filler = ["the", "film", "was", "a", "story", "about", "people", "and", "music"]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for index in range(300):
            label = ("good", "bad")[index % 2]
            text = chance.choices(filler, k=chance.randint(4, 9)) + [chance.choice(words[label])]
            chance.shuffle(text)
            rows.writerow([" ".join(text), label])
    return path


# A model with its tokenizer in a folder, as save_pretrained writes them, and the task on it.
PRETRAINED = program_text("recipes_pretrained")


@pytest.mark.timeout(600)
def test_texts_are_told_apart_by_a_transformers_model(processes: Any, require: Any, tmp_path: Path) -> None:
    python = os.environ.get("FRAMEWORKS_PYTHON") or sys.executable
    look = "import importlib.util as u; exit(not all(map(u.find_spec, ('transformers', 'datasets'))))"
    found = subprocess.run([python, "-c", look], check=False).returncode == 0
    require("frameworks", found, "no packages transformers and datasets: make frameworks")
    data = reviews(tmp_path / "reviews.csv")
    task = ("--task", f"{RECIPES}/finetune.py:FineTune", "--task.data", data, "--task.width", 32)
    flags = ("--nproc", 2, "--epochs", 6, "--batch-size", 30, "--task.lr", 0.003, "--workers", 0)
    code, output = processes.run(limit=300, **launch(tmp_path, "run", *task, *flags, python=python))
    assert code == 0, output
    seen = summary(tmp_path, "run")
    assert seen["global_step"] == 54 and seen["eval"]["accuracy"] > 0.9
    paths = f"{RECIPES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [python, "-c", PRETRAINED, str(data), str(tmp_path / "model")]
    code, output = processes.run(command, 200, cwd=tmp_path, env={**environment(), "PYTHONPATH": paths})
    assert code == 0 and "same True trained classifier.weight classifier.bias" in output, output


def tokens(folder: Path) -> Path:
    """Python's own source, a token for each byte, in two files to train and one to validate."""
    folder.mkdir()
    text = Path(typing.__file__).read_bytes()
    pieces = {"train-0": text[:40_000], "train-1": text[40_000:75_000], "val": text[75_000:80_000]}
    for name, piece in pieces.items():
        with (folder / f"{name}.bin").open("wb") as file:
            array.array("H", list(piece)).tofile(file)
    return folder


def gpt(folder: Path, run: str, steps: int) -> dict[str, Any]:
    words = ("--nproc", 2, "--checkpoint-every", 5, "--log-every", 1, RECIPES / "gpt.py", "tokens", *GPT)
    more = ("--steps", steps, "--warmup", 10, "--eval-every", 20, "--parts", 2)
    return launch(folder, run, *words, *more)


def lines(folder: Path, run: str) -> dict[int, float]:
    """The loss of each step."""
    path = folder / run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    read = [json.loads(line) for line in whole]
    return {line["step"]: line["loss"] for line in read if line.get("loss") is not None}


@pytest.mark.timeout(600)
def test_a_killed_gpt_ends_with_the_same_bits(processes: Any, tmp_path: Path) -> None:
    """A rank is killed, then the whole launch; the second launch resumes from a checkpoint."""
    tokens(tmp_path / "tokens")
    steps = 100
    code, output = processes.run(limit=250, **gpt(tmp_path, "calm", steps))
    assert code == 0 and "step 100: validation loss" in output, output
    calm = lines(tmp_path, "calm")
    assert calm[steps] < calm[1] - 1
    started = gpt(tmp_path, "killed", steps)
    first = processes.start(started.pop("command"), **started)
    until(tmp_path, first, 10)
    kill = [sys.executable, "-m", "tandem", "kill", "killed", "--rank", "1"]
    code, output = processes.run(kill, 60, cwd=tmp_path, env=environment())
    assert code == 0, output
    until(tmp_path, first, 60)
    processes.kill(first)
    code, output = processes.run(limit=250, **gpt(tmp_path, "killed", steps))
    assert code == 0, output
    seen = summary(tmp_path, "killed")
    assert 0 < seen["resumed_from_step"] < steps
    events = (tmp_path / "killed" / "events.jsonl").read_text().splitlines()
    worlds = [json.loads(line)["kind"] for line in events].count("world")
    assert worlds == 3, "a start, a restart of the ranks, a second launch"
    assert seen["weights_sha256"] == summary(tmp_path, "calm")["weights_sha256"]
    assert lines(tmp_path, "killed") == calm


def until(folder: Path, process: Any, step: int) -> None:
    deadline = time.monotonic() + patient(120)
    while max(lines(folder, "killed"), default=0) < step:
        assert process.poll() is None, "it was over before it could be killed"
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.02)


def test_tokens_outside_of_the_vocabulary_are_one_line(tmp_path: Path) -> None:
    tokens(tmp_path / "tokens")
    assert refused(tmp_path).startswith("gpt.py: error: tokens has token 1")
    shutil.rmtree(tmp_path / "tokens")
    assert "tokens/train*.bin" in refused(tmp_path)


def refused(folder: Path) -> str:
    """The last line of a GPT with too small a vocabulary."""
    command = [sys.executable, str(RECIPES / "gpt.py"), "tokens", *GPT, "--vocabulary", "100"]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=patient(100)
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]
