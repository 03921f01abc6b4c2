"""FlashAttention-3 for Hopper in CuTe DSL."""
