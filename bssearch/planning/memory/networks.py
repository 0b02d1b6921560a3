"""Count the parameters of convolutional networks, and the elements per sample that the backward pass needs."""

# A layer keeps the input for the gradients. An in-place activation's output is the next layer's input. He et al. 2015
# (arXiv 1512.03385), Tan & Le 2019 (arXiv 1905.11946), Liu et al. 2022 (arXiv 2201.03545), Ronneberger et al. 2015
# (arXiv 1505.04597, with padding and batch normalisation).

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from bssearch.errors import require

INDEX_BYTES = 8  # per index of a maximum in pooling


@dataclass(slots=True)
class Block:
    """Layers that checkpointing recomputes together, with sizes in elements per sample."""

    given: int  # elements of the input
    kept: int = 0
    widest: int = 0  # elements of the largest tensor

    @property
    def backward(self) -> int:
        """The kept elements plus the gradients of a layer's output and input."""
        return self.kept + 2 * self.widest


@dataclass(slots=True)
class Network:
    """A network that grows layer by layer, with the sizes of the current tensor."""

    channels: int
    height: int
    width: int
    parameters: int = 0
    pooled: int = 0  # elements behind max pooling
    blocks: list[Block] = field(default_factory=lambda: [Block(0)])  # checkpointing never recomputes the first block
    is_kept: bool = False

    @property
    def elements(self) -> int:
        return self.channels * self.height * self.width

    def sample_bytes(self, width: int, *, checkpointing: bool) -> int:
        first, *others = self.blocks
        if checkpointing and others:
            elements = first.kept + sum(one.given for one in others) + max(one.backward for one in others)
        else:
            elements = sum(one.kept for one in self.blocks) + 2 * self.blocks[-1].widest
        return width * elements + INDEX_BYTES * self.pooled

    def begin_block(self) -> None:
        self.blocks.append(Block(self.elements))

    def keep(self, elements: int | None = None) -> None:
        """Keep ``elements`` elements for the gradients, by default the current tensor once."""
        if elements is None and self.is_kept:
            return
        block = self.blocks[-1]
        block.kept += elements or self.elements
        block.widest = max(block.widest, elements or self.elements)
        self.is_kept = self.is_kept or elements is None

    def convolve(self, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, *, bias: bool = False) -> None:
        """Convolve with padding. A kernel of 1 is a linear layer over channels."""
        self.keep()
        self.parameters += self.channels // groups * out * kernel**2 + out * bias
        self.channels, self.height, self.width = out, -(-self.height // stride), -(-self.width // stride)
        self.is_kept = False

    def normalize(self) -> None:
        self.keep()
        self.parameters += 2 * self.channels
        self.is_kept = False

    def activate(self, *, in_place: bool) -> None:
        self.keep()
        self.is_kept = in_place

    def pool(self) -> None:
        self.keep()
        self.height, self.width = -(-self.height // 2), -(-self.width // 2)
        self.pooled += self.elements
        self.is_kept = False

    def classify(self, classes: int) -> None:
        self.parameters += (self.channels + 1) * classes
        self.keep(self.channels)


def _resnet(net: Network, stages: Sequence[int], channels: Sequence[int], *, expansion: int) -> None:
    net.convolve(channels[0], 7, 2)
    net.normalize()
    net.activate(in_place=True)
    net.pool()
    for stage, (blocks, width) in enumerate(zip(stages, channels, strict=True)):
        for block in range(blocks):
            _residual(net, width, 2 if stage and not block else 1, expansion)


def _residual(net: Network, width: int, stride: int, expansion: int) -> None:
    net.begin_block()
    inputs, out = net.channels, width * expansion
    layers = [(width, 1, 1), (width, 3, stride), (out, 1, 1)] if expansion > 1 else [(width, 3, stride), (out, 3, 1)]
    for index, (size, kernel, step) in enumerate(layers):
        net.convolve(size, kernel, step)
        net.normalize()
        if index < len(layers) - 1:
            net.activate(in_place=True)
    if stride > 1 or inputs != out:
        net.parameters += (inputs + 2) * out
        net.keep(net.elements)  # the input of the shortcut's normalisation
    net.activate(in_place=True)


# stages of EfficientNet-B0: expansion, stride, kernel
_EFFICIENT = ((1, 1, 3), (6, 2, 3), (6, 2, 5), (6, 2, 3), (6, 1, 5), (6, 2, 5), (6, 1, 3))


def _efficientnet(net: Network, stages: Sequence[int], channels: Sequence[int]) -> None:
    _with_silu(net, 32, 3, 2)
    for blocks, out, (expansion, stride, kernel) in zip(stages, channels, _EFFICIENT, strict=True):
        for block in range(blocks):
            net.begin_block()
            inputs = net.channels
            if expansion > 1:
                _with_silu(net, inputs * expansion)
            _with_silu(net, net.channels, kernel, 1 if block else stride, net.channels)
            squeezed = inputs // 4
            net.parameters += 2 * net.channels * squeezed + squeezed + net.channels
            net.keep()  # the product with the excitation
            net.is_kept = False
            net.convolve(out)
            net.normalize()
    _with_silu(net, 1280)


def _with_silu(net: Network, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
    net.convolve(out, kernel, stride, groups)
    net.normalize()
    net.activate(in_place=False)


def _convnext(net: Network, stages: Sequence[int], channels: Sequence[int]) -> None:
    for stage, (blocks, width) in enumerate(zip(stages, channels, strict=True)):
        if stage:
            net.normalize()
            net.convolve(width, 2, 2, bias=True)
        else:
            net.convolve(width, 4, 4, bias=True)
            net.normalize()
        for _ in range(blocks):
            net.begin_block()
            net.convolve(width, 7, 1, width, bias=True)
            net.normalize()
            net.convolve(4 * width, bias=True)
            net.activate(in_place=False)
            net.convolve(width, bias=True)
            net.keep()  # the product with the layer's scale
            net.parameters += width
            net.is_kept = False
    net.parameters += 2 * net.channels  # the head's norm


def _unet(net: Network, stages: Sequence[int], channels: Sequence[int]) -> None:
    *levels, middle = channels
    side = 2 ** len(levels)
    require(
        net.height % side == net.width % side == 0,
        f"input_shape = {net.height}x{net.width} must have sides divisible by {side}, because each of "
        f"{len(levels)} levels halves the sides",
    )
    for blocks, width in zip(stages, levels, strict=False):
        _convolutions(net, width, blocks)
        net.pool()
    _convolutions(net, middle, stages[-1])
    for blocks, width in zip(stages[-2::-1], levels[::-1], strict=True):
        net.keep()
        net.parameters += 4 * net.channels * width + width
        net.channels, net.height, net.width, net.is_kept = 2 * width, 2 * net.height, 2 * net.width, False
        _convolutions(net, width, blocks)


def _convolutions(net: Network, width: int, count: int) -> None:
    net.begin_block()
    for _ in range(count):
        net.convolve(width, 3)
        net.normalize()
        net.activate(in_place=True)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of network, with the usual blocks and channels of each stage."""

    build: Callable[[Network, Sequence[int], Sequence[int]], None]
    stages: tuple[int, ...]
    channels: tuple[int, ...]
    classes: int = 1000


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "resnet18": Architecture(partial(_resnet, expansion=1), (2, 2, 2, 2), (64, 128, 256, 512)),
        "resnet50": Architecture(partial(_resnet, expansion=4), (3, 4, 6, 3), (64, 128, 256, 512)),
        "efficientnet_b0": Architecture(_efficientnet, (1, 2, 2, 3, 3, 4, 1), (16, 24, 40, 80, 112, 192, 320)),
        "convnext_tiny": Architecture(_convnext, (3, 3, 9, 3), (96, 192, 384, 768)),
        "unet": Architecture(_unet, (2, 2, 2, 2, 2), (64, 128, 256, 512, 1024), classes=2),
    }
)


def network(
    name: str, shape: Sequence[int], stages: Sequence[int] | None = None, channels: Sequence[int] | None = None
) -> Network:
    """Build a network for inputs (channels, height, width). Raises `UsageError` for invalid sizes."""
    kind = ARCHITECTURES[name]
    blocks, widths = tuple(stages or kind.stages), tuple(channels or kind.channels)
    require(
        len(shape) == 3,
        f"input_shape = {'x'.join(map(str, shape))} must be channels x height x width, such as 3x224x224",
    )
    given = f"stages = {','.join(map(str, blocks))} and channels = {','.join(map(str, widths))}"
    require(len(blocks) == len(widths), f"{given} must have equal lengths")
    if name == "efficientnet_b0":
        require(len(blocks) == len(_EFFICIENT), f"{given} must have {len(_EFFICIENT)} numbers each for {name}")
    net = Network(channels=shape[0], height=shape[1], width=shape[2])
    kind.build(net, blocks, widths)
    if name == "unet":
        net.convolve(kind.classes, bias=True)
    else:
        net.classify(kind.classes)
    return net
