"""The fused kernels of a training step besides attention: pointwise kernels, loss, packed AdamW."""
