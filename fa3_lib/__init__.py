"""FlashAttention-3 for Hopper in CuTe DSL: `from fa3_lib import flash_attn_func`."""

from fa3_lib.interface import flash_attn_func

__all__ = ["flash_attn_func"]
__version__ = "0.1.0"
