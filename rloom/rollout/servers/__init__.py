"""Inference servers (vLLM, SGLang, TensorRT-LLM) as one rollout engine, over HTTP. Imports none of these libraries."""
