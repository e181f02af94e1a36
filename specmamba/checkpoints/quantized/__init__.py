"""From the tensors that quantized checkpoints store to one canonical form, ``kernels.linear.QuantizedMatrix``."""
