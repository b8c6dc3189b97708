"""``fsdp-guard demo``: Megatron-LM issue 6087, made to happen, caught and fixed on the real runtime."""
