"""A model that is built without memory for its values, and gets the same bits later, one tensor at a time."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tandem.distributed import deferred_values
from tandem.distributed.deferred_values import DeferredValues, NotDeferrableError, build_deferred
from tandem.torch_private import FakeTensors

Build = Callable[[], nn.Module]


def whole(build: Build) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return held(build())


def held(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model by its path, buffers that are not saved and plain attributes too."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules():
        found.update({f"{prefix}.{k}": v for k, v in vars(module).items() if isinstance(v, Tensor)})
    return {name: tensor.detach() for name, tensor in found.items()}


def deferred(build: Build) -> tuple[nn.Module, DeferredValues]:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    try:
        return build_deferred(FakeTensors(), build)
    finally:
        assert torch.equal(torch.get_rng_state(), before)


def computed(build: Build) -> dict[str, Tensor]:
    model, values = deferred(build)
    places = values.module_tensors(model)
    assert all(place.tensor.is_meta for place in places)
    found = {key: value.clone() for key, value in values.computed(True) if value is not None}
    real = {name: found.get(id(tensor), tensor) for name, tensor in held_as_is(model).items()}
    return {name: tensor.detach() for name, tensor in real.items()}


def held_as_is(model: nn.Module) -> dict[str, Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules():
        found.update({f"{prefix}.{k}": v for k, v in vars(module).items() if isinstance(v, Tensor)})
    return found


class Initialized(nn.Module):
    """Values as models have them: a second pass over all, tied weights, tables, a pretrained row."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16, padding_idx=3)
        self.place = nn.Parameter(torch.zeros(1, 8, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(16, 30, bias=False)
        self.out.weight = self.words.weight
        angles = torch.outer(torch.arange(8.0), 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("angles", angles.cos(), persistent=False)
        self.mask = torch.full((8, 8), float("-inf")).triu(1)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.scale = nn.Parameter(torch.tensor(2.5).mul(0.5).reshape(1))
        self.fixed = nn.Parameter(torch.from_numpy(numpy.arange(4.0, dtype=numpy.float32)))
        self.apply(self._again)
        nn.init.trunc_normal_(self.place, std=self.rates[1])
        with torch.no_grad():
            self.layers.layers[0].linear1.weight[2:4] *= 3

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.constant_(module.bias, 0.1) if module.bias is not None else None


class Attributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3).to(torch.bfloat16)
        self.a.weight.no_decay = True  # type: ignore[attr-defined]
        self.b = copy.deepcopy(self.a)
        self.c = nn.Parameter(torch.rand(4, 4).t() @ torch.randn(4, 2), requires_grad=False)


def in_half() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    finally:
        torch.set_default_dtype(torch.float32)


def with_generator() -> nn.Module:
    made = nn.Linear(6, 6)
    nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(8))
    nn.init.normal_(made.bias)
    return made


MODELS: dict[str, Build] = {
    "many ways": Initialized,
    "attributes, copies, views": Attributed,
    "another default dtype": in_half,
    "its own generator": with_generator,
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose1d(4, 4, 2)),
    "recurrent": lambda: nn.LSTM(5, 7, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(6, 5)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 5)),
    "one parameter": lambda: nn.PReLU(),
    "quantiles": lambda: nn.ParameterList([torch.rand(9).sort().values, torch.randperm(5).float()]),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_have_the_bits_of_a_model_that_is_built_whole(name: str) -> None:
    expected = whole(MODELS[name])
    found = computed(MODELS[name])
    assert found.keys() == expected.keys() and len(found) > 0
    for each, tensor in expected.items():
        assert found[each].dtype == tensor.dtype and torch.equal(found[each], tensor), each
        assert found[each].stride() == tensor.stride(), each


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "swin_t", "efficientnet_b0", "convnext_tiny"])
@pytest.mark.slow
def test_models_of_torchvision_have_the_same_bits(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    build = getattr(models, name)
    expected = whole(build)
    found = computed(build)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], tensor) for each, tensor in expected.items())


def seeds() -> nn.Module:
    first = nn.Linear(3, 3)
    torch.manual_seed(0)
    return nn.Sequential(first, nn.Linear(3, 3))


def sets_back() -> nn.Module:
    """The second layer has the numbers of the first."""
    layers = [nn.Linear(3, 3)]
    with torch.random.fork_rng():
        layers.append(nn.Linear(3, 3))
    layers.append(nn.Linear(3, 3))
    return nn.Sequential(*layers)


def reads_random_values() -> nn.Module:
    return nn.Linear(3, 1 + int(torch.rand(1).item() * 5))


def keeps_a_list() -> nn.Module:
    made = nn.Linear(3, 3)
    made.table = [torch.arange(3.0)]  # type: ignore[assignment]
    return made


def computes_with_numpy() -> nn.Module:
    made = nn.Linear(3, 3)
    made.bias.data.copy_(torch.from_numpy(made.weight.detach().sum(1).numpy()))
    return made


def loads_a_file() -> nn.Module:
    made = nn.Linear(3, 3)
    file = io.BytesIO()
    torch.save(whole(lambda: nn.Linear(3, 3)), file)
    made.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    return made


def writes_into_numpy() -> nn.Module:
    made = nn.Linear(3, 3)
    table = torch.from_numpy(numpy.zeros(3, dtype=numpy.float32))
    table.copy_(torch.ones(3))
    made.bias.data.copy_(table)
    return made


OTHERS: dict[str, tuple[Build, str]] = {
    "seeds": (seeds, "seeds"),
    "sets a generator back": (sets_back, "sets its state"),
    "reads random values": (reads_random_values, "random values"),
    "a list of tensors": (keeps_a_list, "outside its modules"),
    "NumPy": (computes_with_numpy, ""),
    "a file": (loads_a_file, ""),
    "writes into NumPy's memory": (writes_into_numpy, "returned a copy"),
    "lazy": (lambda: nn.LazyLinear(3, bias=False), ""),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_needs_its_values_says_so_and_leaves_the_generators(name: str) -> None:
    build, word = OTHERS[name]
    torch.manual_seed(5)
    build()
    after = torch.get_rng_state()
    with pytest.raises(Exception, match=word or None) as error:
        deferred(build)
    assert not word or isinstance(error.value, NotDeferrableError)
    build()
    assert torch.equal(torch.get_rng_state(), after)


def test_most_memory_is_that_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a second pass over all tensors."""

    def build() -> nn.Module:
        made = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
        for layer in made:
            nn.init.xavier_normal_(layer.weight)
        return made

    most = 0
    repeat = deferred_values._repeat

    def watched(operation: Any, real: dict[int, Tensor], memories: Any) -> None:
        nonlocal most
        repeat(operation, real, memories)
        most = max(most, sum(memory.nbytes for memory in real.values()))

    monkeypatch.setattr(deferred_values, "_repeat", watched)
    _, values = deferred(build)
    assert sum(1 for _ in values.computed(True)) == 40 and most <= 64 * 64 * 4 + 64 * 4


def test_fake_tensors_of_others_do_not_count() -> None:
    """torch.compile keeps some in the same process."""
    with FakeTensors().mode():
        kept = torch.empty(2)
    model, values = build_deferred(FakeTensors(), lambda: nn.Linear(3, 2))
    assert len(list(values.computed(True))) == 2 and kept.shape == (2,)
