"""Pictures as bytes until they are where the model is: the floats, names and states that they had before."""

import copy
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from tandem.data.kinds import evaluation_batches
from tandem.data.seeds import seed_model
from tandem.errors import ConfigError
from tandem.tasks.base import load_task
from tandem.tasks.normalized import normalized
from tandem.training.precision import lay_out

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, images: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        assert images.dtype == torch.float32
        return self.layer(images).mean(dim=(2, 3)) * factor


@pytest.fixture
def pictures() -> torch.Tensor:
    return torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def test_the_numbers_are_torchvisions_and_the_state_is_the_models(pictures: torch.Tensor) -> None:
    vision = pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    plain = Net()
    ours = normalized(copy.deepcopy(plain), MEAN, STD)
    normal = vision.transforms.Normalize(MEAN, STD)
    floats = torch.stack([normal(vision.transforms.ToTensor()(_image(each))) for each in pictures])
    untouched = pictures.clone()
    assert torch.equal(ours(pictures, factor=3.0), plain(floats, factor=3.0))
    assert torch.equal(pictures, untouched), "the batch itself is left alone"
    assert type(ours).__name__ == "Net" and ours.state_dict().keys() == plain.state_dict().keys()
    assert not list(ours.buffers()), "DDP would send them before every forward pass"
    twin = copy.deepcopy(ours)
    nn.init.zeros_(twin.layer.weight)
    assert not torch.equal(twin(pictures), ours(pictures)), "a copy runs with its own weights"


def _image(picture: torch.Tensor) -> Image.Image:
    return Image.fromarray(picture.permute(1, 2, 0).numpy())


def test_the_constants_go_to_the_device_once(pictures: torch.Tensor) -> None:
    """A copy from the host in each step would wait for the GPU."""
    model = normalized(Net().to("meta"), MEAN, STD)
    assert model(pictures.to("meta")).device.type == "meta"
    there = model._of_bytes
    model(pictures.to("meta"))
    assert model._of_bytes is there and there.device.type == "meta"


def test_bytes_are_laid_out_with_the_channels_last(pictures: torch.Tensor) -> None:
    class Seeing(Net):
        def forward(self, images: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            assert images.is_contiguous(memory_format=torch.channels_last)
            return super().forward(images, factor)

    model = normalized(Seeing(), MEAN, STD)
    with pytest.raises(AssertionError):
        model(pictures)
    lay_out(model, channels_last=True)
    model(pictures)


def test_floats_and_lengths_that_differ_are_refused(pictures: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"torch.float32; expected torch.uint8"):
        normalized(Net(), MEAN, STD)(pictures.float())
    for mean, std in ((MEAN, STD[:2]), ((), ()), (MEAN, (1.0, 0.0, 1.0))):
        with pytest.raises(ConfigError, match="expected one number per channel"):
            normalized(Net(), mean, std)


def test_the_image_folder_gives_bytes_and_computes_what_it_did(tmp_path: Path) -> None:
    vision = pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    for part in ("train", "val"):
        for kind in ("cat", "dog"):
            (tmp_path / part / kind).mkdir(parents=True)
            for number in range(2):
                noise = torch.randint(256, (3, 40, 40), dtype=torch.uint8)
                _image(noise).save(tmp_path / part / kind / f"{number}.png")
    task = load_task("image-folder", {"image_size": "32"}, tmp_path, False)
    [batch] = evaluation_batches(task.build_datasets().evaluation, 0, 1, 4, device=CPU)
    assert batch[0].dtype == torch.uint8 and batch[0].shape == (4, 3, 32, 32)
    seed_model(1)
    loss, _ = task.loss(task.build_model(), batch)  # type: ignore[misc]
    seed_model(1)
    before = vision.models.resnet18(weights=None, num_classes=2)
    center = [vision.transforms.Resize(36), vision.transforms.CenterCrop(32), vision.transforms.ToTensor()]
    form = vision.transforms.Compose([*center, vision.transforms.Normalize(MEAN, STD)])
    folder = vision.datasets.ImageFolder(tmp_path / "val", form)
    floats = torch.stack([folder[index][0] for index in range(4)])
    assert torch.equal(loss, nn.functional.cross_entropy(before(floats), batch[1]))
