"""Casts and GEMMs on tensors: fast kernels where the device has them, the reference elsewhere."""
