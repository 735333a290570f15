"""Triton kernels of the native engine's decode step. For generation, only this folder imports triton."""
