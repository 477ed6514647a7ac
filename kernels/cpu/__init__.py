"""The CPU backend: a decoder step in C, compiled at first use, with everything working without a compiler too."""

from kernels.cpu.build import CompilerMissing, library
from kernels.cpu.decoder import Decoder, DecoderShape, LayerWeights
from kernels.cpu.packing import LANES, PackedMatrix, pack

__all__ = [
    "LANES",
    "CompilerMissing",
    "Decoder",
    "DecoderShape",
    "LayerWeights",
    "PackedMatrix",
    "library",
    "pack",
]
