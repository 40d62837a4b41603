"""Kernels that compute the statistics of a tensor in one pass: C, Triton and plain torch."""
