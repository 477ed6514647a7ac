"""The operations as Triton kernels, for CUDA and HIP devices. What they mean is in `kernels.ops`."""

from kernels.ops import Ops
from kernels.triton.activation import silu_mul
from kernels.triton.attention import paged_attention
from kernels.triton.cache import cache_write
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.rope import apply_rope

OPS = Ops(
    name="triton",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    apply_rope=apply_rope,
    silu_mul=silu_mul,
    cache_write=cache_write,
    paged_attention=paged_attention,
)
