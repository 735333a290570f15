"""vLLM as a rollout engine, in the worker's own process. The only home of the library."""
